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

from tensorloop.compiler.emitter.ir.kernels import Operand
from tensorloop.compiler.emitter.write.function import Call
from tensorloop.compiler.operations import aten
from tensorloop.compiler.verify import Broken

_ENTRY = ctypes.CFUNCTYPE(None)  # which takes the interpreter's lock, and lets it go


class CalledOperations:
    """One run's. `fixed` are the tensors of invariants and constants, by kind; scratch memory begins at `scratch`."""

    def __init__(self, calls: Sequence[Call], scratch: int, fixed: dict[str, Sequence[Tensor]]) -> None:
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


def _ready(call: Call, scratch: int, fixed: dict[str, Sequence[Tensor]]) -> Callable[[], None]:
    """The operation on its tensors."""
    kernel = call.kernel

    def tensor(one: Operand) -> Tensor:
        array, buffer = one.array, one.array.buffer
        if buffer.kind == "scratch":
            whole = _at(scratch + call.places[buffer], buffer.numel, array.dtype)
        else:
            whole = fixed[buffer.kind][buffer.index].detach()
        found = whole.as_strided(array.shape, array.strides, whole.storage_offset() + array.offset)
        return torch.view_as_complex(found) if one.dtype.is_complex else found.view(one.dtype)

    given = {n: tensor(one) for n, one in kernel.ins.items()}
    args, kwargs = fx.map_arg((kernel.node.args, kernel.node.kwargs), given.__getitem__)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    outs = [None if one is None else tensor(one) for one in kernel.outs]
    operation: Any = kernel.node.target
    single, check = kernel.single, kernel.check
    if check is not None:
        kwargs = {**kwargs, "check_errors": False}  # whose error has another name

    def do() -> None:
        found = operation(*args, **kwargs)
        if check is not None:
            aten._linalg_check_errors.default(found[-1], check, is_matrix=not found[-1].dim())
        for x, out in zip((found,) if single else found, outs, strict=True):
            if out is not None:
                if x is None or x.shape != out.shape or x.dtype is not out.dtype or not x.is_cpu:
                    raise _other(operation, x, out)
                out.copy_(x)

    return do


def _at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The tensor of so many elements from an address on; who makes it sees to it that they stay there."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    size = numel * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).view(dtype)


def _other(operation: Any, found: Any, said: Tensor) -> Broken:
    what = f"{found.dtype} of shape {tuple(found.shape)} on {found.device}" if isinstance(found, Tensor) else "None"
    return Broken(f"{operation} gives {what}, where its graph has {said.dtype} of shape {tuple(said.shape)}")
