"""What queries see of slots, and the formula of their attention; its kernels are `past_attend` and `beam_attend`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sight(NamedTuple):
    """What t queries see of n slots, of which the last t are their own, and what is done to their scores."""

    scale: float
    causal: bool = True  # a query sees no later slot
    window: int = 0  # nor one that is so many before its own, where above 0
    first: Tensor | None = None  # (B,) int64: slots before it are not seen
    seen: Tensor | None = None  # (B, t, n) bool: of the others, those that are
    softcap: float = 0.0  # c tanh(score / c), where above 0
    bias: Tensor | None = None  # (1 or B, heads, 1 or t, n), added then
    dropout: float = 0.0  # of the weights
    seed: int | None = 0  # for a hash of a weight's place; None lets torch draw, in the formula alone
    slots: int | None = None  # of which these n are a part that goes on: places are counted among them


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """The same as differentiable operations, with all weights at once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.unflatten(2, (k.shape[2], -1)).to(wide)
    weights, lse = weigh(torch.einsum("bthgd,sbhd->bhgts", queries, k.to(wide)).flatten(1, 2), sight)
    out = torch.einsum("bhgts,sbhd->bthgd", weights.unflatten(1, (k.shape[2], -1)), v.to(wide))
    return out.flatten(2, 3).to(q.dtype), lse.transpose(1, 2)


def weigh(products: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """The weights of products (B, heads, t, n), and the log-sum-exp of their scores, 0 where nothing is seen."""
    rows, heads, new, length = products.shape
    seen = visible(rows, new, length, sight, products.device)[:, None]
    scores = bent(products, sight)[0].masked_fill(~seen, float("-inf"))
    some = (scores > float("-inf")).any(-1)  # a bias may hide, too
    lse = scores.masked_fill(~some[..., None], 0).logsumexp(-1)
    weights = torch.where(seen & some[..., None], (scores - lse[..., None]).exp(), 0)
    if sight.dropout and sight.seed is None:
        weights = torch.nn.functional.dropout(weights, sight.dropout)
    elif sight.dropout:
        weights = weights * kept(rows, heads, new, length, sight).to(weights)
    return weights, torch.where(some, lse, 0)


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
    if sight.window:
        seen = seen & (place > place[length - new :, None] - sight.window)
    if sight.first is not None:
        seen = seen & (place >= sight.first[:, None, None])
    return seen if sight.seen is None else seen & sight.seen


def kept(rows: int, heads: int, new: int, length: int, sight: Sight) -> Tensor:
    """(B, heads, t, n): 0 where a weight is dropped, by a hash of its place and the seed, else 1 / (1 - dropout)."""
    assert sight.seed is not None
    slots = length if sight.slots is None else sight.slots
    queries = torch.arange(rows * new * heads).view(rows, new, heads).transpose(1, 2)
    x = queries[..., None] * slots + torch.arange(length) + sight.seed
    for shift, factor in ((33, -49064778989728563), (33, -4265267296055464877), (33, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).ge(int(sight.dropout * (1 << 24))).double() / (1 - sight.dropout)
