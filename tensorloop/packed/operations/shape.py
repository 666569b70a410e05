"""Shapes of packed tensors, their dims in any order: dims exchanged, added, dropped, repeated, stacked.

Where only features are moved, they are moved among the values. Where batch or ragged dim are, the result is a view of
the packed tensor, and nothing is moved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import NoNumber, RaggedSize
from tensorloop.packed.scores.score_ops import expand_to_scores
from tensorloop.packed.table.base import Packed, PackedView, check_same_rows, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.heads_as_rows import is_size_of
from tensorloop.packed.table.layout import find_place, layout_of, see, unwrap
from tensorloop.packed.table.pointwise import align

ALL = slice(None)


def as_tuple(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or dims that came one by one, or as one list."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def reorder(x: Any, dims: Sequence[int]) -> Any:
    """The dims in the order `dims`, numbers from 0: features are moved among the values, the rest is seen anew."""
    order = layout_of(x).order
    new = [order[d] for d in dims]
    features = [d - 1 for d in new if d > 1]
    p = unwrap(x)
    if features != sorted(features):
        p = p._with(p.values.permute(0, *features))
    return see(p, new.index(0), new.index(1))


@handles
def _transpose(func: Any, input: Any, dim0: Any, dim1: Any) -> Any:
    """Two dims exchanged; where batch or ragged dim are among them, a view: nothing is moved."""
    a, b = find_place(input, dim0), find_place(input, dim1)
    if a == b:
        return input
    if min(a, b) > 1 and is_packed(input):
        return input._with(input.values.transpose(a - 1, b - 1))
    return reorder(input, [b if d == a else a if d == b else d for d in range(input.ndim)])


@handles
def _permute(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """The dims in another order; where batch or ragged dim are moved, a view."""
    order = [find_place(input, d) for d in as_tuple(dims or (kwargs["dims"],))]
    if sorted(order) != list(range(input.ndim)):
        raise WrongValue(f"order {tuple(order)} is no order of the {input.ndim} dims of {input.shape}")
    return reorder(input, order)


@handles
def _movedim(func: Any, input: Any, source: Any, destination: Any) -> Any:
    """Dims moved to other places; the rest keep their order."""
    source, target = ([find_place(input, d) for d in as_tuple((x,))] for x in (source, destination))
    moved = dict(zip(target, source, strict=True))
    rest = iter(d for d in range(input.ndim) if d not in source)
    return reorder(input, [moved[d] if d in moved else next(rest) for d in range(input.ndim)])


# -- dims of size 1, repeated features


@handles
def _unsqueeze(func: Any, input: Any, dim: Any) -> Any:
    """A new feature dim of size 1 at any place; before the ragged dim it gives a view, such as (B, 1, T*)."""
    layout, place = layout_of(input), find_place(input, dim, extra=1)
    p, new = unwrap(input), layout.insert(place)
    return see(p._with(p.values.unsqueeze(layout.features_before(place) + 1)), new.batch, new.time)


@handles
def _squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Without feature dims of size 1."""
    layout, shape = layout_of(input), input.shape
    if dim is None:
        dims = [d for d in range(layout.ndim) if d not in layout[:2] and shape[d] == 1]
    else:
        dims = [find_place(input, d) for d in as_tuple((dim,))]
        if layout.time in dims or (layout.batch in dims and shape[layout.batch] == 1):
            raise refusal("the batch and the ragged dim are never dropped", "use p[0] for the only row")
        dims = [d for d in dims if d != layout.batch and shape[d] == 1]
    p, new = unwrap(input), layout.without(dims)
    return see(p._with(p.values.squeeze(tuple(layout.order[d] - 1 for d in dims))), new.batch, new.time)


def is_ragged(n: Any) -> bool:
    """Whether a size stands for a ragged dim."""
    return n is None or isinstance(n, (Dim, RaggedSize))


def check_size(n: Any, *rows: Packed) -> None:
    """Raises where a ragged size is of neither rows: those before, nor those with heads joined or parted."""
    dim = n._dim if isinstance(n, RaggedSize) else n
    if isinstance(dim, Dim) and not any(is_size_of(dim, p._dim) for p in rows):
        raise describe_difference(rows[0]._dim, dim, "a view by a size of other rows")


@handles
def _expand(func: Any, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Feature dims of size 1 repeated without a copy, and new ones in front."""
    given = as_tuple(sizes or (kwargs["size"],))
    layout = layout_of(input)
    extra = len(given) - layout.ndim
    fixed = {layout.batch + extra: (-1, len(unwrap(input)._dim)), layout.time + extra: (-1,)}
    if extra < 0 or not all(is_ragged(given[d]) or given[d] in sizes for d, sizes in fixed.items()):
        raise refusal(f"{input.shape} as {given}", "keep batch and ragged dim, as -1 or as they stand in the shape")
    features = [n for d, n in enumerate(given) if d not in fixed]
    p = unwrap(input)
    check_size(given[layout.time + extra], p)
    if any(isinstance(n, NoNumber) for n in features):
        return expand_to_scores(input, given)
    values = p.values[(ALL, *[None] * extra)]
    return see(p._with(values.expand(-1, *features)), layout.batch + extra, layout.time + extra)


@handles
def _expand_as(func: Any, input: Any, other: Any) -> Any:
    """To the shape of `other`."""
    if is_packed(other) and isinstance(input, Tensor):
        return other._with(align(input, other).expand(other.values.shape))
    return _expand(func, input, *other.shape)


@handles
def _repeat(func: Any, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Features repeated, and new dims in front."""
    given = as_tuple(sizes or tuple(kwargs.values()))
    layout = layout_of(input)
    extra = len(given) - layout.ndim
    places = layout.batch + extra, layout.time + extra
    if extra < 0 or any(given[d] != 1 for d in places):
        raise refusal(f"{given} repeats the batch or the ragged dim", "use repeat_interleave(n, 0) for rows")
    if any(isinstance(n, NoNumber) for n in given):
        raise refusal(f"{given} repeats a feature as often as rows are long", "keep size 1 there: it broadcasts")
    p = unwrap(input)
    values = p.values[(ALL, *[None] * extra)].repeat(1, *(n for d, n in enumerate(given) if d not in places))
    return see(p._with(values), *places)


@handles
def _stack(func: Any, tensors: Any, dim: Any = 0) -> Any:
    """Along a new feature dim at any place; before the ragged one it gives a view."""
    if not all(isinstance(x, (Packed, PackedView)) for x in tensors):
        raise refusal("packed and padded tensors", "pack all of them: pack_padded(x, p.lens)")
    first, layout = tensors[0], layout_of(tensors[0])
    for x in tensors:
        check_same_rows(unwrap(first), unwrap(x))
        if layout_of(x) != layout:
            raise refusal(f"{first.shape} and {x.shape} in different orders", "transpose one of them")
    place = find_place(first, dim, extra=1)
    values = torch.stack([unwrap(x).values for x in tensors], layout.features_before(place) + 1)
    new = layout.insert(place)
    return see(unwrap(first)._with(values), new.batch, new.time)
