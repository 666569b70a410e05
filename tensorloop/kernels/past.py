"""What new tokens see of those before them, and the formula of their attention; its kernels are `past_attend`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sight(NamedTuple):
    """What the last t of n tokens see, and what is done to their scores."""

    scale: float
    causal: bool = True  # a query sees no later token
    first: Tensor | None = None  # (B,) int64: tokens before it are not seen
    seen: Tensor | None = None  # (B, t, n) bool: of the others, those that are
    softcap: float = 0.0  # c tanh(score / c), where above 0
    bias: Tensor | None = None  # (1 or B, heads, t, n), added then
    dropout: float = 0.0  # of the weights
    seed: int = 0


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """The same as differentiable operations, with all weights at once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    (rows, new, heads, _), length = q.shape, len(k)
    queries = q.unflatten(2, (k.shape[2], -1)).to(wide)
    scores, _ = bent(torch.einsum("bthgd,sbhd->bhgts", queries, k.to(wide)).flatten(1, 2), sight)
    seen = visible(rows, new, length, sight, q.device)[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    some = seen.any(-1)
    lse = scores.masked_fill(~some[..., None], 0).logsumexp(-1)
    weights = torch.where(seen, (scores - lse[..., None]).exp(), 0)
    if sight.dropout:
        weights = weights * kept(rows, heads, new, length, sight).to(q.device, wide)
    out = torch.einsum("bhgts,sbhd->bthgd", weights.unflatten(1, (k.shape[2], -1)), v.to(wide))
    return out.flatten(2, 3).to(q.dtype), torch.where(some, lse, 0).transpose(1, 2)


def bent(products: Tensor, sight: Sight) -> tuple[Tensor, Tensor | float]:
    """The scores of products (B, heads, t, n), and how much they move with them beside the scale."""
    scores, slope = products * sight.scale, 1.0
    if sight.softcap:
        turned = torch.tanh(scores / sight.softcap)
        scores, slope = sight.softcap * turned, 1 - turned * turned
    return (scores if sight.bias is None else scores + sight.bias.to(scores.dtype)), slope


def visible(rows: int, new: int, length: int, sight: Sight, device: torch.device) -> Tensor:
    """(B, t, n) bool: what each query sees."""
    place = torch.arange(length, device=device)
    last = place[length - new :, None] if sight.causal else place[-1:]
    seen = (place <= last).expand(rows, new, length)
    if sight.first is not None:
        seen = seen & (place >= sight.first[:, None, None])
    return seen if sight.seen is None else seen & sight.seen


def kept(rows: int, heads: int, new: int, length: int, sight: Sight) -> Tensor:
    """(B, heads, t, n): 0 where a weight is dropped, by a hash of its place and the seed, else 1 / (1 - dropout)."""
    x = torch.arange(rows * heads * new * length).view(rows, heads, new, length) + sight.seed
    for shift, factor in ((33, -49064778989728563), (33, -4265267296055464877), (33, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).ge(int(sight.dropout * (1 << 24))).double() / (1 - sight.dropout)
