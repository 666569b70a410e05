"""`nn.MultiheadAttention` on packed tensors: the function that the layer calls, by `attention`, or by scores."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.attention import sdpa
from tensorloop.attention.masks import read_mask
from tensorloop.kernels.sight import Sight
from tensorloop.packed.table.base import Packed, PackedView, refusal
from tensorloop.packed.table.layout import layout_of, see, unwrap


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
) -> tuple[Any, Any]:
    """The arguments of torch's function of this name; every entry sees its own row, with `is_causal` the past of it."""
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise refusal("added or given keys and values", "leave out bias_k, add_zero_attn and static_k")
    weights: tuple[Any, ...] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = (query, key, value)
    q, k, v = (_project(x, w, b, num_heads) for x, w, b in zip(inputs, weights, biases, strict=True))
    dropout = dropout_p if training else 0.0
    like = next(unwrap(x) for x in (q, k, v) if isinstance(x, (Packed, PackedView)))
    parts = [sdpa.read_part(x, name, like) for x, name in ((q, "query"), (k, "key"), (v, "value"))]
    mask = _read_masks(None if is_causal else attn_mask, key_padding_mask, parts, is_causal)
    if need_weights:
        seen, given = _by_weights(q, k, v, mask, dropout)
        given = given.mean(1) if average_attn_weights else given
    else:
        seen, given = sdpa.attend(parts[0], parts[1], parts[2], mask, dropout, None), None
    # (B, heads, T, D) as (T, B, heads * D)
    out = F.linear(seen.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return out, given


def _project(x: Any, weight: Tensor, bias: Tensor | None, heads: int) -> Any:
    """(B, heads, T, D) of (T, B, E)"""
    if isinstance(x, (Packed, PackedView)):
        if layout_of(x) != (1, 0, 3):
            raise refusal(
                f"query, key and value are (T, B, E) here, got {x.shape}", "make the layer with batch_first=True"
            )
        p = unwrap(x)
        return see(p._with(F.linear(p.values, weight, bias).unflatten(-1, (heads, -1))), 0, 2)
    return F.linear(x, weight, bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _read_masks(attn_mask: Any, padding: Any, parts: list[Any], causal: bool) -> Sight:
    rows, columns, heads = parts[0].packed._dim, parts[1].packed._dim, parts[0].packed.values.shape[1]
    dtype = parts[0].packed.values.dtype
    if isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
        if attn_mask.shape[0] != len(rows) * heads:
            raise WrongValue(f"attn_mask must be ({len(rows) * heads}, T, S), got {tuple(attn_mask.shape)}")
        attn_mask = attn_mask.unflatten(0, (len(rows), heads))
    first = read_mask(_seen(attn_mask), rows, columns, heads, dtype)
    if isinstance(padding, (Tensor, Packed)):
        padding = _seen(padding)[:, None, None]
    second = read_mask(padding, rows, columns, heads, dtype, "key_padding_mask")
    biases = [m.bias for m in (first, second) if m.bias is not None]
    bias = biases[0] if len(biases) == 1 else biases[0] + biases[1] if biases else None
    return Sight(causal=first.causal or second.causal or causal, bias=bias)


def _seen(mask: Any) -> Any:
    """A mask of this layer, true where it hides, as one that is true where it shows; floats as they are."""
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


def _by_weights(q: Any, k: Any, v: Any, mask: Sight, dropout: float) -> tuple[Any, Any]:
    """Returns the output of attention, and its weights (B, heads, T, S)."""
    scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)
    if mask.bias is not None:
        scores = scores + mask.bias
    if mask.causal:
        sizes = (x.shape[-2] if isinstance(x, Tensor) else x.max_len for x in (q, k))
        later = torch.ones(*sizes, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights
