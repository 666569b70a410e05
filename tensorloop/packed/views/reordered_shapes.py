"""Shapes of packed tensors seen in any order: dims exchanged, added, regrouped and indexed.

Batch and ragged dim are never regrouped with features, with one exception: heads that follow the batch may be joined
with it, (B * H, T*, D), and parted from it.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongIndex, WrongValue
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import NoNumber, RaggedSize
from tensorloop.packed.scores.relative import skew
from tensorloop.packed.scores.score_ops import expand_to_scores
from tensorloop.packed.table.base import Handler, Packed, PackedView, check_same_rows, refusal
from tensorloop.packed.table.dispatch import dispatch
from tensorloop.packed.table.heads_as_rows import has_heads, is_size_of, join_heads, part_heads
from tensorloop.packed.table.layout import ViewLayout, layout_of, see, turn_back, turn_tensor, unwrap

_ALL = slice(None)


def _as_tuple(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or dims that came one by one, or as one list."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


# -- order


def reorder(x: Any, dims: Sequence[int]) -> Any:
    """The dims in the order `dims`, numbers from 0: features are moved among the values, the rest is seen anew."""
    order = layout_of(x).order
    new = [order[d] for d in dims]
    features = [d - 1 for d in new if d > 1]
    p = unwrap(x)
    if features != sorted(features):
        p = p._with(p.values.permute(0, *features))
    return see(p, new.index(0), new.index(1))


def transpose(func: Any, input: Any, dim0: int, dim1: int) -> Any:
    """Two dims exchanged."""
    layout = layout_of(input)
    a, b = layout.find(dim0), layout.find(dim1)
    dims = list(range(layout.ndim))
    dims[a], dims[b] = b, a
    return reorder(input, dims)


def permute(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """The dims in another order."""
    layout = layout_of(input)
    order = [layout.find(d) for d in _as_tuple(dims or (kwargs["dims"],))]
    if sorted(order) != list(range(layout.ndim)):
        raise WrongValue(f"order {tuple(order)} is no order of the {layout.ndim} dims of {input.shape}")
    return reorder(input, order)


def move(func: Any, input: Any, source: Any, destination: Any) -> Any:
    """Dims moved to other places; the rest keep their order."""
    layout = layout_of(input)
    source, target = ([layout.find(d) for d in _as_tuple((x,))] for x in (source, destination))
    moved = dict(zip(target, source, strict=True))
    rest = iter(d for d in range(layout.ndim) if d not in source)
    return reorder(input, [moved[d] if d in moved else next(rest) for d in range(layout.ndim)])


# -- dims of size 1, repeated features


def unsqueeze(func: Any, input: Any, dim: int) -> Any:
    """A new feature dim of size 1 at any place."""
    layout = layout_of(input)
    place = ViewLayout(0, 1, layout.ndim + 1).find(dim)
    p = unwrap(input)
    new = layout.insert(place)
    return see(p._with(p.values.unsqueeze(layout.features_before(place) + 1)), new.batch, new.time)


def squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Without feature dims of size 1."""
    layout, shape = layout_of(input), input.shape
    fixed = layout.batch, layout.time
    if dim is None:
        dims = [d for d in range(layout.ndim) if d not in fixed and shape[d] == 1]
    else:
        dims = [layout.find(d) for d in _as_tuple((dim,))]
        if layout.time in dims or (layout.batch in dims and shape[layout.batch] == 1):
            raise refusal("the batch and the ragged dim are never dropped", "use x[0] for the only row")
        dims = [d for d in dims if shape[d] == 1]
    p, new = unwrap(input), layout.without(dims)
    return see(p._with(p.values.squeeze(tuple(layout.order[d] - 1 for d in dims))), new.batch, new.time)


def expand(func: Any, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Feature dims of size 1 repeated without a copy, and new ones in front."""
    given = _as_tuple(sizes or (kwargs["size"],))
    layout = layout_of(input)
    extra = len(given) - layout.ndim
    fixed = {layout.batch + extra: (-1, len(unwrap(input)._dim)), layout.time + extra: (-1,)}
    if extra < 0 or not all(_is_ragged(given[d]) or given[d] in sizes for d, sizes in fixed.items()):
        raise refusal(f"{input.shape} as {given}", "keep batch and ragged dim, as -1 or as they stand in the shape")
    features = [n for d, n in enumerate(given) if d not in fixed]
    p = unwrap(input)
    _check_size(given[layout.time + extra], p)
    if any(isinstance(n, NoNumber) for n in features):
        return expand_to_scores(input, given)
    values = p.values[(_ALL, *[None] * extra)]
    return see(p._with(values.expand(-1, *features)), layout.batch + extra, layout.time + extra)


def expand_as(func: Any, input: Any, other: Any) -> Any:
    """To the shape of `other`."""
    return expand(func, input, *other.shape)


def repeat(func: Any, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    """Features repeated, and new dims in front."""
    given = _as_tuple(sizes or tuple(kwargs.values()))
    layout = layout_of(input)
    extra = len(given) - layout.ndim
    places = layout.batch + extra, layout.time + extra
    if extra < 0 or any(given[d] != 1 for d in places):
        raise refusal(f"{given} repeats the batch or the ragged dim", "use repeat_interleave(n, 0) for rows")
    refuse_ragged_repeats(given)
    p = unwrap(input)
    values = p.values[(_ALL, *[None] * extra)].repeat(1, *(n for d, n in enumerate(given) if d not in places))
    return see(p._with(values), *places)


def refuse_ragged_repeats(sizes: Sequence[Any]) -> None:
    """Raises where features would be repeated as often as the longest row is long, in all rows."""
    if any(isinstance(n, NoNumber) for n in sizes):
        raise refusal(f"{tuple(sizes)} repeats a feature as often as rows are long", "keep size 1 there: it broadcasts")


def stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Along a new feature dim at any place."""
    if not all(isinstance(x, (Packed, PackedView)) for x in tensors):
        raise refusal("packed and padded tensors", "pack all of them: pack_padded(x, p.lens)")
    layout = layout_of(tensors[0])
    for x in tensors:
        check_same_rows(unwrap(tensors[0]), unwrap(x))
        if layout_of(x) != layout:
            raise refusal(f"{tensors[0].shape} and {x.shape} in different orders", "transpose one of them")
    place = ViewLayout(0, 1, layout.ndim + 1).find(dim)
    values = torch.stack([unwrap(x).values for x in tensors], layout.features_before(place) + 1)
    new = layout.insert(place)
    return see(unwrap(tensors[0])._with(values), new.batch, new.time)


# -- sizes


def _is_ragged(n: Any) -> bool:
    return n is None or isinstance(n, (Dim, RaggedSize))


def reshape(func: Any, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """Features regrouped where they stand, between batch and ragged dim; heads behind the batch joined with it."""
    given = _as_tuple(shape or (kwargs.get("shape", kwargs.get("size")),))
    if len(given) == 1 and isinstance(given[0], torch.dtype):
        p = unwrap(input)
        return see(p._with(p.values.view(given[0])), *layout_of(input)[:2])
    found = regroup(input, given)
    found = skew(input, given) if found is None else found
    if found is None:
        raise refusal(
            f"{input.shape} as {given} mixes the batch or the ragged dim with features",
            "keep both, the ragged one as it stands in the shape (or as the only -1)",
        )
    return found


def view_as(func: Any, input: Any, other: Any) -> Any:
    """With the sizes of `other`, of the same rows."""
    if not isinstance(input, (Packed, PackedView)) or not isinstance(other, (Packed, PackedView)):
        raise refusal("only one of two tensors is packed", "use .flatten(0, 1) or pack_padded")
    return reshape(func, input, *other.shape)


def flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Features as one, or heads joined with the batch before them."""
    layout, shape = layout_of(input), input.shape
    a, b = layout.find(start_dim), layout.find(end_dim)
    if a <= layout.time <= b and a != b:
        raise refusal(f"dims {a} to {b} of {shape}", "the ragged dim stays; bring it to dim 1 and flatten (0, 1)")
    return reshape(func, input, *shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :])


def unflatten(func: Any, input: Any, dim: int, sizes: Any) -> Any:
    """One dim as several: a feature, or a batch that heads were joined with."""
    shape, d = input.shape, layout_of(input).find(dim)
    sizes = tuple(sizes)
    if -1 in sizes:
        known = -prod(sizes)
        sizes = tuple(shape[d] // known if n == -1 and known else n for n in sizes)
    layout, p = layout_of(input), unwrap(input)
    if d not in layout[:2]:
        batch, time = (place + (place > d) * (len(sizes) - 1) for place in layout[:2])
        return see(p._with(p.values.unflatten(layout.order[d] - 1, sizes)), batch, time)
    return reshape(func, input, *shape[:d], *sizes, *shape[d + 1 :])


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
            _check_size(sizes[time], p, found)
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


def _check_size(n: Any, *rows: Packed) -> None:
    """Raises where a ragged size is of neither rows: those before, nor those with heads joined or parted."""
    dim = n._dim if isinstance(n, RaggedSize) else n
    if isinstance(dim, Dim) and not any(is_size_of(dim, p._dim) for p in rows):
        raise describe_difference(rows[0]._dim, dim, "a view by a size of other rows")


def _segments(sizes: Sequence[Any], batch: int, time: int) -> list[list[Any]]:
    """The features before both places, between them, and behind both."""
    a, b = sorted((batch, time))
    return [list(sizes[:a]), list(sizes[a + 1 : b]), list(sizes[b + 1 :])]


def _places(sizes: tuple[Any, ...], batch_first: bool) -> Iterator[tuple[int, int]]:
    """Where the batch and the ragged dim may be: the latter is written as such, or is -1."""
    ragged = [i for i, n in enumerate(sizes) if _is_ragged(n)]
    for time in ragged or [i for i, n in enumerate(sizes) if type(n) is int and n == -1]:
        for batch in range(len(sizes)):
            if batch != time and (batch < time) == batch_first and not _is_ragged(sizes[batch]) and len(ragged) < 2:
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


def pair(func: Any, input: Any) -> Any:
    """The last dim, of size 2, as complex numbers; or those as a dim more."""
    layout, p = layout_of(input), unwrap(input)
    if func.__name__ == "view_as_complex" and layout.ndim - 1 in layout[:2]:
        raise refusal(f"the last dim of {input.shape} is no feature", "transpose it back")
    return see(p._with(func(p.values)), *layout[:2])


def pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """F.pad with a number, of features and of each row's own entries."""
    layout = layout_of(input)
    sizes = dict(zip(range(layout.ndim - 1, -1, -1), zip(pad[::2], pad[1::2], strict=True), strict=False))
    if mode != "constant" or len(pad) > 2 * layout.ndim or any(sizes.get(layout.batch, ())):
        raise refusal(f"{tuple(pad)} of {input.shape}, mode {mode!r}", "pad with a number, or x.transpose it back")
    given = [sizes.get(layout.order.index(d), (0, 0)) for d in range(layout.ndim - 1, 0, -1)]
    padded = dispatch(torch.nn.functional.pad, (unwrap(input), [n for pair in given for n in pair]), {"value": value})
    return see(padded, *layout[:2])


# -- indices


def gather(func: Any, input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Along a feature dim, at an index of as many dims: packed in the same order, or ordinary, of the longest row."""
    layout, p = layout_of(input), unwrap(input)
    d = layout.find(dim)
    if d in layout[:2]:
        raise refusal(f"along the batch or the ragged dim of {input.shape}", "transpose it back, (B, T*, *F)")
    if isinstance(index, PackedView) and layout_of(index) == layout:
        check_same_rows(p, unwrap(index))
        at = unwrap(index).values
    elif isinstance(index, Tensor) and index.dim() == layout.ndim:
        sizes = index.shape[layout.batch], index.shape[layout.time]
        if sizes != (len(p._dim), p._dim.max_len):
            raise WrongValue(f"the index {tuple(index.shape)} is not of all entries of {input.shape}; expand it")
        at = segments.pack(turn_tensor(index, layout), p._dim._offsets, p._dim.total)
    else:
        raise refusal("its index has not the dims of the input in the same order", "transpose one of them")
    return see(p._with(torch.gather(p.values, layout.order[d] - 1, at)), *layout[:2])


def index(x: Any, key: Any) -> Any:
    """x[key]: numbers, slices, None, dots, and one list or tensor of numbers."""
    layout = layout_of(x)
    keys = _fill_dots(key if isinstance(key, tuple) else (key,), layout.ndim)
    if sum(not isinstance(k, (int, slice)) and k is not None for k in keys) > 1:
        raise refusal("several lists of indices", "index by one after the other")
    dims = iter(range(layout.ndim))
    placed = [(k, -1 if k is None else next(dims)) for k in keys]  # each key with its dim
    of_dims = {d: k for k, d in placed}
    rows, times = of_dims[layout.batch], of_dims[layout.time]
    p: Any = unwrap(x)
    if not (_is_whole(rows) and _is_whole(times)):
        p = p[rows, times]
    if isinstance(p, Tensor):
        gone = [d for d in layout[:2] if isinstance(of_dims[d], int)]
        left = [_ALL if d in layout[:2] else k for k, d in placed if d not in gone]
        return turn_back(p, layout, gone)[tuple(left)]
    values = p.values[(_ALL, *(k for k, d in placed if d not in layout[:2]))]
    sizes = [0 if isinstance(k, int) else max(1, getattr(k, "ndim", 1)) for k, _ in placed]
    places = [sum(sizes[: next(i for i, (_, d) in enumerate(placed) if d == place)]) for place in layout[:2]]
    return see(p._with(values), *places)


def _is_whole(k: Any) -> bool:
    return isinstance(k, slice) and k.start is None and k.stop is None and k.step is None


def _fill_dots(keys: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > ndim:
        raise WrongIndex(f"{used} indices for a packed tensor of {ndim} dims")
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    at = dots[0] if dots else len(keys)
    return (*keys[:at], *[_ALL] * (ndim - used), *keys[at + (1 if dots else 0) :])


def _index_table(func: Any, input: Any, key: Any) -> Any:
    """An ordinary tensor at a packed index: `table[x]`; or a view at an ordinary one."""
    if isinstance(input, PackedView):
        return index(input, key)
    if isinstance(key, PackedView) and key.packed.values.dtype is not torch.bool:
        return see(key.packed._with(input[key.packed.values]), *layout_of(key)[:2])
    raise refusal("an ordinary tensor is indexed by one packed tensor of integers", "use .values or .pad()")


TABLE: dict[str, Handler] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("movedim", "moveaxis"), move),
    **dict.fromkeys(("reshape", "view"), reshape),
    **dict.fromkeys(("view_as", "reshape_as"), view_as),
    **dict.fromkeys(("repeat", "tile"), repeat),
    **dict.fromkeys(("view_as_complex", "view_as_real"), pair),
    **{"permute": permute, "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "expand_as": expand_as},
    **{"stack": stack, "flatten": flatten, "unflatten": unflatten, "pad": pad, "__getitem__": _index_table},
    "gather": gather,
}
