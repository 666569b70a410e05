"""Attention by the kernels that torch has for a GPU: SDPA, its variable-length form, FlexAttention.

Their gradients can be taken once. Where none of them fits, the answer is None and the engine of `engine.py` serves:
float64, keys that several heads share in float32, packed rows in float32 or with a block mask, causal rows of unequal
lengths, windows and chunks, what is done to scores, no keys, and transforms.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tensorloop._torch import transforms
from tensorloop.kernels.sight import Sight
from tensorloop.packed.rows.dim import Dim

_HALF = frozenset({torch.float16, torch.bfloat16})


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, rows: tuple[Dim, Dim] | None) -> Tensor | None:
    """Attends by torch's kernels; `rows` are the dims of packed q and k. None if torch cannot."""
    if transforms.maybe_level() is not None or transforms.forward_mode() or not all(x.numel() for x in (q, k, v)):
        return None
    if sight.near or sight.scored or sight.sinks is not None:
        return None
    if rows is not None:
        return variable_length(q, k, v, sight, *rows) if _has_variable_length(q, v, sight, *rows) else None
    if sight.blocks is not None:
        return flex(q, k, v, sight, _compiled_flex()) if find_spec("triton") else None
    return dense(q, k, v, sight) if _has_dense(q, k) else None


def _has_dense(q: Tensor, k: Tensor) -> bool:
    """Whether it is one kernel: torch composes the rest of operations that keep all weights."""
    return q.dtype in _HALF or (q.dtype is torch.float32 and q.shape[2] == k.shape[2])


def dense(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """By `scaled_dot_product_attention`, whose `is_causal` aligns first positions too."""
    return _heads_first(scaled_dot_product_attention, q, k, v, is_causal=sight.causal, scale=sight.scale)


def flex(q: Tensor, k: Tensor, v: Tensor, sight: Sight, function: Any) -> Tensor:
    """By `flex_attention`, here `function`: compiled, or as it is."""
    return _heads_first(function, q, k, v, block_mask=sight.blocks, scale=sight.scale)


def _heads_first(function: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    shared = q.shape[2] != k.shape[2]
    return function(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=shared, **options).transpose(1, 2)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _has_variable_length(q: Tensor, v: Tensor, sight: Sight, of_q: Dim, of_k: Dim) -> bool:
    # The kernel aligns the last positions; those of rows as long in keys as in queries are aligned both ways.
    aligned = not sight.causal or of_q.same(of_k)
    narrow = q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return sight.blocks is None and q.dtype in _HALF and narrow and aligned


def variable_length(q: Tensor, k: Tensor, v: Tensor, sight: Sight, of_q: Dim, of_k: Dim) -> Tensor:
    """By `varlen_attn` of packed (1, N, heads, D)."""
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = (dim._offsets.to(torch.int32) for dim in (of_q, of_k))
    window, shared = (-1, 0) if sight.causal else (-1, -1), q.shape[2] != k.shape[2]
    out = varlen_attn(
        *(q[0], k[0], v[0], cu_q, cu_k),
        max_q=of_q.max_len,
        max_k=of_k.max_len,
        scale=sight.scale,
        window_size=window,
        enable_gqa=shared,
    )
    assert isinstance(out, Tensor)
    return out[None]
