"""Two-byte floats in compiled loops: an operation that is taken apart is computed in float32 and rounded once.

What is compared is how far both loops are from float64, as eager kernels round in orders of their own. The user's own
chain of operations is rounded after each of them, as in eager loops.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tests.support.devices import HERE

Rule = Callable[[Tensor], Tensor]
CLASSES = torch.arange(8) % 16
GROUPS: dict[str, dict[str, Rule]] = {
    "activations": {
        **{
            name: getattr(F, name)
            for name in (
                *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "leaky_relu", "logsigmoid", "mish", "relu6"),
                *("selu", "silu", "softplus", "softshrink", "softsign", "tanhshrink", "glu"),
            )
        },
        "gelu by tanh": lambda v: F.gelu(v, approximate="tanh"),
    },
    "norms": {
        "2": lambda v: v.norm(dim=-1),
        "1": lambda v: v.norm(1, dim=-1),
        "3": lambda v: (v * 0.1).norm(3, dim=-1),
        "inf": lambda v: v.norm(float("inf"), dim=-1),
        "normalize": lambda v: F.normalize(v, dim=-1),
        "layer": lambda v: F.layer_norm(v + 100, (16,)),
        "group": lambda v: F.group_norm(v[None] + 100, 4),
        "rms": lambda v: F.rms_norm(v, (16,)),
        "distance": lambda v: F.pairwise_distance(v, v * 0.5),
    },
    "sums": {
        "var": lambda v: (v + 100).var(-1),
        "std": lambda v: (v + 100).std(-1),
        "mean": lambda v: v.mean(-1),
        "logsumexp": lambda v: v.logsumexp(-1),
        "softmax": lambda v: v.softmax(-1),
        "log_softmax": lambda v: v.log_softmax(-1),
        "cumsum": lambda v: v.cumsum(-1),
        "logcumsumexp": lambda v: v.logcumsumexp(-1),
        "cross entropy": lambda v: F.cross_entropy(v, CLASSES),
    },
    "products": {
        "addmm": lambda v: torch.addmm(v[:, :8], v, v.T, beta=0.5, alpha=0.3),
        "baddbmm": lambda v: torch.baddbmm(v[None, :, :8], v[None], v.T[None], alpha=0.1),
        "addbmm": lambda v: torch.addbmm(v[:, :8], v[None], v.T[None], alpha=0.1),
        "addmv": lambda v: torch.addmv(v[:, 0], v, v[0], alpha=0.3),
        "addr": lambda v: torch.addr(v, v[:, 0], v[0], alpha=0.3),
        "dot": lambda v: torch.dot(v[0], v[1]),
        "linear": lambda v: F.linear(v, v, v[:, 0]),
        "attention": lambda v: F.scaled_dot_product_attention(v[None, None], v[None, None], v[None, None]),
        "addcmul": lambda v: torch.addcmul(v, v, v * 0.1, value=0.3),
        "addcdiv": lambda v: torch.addcdiv(v, v, v.abs() + 1, value=0.3),
    },
}


@pytest.mark.parametrize("scale", [3, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", GROUPS)
def test_an_operation_is_rounded_once(group: str, dtype: torch.dtype, scale: int):
    rules = GROUPS[group]
    xs = (torch.randn(3, 8, 16) * scale).to(dtype)

    def run(compile: Any) -> list[Tensor]:
        def body(h: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return h * 1, [rule(x + h) for rule in rules.values()]

        return tl.scan(body, torch.zeros((), dtype=dtype), xs, compile=compile)[1]

    found, eager = run("strict"), run(False)
    for name, ours, theirs in zip(rules, found, eager, strict=True):
        exact = torch.stack([rules[name](x.double()) for x in xs])
        assert ours.dtype is dtype
        assert ours.isfinite().all() or not theirs.isfinite().all(), name
        apart = [(y.double() - exact).abs().nan_to_num(posinf=0).max().item() for y in (ours, theirs)]
        assert apart[0] <= 1.3 * apart[1] + torch.finfo(dtype).eps * exact.abs().max().item() / 8, name


def test_norms_of_large_numbers_are_finite():
    xs = torch.full((2, 16), 200.0, dtype=torch.float16)
    ys = tl.scan(lambda h, x: (h * 1, (x + h).norm()), torch.zeros((), dtype=torch.float16), xs, compile="strict")[1]
    assert ys.tolist() == [800.0, 800.0]


def test_a_chain_of_the_users_is_rounded_after_each_operation():
    xs = torch.full((2, 16), 200.0, dtype=torch.float16)

    def run(compile: Any) -> Tensor:
        init = torch.zeros((), dtype=torch.float16)
        body = lambda h, x: (h * 1, ((x + h) * (x + h)).sum().sqrt())  # noqa: E731
        return tl.scan(body, init, xs, compile=compile)[1]

    torch.testing.assert_close(run("strict"), run(False), rtol=0, atol=0)
    assert run("strict").isinf().all()


NUMBER = 0.7  # 0.69921875 in bfloat16, 0.7001953125 in float16
OTHER = torch.full((), NUMBER)
BESIDE_NUMBERS: dict[str, Rule] = {
    "sums": lambda v: torch.stack([v + NUMBER, NUMBER - v, v - OTHER, torch.arange(257, 273) + v]),
    "products": lambda v: torch.stack([v * NUMBER, v / NUMBER, v * OTHER, OTHER * v, torch.arange(257, 273) * v]),
    "comparisons": lambda v: torch.stack([v == NUMBER, v != 0.3, v > 0.3, v <= NUMBER, v.ge(OTHER), v > NUMBER]),
    "rests": lambda v: torch.stack([v % NUMBER, torch.fmod(v, 0.3), torch.remainder(NUMBER, v.detach())]),
    "whole quotients": lambda v: torch.stack(
        [v.detach() // 0.3, *(torch.div(v, w, rounding_mode="trunc") for w in (NUMBER, 0.3, v.roll(1)))]
    ),
    "powers": lambda v: torch.stack([v.abs() ** NUMBER, NUMBER**v, torch.atan2(v, OTHER)]),
    "decimals": lambda v: v.round(decimals=1),
    "thresholds": lambda v: torch.stack(
        [F.softshrink(v, 0.3), F.softshrink(v, NUMBER), F.threshold(v, 0.3, 0.1), F.hardshrink(v, 0.3)]
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BESIDE_NUMBERS)
def test_numbers_are_rounded_where_torch_rounds_them(name: str, dtype: torch.dtype):
    """x == 0.7 holds of the two-byte number next to 0.7, but x * 0.7 is a product with 0.7 itself."""
    marks = torch.tensor([1, -1, 2, 3, -3]).outer(torch.tensor([NUMBER, 0.3, 0.1])).flatten()
    xs = torch.cat([marks, torch.randn(225, generator=torch.Generator(HERE).manual_seed(0))]).view(3, 5, 16).to(dtype)

    def body(h: Tensor, x: Tensor) -> Any:
        made = BESIDE_NUMBERS[name](x + 0 * h)
        return h + 0 * made.to(dtype).reshape(-1, 16).sum(0), made  # so that all of it stays in the loop

    def run(compile: Any) -> list[Tensor]:
        v = xs.clone().requires_grad_()
        ys = tl.scan(body, torch.zeros(16, dtype=dtype), v, compile=compile)[1]
        return [ys, *(torch.autograd.grad(ys.sum(), v) if ys.requires_grad else ())]

    for found, expected in zip(run("strict"), run(False), strict=True):
        least = torch.finfo(dtype).eps * 1.01  # one rounding
        torch.testing.assert_close(found, expected, rtol=least, atol=1e-3 * least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_spread_is_of_the_mean_that_torch_rounds(dtype: torch.dtype):
    """Of numbers near 100 the mean in two bytes is as far off as they are from each other."""
    xs = (100 + 3 * torch.linspace(-1, 1, 24, dtype=torch.float64).sin()).view(2, 3, 4)

    def body(h: Tensor, x: Tensor) -> Any:
        near = (h + x).to(dtype)
        return h * 0.9 + near.var(-1, keepdim=True) * 0.1, [torch.std_mean(near, -1), near.std(0), torch.var_mean(near)]

    def run(compile: Any) -> list[Tensor]:
        v = xs.clone().requires_grad_()
        leaves = tree_leaves(tl.scan(body, torch.zeros(3, 4, dtype=torch.float64), v, compile=compile))
        return [*leaves, *torch.autograd.grad(sum(y.double().sum() for y in leaves), v)]  # pyright: ignore

    for found, expected in zip(run("strict"), run(False), strict=True):
        least = torch.finfo(dtype).eps
        torch.testing.assert_close(found, expected, rtol=2 * least, atol=2 * least)
