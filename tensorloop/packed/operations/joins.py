"""What makes rows longer: tensors joined along a dim, and entries repeated."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.operations.index import select_rows
from tensorloop.packed.operations.pieces import pack_steps
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, check_same_rows, find_dim, find_feature_dim, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import align, check_partner


@handles
def _cat(func: Any, tensors: Any, dim: Any = 0, **kwargs: Any) -> Any:
    """Along features and along time the rows are those of each; along the batch the rows follow one another.

    Along time an ordinary tensor (B, n, *F) gives every row n entries more, along features (B, T, *F) is padded.
    """
    first = next(x for x in tensors if is_packed(x))
    d = find_dim(first, dim)
    tensors = [x if is_packed(x) else _pack_beside(x, first, d) for x in tensors]
    if d > 1:
        for x in tensors:
            check_same_rows(first, x)
        return first._with(torch.cat([x.values for x in tensors], d - 1))
    values = torch.cat([x.values for x in tensors])
    known = all(x._dim._on_host for x in tensors)
    lens = [x._dim._host_lens if known else x._dim._lens for x in tensors]
    if d == 0:
        return first._with(values, Dim(first._dim.name, torch.cat(lens)).to(values.device))
    if len({len(n) for n in lens}) > 1:
        raise WrongValue(f"along time the numbers of rows must agree, got {[len(n) for n in lens]}")
    batch = len(first._dim)
    whole = first._with(values, Dim(None, torch.cat(lens)).to(values.device))
    rows = torch.arange(len(tensors) * batch, device=lens[0].device).view(len(tensors), batch).T.reshape(-1)
    pieces = select_rows(whole, rows, permutation=True)
    return first._with(pieces.values, Dim(first._dim.name, torch.stack(lens).sum(0)).to(values.device))


def _pack_beside(x: Tensor, p: Packed, d: int) -> Packed:
    """An ordinary tensor that is joined with `p` along dim `d`, packed."""
    dim, sizes = p._dim, tuple(x.shape)
    if d == 0:
        raise refusal("packed and padded tensors along the batch", "pack all of them: pack_padded(x, lens)")
    if x.dim() != p.ndim or len(x) != len(dim):
        raise WrongValue(f"{sizes} beside {p.shape}; it must have {p.ndim} dims and {len(dim)} rows")
    if d == 1:
        # One entry more for each row is the token that every row gets, as (B, 1, *F) is everywhere.
        if sizes[1] == dim.max_len != 1 and not bool((dim._host_lens == sizes[1]).all()):
            raise refusal(
                f"{sizes} beside {p.shape} is as long as the longest row: a padded tensor, or so many entries for each",
                "pack it: pack_padded(x, p.lens), or pack_padded(x, [x.shape[1]] * len(x)) where nothing is padding",
            )
        return pack_steps(x, p)
    if sizes[1] != dim.max_len:
        raise WrongValue(f"{sizes} beside {p.shape}, whose longest row has {dim.max_len}")
    return p._with(segments.pack(x, dim._offsets, dim.total))


@handles
def _repeat_interleave(func: Any, input: Any, repeats: Any, dim: Any = None, *, output_size: Any = None) -> Any:
    """Rows, entries or features as often as given: beams, samples, durations.

    Along the ragged dim `repeats` is an int, (T,) as in torch, (B, 1) or (B, T) padded, or packed, one for each entry.
    """
    if not is_packed(input):
        raise refusal("only its repeats are packed", "pack the input, or take repeats.values")
    if dim is None:
        raise refusal("without dim it repeats the entries of a padded tensor", "give dim")
    d = find_dim(input, dim)
    if d == 0:
        rows = torch.arange(len(input._dim), device="cpu")
        times = repeats.cpu() if isinstance(repeats, Tensor) else repeats
        return select_rows(input, rows.repeat_interleave(times, output_size=output_size))
    if d == 1:
        return _repeat_entries(input, repeats)
    d = find_feature_dim(input, dim)
    return input._with(input.values.repeat_interleave(repeats, d, output_size=output_size))


def _repeat_entries(p: Packed, repeats: Any) -> Packed:
    dim, n = p._dim, len(p.values)
    if isinstance(repeats, int):
        longer = dim._kept(f"times {repeats}", lambda: dim._derive(lambda lens: lens * repeats))
        times: Any = repeats
    else:
        times = _read_times(p, repeats)
        longer = Dim(dim.name, segments.sum(times.unsqueeze(1), dim._offsets).squeeze(1))
    index = torch.arange(n, device=dim.device).repeat_interleave(times)
    return p._with(segments.gather(p.values, index, in_order=True), longer)


def _read_times(p: Packed, repeats: Any) -> Tensor:
    """(N,) int64: how often each entry is taken."""
    entries = p._with(p._dim._positions)
    if is_packed(repeats):
        times = check_partner(entries, repeats).values
    elif isinstance(repeats, Tensor):
        times = align(repeats.to(p.values.device), entries)
    else:
        raise WrongType(f"repeats must be an int or a tensor, got {type(repeats).__name__}")
    if times.is_floating_point() or times.is_complex() or times.dtype is torch.bool:
        raise WrongType(f"repeats have dtype {times.dtype}, but counts are integers; round them: .round().long()")
    return times.to(torch.int64).expand(len(p.values))
