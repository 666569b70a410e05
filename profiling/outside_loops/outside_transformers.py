"""Recurrences of transformers' models, in the functions that run where no kernel is installed."""

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl

MODELS = "transformers.models."
FLOAT32 = {"double": False, "at_most": 1e-4}  # their states are of float32


def rwkv(size: Size) -> Made:
    original = find(MODELS + "rwkv.modeling_rwkv.rwkv_linear_attention_cpu")
    decay, first = torch.randn(size.width, requires_grad=True), torch.randn(size.width, requires_grad=True)
    key, value = (torch.randn(size.rows, size.steps, size.width, requires_grad=True) for _ in range(2))

    def port(decay: Tensor, first: Tensor, key: Tensor, value: Tensor, compile: bool | None = None):
        rate = -torch.exp(decay)

        def body(state, x):
            num, den, top = state
            k, v = x
            here = torch.maximum(top, k + first)
            e1, e2 = torch.exp(top - here), torch.exp(k + first - here)
            y = (e1 * num + e2 * v) / (e1 * den + e2)
            after = torch.maximum(top + rate, k)
            e1, e2 = torch.exp(top + rate - after), torch.exp(k - after)
            return (e1 * num + e2 * v, e1 * den + e2, after), y

        zeros = torch.zeros_like(key[:, 0])
        return tl.scan(body, (zeros, zeros, zeros - 1e38), (key, value), dim=1, compile=compile)[1]

    return Made(lambda *xs: original(*xs)[0], port, (decay, first, key, value))


def delta_rule(size: Size) -> Made:
    """Qwen3-Next's gated delta rule; the same function is in eight other models."""
    original = find(MODELS + "qwen3_next.modeling_qwen3_next.torch_recurrent_gated_delta_rule")
    heads, width = 4, max(size.width // 2, 2)
    q, k, v = (torch.randn(size.rows // 2 + 1, size.steps, heads, width, requires_grad=True) for _ in range(3))
    decay = (-torch.rand(q.shape[:3])).requires_grad_()
    beta = torch.rand(q.shape[:3], requires_grad=True)

    def port(q, k, v, decay, beta, compile: bool | None = None):
        dtype = q.dtype
        q, k, v, decay, beta = (x.float() for x in (q, k, v, decay, beta))
        k, q = (torch.nn.functional.normalize(x, dim=-1) for x in (k, q))

        def body(state, x):
            q, k, v, decay, beta = x
            state = state * decay.exp()[..., None, None]
            delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
            state = state + k[..., None] * delta[..., None, :]
            return state, (state * q[..., None]).sum(-2)

        state = q.new_zeros(len(q), heads, width, width)
        state, ys = tl.scan(body, state, (q / width**0.5, k, v, decay, beta), dim=1, compile=compile)
        return ys.to(dtype), state

    def run(*xs: Tensor):
        return original(*xs, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return Made(run, port, (q, k, v, decay, beta))


def gated_linear(size: Size) -> Made:
    """RecurrentGemma's RG-LRU, with documents that begin within a row."""
    original = find(MODELS + "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan")
    shape = size.rows, size.steps, size.width
    xs, gates = torch.randn(shape, requires_grad=True), torch.rand(shape, requires_grad=True)
    reset = torch.rand(*shape[:2], 1) < 0.05

    def port(xs: Tensor, gates: Tensor, reset: Tensor, compile: bool | None = None):
        ys = tl.linear_recurrence((gates * ~reset).float(), xs.float(), dim=1)
        return ys.to(xs.dtype), ys[:, -1]

    return Made(lambda *xs: original(None, *xs, None), port, (xs, gates, reset))


LOOPS = [
    Loop("transformers", "RWKV's attention", rwkv, MODELS + "rwkv.modeling_rwkv.rwkv_linear_attention_cpu", **FLOAT32),
    Loop(
        "transformers",
        "gated delta rule",
        delta_rule,
        MODELS + "qwen3_next.modeling_qwen3_next.torch_recurrent_gated_delta_rule",
        **FLOAT32,
    ),
    Loop(
        "transformers",
        "RG-LRU",
        gated_linear,
        MODELS + "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan",
        compiles=False,
        **FLOAT32,
    ),
]
