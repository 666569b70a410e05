"""Reductions over segments of packed rows in torch operations. What `offsets` are is said in `rows`.

Sums of half precision are taken in float32.
"""

import torch
from torch import Tensor

from tensorloop.kernels.eager.rows import row_ids, spread_rows

_HALVES = frozenset({torch.float16, torch.bfloat16})


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); 0 for an empty segment."""
    wide = values.float() if values.dtype in _HALVES else values
    out = wide.new_zeros(len(offsets) - 1, values.shape[1])
    return out.index_add_(0, row_ids(offsets, len(values)), wide).to(values.dtype)


def segment_max(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the maximum and where it is first; `fill` and -1 for an empty segment."""
    return _extreme(values, offsets, fill, "amax")


def segment_min(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the minimum and where it is first; `fill` and -1 for an empty segment."""
    return _extreme(values, offsets, fill, "amin")


def segment_logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); -inf for an empty segment."""
    wide = values.float() if values.dtype in _HALVES else values
    top = _top(wide, offsets)
    top = torch.where(top.isfinite(), top, 0)  # inf - inf would be NaN
    shifted = (wide - spread_rows(top, offsets, len(wide))).exp_()
    return segment_sum(shifted, offsets).log_().add_(top).to(values.dtype)


def segment_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F), each segment and column adding up to 1; NaN where torch's softmax has NaN."""
    wide = values.float() if values.dtype in _HALVES else values
    n = len(wide)
    out = (wide - spread_rows(_top(wide, offsets), offsets, n)).exp_()
    return out.div_(spread_rows(segment_sum(out, offsets), offsets, n)).to(values.dtype)


def segment_softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (N, F) -> (N, F): the gradient of what y is the softmax of, y * (dy - sum(y * dy))."""
    return y * (dy - spread_rows(segment_sum(y * dy, offsets), offsets, len(y)))


def segment_logsumexp_grad(values: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad * exp(values - out), 0 in segments that are -inf throughout."""
    n = len(values)
    base = spread_rows(out.masked_fill(out == -torch.inf, 0), offsets, n)
    return (values - base).exp() * spread_rows(grad, offsets, n)


def segment_extreme_grad(values: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad in equal shares to the entries that equal `best`, 0 in the others."""
    n = len(values)
    equal = values == spread_rows(best, offsets, n)
    shares = grad / segment_sum(equal.to(torch.int64), offsets).clamp_min_(1)
    return torch.where(equal, spread_rows(shares.to(grad.dtype), offsets, n), 0)  # 0 * inf would be NaN


def segment_cumsum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F): sums from the start of the segment. Nothing of one segment reaches another, NaN included."""
    wide = values.float() if values.dtype in _HALVES else values.clone()
    n = len(wide)
    longest = int(offsets.diff().max()) if n and offsets.device.type == "cpu" else n  # a device is not waited for
    positions = _positions(offsets, n).unsqueeze(1)
    step = 1
    while step < longest:  # after each round an entry is the sum of the 2 * step entries up to it
        added = wide[step:] + wide[:-step]
        wide = torch.cat([wide[:step], torch.where(positions[step:] >= step, added, wide[step:])])
        step *= 2
    return wide.to(values.dtype)


def _rows_like(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F): the segment each number is in."""
    return row_ids(offsets, len(values)).unsqueeze(1).expand(values.shape)


def _positions(offsets: Tensor, n: int) -> Tensor:
    """(n,): the place of each entry in its segment."""
    return torch.arange(n, device=offsets.device) - offsets[:-1].index_select(0, row_ids(offsets, n))


def _top(values: Tensor, offsets: Tensor) -> Tensor:
    """(B, F): the maximum, -inf for an empty segment."""
    out = values.new_full((len(offsets) - 1, values.shape[1]), -torch.inf)
    return out.scatter_reduce_(0, _rows_like(values, offsets), values, "amax", include_self=True)


def _extreme(values: Tensor, offsets: Tensor, fill: float, reduce: str) -> tuple[Tensor, Tensor]:
    n, features = values.shape
    rows = _rows_like(values, offsets)
    wide = values.to(torch.uint8) if values.dtype is torch.bool else values
    empty = (offsets.diff() == 0).unsqueeze(1)
    best = wide.new_zeros(len(offsets) - 1, features)
    best.scatter_reduce_(0, rows, wide, reduce, include_self=False)
    spread = best.gather(0, rows)
    equal = wide == spread
    if wide.is_floating_point():
        equal |= wide.isnan() & spread.isnan()
    places = torch.where(equal, torch.arange(n, device=values.device).unsqueeze(1), n)
    where = places.new_full(best.shape, n).scatter_reduce_(0, rows, places, "amin", include_self=True)
    return best.to(values.dtype).masked_fill_(empty, fill), where.masked_fill_(empty, -1)
