"""Heads taken into the batch, (B * H, T*, *F), and out of it again: each row becomes H rows of its length."""

import torch
from torch import Tensor

from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, refusal


def join_heads(p: Packed) -> Packed:
    """(B, T*, H, *F) -> (B * H, T*, *F): row b * H + h is head h of row b. Cost: one permutation."""
    heads = p.values.shape[1]
    dim, index, inverse = _join(p._dim, heads)
    return p._with(segments.permute(p.values.flatten(0, 1), index, inverse), dim)


def part_heads(p: Packed, heads: int) -> Packed:
    """(B * H, T*, *F) -> (B, T*, H, *F), where the H rows of each are of one length."""
    dim = divide(p._dim, heads)
    _, index, inverse = _join(dim, heads)
    return p._with(segments.permute(p.values, inverse, index).unflatten(0, (dim.total, heads)), dim)


def multiply(dim: Dim, heads: int) -> Dim:
    """The dim of B * H rows, each length H times."""
    return dim if heads == 1 else _join(dim, heads)[0]


def divide(dim: Dim, heads: int) -> Dim:
    """The dim of B rows that, multiplied by `heads`, is this one."""

    def make() -> Dim | None:
        shape = len(dim) // heads, heads
        return dim._derive(lambda x: x.view(shape)[:, 0]) if has_heads(dim, heads) else None

    if heads < 1 or len(dim) % heads:
        raise refusal(f"{len(dim)} rows are no {heads} heads each", "give as many heads as were joined with the batch")
    found = dim if heads == 1 else dim._kept(f"parted {heads}", make)
    if found is None:
        raise refusal(f"the rows are of different lens, no {heads} heads of one", "keep the batch as dim 0")
    return found


def has_heads(dim: Dim, heads: int) -> bool:
    """Whether each `heads` rows, one after another, are of one length."""
    if heads < 1 or len(dim) % heads:
        return False
    lens = dim._host_lens.view(-1, heads)
    return bool((lens == lens[:, :1]).all())


def is_size_of(size: Dim, rows: Dim) -> bool:
    """Whether a size is that of these rows, or of those that heads were joined with or parted from to make them."""
    few, many = sorted((size, rows), key=len)
    n, m = len(few), len(many)
    return few.same(many) if n == m or not n or m % n else multiply(few, m // n).same(many)


def _join(dim: Dim, heads: int) -> tuple[Dim, Tensor, Tensor]:
    """The dim of B * H rows; for each of its entries that of (N * H), entry by entry; and the other way."""

    def make() -> tuple[Dim, Tensor, Tensor]:
        joined = dim._derive(lambda lens: lens.repeat_interleave(heads))
        joined._cache |= {"total": dim.total * heads, "heads": heads}
        head, row = joined._row_ids % heads if heads else joined._row_ids, joined._row_ids // max(heads, 1)
        index = (dim._offsets.index_select(0, row) + joined._positions) * heads + head
        inverse = torch.empty_like(index).index_copy_(0, index, torch.arange(len(index), device=index.device))
        return joined, index, inverse

    return dim._kept(f"joined {heads}", make)
