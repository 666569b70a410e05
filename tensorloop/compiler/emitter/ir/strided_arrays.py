"""Where values lie: buffers, and arrays that look at them through strides."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tensorloop.compiler.lengths import LENGTH_MARKS, OTHER_MARKS, Length, Size, actual, has_length, join
from tensorloop.compiler.step import Unsupported


@dataclasses.dataclass(eq=False)
class Region:
    """Memory of one kind. `kind` says whose, `index` which of them:

    invariant, constant: the same at every step; sequence, out: one slice a step; carry: the state before the step;
    next: the state after it; sum: added to; scratch: this step's own; value: no memory at all, one number or, None, of
    each element its place;
    array: one of the carry, changed in place; prefix: one that is only read.
    """

    kind: str
    index: int
    numel: Size
    dtype: torch.dtype
    value: Any = None
    stays: bool = False  # whether it is scratch that torch looks at, which must be at one place at every step

    @property
    def bytes(self) -> Size:
        """The bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def written(self) -> bool:
        """Whether the step writes it."""
        return self.kind in ("scratch", "next", "out", "sum", "array")


@dataclasses.dataclass(frozen=True)
class Array:
    """A buffer's elements at offset + sum(index * stride)."""

    buffer: Region
    shape: tuple[Size, ...]
    strides: tuple[int, ...]
    offset: Size = 0

    def __post_init__(self) -> None:
        # A loop's steps from element to element are written into the code as numbers; a dim of one element has none.
        if any(size != 1 and isinstance(stride, Length) for size, stride in zip(self.shape, self.strides, strict=True)):
            raise Unsupported("a size that changes from step to step lies within another")

    @property
    def dtype(self) -> torch.dtype:
        """Returns the buffer's dtype."""
        return self.buffer.dtype

    @property
    def numel(self) -> Size:
        """Returns how many elements the array has."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether it is its buffer, element by element."""
        return self.offset == 0 and self.numel == self.buffer.numel and self.strides == dense(self.shape, self.strides)

    def expand(self, shape: Sequence[Size]) -> "Array":
        """Returns the array broadcast to a shape: new dims have stride 0."""
        missing = len(shape) - len(self.shape)
        strides = (0,) * missing + tuple(
            0 if here == 1 and size != 1 else stride
            for here, size, stride in zip(self.shape, shape[missing:], self.strides, strict=True)
        )
        return Array(self.buffer, tuple(shape), strides, self.offset)

    def squeeze(self) -> "Array":
        """Returns the array without dims of one element."""
        kept = [n for n, size in enumerate(self.shape) if size != 1]
        return Array(self.buffer, tuple(self.shape[n] for n in kept), tuple(self.strides[n] for n in kept), self.offset)

    def view(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> "Array | tuple[Array, ...]":
        """Returns the arrays that a view of torch makes of this one; RuntimeError where its strides do not allow it."""

        asked = self.shape, self.strides, args, kwargs

        def layouts(lengths: Sequence[int]) -> Any:
            shape, strides, given, named = actual(asked, lengths)
            with torch.no_grad():
                made = function(torch.empty_strided(shape, strides, dtype=self.dtype, device="meta"), *given, **named)
            return _layout(made) if isinstance(made, torch.Tensor) else [_layout(one) for one in made]

        found = join(layouts(LENGTH_MARKS), layouts(OTHER_MARKS)) if has_length(asked) else layouts(())
        return tuple(map(self._with, found)) if isinstance(found, list) else self._with(found)

    def _with(self, layout: tuple[Any, Any, Any]) -> "Array":
        shape, strides, start = layout
        return Array(self.buffer, shape, strides, self.offset + start)

    def flip(self, dims: Sequence[int]) -> "Array":
        """Returns the array read from the other end along these dims."""
        offset, strides = self.offset, list(self.strides)
        for dim in dims:
            offset += strides[dim] * max(0, self.shape[dim] - 1)
            strides[dim] = -strides[dim]
        return Array(self.buffer, self.shape, tuple(strides), offset)


def _layout(x: torch.Tensor) -> tuple[Any, Any, Any]:
    return tuple(x.shape), tuple(x.stride()), int(x.storage_offset())


def dense(shape: Sequence[Size], strides: Sequence[Size] | None = None) -> tuple[Size, ...]:
    """Strides of a contiguous tensor; those of dims of one element are taken from `strides`, as they do not matter."""
    made, step = [0] * len(shape), 1
    for n in reversed(range(len(shape))):
        made[n] = strides[n] if strides is not None and shape[n] == 1 else step
        step *= shape[n] or 1
    return tuple(made)


def contiguous(buffer: Region, shape: Sequence[Size]) -> Array:
    """Returns all of a buffer, in order, as an array of this shape."""
    return Array(buffer, tuple(shape), dense(shape))


def broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape that these fit into, which torch has checked; its own function loads sympy."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
