"""Attention of the last tokens to all tokens of an array, in torch operations."""

from torch import Tensor

from tensorloop.kernels.scores import Attended, ScorePlaces, attend, attend_grad, hide
from tensorloop.kernels.sight import Sight


def past_attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Attention of q (B, t, heads, D) to slots k, v (n, B, heads_kv, D): the output, and the log-sum-exp (B, t, heads).

    A query that sees nothing gets 0, with a log-sum-exp of 0. Sums are float32 at least.
    """
    keys, values = (x.permute(1, 2, 0, 3) for x in (k, v))
    out, lse = attend(q.transpose(1, 2), keys, values, sight, _places(q, k), hide(q, len(k), sight))
    return out.transpose(1, 2).to(q.dtype), lse.transpose(1, 2)


def past_attend_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of q and of the bias; those of k and v are added to `of_k` and `of_v` (n, B, heads_kv, D)."""
    keys, values = (x.permute(1, 2, 0, 3) for x in (k, v))
    given = Attended(q.transpose(1, 2), keys, values, out.transpose(1, 2), lse.transpose(1, 2))
    coming = grad.transpose(1, 2)
    dq, dk, dv, found = attend_grad(coming, given, sight, _places(q, k), hide(q, len(k), sight))
    of_k.add_(dk.permute(2, 0, 1, 3))
    of_v.add_(dv.permute(2, 0, 1, 3))
    return dq.transpose(1, 2).to(q.dtype), found[0]


def _places(q: Tensor, k: Tensor) -> ScorePlaces:
    rows, new, heads, _ = q.shape
    return ScorePlaces.dense((rows, heads, new, len(k)), q.device)
