"""Rows in a fixed number of entries: what follows from lens without reading them, and sums and copies over rows.

There are B + 1 segments: segment B has the free entries behind the last row. What is computed of it is cut off, so that
its gradient is 0. All is in torch operations whose shapes come from B, the capacity and max_len.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop._common.errors import WrongValue
from tensorloop.kernels.sight import Sight, visible


class StaticRows:
    """lens (B,) int64 in `capacity` entries: rows behind each other, the last of them cut where they do not fit."""

    def __init__(self, lens: Tensor, capacity: int, max_len: int) -> None:
        self.lens, self.capacity, self.max_len = lens, capacity, max_len
        self.count = lens.shape[0]
        ends = lens.cumsum(0).clamp(max=capacity)
        self.offsets = torch.cat([ends.new_zeros(1), ends])  # (B+1,)
        numbers = torch.arange(capacity, device=lens.device)
        self.row_ids = torch.searchsorted(ends, numbers, right=True)  # (N,); B for a free entry
        self.there = self.row_ids < self.count  # (N,): whether an entry is one
        starts = self.offsets.index_select(0, self.row_ids)  # that of segment B is the total
        self.positions = numbers - starts  # (N,)

    def same(self, other: "StaticRows") -> bool:
        """Whether these are the same rows, known without looking at lengths: made of one tensor `lens`."""
        sizes = (self.capacity, self.max_len) == (other.capacity, other.max_len)
        return self is other or (self.lens is other.lens and sizes)

    def mask(self, like: Tensor) -> Tensor:
        """`there`, as it broadcasts to (N, *F)."""
        return self.there.view(-1, *[1] * (like.dim() - 1))

    def clean(self, values: Tensor, fill: float | Tensor = 0) -> Tensor:
        """(N, *F) with `fill` in free entries, whose gradient is 0 whatever comes back to them."""
        filler = fill if isinstance(fill, Tensor) else values.new_full((), fill)
        return torch.where(self.mask(values), values, filler)

    def sum(self, values: Tensor) -> Tensor:
        """(N, *F) -> (B, *F); 0 for an empty row. Half precision is summed in float32."""
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        zeros = wide.new_zeros(self.count + 1, *values.shape[1:])
        return zeros.index_add(0, self.row_ids, wide)[:-1].to(values.dtype)

    def extreme(self, values: Tensor, which: str, fill: float) -> Tensor:
        """(N, *F) -> (B, *F), "amax" or "amin"; `fill` for an empty row."""
        index = self.row_ids.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
        start = values.new_full((self.count + 1, *values.shape[1:]), fill)
        return start.scatter_reduce(0, index, values, which, include_self=False)[:-1]

    def sizes(self, like: Tensor) -> Tensor:
        """(B, 1, ..): how many entries each row has, in a floating dtype of `like` (·, *F)."""
        return self.offsets.diff().to(like.dtype).view(-1, *[1] * (like.dim() - 1))

    def spread(self, rows: Tensor, fill: float = 0) -> Tensor:
        """(B, *F) -> (N, *F): what each entry's row has; `fill` for a free entry."""
        free = rows.new_full((1, *rows.shape[1:]), fill)
        return torch.cat([rows, free]).index_select(0, self.row_ids)

    def pad(self, values: Tensor, fill: float = 0) -> Tensor:
        """(N, *F) -> (B, max_len, *F)."""
        steps = torch.arange(self.max_len, device=values.device)
        places = self.offsets[:-1, None] + steps  # (B, max_len)
        inside = places < self.offsets[1:, None]
        if self.capacity == 0:
            return values.new_full((self.count, self.max_len, *values.shape[1:]), fill)
        picked = values.index_select(0, torch.where(inside, places, 0).flatten())
        picked = picked.view(self.count, self.max_len, *values.shape[1:])
        shown = inside.view(self.count, self.max_len, *[1] * (values.dim() - 1))
        return torch.where(shown, picked, picked.new_full((), fill))

    def pack(self, padded: Tensor) -> Tensor:
        """(B, max_len, *F) -> (N, *F), with 0 in free entries."""
        steps = padded.shape[1]
        if self.count * steps == 0:
            return padded.new_zeros(self.capacity, *padded.shape[2:])
        inside = self.there & (self.positions < steps)
        places = torch.where(inside, self.row_ids * steps + self.positions, 0)
        picked = padded.flatten(0, 1).index_select(0, places)
        return torch.where(inside.view(-1, *[1] * (picked.dim() - 1)), picked, picked.new_zeros(()))

    def align(self, x: Tensor, ndim: int) -> Tensor:
        """Turns what broadcasts to (B, max_len, *F) of `ndim` dims into what broadcasts to (N, *F)."""
        if x.dim() <= ndim - 2:
            return x
        if x.dim() == ndim - 1:
            x = x.unsqueeze(0)
        if x.dim() > ndim or x.shape[0] not in (1, self.count) or x.shape[1] not in (1, self.max_len):
            raise WrongValue(
                f"{tuple(x.shape)} does not broadcast against ({self.count}, {self.max_len}, *F) of {ndim} dims; as "
                f"the ragged dim take 1 or max_len, {self.max_len}"
            )
        if x.shape[1] == 1:
            return x[0] if x.shape[0] == 1 else self.spread(x[:, 0])
        return self.pack(x.expand(self.count, *x.shape[1:]))


def attend(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Padded (B, T, heads, D), with `lens` of the keys -> (B, T, heads, Dv); 0 where no key is seen."""
    inside = torch.arange(k.shape[1], device=q.device) < lens[:, None]
    sight = Sight(causal=causal, seen=inside[:, None], ends=False)
    seen = visible(len(q), q.shape[1], k.shape[1], sight, q.device)[:, None]
    any_seen = seen.any(-1, keepdim=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # A row of a mask without True would be NaN: it sees all, and its result is left.
    out = F.scaled_dot_product_attention(q, k, v, seen | ~any_seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return torch.where(any_seen, out, 0).transpose(1, 2)
