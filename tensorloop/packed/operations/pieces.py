"""Parts of a packed tensor along one dim (chunk, split, narrow, gather) and what moves along it (roll, diff, pad).

Along feature dims they are torch's own, of the values. Along the batch dim they take rows, along the ragged dim steps:
a piece has of each row what the slice of that place gives, so that the pieces of a split joined again are the whole.
"""

import builtins
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongValue
from tensorloop.packed.operations.index import crop, slice_rows, split_rows
from tensorloop.packed.operations.padding import pad_time
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, check_same_rows, find_dim, find_feature_dim, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import align, check_partner, rewrap


def _needs_packed(input: Any) -> None:
    if not is_packed(input):
        raise refusal("only another argument than its input is packed", "pack the input: pack_padded(x, p.lens)")


def _take_values(x: Any, input: Packed) -> Any:
    """An index or a part beside the values: that of the same rows."""
    if is_packed(x):
        check_same_rows(input, x)
        return x.values
    return x


# -- pieces


def _cut(p: Packed, d: int, places: Any) -> tuple[Packed, ...]:
    """Rows or steps; `places` are what torch makes of their numbers from 0."""
    ends = [(int(x[0]), int(x[-1]) + 1) if len(x) else (0, 0) for x in places]
    return tuple(slice_rows(p, a, b) if d == 0 else crop(p, slice(a, b)) for a, b in ends)


def _count(p: Packed, d: int) -> int:
    return len(p._dim) if d == 0 else p._dim.max_len


@handles
def _chunk(func: Any, input: Any, chunks: Any, dim: Any = 0) -> Any:
    """Along the ragged dim pieces of the longest row, and of each row what is there."""
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, torch.chunk(input.values, chunks, d - 1))
    return _cut(input, d, torch.chunk(torch.arange(_count(input, d), device="cpu"), chunks))


@handles
def _tensor_split(func: Any, input: Any, indices_or_sections: Any = None, dim: Any = 0, **kwargs: Any) -> Any:
    """By a number of pieces, or by the places where to cut."""
    how = kwargs.get("sections", kwargs.get("indices", indices_or_sections))
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, torch.tensor_split(input.values, how, d - 1))
    return _cut(input, d, torch.tensor_split(torch.arange(_count(input, d), device="cpu"), how))


@handles
def _split(func: Any, input: Any, size: Any = None, dim: Any = 0, **kwargs: Any) -> Any:
    """Along the ragged dim pieces of the longest row, and of each row what is there."""
    size = next(iter(kwargs.values()), size)  # split_size, split_sizes, split_size_or_sections
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, input.values.split(size if isinstance(size, int) else list(size), d - 1))
    if d == 0:
        return split_rows(input, size)
    steps = _count(input, 1)
    if not isinstance(size, int):
        size = [arguments.as_int(n, f"sizes[{i}]") for i, n in enumerate(arguments.items(size, "sizes"))]
        if builtins.sum(size) != steps:
            raise WrongValue(f"sizes {size} do not sum to the {steps} steps of the longest row")
    return _cut(input, 1, torch.arange(steps, device="cpu").split(size))


@handles
def _unbind(func: Any, input: Any, dim: Any = 0) -> Any:
    """The rows, ordinary tensors; or the slices of a feature dim, packed."""
    d = find_dim(input, dim)
    if d == 0:
        return input.unbind()
    if d == 1:
        raise refusal("rows end at different steps", "use p[:, t], p.split(1, 1), or tensorloop.scan")
    return rewrap(input, input.values.unbind(d - 1))


@handles
def _select(func: Any, input: Any, dim: Any, index: Any) -> Any:
    """p[b], p[:, t], or an index of a feature dim."""
    d = find_dim(input, dim)
    return input._with(input.values.select(d - 1, index)) if d > 1 else input[index] if d == 0 else input[:, index]


@handles
def _narrow(func: Any, input: Any, dim: Any, start: Any, length: Any) -> Any:
    """Rows, or features; along the ragged dim p[:, start : start + length]."""
    d = find_dim(input, dim)
    if d > 1:
        return input._with(input.values.narrow(d - 1, start, length))
    size = _count(input, d)
    first, length = arguments.as_int(start, "start"), arguments.as_int(length, "length")
    first = first + size if first < 0 else first
    if first < 0 or length < 0 or first + length > size:
        what = "rows" if d == 0 else "steps of the longest row"
        raise WrongIndex(f"start {start} and length {length} are out of range for {size} {what}")
    return slice_rows(input, first, first + length) if d == 0 else crop(input, slice(first, first + length))


@handles
def _index_select(func: Any, input: Any, dim: Any, index: Any) -> Any:
    """p[index], p[:, index], or features."""
    _needs_packed(input)
    d = find_dim(input, dim)
    if d > 1:
        return input._with(input.values.index_select(d - 1, index))
    index = index.reshape(-1)
    return input[index] if d == 0 else input[:, index]


@handles
def _gather(func: Any, input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """By an index of the same rows; along the ragged dim also by an ordinary one (B, K, *F), from each row's start."""
    if _is_table(input, dim, index):
        return _pick_from_table(input, index)
    _needs_packed(input)
    if find_dim(input, dim) > 1:
        at = _take_values(index, input) if is_packed(index) else _pack_index(index, input)
        return input._with(torch.gather(input.values, find_feature_dim(input, dim), at))
    return _pick_steps(lambda values, at: torch.gather(values, 0, at), input, dim, index)


def _pack_index(index: Tensor, p: Packed) -> Tensor:
    """An ordinary index (B, T, *F) cut to rows. One of fewer rows or steps would pick from the first ones alone."""
    if index.dim() != p.ndim or index.shape[:2] != (len(p._dim), p._dim.max_len):
        raise WrongValue(f"the index {tuple(index.shape)} is not of all entries of {p.shape}; expand it")
    return segments.pack(index, p._dim._offsets, p._dim.total)


def _is_table(input: Any, dim: Any, index: Any) -> bool:
    return isinstance(input, Tensor) and input.dim() == index.ndim == 2 and dim in (1, -1)


def _pick_from_table(table: Tensor, index: Packed) -> Packed:
    """Picks from an ordinary table (B, L) by a packed index (B, T*): each row of it from the same row of the table."""
    rows, size = index._dim._row_ids, table.shape[1]
    if len(table) != len(index._dim):
        raise WrongValue(f"a table of {len(table)} rows, an index of {len(index._dim)}")
    bad = (index.values < 0) | (index.values >= size)
    if arguments.must_check(None, bad) and bool(bad.any()):
        entry = int(bad.nonzero()[0])
        raise WrongIndex(f"index {int(index.values[entry])} of row {int(rows[entry])} is out of range for {size}")
    # Where nobody looked, an index below 0 must not count from the end: it becomes one that the device refuses.
    return index._with(table[rows, index.values.where(index.values >= 0, size)])


@handles
def _take_along_dim(func: Any, input: Any, indices: Any, dim: Any = None) -> Any:
    """As gather; an index broadcasts along the other dims."""
    _needs_packed(input)
    if dim is None:
        raise refusal("without dim it counts the entries of a padded tensor", "give dim")
    if find_dim(input, dim) > 1:
        index = _take_values(indices, input) if is_packed(indices) else align(indices, input)
        index = index.view(*[1] * (input.values.dim() - index.dim()), *index.shape)
        return input._with(torch.take_along_dim(input.values, index, find_feature_dim(input, dim)))
    return _pick_steps(lambda values, at: torch.take_along_dim(values, at, 0), input, dim, indices)


def _pick_steps(pick: Any, p: Packed, dim: Any, index: Any) -> Any:
    """Along the ragged dim: the index counts from the start of each row, as argsort gives it; `pick(values, index)`."""
    if find_dim(p, dim) == 0:
        raise refusal("dim 0 would mix rows", "take rows by p[index]")
    lens, starts = p._dim._lens, p._dim._offsets[:-1]
    if is_packed(index):
        at = _take_values(index, p)
        rows = p._dim._row_ids.view(-1, *[1] * (at.dim() - 1))
    else:
        at = index
        if at.dim() < 2 or len(at) != len(lens):
            raise WrongValue(f"along the ragged dim the index must be ({len(lens)}, K, ...), got {tuple(at.shape)}")
        rows = torch.arange(len(lens), device=at.device).view(-1, *[1] * (at.dim() - 1))
    bad = (at < 0) | (at >= lens[rows])
    if arguments.must_check(None, bad) and bool(bad.any()):
        first = bad.nonzero()[0]
        b, t = int(rows.expand_as(at)[tuple(first)]), int(at[tuple(first)])
        raise WrongIndex(f"index {t} is out of range for row {b} of length {int(lens[b])}")
    entries = at + starts[rows]
    if is_packed(index):
        return p._with(pick(p.values, entries))
    out = pick(p.values, entries.flatten(0, 1))
    return out.view(*at.shape[:2], *out.shape[1:])


@handles
def _masked_select(func: Any, input: Any, mask: Any) -> Any:
    """The numbers where the mask is true, (M,), in the order of a padded tensor without its padding."""
    if not is_packed(input):
        return align(input, mask).expand_as(mask.values).masked_select(mask.values)
    return input.values.masked_select(check_partner(input, mask).values if is_packed(mask) else align(mask, input))


@handles
def _glu(func: Any, input: Any, dim: Any = -1) -> Any:
    """Along a feature dim."""
    return input._with(torch.nn.functional.glu(input.values, find_feature_dim(input, dim)))


# -- what moves along a dim


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


@handles
def _roll(func: Any, input: Any, shifts: Any, dims: Any = None) -> Any:
    """Along the ragged dim each row rolls by itself."""
    if dims is None or dims == ():
        raise refusal("without dims it rolls a flattened tensor", "give dims, or use .values.roll(n)")
    shifts, numbers = _as_tuple(shifts), [find_dim(input, d) for d in _as_tuple(dims)]
    if len(shifts) != len(numbers):
        raise WrongValue(f"{len(shifts)} shifts and {len(numbers)} dims; give one shift for each dim")
    if 0 in numbers:
        raise refusal("dim 0 would put rows in another order", "use p[torch.arange(B).roll(n)]")
    features = [(n, d - 1) for n, d in zip(shifts, numbers, strict=True) if d > 1]
    values = input.values.roll(*zip(*features, strict=True)) if features else input.values.clone()
    n = builtins.sum(arguments.as_int(n, "shifts") for n, d in zip(shifts, numbers, strict=True) if d == 1)
    if n and len(values):
        places, lens = input._dim._positions, input._dim._lens[input._dim._row_ids]
        starts = torch.arange(len(places), device=places.device) - places
        values = segments.permute(values, starts + (places - n) % lens, starts + (places + n) % lens)
    return input._with(values)


@handles
def _diff(func: Any, input: Any, n: int = 1, dim: Any = -1, prepend: Any = None, append: Any = None) -> Any:
    """Along the ragged dim every row gets n shorter, an empty one stays; what is joined to it may be (B, K, *F)."""
    _needs_packed(input)
    d = find_dim(input, dim)
    if d == 0:
        raise refusal("rows of unequal length have no differences", "use p.pad() where the padding may count")
    parts = (prepend, input, append)
    if d > 1:
        given = [_take_values(x, input) if is_packed(x) or x is None else align(x, input) for x in parts]
        return input._with(torch.diff(given[1], n, d - 1, given[0], given[2]))
    whole = torch.cat([x if is_packed(x) else pack_steps(x, input) for x in parts if x is not None], 1)  # pyright: ignore
    if n < 0:
        raise WrongValue(f"n must be at least 0, got {n}")
    for _ in range(n):
        later, earlier = crop(whole, slice(1, None)), crop(whole, slice(None, -1))  # pyright: ignore
        differs = torch.logical_xor if earlier.values.dtype is torch.bool else torch.sub
        whole = later._with(differs(later.values, earlier.values))
    return whole


def pack_steps(x: Tensor, p: Packed) -> Packed:
    """(B, K, *F) packed: K entries a row."""
    if x.dim() != p.ndim or len(x) != len(p._dim):
        raise WrongValue(f"what is joined along time must be packed or ({len(p._dim)}, K, ...), got {tuple(x.shape)}")
    return p._with(x.flatten(0, 1), Dim(p._dim.name, [x.shape[1]] * len(x)).to(p.values.device))


@handles
def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """F.pad: along feature dims torch's own; along the ragged dim before and behind each row's own entries."""
    sizes = [arguments.as_int(n, f"pad[{i}]") for i, n in enumerate(pad)]
    features = 2 * (input.ndim - 2)
    if len(sizes) % 2 or len(sizes) > features + 4:
        raise WrongValue(f"{sizes} is not two numbers for each of the last dims of {input.shape}")
    if any(sizes[features + 2 :]):
        raise refusal("rows are not added along the batch dim", "use torch.cat([p, q], 0)")
    x = input if not any(sizes[:features]) else input._with(_pad_features(input.values, sizes[:features], mode, value))
    before, behind = sizes[features : features + 2] or (0, 0)
    if not before and not behind:
        return x._with(x.values.clone()) if x is input else x
    return pad_time(x, before, behind, mode, value or 0)


def _pad_features(values: Tensor, sizes: list[int], mode: str, value: Any) -> Tensor:
    if mode == "constant" or len(sizes) < 2 * (values.dim() - 1):
        return torch.nn.functional.pad(values, sizes, mode, value)
    return torch.nn.functional.pad(values.unsqueeze(1), sizes, mode, value).squeeze(1)  # entries as the batch
