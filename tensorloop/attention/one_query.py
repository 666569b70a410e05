"""One new token of each row that sees all slots, with nothing done to its scores: what a decoder does at every step.

For devices, where a launch costs more than the products of one query: ten operations, forward and backward. Backward
makes the weights again, and adds to the gradients of the slots where they are. Private name of torch, tried with 2.11
and 2.13: `aten._softmax_backward_data`.
"""

import torch
from torch import Tensor

from tensorloop.kernels.sight import Sight, sees_all

_softmax_grad = torch.ops.aten._softmax_backward_data.default


def fits(q: Tensor, slots: int, sight: Sight) -> bool:
    """Whether q (B, 1, heads, D) and what it sees are of this kind; for halves torch has better kernels."""
    if q.device.type == "cpu" or q.shape[1] != 1 or q.dtype not in (torch.float32, torch.float64):
        return False
    return not sight.scored and sight.sinks is None and sees_all(1, slots, sight)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The output (B, 1, heads, Dv), of slots k, v (n, B, heads_kv, D)."""
    weights = _weights(_by_group(q, k), k, scale)
    return _as_query(torch.bmm(weights, _by_head(v)), q)


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, of_k: Tensor, of_v: Tensor) -> Tensor:
    """The gradient of q; those of k and v are added to `of_k` and `of_v`, which are contiguous."""
    queries, coming = _by_group(q, k), _by_group(grad, k)
    weights = _weights(queries, k, scale)
    slopes = _softmax_grad(torch.bmm(coming, _by_head(v).transpose(1, 2)), weights, -1, q.dtype)
    _by_head(of_k).baddbmm_(slopes.transpose(1, 2), queries, alpha=scale)
    _by_head(of_v).baddbmm_(weights.transpose(1, 2), coming)
    return _as_query(_scaled_product(slopes, _by_head(k), scale), q)


def _weights(queries: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B * heads_kv, group, n)"""
    return _scaled_product(queries, _by_head(k).transpose(1, 2), scale).softmax(-1)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)  # what is multiplied by 0 is not read


def _by_head(slots: Tensor) -> Tensor:
    """(B * heads_kv, n, D), a view of slots where their rows and heads lie behind one another."""
    return slots.flatten(1, 2).transpose(0, 1)


def _by_group(q: Tensor, k: Tensor) -> Tensor:
    """(B * heads_kv, group, D): the heads of a query that share keys."""
    return q.reshape(len(q) * k.shape[2], q.shape[2] // k.shape[2], q.shape[3])


def _as_query(x: Tensor, q: Tensor) -> Tensor:
    return x.view(*q.shape[:3], x.shape[-1])
