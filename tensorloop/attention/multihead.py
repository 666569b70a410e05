"""`nn.MultiheadAttention` on packed tensors: the function that the layer calls, by `attention`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop.attention.api import attention
from tensorloop.packed.base import Packed, refusal
from tensorloop.packed.time_first import TimeFirst


def forward(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[TimeFirst, None]:
    """The arguments of torch's function of this name; every entry sees its own row, with `is_causal` the past of it."""
    if not all(isinstance(x, TimeFirst) for x in (query, key, value)):
        raise refusal("query, key and value must be packed", "make the layer with batch_first=True, pack all three")
    if need_weights:
        raise refusal("the weights are never held whole", "call the layer with need_weights=False")
    if key_padding_mask is not None or (attn_mask is not None and not is_causal):
        raise refusal("masks are not taken; rows have no padding", "use is_causal=True, or tensorloop.attention")
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise refusal("added or given keys and values", "use tensorloop.attention")
    weights: tuple[Any, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = (query.packed, key.packed, value.packed)
    q, k, v = (_heads(*parts, num_heads) for parts in zip(inputs, weights, biases, strict=True))
    seen = attention(q, k, v, causal=is_causal, dropout=dropout_p if training else 0.0)
    out = F.linear(torch.flatten(seen, 2), out_proj_weight, out_proj_bias)
    return TimeFirst(out), None  # pyright: ignore[reportArgumentType]


def _heads(x: Packed, weight: Tensor, bias: Tensor | None, heads: int) -> Packed:
    """(B, T*, heads, D)"""
    projected = F.linear(x.values, weight, bias)
    return x._with(projected.unflatten(-1, (heads, -1)))
