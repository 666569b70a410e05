"""What queries see of slots, and the formula of their attention; its kernels are `past_attend` and `beam_attend`."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sight(NamedTuple):
    """Says which of n slots t queries see, the last t being their own, and what is done to their scores."""

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
    sinks: Tensor | None = None  # (heads,): the score of a slot more, whose value is 0; kernels get none, see `drain`


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attends to slots in differentiable operations, with all weights in memory at once."""
    return mix(weigh(score(q, k, sight), sight), v, q.dtype)


def score(q: Tensor, k: Tensor, sight: Sight) -> Tensor:
    """The scores (B, heads, t, n), -inf where a slot is not seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.unflatten(2, (k.shape[2], -1)).to(wide)
    return hide(torch.einsum("bthgd,sbhd->bhgts", queries, k.to(wide)).flatten(1, 2), sight)


def hide(products: Tensor, sight: Sight) -> Tensor:
    """The scores of products (B, heads, t, n)."""
    rows, _, new, length = products.shape
    scores = bent(products, sight)[0]
    if sees_all(new, length, sight):
        return scores
    return scores.masked_fill(~visible(rows, new, length, sight, products.device)[:, None], float("-inf"))


def weigh(scores: Tensor, sight: Sight) -> Tensor:
    """The weights of scores, 0 where a query sees nothing."""
    if sight.sinks is not None:
        sinks = sight.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    elif sight.first is None and sight.seen is None and sight.bias is None:  # its own slot it sees
        weights = scores.softmax(-1)
    else:
        some = (scores > float("-inf")).any(-1, keepdim=True)  # a softmax of none is NaN
        weights = torch.where(some, scores.masked_fill(~some, 0).softmax(-1), 0)
    if sight.dropout and sight.seed is None:
        return torch.nn.functional.dropout(weights, sight.dropout)
    rows, heads, new, length = scores.shape
    return weights * kept(rows, heads, new, length, sight).to(weights) if sight.dropout else weights


def mix(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """The output (B, t, heads, Dv) of weights (B, heads, t, n)."""
    out = torch.einsum("bhgts,sbhd->bthgd", weights.unflatten(1, (v.shape[2], -1)), v.to(weights.dtype))
    return out.flatten(2, 3).to(dtype)


def log_sums(scores: Tensor) -> Tensor:
    """The log-sum-exp of scores as (B, t, heads), 0 where a query sees nothing."""
    some = (scores > float("-inf")).any(-1)
    return torch.where(some, scores.masked_fill(~some[..., None], 0).logsumexp(-1), 0).transpose(1, 2)


def drain(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (B, t, heads) where a sink (heads,) takes its part of the weights.

    With these two the gradients of all else are what they are without sinks, by the same kernels.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp()[..., None]).to(out.dtype), total


def drain_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, from what `drain` gave."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)


def bent(products: Tensor, sight: Sight) -> tuple[Tensor, Tensor | float]:
    """The scores of products (B, heads, t, n), and how much they move with them beside the scale."""
    scores, slope = products * sight.scale, 1.0
    if sight.softcap:
        turned = torch.tanh(scores / sight.softcap)
        scores, slope = sight.softcap * turned, 1 - turned * turned
    return (scores if sight.bias is None else scores + sight.bias.to(scores.dtype)), slope


def sees_all(new: int, length: int, sight: Sight) -> bool:
    """Whether each query sees every slot: then no mask is made."""
    apart = new > 1 and (sight.causal or sight.window)
    return not apart and sight.first is None and sight.seen is None and (not sight.window or length <= sight.window)


def visible(rows: int, new: int, length: int, sight: Sight, device: torch.device) -> Tensor:
    """(B, t, n) bool, or (1, t, n) where rows are alike: what each query sees."""
    place = torch.arange(length, device=device)
    last = place[length - new :, None] if sight.causal else place[-1:]
    alike = sight.first is None and sight.seen is None
    seen = (place <= last).expand(1 if alike else rows, new, length)
    if sight.window:
        seen = seen & (place > place[length - new :, None] - sight.window)
    if sight.first is not None:
        seen = seen & (place >= sight.first[:, None, None])
    return seen if sight.seen is None else seen & sight.seen


def kept(rows: int, heads: int, new: int, length: int, sight: Sight) -> Tensor:
    """(B, heads, t, n): 0 where a weight is dropped, by a hash of its place and the seed, else 1 / (1 - dropout)."""
    assert sight.seed is not None
    slots = length if sight.slots is None else sight.slots
    queries = torch.arange(rows * new * heads, device="cpu").view(rows, new, heads).transpose(1, 2)
    x = queries[..., None] * slots + torch.arange(length, device="cpu") + sight.seed
    for shift, factor in ((33, -49064778989728563), (33, -4265267296055464877), (33, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).ge(int(sight.dropout * (1 << 24))).double() / (1 - sight.dropout)
