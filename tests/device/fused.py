"""What torch has as one kernel for CUDA alone: cells of LSTM and GRU, and attention.

On a device, `nn.LSTM`, `nn.LSTMCell` and their like call the former, forward and backward, and
`F.scaled_dot_product_attention` calls the latter. Here is also what torch asks of cuDNN: it has no CTC loss.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Optional = Tensor | None


def biased(gates: Tensor, bias: Optional) -> Tensor:
    return gates if bias is None else gates + bias


def lstm(inputs: Tensor, hidden: Tensor, c: Tensor, input_bias: Optional = None, hidden_bias: Optional = None) -> Any:
    i, f, g, o = (biased(inputs, input_bias) + biased(hidden, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_backward(
    dh: Optional, dc: Optional, c: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Optional, Optional, Optional]:
    if dh is None and dc is None:
        return None, None, None
    i, f, g, o = gates.chunk(4, 1)
    dh = torch.zeros_like(c) if dh is None else dh
    t = new.tanh()
    dnew = dh * o * (1 - t * t) + (0 if dc is None else dc)
    parts = [dnew * g * i * (1 - i), dnew * c * f * (1 - f), dnew * i * (1 - g * g), dh * t * o * (1 - o)]
    dgates = torch.cat(parts, 1)
    return dgates, dnew * f, dgates.sum(0) if has_bias else None


def gru(inputs: Tensor, hidden: Tensor, h: Tensor, input_bias: Optional = None, hidden_bias: Optional = None) -> Any:
    ir, iz, n = biased(inputs, input_bias).chunk(3, 1)
    hr, hz, hn = biased(hidden, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (n + r * hn).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, hn], 1)


def gru_backward(dh: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Optional, Optional]:
    r, z, n, h, hn = kept.chunk(5, 1)
    dn = dh * (1 - z) * (1 - n * n)
    dr, dz = dn * hn * r * (1 - r), dh * (h - n) * z * (1 - z)
    dinputs, dhidden = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
    if not has_bias:
        return dinputs, dhidden, dh * z, None, None
    return dinputs, dhidden, dh * z, dinputs.sum(0), dhidden.sum(0)


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional, lse: bool, dropout: float = 0.0, causal: bool = False, **scale: Any
) -> tuple[Tensor, ...]:
    none = torch.empty((), dtype=torch.int64, device="cpu")  # a place among random numbers
    return *_FLASH(q, k, v, dropout, causal, attn_mask=bias, **scale), none, none


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    mask: list[bool],
    causal: bool = False,
    **scale: Any,
) -> tuple[Optional, ...]:
    return *_FLASH_BACKWARD(grad, q, k, v, out, lse, dropout, causal, attn_mask=bias, **scale), None


FUSED: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": lstm,
    "_thnn_fused_lstm_cell_backward_impl": lstm_backward,
    "_thnn_fused_gru_cell": gru,
    "_thnn_fused_gru_cell_backward": gru_backward,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
}


def register(one_launch: Callable[[str], contextlib.AbstractContextManager[None]]) -> torch.library.Library:
    """Gives them to the device, each as one launch; they are there as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in FUSED.items():

        def run(*args: Any, name: str = name, kernel: Callable[..., Any] = kernel, **options: Any) -> Any:
            with one_launch(f"aten::{name}"):
                return kernel(*args, **options)

        library.impl(name, run, "CUDA")
    for library_name, overload in itertools.product(("cudnn", "miopen"), ("", ".Tensor")):
        library.impl(f"_use_{library_name}_ctc_loss{overload}", lambda *_: False, "CUDA")
    return library
