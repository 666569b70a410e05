"""Rows moved in torch operations: between padded and packed, repeated, picked.

`offsets` (B+1,) int64 cut N rows of values into B segments: segment b is [offsets[b], offsets[b+1]), and may be empty.
Trailing dims come flattened into one, F.
"""

import torch
from torch import Tensor


def pack_rows(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, F) -> (n, F): the first lens[b] slots of each row."""
    batch, steps, features = padded.shape
    # From the number of an entry to that of its slot it is as far in all of a row.
    shift = torch.arange(0, batch * steps, steps, device=offsets.device) if steps else offsets[:-1]
    shift = (shift - offsets[:-1]).index_select(0, row_ids(offsets, n))
    return padded.reshape(batch * steps, features).index_select(0, torch.arange(n, device=offsets.device) + shift)


def pad_rows(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:
    """(N, F) -> (B, steps, F), `fill` behind the end of each row. A row longer than `steps` is cut."""
    n, features = values.shape
    batch = len(offsets) - 1
    if not n:
        return values.new_full((batch, steps, features), fill)
    places = torch.arange(steps, device=offsets.device) + offsets[:-1, None]
    outside = places >= offsets[1:, None]
    out = values.index_select(0, places.clamp_(max=n - 1).view(-1)).view(batch, steps, features)
    number = torch.full((), fill, dtype=values.dtype, device="cpu").item()
    return out.masked_fill_(outside.unsqueeze(2), number)


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    return rows.index_select(0, row_ids(offsets, n))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) -> (M, F)"""
    return values.index_select(0, index)


def row_ids(offsets: Tensor, n: int) -> Tensor:
    """(n,): the segment each entry is in."""
    if offsets.device.type == "cpu":
        rows = torch.arange(len(offsets) - 1, device="cpu")
        return torch.repeat_interleave(rows, offsets.diff(), output_size=n)
    return torch.searchsorted(offsets[1:], torch.arange(n, device=offsets.device), right=True)  # two launches for five
