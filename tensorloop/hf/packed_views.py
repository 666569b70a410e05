"""`attn_implementation="tensorloop"` where a model itself runs on packed tensors: queries (B, heads, T*, D) of rows."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.hf import known


def attend_rows(
    module: Any,
    parts: tuple[Any, Any, Any],
    mask: Any,
    dropout: float,
    scale: float,
    is_causal: bool | None,
    bias: Any = None,
) -> Any:
    """(B, T*, heads, D): queries see the keys of their row, as torch's scaled_dot_product_attention has it."""
    query, key, value = parts
    if any(isinstance(x, Tensor) for x in parts):
        raise WrongValue(f"{type(module).__name__} attends with packed and padded tensors together; pack all of them")
    if mask is None and is_causal is None:
        is_causal = known.is_causal(module)
    causal = mask is None and bool(is_causal)
    if causal and query.shape[2] != key.shape[2]:
        # Where a row has one query and more keys, models mean all keys, and torch the first.
        raise WrongValue(f"{type(module).__name__} is causal, with queries and keys of other lens; give it a mask")
    if bias is not None:
        if causal:
            raise WrongValue(f"{type(module).__name__} is causal and has a bias by position; give it a mask")
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else bias + mask
        mask = bias
    out: Any = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)
