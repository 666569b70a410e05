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
from tensorloop._torch.plain_sizes import plain_sizes


@contextmanager
def fake_tensors(reads: "MadeUpNumbers | None" = None) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, no operation computes anything or changes a real tensor; gives the function that makes fakes of those.

    What needs the numbers of a fake raises torch's error, unless `reads` answers.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:

        def fake(x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                return x
            if x.grad_fn is not None:  # making a fake looks at .grad, of which torch warns there
                with torch._C._DisableTorchDispatch():
                    x = x.detach()
            return mode.from_tensor(x)

        with _NothingReal(fake, reads), reads or nullcontext():
            yield fake


class MadeUpNumbers(TorchFunctionMode):
    """Answers what a function reads from tensors without numbers, as if they held ones: `taken` reads.

    A bool is `first`. After many reads numbers are small or large by chance, so that a loop that waits for one ends.
    """

    MANY, MOST = 100, 20_000

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.taken, self._chance = first, 0, random.Random(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives out the numbers of a whole tensor, where memory is read and no operation shows it."""
        if func not in (Tensor.numpy, Tensor.__array__, Tensor.__format__, Tensor.tolist):
            return func(*args, **kwargs or {})
        with torch._C._DisableTorchDispatch():
            return func(self.real(args[0]), *args[1:], **kwargs or {})

    def real(self, x: Tensor) -> Tensor:
        """A tensor with numbers, on the CPU."""
        self.taken += (unknown := hasattr(x, "fake_mode"))
        return torch.ones(x.shape, dtype=x.dtype, device="cpu") if unknown else x

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Gives an answer for an operation whose result, or the size of it, depends on numbers."""
        with torch._C._DisableTorchDispatch():
            taken = self.taken
            result = func(*tree_map_only(Tensor, self.real, args), **tree_map_only(Tensor, self.real, kwargs))
        if isinstance(result, Tensor | tuple | list) or taken == self.taken:
            return result
        if taken > self.MOST:
            raise RuntimeError("the body reads tensors without end")
        kind = type(result)
        return kind(self._chance.choice((0, self.MOST)) if taken > self.MANY else self.first or kind is not bool)


_UNKNOWN = "DataDependentOutputException", "DynamicOutputShapeException"  # of torch._subclasses


class _NothingReal(OperationMode):
    """Gives every operation a fake of each real tensor: by itself the mode runs one that meets no fake for real."""

    def __init__(self, fake: Callable[[Tensor], Tensor], reads: MadeUpNumbers | None) -> None:
        super().__init__()
        self._fake, self._reads = fake, reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation on fakes."""
        positional, named = tree_map_only(Tensor, self._fake, (list(args), kwargs or {}))
        try:
            return func(*positional, **named)
        except RuntimeError as error:
            if self._reads is None or type(error).__name__ not in _UNKNOWN:
                raise
        device = next(x.device for x in tree_leaves((positional, named)) if isinstance(x, Tensor))
        result = self._reads.answer(func, args, kwargs or {})
        return tree_map_only(Tensor, lambda x: self._fake(x).to(device), result)


def without_memory(x: Tensor) -> Tensor:
    """A tensor on `meta` that lies in its memory as x does."""
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if offset := x.storage_offset():  # a view's, which an operation may take it for
        whole = shape.new_empty(offset + shape.untyped_storage().nbytes() // shape.itemsize)
        shape = whole[offset:].as_strided(x.shape, x.stride(), offset)
    return shape


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
    """Inside, if one of these is on `meta`, so are new tensors; gives what makes such a one of a real tensor."""
    if not any(x.is_meta for x in examples):
        yield lambda x: x
        return
    with _OnMeta(), plain_sizes():
        yield _on_meta


def _on_meta(x: Tensor) -> Tensor:
    return x if x.is_meta else without_memory(x)


_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _OnMeta(OperationMode):
    """Makes on `meta` what an operation makes elsewhere, of tensors that are there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation on `meta`."""
        given: Any = tree_map_only(Tensor, _on_meta, (args, kwargs or {}))
        if any(a.name == "device" for a in func._schema.arguments):
            given[1]["device"] = "meta"
        if func in (torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default):
            # Torch would find what these give by a tensor as large as the square of theirs.
            x = given[0][0]
            own = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
            return x.new_empty(x.shape, dtype=given[1].get("dtype") or own)
        try:
            return func(*given[0], **given[1])
        except NotImplementedError:  # as torch's fakes do where that has no kernel: by zeros, of which only shapes stay
            elements = sum(x.numel() for x in tree_leaves(given) if isinstance(x, Tensor))
            if func.namespace != "aten" or func._schema.is_mutable or _BY_NUMBERS & {*func.tags} or elements > 1 << 20:
                raise
        zeros: Any = tree_map_only(Tensor, lambda x: torch.zeros_like(x, device="cpu"), given)
        return tree_map_only(Tensor, without_memory, func(*zeros[0], **zeros[1]))
