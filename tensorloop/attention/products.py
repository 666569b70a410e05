"""A strip by matrix products: its scores, its output and the gradients of both, on any device."""

import torch
from torch import Tensor

from tensorloop.attention.strips import Strip


def widen(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def share_heads(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How the heads of queries (G, heads, ...) share those of keys (G, heads_kv, ...); also for sizes of 0."""
    return k.shape[1], q.shape[1] // max(k.shape[1], 1)


def group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of sums, q (G, heads_kv, heads / heads_kv, L, D), k and v with a dim of 1 there."""
    wide = widen(q.dtype)
    return q.unflatten(1, share_heads(q, k)).to(wide), k[:, :, None].to(wide), v[:, :, None].to(wide)


def attend_strip(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    """The output (G, heads, L, Dv) and the log-sum-exp (G, heads, L); keys and values are (G, heads_kv, S, ·)."""
    q, k, v = group(q, k, v)
    scores = _make_scores(q, k, strip, scale)
    lse = log_sum(scores)
    out = scores.sub_(lse).exp_() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)[..., 0]


def log_sum(scores: Tensor) -> Tensor:
    """The log-sum-exp (..., 1) of scores, 0 where a query sees nothing."""
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.where(lse == -torch.inf, 0, lse)


def attend_strip_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    heads = share_heads(q, k)
    q, k, v = group(q, k, v)
    grad, out, lse = (x.unflatten(1, heads).to(q.dtype) for x in (grad, out, lse))
    weights = _make_scores(q, k, strip, scale).sub_(lse[..., None]).exp_()
    dv = weights.transpose(-1, -2) @ grad
    dscores = (grad @ v.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return (dscores @ k).flatten(1, 2), (dscores.transpose(-1, -2) @ q).sum(2), dv.sum(2)


def _make_scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    hidden = find_hidden(strip, scores)
    if hidden is not None:
        hidden = hidden.unflatten(1, (k.shape[1], -1)) if hidden.shape[1] > 1 else hidden[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def find_hidden(strip: Strip, scores: Tensor) -> Tensor | None:
    """(G or 1, heads or 1, L or 1, S) bool: what the queries do not see; None where they see all."""
    hidden = None
    if strip.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(strip.first + 1)[None, None]
    if strip.mask is not None:
        hidden = ~strip.mask() if hidden is None else hidden | ~strip.mask()
    return hidden
