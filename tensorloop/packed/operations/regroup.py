"""Sizes of packed tensors, their dims in any order: features regrouped, heads joined with the batch, entries as such.

Batch and ragged dim are never regrouped with features, with two exceptions. Heads that follow the batch may be joined
with it, (B * H, T*, D), and parted from it. And batch and ragged dim together are all entries, an ordinary tensor.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from tensorloop.packed.operations.shape import as_tuple, check_size, is_ragged
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import EntryCount, RaggedSize
from tensorloop.packed.scores.relative import skew
from tensorloop.packed.table.base import Packed, PackedView, check_same_rows, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.entries import entries_of
from tensorloop.packed.table.heads_as_rows import has_heads, is_size_of, join_heads, part_heads
from tensorloop.packed.table.layout import find_place, layout_of, see, unwrap


@handles
def _reshape(func: Any, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """Features regrouped where they stand, heads joined with the batch before; (-1, *sizes): the entries there are."""
    given = as_tuple(shape or (kwargs.get("shape", kwargs.get("size")),))
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        p = unwrap(input)
        return see(p._with(p.values.view(given[0])), *layout_of(input)[:2])
    found = _reshape_rows(input, given) if is_packed(input) else None
    found = regroup(input, given) if found is None else found
    if found is None and is_packed(input):
        if _is_even(input, given):
            return input.values.reshape(given)
        cure = "keep the first two as (B, None), or merge them with the first as -1"
        raise refusal(f"{input.shape} as {given}", cure)
    found = skew(input, given) if found is None else found
    if found is None:
        raise refusal(
            f"{input.shape} as {given} mixes the batch or the ragged dim with features",
            "keep both, the ragged one as it stands in the shape (or as the only -1)",
        )
    return found


def _reshape_rows(p: Packed, sizes: tuple[Any, ...]) -> Any:
    """(B, None or -1, *sizes), or all entries, (-1, *sizes) or (B * T, *sizes); None for other sizes."""
    if sizes and (isinstance(sizes[0], EntryCount) or (isinstance(sizes[0], RaggedSize) and len(p._dim) == 1)):
        _check_sizes(p, sizes)
        rest = _find_rest(sizes[1:], prod(p.values.shape[1:]))
        return entries_of(p, p.values.reshape(len(p.values), *rest))
    # A size of other rows is that of heads joined with the batch, or parted from it.
    if any(len(n._dim) != len(p._dim) for n in sizes if isinstance(n, RaggedSize)):
        return None
    _check_sizes(p, sizes)
    return _keep_rows(p, tuple(None if isinstance(n, (Dim, RaggedSize)) else n for n in sizes))


def _check_sizes(p: Packed, sizes: tuple[Any, ...]) -> None:
    """Raises where a size is of other rows. A count of entries is none of those that heads were joined with."""
    for n in sizes:
        dim = n._dim if isinstance(n, (RaggedSize, EntryCount)) else n
        if isinstance(dim, Dim) and not (dim.same(p._dim) or (isinstance(n, RaggedSize) and is_size_of(dim, p._dim))):
            raise describe_difference(p._dim, dim, f"{p.shape} by a size of other rows")


def _is_even(p: Packed, sizes: Any) -> bool:
    """Whether they are numbers, of rows that are of one length: a token that was cut from each row, say."""
    numbers = all(type(n) is int and n >= 0 for n in sizes) and prod(sizes) == p.values.numel()
    return numbers and len(set(p._dim._host_lens.tolist())) < 2


def _keep_rows(p: Packed, sizes: tuple[Any, ...]) -> Any:
    """(B, None or -1, *sizes), or (-1, *sizes) of all entries; None for other sizes."""
    features = p.values.shape[1:]
    if len(sizes) >= 2 and sizes[0] in (len(p._dim), -1) and (sizes[1] is None or sizes[:2] == (sizes[0], -1)):
        rest = sizes[2:]
        if sizes[1] is None and sizes[0] != -1:
            rest = _find_rest(rest, prod(features))
        return p._with(p.values.reshape(len(p.values), *rest)) if prod(rest) == prod(features) else None
    if not sizes or sizes[0] != -1 or None in sizes:
        return None
    if prod(sizes[1:]) and prod(features) % prod(sizes[1:]):
        return None
    return entries_of(p, p.values.reshape(sizes))


def _find_rest(sizes: Any, total: int) -> tuple[int, ...]:
    """Sizes with a number for one -1, as torch finds it, also where there are no entries."""
    known = -prod(sizes)
    return tuple(total // known if n == -1 else n for n in sizes) if known > 0 else tuple(sizes)


@handles
def _view_as(func: Any, input: Any, other: Any) -> Any:
    """The features as those of `other`, of the same rows."""
    if not isinstance(input, (Packed, PackedView)) or not isinstance(other, (Packed, PackedView)):
        raise refusal("only one of two tensors is packed", "use .flatten(0, 1) or pack_padded")
    if isinstance(input, Packed) and isinstance(other, Packed):
        check_same_rows(input, other)
        return input._with(input.values.reshape(other.values.shape))
    return _reshape(func, input, *other.shape)


@handles
def _flatten(func: Any, input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    """Features as one, heads joined with the batch; from dims 0 to 1 on all entries, (N, ...): nothing is padding."""
    a, b = find_place(input, start_dim), find_place(input, end_dim)
    if is_packed(input) and (a > 1 or (a == 0 and b >= 1)):
        flat = input.values.flatten(max(a - 1, 0), b - 1)
        return input._with(flat) if a else entries_of(input, flat)
    layout, shape = layout_of(input), input.shape
    if a <= layout.time <= b and (a != b or is_packed(input)):
        ours = "flatten (0, 1) or more, or feature dims only"
        cure = ours if is_packed(input) else "the ragged dim stays; bring it to dim 1 and flatten (0, 1)"
        raise refusal(f"dims {a} to {b} of {shape}", cure)
    return _reshape(func, input, *shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :])


@handles
def _unflatten(func: Any, input: Any, dim: Any, sizes: Any) -> Any:
    """One dim as several: a feature, or a batch that heads were joined with."""
    shape, d = input.shape, find_place(input, dim)
    sizes = tuple(sizes)
    if -1 in sizes:
        known = -prod(sizes)
        sizes = tuple(shape[d] // known if n == -1 and known else n for n in sizes)
    layout, p = layout_of(input), unwrap(input)
    if d == layout.time:
        raise refusal(f"dim {dim} is the ragged dim", "it works on features, and on a batch with heads")
    if d != layout.batch:
        batch, time = (place + (place > d) * (len(sizes) - 1) for place in layout[:2])
        return see(p._with(p.values.unflatten(layout.order[d] - 1, sizes)), batch, time)
    return _reshape(func, input, *shape[:d], *sizes, *shape[d + 1 :])


@handles
def _pair(func: Any, input: Any) -> Any:
    """The last dim, of size 2, as complex numbers; or those as a feature dim more."""
    layout, p = layout_of(input), unwrap(input)
    if func.__name__ == "view_as_complex" and layout.ndim - 1 in layout[:2]:
        raise refusal(f"the last dim of {input.shape} is no feature", "transpose it back")
    return see(p._with(func(p.values)), *layout[:2])


def regroup(x: Any, sizes: tuple[Any, ...]) -> Any:
    """The view with these sizes; None where they do not keep batch and ragged dim apart from features."""
    p, layout = unwrap(x), layout_of(x)
    rows, shape = len(p._dim), x.shape
    have = _segments(shape, layout.batch, layout.time)
    behind = 1 if layout.batch < layout.time else 2  # the segment of features that follow the batch
    ways = []
    for batch, time in _places(sizes, layout.batch < layout.time):
        want = _segments(sizes, batch, time)
        ways += [(heads, batch, time, want) for heads in _joined(have, want, behind, rows, sizes[batch])]
    for heads, batch, time, want in sorted(ways, key=lambda way: _rate(p._dim, way[0], sizes[way[2]])):
        totals = [prod(s) for s in have]
        totals[behind] = totals[behind] // heads if heads > 0 else totals[behind] * -heads
        filled = [_fill(s, total) for s, total in zip(want, totals, strict=True)]
        if all(s is not None for s in filled):
            found = _regroup_values(p, have, filled, behind, heads)
            check_size(sizes[time], p, found)
            return see(found, batch, time)
    return None


def _rate(dim: Dim, heads: int, size: Any) -> tuple[bool, bool, int]:
    """The less, the likelier: of (1, B, T, d) from rows of one length, either 1 or B may be the batch.

    A ragged size of other rows tells how many there are to be, as do rows that heads were joined with. Else rows stay,
    or are joined with heads. Rows of different lens are no heads of one; that is said where nothing else fits.
    """
    rows = len(dim)
    said = len(size._dim) if isinstance(size, RaggedSize) else rows
    wanted = said if said != rows else rows // max(dim._cache.get("heads", 1), 1)
    made = rows * heads if heads > 0 else rows // -heads
    return heads < 0 and not has_heads(dim, -heads), made != wanted, 0 if heads == 1 else 1 if heads > 0 else 2


def _segments(sizes: Sequence[Any], batch: int, time: int) -> list[list[Any]]:
    """The features before both places, between them, and behind both."""
    a, b = sorted((batch, time))
    return [list(sizes[:a]), list(sizes[a + 1 : b]), list(sizes[b + 1 :])]


def _places(sizes: tuple[Any, ...], batch_first: bool) -> Iterator[tuple[int, int]]:
    """Where the batch and the ragged dim may be: the latter is written as such, or is -1."""
    ragged = [i for i, n in enumerate(sizes) if is_ragged(n)]
    for time in ragged or [i for i, n in enumerate(sizes) if type(n) is int and n == -1]:
        for batch in range(len(sizes)):
            if batch != time and (batch < time) == batch_first and not is_ragged(sizes[batch]) and len(ragged) < 2:
                yield batch, time


def _joined(have: list[Any], want: list[Any], behind: int, rows: int, n: int) -> Iterator[int]:
    """How many heads the batch of size n has more: h joined with it, -h parted from it, 1 for neither."""
    there, wanted = prod(have[behind]), prod(want[behind])
    if n in (rows, -1) and (wanted == there or wanted < 0):
        yield 1
    elif n == -1 or n == rows == 0:  # as many as it takes
        if wanted > 0 and there % wanted == 0:
            yield there // wanted
        elif there > 0 and wanted % there == 0:
            yield -(wanted // there)
    elif n > rows > 0 and n % rows == 0 and there % (n // rows) == 0:
        yield n // rows
    elif 0 < n < rows and rows % n == 0:
        yield -(rows // n)


def _fill(sizes: list[Any], total: int) -> list[int] | None:
    """The sizes with one -1 found; None where they do not make `total`."""
    if sizes.count(-1) == 1:
        known = -prod(sizes)
        if known <= 0 or total % known:
            return None
        sizes = [total // known if n == -1 else n for n in sizes]
    return sizes if prod(sizes) == total else None


def _regroup_values(p: Packed, have: list[Any], want: list[Any], behind: int, heads: int) -> Packed:
    if heads != 1:
        # As (N, before, between, behind): heads are the outer part of the segment that follows the batch.
        before, middle, after = (prod(s) for s in have)
        if heads > 1:
            parts = (before, heads, middle // heads, after) if behind == 1 else (before, middle, heads, after // heads)
            p = join_heads(p._with(p.values.reshape(-1, *parts).movedim(behind + 1, 1)))
        else:
            p = part_heads(p._with(p.values.reshape(-1, before, middle, after)), -heads)
            p = p._with(p.values.movedim(1, behind + 1))
    return p._with(p.values.reshape(len(p.values), *(n for s in want for n in s)))
