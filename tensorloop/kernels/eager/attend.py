"""Attention of running hypotheses to their histories in torch operations: slots are gathered, then matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop.kernels.scores import ScorePlaces, hide, soften, widen
from tensorloop.kernels.sight import Sight


def beam_attend(
    q: Tensor, prefix: Sequence[Tensor], slots: Sequence[Tensor], shared: Tensor, own: Tensor, sight: Sight
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, K, heads, D) to what each hypothesis sees: the output, and the log-sum-exp of its scores.

    `prefix`: keys and values (P, B, heads_kv, D) that all of a row see. `slots`: keys and values (c + m, B, K,
    heads_kv, D), of which hypothesis k of row b sees those of shared[j, b] in the first c, then those of own[j, b, k].
    Either may be empty, or one tensor that is both. `sight`: of K queries, not causal; its slots are those of the
    prefix, then the others. What sees nothing gets 0, with a log-sum-exp of 0. Sums are float32 at least.
    """
    common, single = _seen(prefix, slots, shared, own, widen(q.dtype))
    groups = common[0].shape[2], q.shape[2] // common[0].shape[2]
    queries = q.transpose(1, 2).unflatten(1, groups).to(common[0].dtype)
    parts = [
        torch.einsum("bhgkd,sbhd->bhgks", queries, common[0]),
        torch.einsum("bhgkd,sbkhd->bhgks", queries, single[0]),
    ]
    products = torch.cat(parts, -1).flatten(1, 2)
    places = ScorePlaces.dense(products.shape, q.device)
    weights, lse = soften(products, sight, places, hide(q, products.shape[3], sight))
    weights = weights.unflatten(1, groups).split([x.shape[-1] for x in parts], -1)
    out = torch.einsum("bhgks,sbhd->bkhgd", weights[0], common[1])
    out = out + torch.einsum("bhgks,sbkhd->bkhgd", weights[1], single[1])
    return out.flatten(2, 3).to(q.dtype), lse[..., 0].transpose(1, 2)


def _seen(
    prefix: Sequence[Tensor], slots: Sequence[Tensor], shared: Tensor, own: Tensor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values (n, B, heads_kv, D) that all of a row see, and (m, B, K, heads_kv, D) of each hypothesis."""
    like, (rows, size) = (prefix or slots)[0], own.shape[1:]
    before = prefix or [like.new_empty(0, rows, *like.shape[-2:])]
    grown = slots or [like.new_empty(0, rows, size, *like.shape[-2:])]
    first = torch.arange(len(grown[0]) * rows, device=like.device).view(len(grown[0]), rows) * size
    split = len(shared)
    places = shared + first[:split], own + first[split:, :, None]
    flat = [grown[i].flatten(0, 2) for i in (0, -1)]
    common = [torch.cat([before[i], flat[i][places[0]]]).to(dtype) for i in (0, -1)]
    return common, [x[places[1]].to(dtype) for x in flat]
