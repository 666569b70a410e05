"""Sinks of attention: a slot more, of a given score and no value, against the softmax of one column more."""

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.attention import Sight, attend_past, whole
from tensorloop.attention.past import attend_slots

RULES = {
    "plain": Sight(0.3),
    "softcap": Sight(0.3, softcap=2.0),
    "window": Sight(0.3, window=2),
    "padded": Sight(0.3, first=torch.tensor([2, 6])),  # the second row's first queries see nothing
    "dropout": Sight(0.3, dropout=0.3, seed=5),
    "bias": Sight(0.3, bias=torch.linspace(-1, 1, 84).view(1, 4, 3, 7)),
}


def given(dtype: torch.dtype, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 3, 4, 8), (7, 2, 2, 8), (7, 2, 2, width), (4,))
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [8, 6])
def test_kernels_are_the_formula(rule: str, dtype: torch.dtype, width: int) -> None:
    q, k, v, sinks = inputs = given(dtype, width)
    sight = RULES[rule]
    sight = sight._replace(sinks=sinks, bias=None if sight.bias is None else sight.bias.to(dtype))
    ours, formula = attend_slots(q, k, v, sight), whole(q, k, v, sight)
    close = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(ours, formula, atol=close, rtol=close)
    weights = torch.randn_like(ours)
    found, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, formula))
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    assert bool(found[3].abs().min() > 0)


def test_the_formula_is_a_softmax_with_a_column_more() -> None:
    q, k, v, sinks = given(torch.float64)
    scores = torch.einsum("bthd,sbhd->bhts", q, k.repeat_interleave(2, 2)) * 0.3
    scores = scores.masked_fill(~torch.ones(3, 7).bool().tril(4), float("-inf"))
    weights = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 3, 1)], -1).softmax(-1)[..., :-1]
    wanted = torch.einsum("bhts,sbhd->bthd", weights, v.repeat_interleave(2, 2))
    torch.testing.assert_close(whole(q, k, v, Sight(0.3, sinks=sinks)), wanted)


def test_derivatives_of_both_orders() -> None:
    inputs = tuple(given(torch.float64))

    def function(*x: Tensor) -> Tensor:
        return attend_slots(x[0], x[1], x[2], Sight(0.3, sinks=x[3]))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_sinks_of_a_loop_over_arrays_get_their_gradient(checkpoints: int | None) -> None:
    q, k, v, sinks = given(torch.float64)

    def body(carry: tl.TensorArray, x: tuple[Tensor, Tensor]) -> tuple[tl.TensorArray, Tensor]:
        carry.append(x[0].sin())
        return carry, attend_past(q[:, :1], carry, carry2(x[1], len(carry)), Sight(0.3, sinks=sinks))

    def carry2(x: Tensor, length: int) -> tl.TensorArray:
        return tl.TensorArray.unstack(x.cos().expand(length, *x.shape))

    _, ys = tl.scan(body, tl.TensorArray(), (k, v), checkpoints=checkpoints)
    wanted = [
        whole(q[:, :1], k[: t + 1].sin(), v[t].cos().expand(t + 1, 2, 2, 8), Sight(0.3, sinks=sinks)) for t in range(7)
    ]
    torch.testing.assert_close(ys, torch.stack(wanted))
    found, true = (torch.autograd.grad(x.square().sum(), (q, k, v, sinks)) for x in (ys, torch.stack(wanted)))
    torch.testing.assert_close(found, true)
