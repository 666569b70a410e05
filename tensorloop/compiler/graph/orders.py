"""sort, topk, kthvalue and medians of short rows, by comparing all pairs; places in what is in order.

`NotImplemented` leaves longer rows to torch.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

MOST_COMPARED = 128  # elements of a row that are compared each with each
MOST_ROUNDS = 16  # of choosing the largest that is left

_aten = torch.ops.aten


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """Puts values in order, and says where they were; equal ones stay as they stand, NaN is larger than all."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    n, dim = x.shape[dim], dim % x.dim()
    if n > MOST_COMPARED or x.is_complex():
        return NotImplemented
    a, b = x.detach().movedim(dim, -1).unsqueeze(-1), x.detach().movedim(dim, -1).unsqueeze(-2)
    ahead = _less(a, b) if descending else _less(b, a)  # whether b goes before a
    earlier = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
    before = ahead | (~_less(a, b) & ~_less(b, a) & earlier)
    rank = before.sum(-1)
    places = torch.arange(n, device=x.device).expand(rank.shape)
    index = torch.zeros_like(rank).scatter(-1, rank, places).movedim(-1, dim)
    return torch.gather(x, dim, index), index


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest, and where it is."""
    found = sort(x, dim)
    if found is NotImplemented or not x.dim():
        return found
    values, index = (part.narrow(dim, k - 1, 1) for part in found)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def median(x: Tensor, dim: int, keepdim: bool = False, *, skips_nan: bool = False) -> Any:
    """The lower of the middle ones, and where it is; the first NaN, if there is one, but where those are skipped."""
    found = sort(x, dim)
    if found is NotImplemented or not x.dim() or not x.shape[dim]:
        return found if not x.dim() else NotImplemented
    last = x.shape[dim] - 1
    none = torch.isnan(x).sum(dim, True)
    first_nan = torch.where(none > 0, last + 1 - none, last // 2)
    at = torch.clamp_min(last - none, 0) // 2 if skips_nan else first_nan
    index = torch.gather(found[1], dim, at)
    values = torch.gather(x, dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def median_of_all(x: Tensor, *, skips_nan: bool = False) -> Any:
    """The median of all elements."""
    found = median(x.reshape(-1), 0, skips_nan=skips_nan)
    return found if found is NotImplemented else found[0]


def searchsorted(
    ordered: Tensor, x: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Tensor:
    """How many of a row in order are before each number, halving the row as torch does, in whatever order it is."""
    kind, n = torch.int32 if out_int32 else torch.int64, ordered.shape[-1]
    x = x if isinstance(x, Tensor) else torch.full([], x, dtype=ordered.dtype)
    low, high = torch.zeros(x.shape, dtype=torch.int64), torch.full(x.shape, n, dtype=torch.int64)
    for _ in range(n.bit_length()):
        middle = (low + high) // 2
        at = torch.clamp_max(middle, n - 1)
        if ordered.dim() == 1:
            known = _read(ordered, at if sorter is None else _read(sorter, at))
        else:
            known = torch.gather(ordered, -1, at if sorter is None else torch.gather(sorter, -1, at))
        behind = known > x if right or side == "right" else known >= x
        low, high = torch.where(behind | (low >= high), low, middle + 1), torch.where(behind, middle, high)
    return low.to(kind)


def _read(row: Tensor, places: Tensor) -> Tensor:
    """The elements of a row at places of any shape, also at one of no dims, which Python would read as an int."""
    return row.index_select(0, places.reshape(-1)).reshape(places.shape)


def logcumsumexp(x: Tensor, dim: int) -> Any:
    """The logsumexp of all elements so far."""
    if not x.dim():
        return x.clone()
    if x.shape[dim] > MOST_COMPARED or not x.is_floating_point():
        return NotImplemented
    n, rows = x.shape[dim], x.movedim(dim, -1).unsqueeze(-2)
    wide = rows.float() if x.dtype in (torch.bfloat16, torch.float16) else rows
    so_far = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.logsumexp(torch.where(so_far, wide, -float("inf")), -1).to(x.dtype).movedim(-1, dim)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest in order, and where they are: chosen one by one, or all put in order."""
    if not x.dim() or not k:
        return NotImplemented
    if k > MOST_ROUNDS or x.shape[dim] <= 2 * k:
        found = sort(x, dim, largest)
        return found if found is NotImplemented else tuple(part.narrow(dim, 0, k) for part in found)
    index = _chosen(x.detach(), k, dim, largest)
    return torch.gather(x, dim, index), index


def _chosen(x: Tensor, k: int, dim: int, largest: bool) -> Tensor:
    """Where the k largest or smallest are, by k rounds over those that are left."""
    left, found = torch.ones_like(x, dtype=torch.bool), []
    floating = x.is_floating_point()
    worst: Any = -float("inf") if floating else torch.iinfo(x.dtype).min
    worst = worst if largest else float("inf") if floating else torch.iinfo(x.dtype).max
    extreme = torch.amax if largest else torch.amin
    for _ in range(k):
        if floating:  # NaN is the largest of all: first to be chosen, or last
            nan = torch.isnan(x) & left
            others = torch.where(left & ~nan, x, worst)
            best = (x == extreme(others, dim, True)) & left & ~nan
            any_other, any_nan = best.any(dim, True), nan.any(dim, True)
            best = torch.where(any_nan if largest else ~any_other, nan, best)
        else:
            best = (x == extreme(torch.where(left, x, worst), dim, True)) & left
        at = best.to(torch.int32).argmax(dim, True)
        left = left.scatter(dim, at, False)
        found.append(at)
    return torch.cat(found, dim)


def _less(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_floating_point():
        return a < b
    return (a < b) | (torch.isnan(b) & ~torch.isnan(a))


TABLE = {
    _aten.sort.default: sort,
    _aten.sort.stable: lambda x, *, stable=None, dim=-1, descending=False: sort(x, dim, descending),
    _aten.kthvalue.default: kthvalue,
    _aten.topk.default: topk,
    _aten.median.dim: median,
    _aten.nanmedian.dim: partial(median, skips_nan=True),
    _aten.median.default: median_of_all,
    _aten.nanmedian.default: partial(median_of_all, skips_nan=True),
    _aten.searchsorted.Tensor: searchsorted,
    _aten.searchsorted.Scalar: searchsorted,
    _aten.bucketize.Tensor: lambda x, ordered, **options: searchsorted(ordered, x, **options),
    _aten.bucketize.Scalar: lambda x, ordered, **options: searchsorted(ordered, x, **options),
    _aten.logcumsumexp.default: logcumsumexp,
}
