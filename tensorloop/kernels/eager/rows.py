"""Rows moved in torch operations: between padded and packed, repeated, picked.

`offsets` (B+1,) int64 cut N rows of values into B segments: segment b is [offsets[b], offsets[b+1]), and may be empty.
Trailing dims come flattened into one, F.
"""

import torch
from torch import Tensor


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
        fits = slots < row_ids(offsets, n).add_(1).mul_(steps)
        slots, values = slots[fits], values[fits]
    return out.index_copy_(0, slots, values).view(batch, steps, features)


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    return rows.index_select(0, row_ids(offsets, n))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) -> (M, F)"""
    return values.index_select(0, index)


def row_ids(offsets: Tensor, n: int) -> Tensor:
    """(n,): the segment each entry is in."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=n)


def _slots(offsets: Tensor, n: int, steps: int) -> Tensor:
    """(n,): where each entry is in a padded (B * steps,)."""
    rows = row_ids(offsets, n)
    starts = offsets[:-1] - torch.arange(len(offsets) - 1, device=offsets.device) * steps
    return torch.arange(n, device=offsets.device) - starts.index_select(0, rows)
