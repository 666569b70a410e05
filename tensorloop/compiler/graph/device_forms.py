"""Operations that torch has for CUDA alone, as what they do on any device: a step that was seen there is traced here.

What only their own gradients read is not made: in its places are tensors of no element.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.graph.compositions import attention, batch_norm, rounded_once

_aten = torch.ops.aten


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, c: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(the next h, the next c); `inputs` and `hidden` are the products with the two weights."""
    i, f, g, o = (_biased(inputs, input_bias) + _biased(hidden, hidden_bias)).chunk(4, 1)
    new = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * new.tanh(), new


def _gru_cell(
    inputs: Tensor, hidden: Tensor, h: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> Tensor:
    """The next h."""
    ir, iz, n = _biased(inputs, input_bias).chunk(3, 1)
    hr, hz, hn = _biased(hidden, hidden_bias).chunk(3, 1)
    n = (n + (ir + hr).sigmoid() * hn).tanh()
    return n + (iz + hz).sigmoid() * (h - n)


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **scale: Any
) -> Any:
    return _attends(q, k, v, None, dropout_p, is_causal, **scale)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    logs: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **scale: Any,
) -> Any:
    return _attends(q, k, v, mask, dropout_p, is_causal, **scale)


def _attends(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None = None
) -> Any:
    """(what queries read, the logsumexp of their scores); several heads of q may share one of k and v."""
    if dropout_p:
        return NotImplemented
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return attention(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)


def _results(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A function with so many results."""
    once = rounded_once(function)

    def padded(*args: Any, **kwargs: Any) -> Any:
        found = once(*args, **kwargs)
        if found is NotImplemented:
            return found
        found = found if isinstance(found, tuple) else (found,)
        return *found, *(found[0].new_zeros(0) for _ in range(count - len(found)))

    return padded


def _wide(function: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """A softmax of two-byte floats that gives float32."""
    return function(x.float(), dim, False) if half_to_float else NotImplemented


TABLE = {
    _aten._thnn_fused_lstm_cell.default: _results(_lstm_cell, 3),
    _aten._thnn_fused_gru_cell.default: _results(_gru_cell, 2),
    _aten._scaled_dot_product_flash_attention.default: _results(_flash, 9),
    _aten._scaled_dot_product_efficient_attention.default: _results(_masked, 4),
    _aten._scaled_dot_product_cudnn_attention.default: _results(_masked, 9),
    _aten.cudnn_batch_norm.default: _results(batch_norm, 4),
    _aten._softmax.default: partial(_wide, _aten._softmax.default),
    _aten._log_softmax.default: partial(_wide, _aten._log_softmax.default),
}
