"""Tensors of shape, dtype and device without numbers, to learn what a function would return.

Private names of torch, tried with 2.11 and 2.13: `torch._subclasses.fake_tensor`. Its first use imports dynamo, a
second or so, so it is imported only then.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.dispatch import OperationMode, tree_map_only


@contextmanager
def fake_tensors() -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, no operation computes anything or changes a real tensor; gives the function that makes fakes of those."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:

        def fake(x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                return x
            if x.grad_fn is not None:  # making a fake looks at .grad, of which torch warns there
                with torch._C._DisableTorchDispatch():
                    x = x.detach()
            return mode.from_tensor(x)

        with _NothingReal(fake):
            yield fake


class _NothingReal(OperationMode):
    """Gives every operation a fake of each real tensor: by itself the mode runs one that meets no fake for real."""

    def __init__(self, fake: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation on fakes."""
        positional, named = tree_map_only(Tensor, self._fake, (list(args), kwargs or {}))
        return func(*positional, **named)


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
