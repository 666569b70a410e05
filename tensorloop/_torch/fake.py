"""Tensors of shape, dtype and device without numbers, to learn what a function would return.

Private names of torch, tried with 2.11 and 2.13: `torch._subclasses.fake_tensor`. Its first use imports dynamo, a
second or so, so it is imported only then.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorloop._torch.dispatch import OperationMode, tree_leaves, tree_map_only


@contextmanager
def fake_tensors(reads: "Reads | None" = None) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, no operation computes anything or changes a real tensor; gives the function that makes fakes of those.

    What needs the numbers of a fake raises torch's error, unless `reads` answers.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )

    with FakeTensorMode() as mode:

        def fake(x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                return x
            if x.grad_fn is not None:  # making a fake looks at .grad, of which torch warns there
                with torch._C._DisableTorchDispatch():
                    x = x.detach()
            return mode.from_tensor(x)

        unknown = (DataDependentOutputException, DynamicOutputShapeException)
        with _NothingReal(fake, unknown if reads else (), reads), reads or nullcontext():
            yield fake


class Reads(TorchFunctionMode):
    """Answers what a function reads from tensors without numbers, as if they held ones, and counts it.

    A bool is `first`, and floats halve from read to read. After many, all are small or large by chance, so that every
    loop that waits for a value ends.
    """

    MANY, MOST = 100, 10_000

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.taken, self._chance = first, 0, random.Random(0)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gives out all numbers of a tensor, where memory is read and no operation shows it."""
        if func not in (Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.tolist):
            return func(*args, **kwargs or {})
        unknown = hasattr(args[0], "fake_mode")
        self.taken += unknown
        with torch._C._DisableTorchDispatch():
            return func(_ones(args[0]) if unknown else args[0], *args[1:], **kwargs or {})

    def number(self, dtype: torch.dtype) -> bool | int | float:
        """The next number that is read."""
        self.taken += 1
        if self.taken > self.MOST:
            raise RuntimeError("the body reads tensors without end")
        if self.taken > self.MANY:
            few = (0.5**self.MANY, 2.0**self.MANY) if dtype.is_floating_point else (0, self.MANY)
            return self._chance.choice((False, True) if dtype is torch.bool else few)
        if dtype is torch.bool:
            return self.first
        return 0.5 ** (self.taken - 1) if dtype.is_floating_point else 1


def _ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=x.dtype, device="cpu")


_READ = torch.ops.aten._local_scalar_dense.default
_BOOLS = (torch.ops.aten.equal.default, torch.ops.aten.allclose.default)


class _NothingReal(OperationMode):
    """Gives every operation a fake of each real tensor: by itself the mode runs one that meets no fake for real."""

    def __init__(
        self, fake: Callable[[Tensor], Tensor], unknown: tuple[type[Exception], ...], reads: Reads | None
    ) -> None:
        super().__init__()
        self._fake, self._unknown, self._reads = fake, unknown, reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation on fakes; one that depends on numbers, on ones."""
        if self._reads and func is _READ:
            x = args[0]
            with torch._C._DisableTorchDispatch():
                return self._reads.number(x.dtype) if hasattr(x, "fake_mode") else func(x)
        fakes = tree_map_only(Tensor, self._fake, (list(args), kwargs or {}))
        try:
            return func(*fakes[0], **fakes[1])
        except self._unknown:
            if self._reads is None:
                raise
        if func in _BOOLS:
            return self._reads.number(torch.bool)
        self._reads.taken += 1
        with torch._C._DisableTorchDispatch():
            ones = tree_map_only(Tensor, _ones, fakes)
            result = func(*ones[0], **ones[1])
        device = next(x.device for x in tree_leaves(fakes) if isinstance(x, Tensor))
        return tree_map_only(Tensor, lambda x: self._fake(x).to(device), result)


def empty_fakes(shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
    """Contiguous CPU tensors without numbers, for tracing: their shapes may be of any size."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return [torch.empty(tuple(shape), dtype=dtype, device="cpu") for shape, dtype in shapes]


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Inside, torch does not write to its log that an operation failed on fakes: the error says it too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def fakes_like(examples: Sequence[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, if there is a fake among these, new tensors are fakes too; gives what makes one of a real tensor."""
    mode = next((found for x in examples if (found := getattr(x, "fake_mode", None)) is not None), None)
    if mode is None:
        yield lambda x: x
        return
    with mode:
        yield lambda x: x if hasattr(x, "fake_mode") else mode.from_tensor(x)
