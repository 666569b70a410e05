"""Order within the rows of a packed tensor: sort, topk, medians and quantiles.

Along the ragged dim all of them come from one order of the entries (`_order`): rows stay where they are, and the
entries of each are put in order by two stable sorts, by value and then by row. Values are gathered by it, which is
their gradient too. Over the batch dim the rows at one t are what is put in order.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.operations.reduce import Segments, divide, refuse_empty
from tensorloop.packed.rows import segments
from tensorloop.packed.table.base import Packed, find_dim, refusal, restore_dims
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import rewrap

_ROWS_STAY = "rows of unequal length do not change places; to order rows: p[torch.argsort(key)]"


def _find_order(values: Tensor, rows: Tensor, descending: bool = False) -> Tensor:
    """(N, *F) int64: which entry is at each place once those of each row are in order; NaN counts as the largest."""
    by_value = torch.sort(values.detach(), dim=0, descending=descending, stable=True).indices
    return by_value.gather(0, torch.sort(rows[by_value], dim=0, stable=True).indices)


def _as_columns(x: Tensor, like: Tensor) -> Tensor:
    """(S,) as (S, 1, ..) with the dims of `like`."""
    return x.view(-1, *[1] * (like.dim() - 1))


@handles
def _sort(func: Any, input: Any, dim: Any = -1, descending: bool = False, *, stable: Any = None) -> Any:
    """Along the ragged dim each row by itself; indices are positions in the row. The order is always stable."""
    name = func.__name__
    d = find_dim(input, dim)
    if d > 1:
        plain = torch.sort if name == "sort" else torch.argsort
        return rewrap(input, plain(input.values, dim=d - 1, descending=descending, stable=bool(stable)))
    if d == 0:
        raise refusal(f"dim {dim} is the batch dim", _ROWS_STAY)
    rows = input._dim
    order = _find_order(input.values, rows._row_ids, descending)
    first = torch.arange(rows.total, device=order.device) - rows._positions  # of the row of each entry
    places = input._with(order - _as_columns(first, order))
    if name == "argsort":
        return places
    return torch.return_types.sort((input._with(input.values.gather(0, order)), places))  # pyright: ignore


@handles
def _msort(func: Any, input: Any) -> Any:
    """Refused: it sorts along the batch dim."""
    raise refusal("it sorts along dim 0, the batch dim", _ROWS_STAY)


class _Ranks:
    """The entries over which dim d is reduced, in order, to be picked by their rank."""

    def __init__(self, p: Packed, d: int, descending: bool = False) -> None:
        s: Segments = divide(p, (d,))
        self.s, self.p = s, p
        self.order = _find_order(s.values, s.dim._row_ids, descending)
        self.starts = _as_columns(s.offsets[:-1], s.values)
        self.counts = _as_columns(s.dim._lens, s.values)

    def entries(self, rank: Tensor) -> Tensor:
        """(Q, S, *F): the entry of each rank (Q, S, 1, ..) or (Q, S, *F)."""
        index = (rank + self.starts).expand(len(rank), len(self.starts), *self.order.shape[1:])
        return self.order.gather(0, index.flatten(0, 1)).view(index.shape)

    def values(self, entries: Tensor) -> Tensor:
        """(Q, S, *F)"""
        return self.s.values.gather(0, entries.flatten(0, 1)).view(entries.shape)

    def places(self, entries: Tensor) -> Tensor:
        """Where each is along the dim: its position in the row, or its row."""
        if self.s.order is not None:
            return self.p._dim._row_ids[self.s.order][entries]
        return entries - self.starts

    def has_nan(self) -> Tensor:
        """(S, *F): NaN are last in ascending order. No segment is empty."""
        return self.values(self.entries((self.counts - 1).unsqueeze(0)))[0].isnan()


@handles
def _topk(func: Any, input: Any, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Over the ragged dim ordinary tensors (B, k, *F): every row must have k entries."""
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, torch.topk(input.values, k, d - 1, largest, sorted))
    k = arguments.as_int(k, "k")
    _check_ranks(input, d, k, 0, "leave such rows out, or p.sort(1, descending=True).values[:, :k], which is packed")
    ranks = _Ranks(input, d, descending=bool(largest))
    entries = ranks.entries(torch.arange(k, device=ranks.order.device).view(k, 1, *[1] * (ranks.order.dim() - 1)))
    picked = ranks.values(entries), ranks.places(entries)
    return torch.return_types.topk(picked if d == 0 else tuple(x.transpose(0, 1) for x in picked))  # pyright: ignore


def _check_ranks(p: Packed, d: int, k: int, least: int, instead: str) -> None:
    """Raises where a segment has fewer than k entries. Lengths on a device are waited for, once a dim."""
    if k < least:
        raise WrongValue(f"k must be at least {least}, got {k}")
    lens = p._dim._lens if d == 1 else p._dim.by_time[0]._lens
    if len(lens) and int(lens.min()) < k:
        at = int((lens < k).nonzero()[0])
        which = f"row {at} has {int(lens[at])} entries" if d == 1 else f"{int(lens[at])} rows reach t = {at}"
        raise WrongValue(f"{which}, k is {k}; {instead}")


@handles
def _kthvalue(func: Any, input: Any, k: Any, dim: Any = -1, keepdim: bool = False) -> Any:
    """The k-th smallest, counted from 1; every row must have k entries."""
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, torch.kthvalue(input.values, k, d - 1, keepdim))
    k = arguments.as_int(k, "k")
    _check_ranks(input, d, k, 1, "leave such rows out")
    ranks = _Ranks(input, d)
    return _pick("kthvalue", ranks, torch.full_like(ranks.counts, k - 1), d, keepdim)


def _pick(name: str, ranks: _Ranks, rank: Tensor, d: int, keepdim: bool) -> Any:
    entries = ranks.entries(rank.unsqueeze(0))[0:1]
    pair = (restore_dims(x[0], (d,), keepdim) for x in (ranks.values(entries), ranks.places(entries)))
    return getattr(torch.return_types, name)(tuple(pair))


@handles
def _median(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The lower of two middle entries, as torch's; of an empty row there is none."""
    name = func.__name__
    plain = getattr(torch, name)
    if dim is None:
        return plain(input.values)
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, plain(input.values, d - 1, keepdim))
    refuse_empty(divide(input, (d,)), "median")
    ranks = _Ranks(input, d)
    if not input.is_floating_point():
        rank = (ranks.counts - 1) // 2
    elif name == "median":
        rank = torch.where(ranks.has_nan(), ranks.counts - 1, (ranks.counts - 1) // 2)
    else:
        rank = (_count_numbers(ranks) - 1).clamp(min=0) // 2
    return _pick(name, ranks, rank, d, keepdim)


def _count_numbers(ranks: _Ranks) -> Tensor:
    """(S, *F): how many are no NaN."""
    return segments.sum(ranks.s.values.isnan().logical_not().to(torch.int64), ranks.s.offsets)


@handles
def _quantile(
    func: Any, input: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """As torch's; several quantiles q (Q,) are the first dim of the result. Of an empty row there is none."""
    name = func.__name__
    plain = getattr(torch, name)
    if dim is None:
        out = plain(input.values, q, interpolation=interpolation)
        return out.view(*out.shape, *[1] * input.ndim) if keepdim else out
    d = find_dim(input, dim)
    if d > 1:
        if isinstance(q, Tensor) and q.dim():
            raise refusal("several quantiles would be a dim before the batch", "one q at a time, and stack them")
        return input._with(plain(input.values, q, d - 1, keepdim, interpolation=interpolation))
    values = input.values
    if values.dtype not in (torch.float32, torch.float64):
        raise WrongType(f"it needs float32 or float64, got {values.dtype}; convert with .float()")
    if interpolation not in ("linear", "lower", "higher", "midpoint", "nearest"):
        raise WrongValue(f"interpolation must be linear, lower, higher, midpoint or nearest, got {interpolation!r}")
    q = _check_fractions(q, values)
    refuse_empty(divide(input, (d,)), "quantile")
    ranks = _Ranks(input, d)
    out = _interpolate(ranks, q.reshape(-1, *[1] * values.dim()), name == "nanquantile", interpolation)
    out = out if q.dim() else out[0]
    return out.unsqueeze(d + q.dim()) if keepdim else out


def _check_fractions(q: Any, values: Tensor) -> Tensor:
    if isinstance(q, Tensor) and q.dtype != values.dtype:
        raise WrongType(f"q must be a number or a tensor of {values.dtype}, got {arguments.describe(q)}")
    q = torch.as_tensor(q, dtype=values.dtype, device=values.device)
    if q.dim() > 1:
        raise WrongValue(f"q must be a number or (Q,), got {arguments.describe(q)}")
    if arguments.must_check(None, q) and bool(((q < 0) | (q > 1)).any()):
        raise WrongValue(f"q must be from 0 to 1, got {q.tolist()}")
    return q


def _interpolate(ranks: _Ranks, q: Tensor, ignore_nan: bool, interpolation: str) -> Tensor:
    """(Q, S, *F): what torch takes at rank q * (count - 1), which need not be whole."""
    if ignore_nan:
        rank = (q * (_count_numbers(ranks) - 1).to(q.dtype)).clamp(min=0)
    else:
        last = (ranks.counts - 1).to(q.dtype)
        rank = torch.where(ranks.has_nan(), last, q * last)
    if interpolation in ("lower", "higher", "nearest"):
        rounded = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](rank)
        return ranks.values(ranks.entries(rounded.long()))
    below = rank.detach().floor()
    weight = torch.full_like(rank, 0.5) if interpolation == "midpoint" else rank - below
    low, high = (ranks.values(ranks.entries(r.long())) for r in (below, rank.detach().ceil()))
    return torch.lerp(low, high, weight)
