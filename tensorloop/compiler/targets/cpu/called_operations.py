"""The operations that torch does in the middle of a native step, made ready for a run.

What each reads and writes is at one place during a run, so its tensors are made once. The native function calls back
without arguments, as often as there are operations in all steps: a generator does the next one each time. A generator
and no function, because Python raises an interrupt (Ctrl-C) where a call begins, before any `try` of a function's; the
generator goes on inside of one. Whether an operation was done is said in memory, where an interrupt changes nothing.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop._torch.dispatch import entry
from tensorloop.compiler.emitter.ir.kernels import Operand
from tensorloop.compiler.emitter.write.function import PlacedCall
from tensorloop.compiler.operations import aten
from tensorloop.compiler.verify import Broken

_ENTRY = ctypes.CFUNCTYPE(None)  # which takes the interpreter's lock, and lets it go


class CalledOperations:
    """One run's operations of torch. `fixed` are its invariants and constants, by kind; scratch begins at `scratch`."""

    def __init__(self, calls: Sequence[PlacedCall], scratch: int, fixed: dict[str, Sequence[Tensor]]) -> None:
        self.scratch = scratch
        self.error: BaseException | None = None  # what one raised
        self._each = [_ready(call, scratch, fixed) for call in calls]
        self._went = ctypes.c_int64()
        turns = self._turns()
        next(turns)
        self._entry = _ENTRY(turns.__next__)

    def begin(self, status: int) -> None:
        """Gives the native function what it calls, in two words at this address."""
        ctypes.c_void_p.from_address(status).value = ctypes.cast(self._entry, ctypes.c_void_p).value
        self._went = ctypes.c_int64.from_address(status + 8)
        self._went.value = 1

    def end(self) -> None:
        """Notes an interrupt that came between an operation's own errors and their being noted."""
        if not self._went.value and self.error is None:
            self.error = KeyboardInterrupt()

    def _turns(self) -> Iterator[None]:
        try:
            while True:
                for do in self._each:
                    yield
                    do()
                    self._went.value = 1
        except GeneratorExit:
            return
        except BaseException as error:
            self.error = error
        yield


def _ready(one: PlacedCall, scratch: int, fixed: dict[str, Sequence[Tensor]]) -> Callable[[], None]:
    """The operation on its tensors."""
    kernel = one.kernel

    def tensor(operand: Operand) -> Tensor:
        array, buffer = operand.array, operand.array.buffer
        if buffer.kind == "scratch":
            whole = _at(scratch + one.places[buffer], buffer.numel, array.dtype)
        else:
            whole = fixed[buffer.kind][buffer.index].detach()
        found = whole.as_strided(array.shape, array.strides, whole.storage_offset() + array.offset)
        return torch.view_as_complex(found) if operand.dtype.is_complex else found.view(operand.dtype)

    given = {n: tensor(x) for n, x in kernel.ins.items()}
    args, kwargs = fx.map_arg((kernel.node.args, kernel.node.kwargs), given.__getitem__)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    puts = [None if x is None else _put(kernel.node.target, tensor(x)) for x in kernel.outs]
    call, check = entry(kernel.node.target), kernel.check
    if check is not None:
        kwargs = {**kwargs, "check_errors": False}  # whose error has another name
    if kernel.single and (put := puts[0]) is not None:
        return lambda: put(call(*args, **kwargs))

    def do() -> None:
        found = call(*args, **kwargs)
        if check is not None:
            aten._linalg_check_errors.default(found[-1], check, is_matrix=not found[-1].dim())
        for x, put in zip(found, puts, strict=True):
            if put is not None:
                put(x)

    return do


def _put(operation: Any, out: Tensor) -> Callable[[Any], None]:
    """Returns a function that copies a result to where it belongs, if it is what the graph says that it is."""
    shape, dtype, copy = out.shape, out.dtype, out.copy_

    def put(x: Any) -> None:
        if x is None or x.shape != shape or x.dtype is not dtype or not x.is_cpu:
            raise _other(operation, x, out)
        copy(x)

    return put


def _at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The tensor of so many elements from an address on; who makes it sees to it that they stay there."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    size = numel * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).view(dtype)


def _other(operation: Any, found: Any, said: Tensor) -> Broken:
    what = f"{found.dtype} of shape {tuple(found.shape)} on {found.device}" if isinstance(found, Tensor) else "None"
    return Broken(f"{operation} gives {what}, where its graph has {said.dtype} of shape {tuple(said.shape)}")
