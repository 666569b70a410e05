"""Kernels in torch operations: any device, any dtype.

Each works on plain tensors, without autograd. `offsets` (B+1,) int64 cut N rows of values into B segments: segment b is
[offsets[b], offsets[b+1]), and may be empty. Trailing dims come flattened into one, F. Sums of half precision are
taken in float32.
"""

import torch
from torch import Tensor

_HALVES = frozenset({torch.float16, torch.bfloat16})


def pack_rows(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, F) -> (n, F): the first lens[b] slots of each row."""
    batch, steps, features = padded.shape
    return padded.reshape(batch * steps, features).index_select(0, _slots(offsets, n, steps))


def pad_rows(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:
    """(N, F) -> (B, steps, F), `fill` behind the end of each row. A row longer than `steps` is cut."""
    n, features = values.shape
    batch = len(offsets) - 1
    out = values.new_full((batch * steps, features), fill)
    slots = _slots(offsets, n, steps)
    if steps < n:  # otherwise no row can be longer than `steps`
        fits = slots < _row_ids(offsets, n).add_(1).mul_(steps)
        slots, values = slots[fits], values[fits]
    return out.index_copy_(0, slots, values).view(batch, steps, features)


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    return rows.index_select(0, _row_ids(offsets, n))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) -> (M, F)"""
    return values.index_select(0, index)


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, *F) to slots[pos[b], b] of (n, B, *F), in place, where `where` (B,) bool is true."""
    rows = torch.arange(len(pos), device=slots.device)
    old = slots[pos, rows]
    slots[pos, rows] = torch.where(where.view(-1, *[1] * (old.dim() - 1)), x, old)


def take_rows(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    """slots[pos[b], b] of (n, B, *F), which is 0 afterwards, in row b of (B, *F); 0 where `where` (B,) is false."""
    rows = torch.arange(len(pos), device=slots.device)
    old = slots[pos, rows]
    takes, zero = where.view(-1, *[1] * (old.dim() - 1)), old.new_zeros(())
    slots[pos, rows] = torch.where(takes, zero, old)
    return torch.where(takes, old, zero)


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); 0 for an empty segment."""
    wide = values.float() if values.dtype in _HALVES else values
    out = wide.new_zeros(len(offsets) - 1, values.shape[1])
    return out.index_add_(0, _row_ids(offsets, len(values)), wide).to(values.dtype)


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


def _row_ids(offsets: Tensor, n: int) -> Tensor:
    """(n,): the segment each entry is in."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=n)


def _rows_like(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F): the segment each number is in."""
    return _row_ids(offsets, len(values)).unsqueeze(1).expand(values.shape)


def _positions(offsets: Tensor, n: int) -> Tensor:
    """(n,): the place of each entry in its segment."""
    return torch.arange(n, device=offsets.device) - offsets[:-1].index_select(0, _row_ids(offsets, n))


def _slots(offsets: Tensor, n: int, steps: int) -> Tensor:
    """(n,): where each entry is in a padded (B * steps,)."""
    rows = _row_ids(offsets, n)
    starts = offsets[:-1] - torch.arange(len(offsets) - 1, device=offsets.device) * steps
    return torch.arange(n, device=offsets.device) - starts.index_select(0, rows)


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
