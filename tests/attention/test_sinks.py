"""Sinks of attention: a slot more, of a given score and no value, against the softmax of one column more."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import reference
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


# -- tl.attention(sinks=)


def reach(t: int, n: int, window: int, starts: Tensor) -> Tensor:
    """(rows, 1, t, n): what the last t tokens see of n slots, themselves among them."""
    i, j = torch.arange(n - t, n)[:, None], torch.arange(n)
    return ((j <= i) & (j > i - window) & (j >= starts[:, None, None]))[:, None]


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.few("True")
def test_arrays_with_rules_and_sinks(chunk: bool) -> None:
    q, k, v, sinks = given(torch.float64)
    starts = torch.tensor([2, 7])  # the second row sees nothing
    q = q if chunk else q[:, 0]

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        keys, values = tl.TensorArray.unstack(k), tl.TensorArray.unstack(v)
        return tl.attention(q, keys, values, sinks=sinks, causal=chunk, window=4, starts=starts, softcap=2.0)

    def wanted(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        t = 3 if chunk else 1
        found = reference.attention(
            q.view(2, t, 4, 8), k.transpose(0, 1), v.transpose(0, 1), sees=reach(t, 7, 4, starts),
            softcap=2.0, sinks=sinks,
        )  # fmt: skip
        return found.view(q.shape)

    tl.testing.assert_matches_reference(ours, wanted, q, k, v, sinks)
    assert ours(q, k, v, sinks)[1].eq(0).all()
    assert torch.autograd.gradgradcheck(ours, (q, k, v, sinks))


def test_a_step_that_sees_all_slots_and_one_with_a_sink_that_takes_nothing() -> None:
    q, k, v, sinks = given(torch.float64)
    keys, values = tl.TensorArray.unstack(k), tl.TensorArray.unstack(v)
    out = tl.attention(q[:, 0], keys, values, sinks=sinks)
    wanted = reference.attention(q[:, :1], k.transpose(0, 1), v.transpose(0, 1), sinks=sinks)[:, 0]
    torch.testing.assert_close(out, wanted)
    nothing = torch.full((4,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(tl.attention(q[:, 0], keys, values, sinks=nothing), tl.attention(q[:, 0], keys, values))
    x = torch.randn(2, 5, 4, 8)
    torch.testing.assert_close(tl.attention(x, x, x, sinks=nothing.float()), tl.attention(x, x, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_arrays_in_a_search(dtype: torch.dtype) -> None:
    """The hypotheses see their histories through their ancestors."""
    embed, out, sinks = tables = [torch.randn(n, dtype=dtype, requires_grad=True) for n in ((5, 8), (8, 5), (2,))]

    def step(carry: Any, tokens: Tensor, plain: bool) -> Any:
        x = embed[tokens].unflatten(-1, (2, 4))
        keys, values = (array.append(y) for array, y in zip(carry, (x.sin(), x.cos()), strict=True))
        if plain:
            k, v = (array.stack().flatten(1, 2).transpose(0, 1) for array in (keys, values))
            y = reference.attention(x.flatten(0, 1)[:, None], k, v, softcap=2.0, sinks=sinks).view(x.shape)
        else:
            y = tl.attention(x, keys, values, softcap=2.0, sinks=sinks)
        return (keys, values), (y.flatten(-2) @ out).log_softmax(-1)

    sizes: Any = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 6}
    found = []
    for plain in (False, True):
        start = tl.TensorArray(), tl.TensorArray()
        scores = tl.beam_search(lambda c, t, plain=plain: step(c, t, plain), start, **sizes).scores
        first = torch.autograd.grad(scores.square().sum(), tables, create_graph=True)
        found.append((scores, *first, *torch.autograd.grad(first[2].square().sum(), tables)))
    close = 1e-10 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(found[0], found[1], atol=close, rtol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_in_other_dtypes(dtype: torch.dtype) -> None:
    """Sinks keep a dtype of their own."""
    torch.manual_seed(0)
    x, sinks = torch.randn(40, 4, 8, dtype=dtype, requires_grad=True), torch.randn(4, requires_grad=True)
    p = tl.PackedTensor(x, [33, 0, 7])
    out = tl.attention(p, p, p, causal=True, sinks=sinks).values
    wide, lens = x.float(), [33, 0, 7]
    wanted = reference.attention_packed(wide, wide, wide, lens, lens, causal=True, sinks=sinks)
    close: dict[str, Any] = {"atol": 5e-2, "rtol": 5e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(out.float(), wanted, **close)
    found, true = (torch.autograd.grad(y.float().sin().sum(), (x, sinks)) for y in (out, wanted))
    torch.testing.assert_close(found, true, **(close or {"atol": 1e-5, "rtol": 1e-4}))


@pytest.mark.parametrize(
    ("sinks", "error", "said"),
    [
        ([1.0], TypeError, r"sinks must be a tensor of floats, got list \[1.0\]"),
        (torch.ones(4).long(), TypeError, "sinks must be a tensor of floats"),
        (torch.ones(3), ValueError, r"sinks must be \(heads,\), here \(4,\), got \(3,\)"),
        (torch.ones(4, device="meta"), ValueError, "sinks is on meta, q is on cpu"),
    ],
)
def test_sinks_that_are_none(sinks: Any, error: type[Exception], said: str) -> None:
    x = torch.randn(2, 3, 4, 8)
    keys = tl.TensorArray.unstack(x.transpose(0, 1))
    for given in ((x, x, x), (x[:, 0], keys, keys)):
        with pytest.raises(error, match=f"attention: {said}"):
            tl.attention(*given, sinks=sinks)
    with pytest.raises(TypeError, match=r"attention.*sinks="):
        tl.attention(x, x, x, s_aux=torch.ones(4))  # pyright: ignore
