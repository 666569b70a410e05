"""Attention of the last tokens to all tokens of an array, in torch operations."""

import torch
from torch import Tensor

from tensorloop.kernels.past import Sight, bent, kept, log_sums, mix, score, sees_all, visible, weigh


def past_attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Attention of q (B, t, heads, D) to slots k, v (n, B, heads_kv, D): the output, and the log-sum-exp (B, t, heads).

    A query that sees nothing gets 0, with a log-sum-exp of 0. Sums are float32 at least.
    """
    scores = score(q, k, sight)
    return mix(weigh(scores, sight), v, q.dtype), log_sums(scores)


def past_attend_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of q and of the bias; those of k and v are added to `of_k` and `of_v` (n, B, heads_kv, D)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    (rows, new, heads, _), (length, _, heads_kv, _) = q.shape, k.shape
    queries, coming, keys, values = (x.to(wide) for x in (*(x.unflatten(2, (heads_kv, -1)) for x in (q, grad)), k, v))
    slopes = torch.einsum("bthgd,sbhd->bhgts", coming, values).flatten(1, 2)
    delta = (grad.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)[..., None]
    scores, bend = bent(torch.einsum("bthgd,sbhd->bhgts", queries, keys).flatten(1, 2), sight)
    log = lse.to(wide).transpose(1, 2)[..., None]
    seen = scores > float("-inf")
    if not sees_all(new, length, sight):
        seen = seen & visible(rows, new, length, sight, q.device)[:, None]
    weights = torch.where(seen, (scores - log).clamp(max=0).exp(), 0)
    if sight.dropout:
        factors = kept(rows, heads, new, length, sight).to(q.device, wide)
        slopes, weights = weights * (slopes * factors - delta), weights * factors
    else:
        slopes = weights * (slopes - delta)
    of_bias = None if sight.bias is None else slopes.sum_to_size(sight.bias.shape).to(sight.bias.dtype)
    slopes = (slopes * bend * sight.scale).unflatten(1, (heads_kv, -1))
    of_k.add_(torch.einsum("bhgts,bthgd->sbhd", slopes, queries))
    of_v.add_(torch.einsum("bhgts,bthgd->sbhd", weights.unflatten(1, (heads_kv, -1)), coming))
    return torch.einsum("bhgts,sbhd->bthgd", slopes, keys).flatten(2, 3).to(q.dtype), of_bias
