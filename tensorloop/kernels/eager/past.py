"""Attention of the last tokens to all tokens of an array, in torch operations."""

import torch
from torch import Tensor

from tensorloop.kernels.past import Sight, whole


def past_attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Attention of q (B, t, heads, D) to slots k, v (n, B, heads_kv, D): the output, and the log-sum-exp (B, t, heads).

    A query that sees nothing gets 0, with a log-sum-exp of 0. Sums are float32 at least.
    """
    out, lse = whole(q, k, v, sight)
    return out, lse


def past_attend_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of q and of the bias; those of k and v are added to `of_k` and `of_v` (n, B, heads_kv, D)."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        bias = None if sight.bias is None else sight.bias.detach().requires_grad_()
        again, _ = whole(*inputs, sight._replace(bias=bias))
        wanted = inputs if bias is None else [*inputs, bias]
        dq, dk, dv, *rest = torch.autograd.grad(again, wanted, grad.to(again.dtype))
    of_k.add_(dk)
    of_v.add_(dv)
    return dq, rest[0] if rest else None
