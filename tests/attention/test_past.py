"""Attention of new tokens to all tokens of two arrays: kernels against the formula, the node against plain autograd."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop import memory, reference
from tensorloop.attention import Sight, attend_past
from tensorloop.kernels.cpu import past as cpu
from tensorloop.kernels.eager import past as eager
from tensorloop.kernels.scores import ScorePlaces, keep, whole
from tensorloop.kernels.sight import visible

INF = float("inf")
SIZES = [
    *((2, 1, 4, 4, 8, 7), (2, 3, 4, 2, 8, 7), (3, 1, 4, 1, 5, 9)),
    *((1, 1, 1, 1, 1, 1), (2, 2, 6, 3, 3, 70), (0, 1, 2, 1, 3, 2)),
]
SIGHTS: dict[str, Callable[[int, int, int, int], dict[str, Any]]] = {
    "plain": lambda B, t, H, n: {},
    "all": lambda B, t, H, n: {"causal": False},
    "first": lambda B, t, H, n: {"first": torch.arange(B) * (n // 2)},
    "nothing": lambda B, t, H, n: {"first": torch.full((B,), n + 1)},
    "seen": lambda B, t, H, n: {"seen": torch.rand(B, t, n) > 0.4},
    "softcap": lambda B, t, H, n: {"softcap": 1.5},
    "bias": lambda B, t, H, n: {"bias": torch.randn(1, H, t, n)},
    "bias by row": lambda B, t, H, n: {"bias": torch.randn(B, H, t, n), "softcap": 2.0, "first": torch.arange(B)},
    "dropout": lambda B, t, H, n: {"dropout": 0.3, "seed": (1 << 61) + 12345},
    "window": lambda B, t, H, n: {"window": 3, "first": torch.arange(B)},
    "window, all": lambda B, t, H, n: {"window": 2, "causal": False},
    "a bias that hides": lambda B, t, H, n: {"bias": torch.randn(B, H, 1, n).masked_fill(torch.rand(n) < 0.5, -INF)},
}


def _case(sizes: tuple[int, ...], sight: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(1)
    B, t, H, heads_kv, D, n = sizes
    q, k, v = torch.randn(B, t, H, D, dtype=dtype), *torch.randn(2, n, B, heads_kv, D, dtype=dtype)
    return q, k, v, Sight(0.7, **SIGHTS[sight](B, t, H, n))


def _double(sight: Sight) -> Sight:
    return sight._replace(bias=None if sight.bias is None else sight.bias.double())


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels_give_the_formula_s(sizes: tuple[int, ...], sight: str) -> None:
    q, k, v, given = _case(sizes, sight)
    out, lse = cpu.past_attend(q, k, v, given)
    wide = q.double(), k.double(), v.double()
    expected, log = eager.past_attend(*wide, _double(given))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), log, atol=2e-6, rtol=2e-6)
    grad, sums = torch.randn_like(q), (torch.ones_like(k), torch.ones_like(v))
    of_q, of_bias = cpu.past_attend_grad(grad, q, k, v, out, lse, given, *sums)
    wanted = torch.ones_like(wide[1]), torch.ones_like(wide[2])
    dq, dbias = eager.past_attend_grad(grad.double(), *wide, expected, log, _double(given), *wanted)
    for got, true in zip((of_q, *sums), (dq, *wanted), strict=True):
        torch.testing.assert_close(got.double(), true, atol=5e-6, rtol=5e-6)
    assert (of_bias is None) == (dbias is None)
    if of_bias is not None and dbias is not None:
        torch.testing.assert_close(of_bias.double(), dbias, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("sight", [name for name in SIGHTS if name != "dropout"])
def test_the_formula_is_the_reference_s(sight: str) -> None:
    q, k, v, given = _case((2, 3, 4, 2, 5, 7), sight, torch.float64)
    given = _double(given)
    sees = visible(2, 3, 7, given, q.device)[:, None].expand(2, 4, 3, 7)
    scores = {"softcap": given.softcap, "bias": 0.0 if given.bias is None else given.bias}
    expected = reference.attention(q, k.transpose(0, 1), v.transpose(0, 1), scale=0.7, sees=sees, **scores)
    torch.testing.assert_close(whole(q, k, v, given), expected, atol=1e-12, rtol=1e-12)


def _kept(sight: Sight) -> Tensor:
    places = ScorePlaces.dense((2, 4, 8, 4096), torch.device(torch.get_default_device()))
    return keep(sight, places, torch.float64)


def test_dropout_drops_its_share_and_grows_the_rest() -> None:
    factors = _kept(Sight(1.0, dropout=0.25, seed=7))
    assert set(factors.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(float((factors == 0).double().mean()) - 0.25) < 5 * (0.25 * 0.75 / factors.numel()) ** 0.5
    other = _kept(Sight(1.0, dropout=0.25, seed=8 << 30))
    assert 0.3 < float((factors == other).double().mean()) < 0.9


def _decode(arrays: bool, inputs: tuple[Tensor, ...], window: int = 5) -> Tensor:
    """T steps, each fed by the one before; keys and values are turned, so that nothing contracts."""
    q, k, v, bias = inputs
    keys, values = tl.TensorArray(), tl.TensorArray()
    plain: list[tuple[Tensor, Tensor]] = []
    out, x = [], q.new_zeros(())
    for t in range(len(q)):
        new = torch.sin(k[t] + x), torch.cos(v[t] - x)
        start = max(0, t + 1 - window)
        sight = Sight(0.7, bias=bias[t][..., start : t + 1], softcap=2.0 if t % 2 else 0.0)
        if arrays:
            y = attend_past(q[t], keys.append(new[0]), values.append(new[1]), sight, start)
        else:
            plain.append(new)
            seen = [torch.stack(z[start:]) for z in zip(*plain, strict=True)]
            y = whole(q[t], seen[0], seen[1], sight)
        x = y.mean()
        out.append(y)
    return torch.cat(out, 1)


def _inputs(dtype: torch.dtype, T: int = 7) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (T, 2, 1, 4, 5), (T, 2, 2, 5), (T, 2, 2, 5), (T, 1, 4, 1, T)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_steps_give_the_gradients_of_plain_tensors(dtype: torch.dtype, bound: float) -> None:
    inputs = _inputs(dtype)
    outs = [_decode(arrays, inputs) for arrays in (True, False)]
    weights = torch.randn_like(outs[0])
    torch.testing.assert_close(outs[0], outs[1], atol=bound, rtol=bound)
    first, second = [], []
    for out in outs:
        grads = torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)
        first.append(grads)
        again = torch.autograd.grad((out * weights).sin().sum(), inputs, create_graph=True)
        squares = torch.stack([(x * x).sum() for x in again])
        second.append(torch.autograd.grad(squares.sum(), inputs))
    for kind in (first, second):
        for got, true in zip(*kind, strict=True):
            torch.testing.assert_close(got, true, atol=20 * bound, rtol=20 * bound)


def test_values_without_a_gradient_stay_without() -> None:
    q, k, v, _ = (x.detach() for x in _inputs(torch.float32))
    keys, values = tl.TensorArray().extend(k), tl.TensorArray().extend(v)
    query = q[0].clone().requires_grad_()
    attend_past(query, keys, values, Sight(1.0)).sum().backward()
    assert query.grad is not None
    assert not keys.stack().requires_grad
    with torch.no_grad():
        assert not attend_past(query, keys, values, Sight(1.0)).requires_grad


def test_a_prefix_that_needs_one_and_later_tokens_that_do_not() -> None:
    _, k, v, _ = _inputs(torch.float64)
    query = torch.randn(2, 1, 4, 5, dtype=torch.float64)
    keys, values = tl.TensorArray().extend(k), tl.TensorArray().extend(v)
    constant = torch.ones(2, 2, 5, dtype=torch.float64)
    out = attend_past(query, keys.append(constant), values.append(constant), Sight(1.0))
    true = whole(query, torch.cat([k, constant[None]]), torch.cat([v, constant[None]]), Sight(1.0))
    weights = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad((y * weights).sum(), (k, v)) for y in (out, true)), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("written", [1, 2])
def test_a_look_without_gradients_takes_none_away(written: int) -> None:
    q, k, v, _ = _inputs(torch.float32)
    keys, values = tl.TensorArray(), tl.TensorArray()
    for t in range(written):
        keys.append(k[t].sin())
        values.append(v[t].sin())
    with torch.no_grad():
        attend_past(q[0], keys, values, Sight(1.0))
    out = attend_past(q[0], keys, values, Sight(1.0))
    true = whole(q[0], k[:written].sin(), v[:written].sin(), Sight(1.0))
    weights = torch.randn_like(out)
    for got, wanted in zip(*(torch.autograd.grad((y * weights).sum(), (k, v)) for y in (out, true)), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("changed", [0, 1])
def test_what_waits_in_one_array_keeps_its_gradient_where_the_other_is_refused(changed: int, waits: bool) -> None:
    q, k, _, _ = _inputs(torch.float32)
    arrays = tl.TensorArray(), tl.TensorArray()
    for array in arrays:
        array.append(k[0].detach())
    arrays[changed].append(k[1] * 2 if waits else k[1].detach())
    view = arrays[changed][:1]
    arrays[1 - changed].append(k[1] * 2)
    with torch.no_grad():
        view.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        attend_past(q[0], *arrays, Sight(1.0))
    (d,) = torch.autograd.grad(arrays[1 - changed].stack().sum(), k)
    assert d[1].eq(2).all()


def test_bytes_grow_with_the_steps_not_their_square() -> None:
    def held(T: int) -> int:
        inputs = _inputs(torch.float32, T)
        q, k, v = (x.detach() * 1 for x in inputs[:3])

        def run() -> Tensor:
            keys, values = tl.TensorArray(capacity=T), tl.TensorArray(capacity=T)
            q_, k_, v_ = (x.requires_grad_() for x in (q, k, v))
            return torch.stack(
                [attend_past(q_[t], keys.append(k_[t].sin()), values.append(v_[t].sin()), Sight(1.0)) for t in range(T)]
            )

        return memory.saved_bytes(run)

    few, more, most = held(16), held(32), held(64)
    assert most - more == 2 * (more - few)


ROUNDS = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 4), st.integers(0, 3), st.sampled_from(["", "branch", "write", "view"])
    ),
    min_size=1,
    max_size=7,
)


@given(ROUNDS)
@settings(max_examples=60, deadline=None)
def test_slots_that_are_forgotten_pass_their_gradient(rounds: list[tuple[int, int, int, str]]) -> None:
    torch.manual_seed(0)
    size = (2, 2, 3)
    given_ = torch.randn(2, 4 * len(rounds), *size, dtype=torch.float64, requires_grad=True)
    queries = torch.randn(len(rounds), 2, 1, 4, 3, dtype=torch.float64, requires_grad=True)

    def run(arrays: bool) -> Tensor:
        new, outs = iter(given_.sin().unbind(1)), []
        keys, values, plain = tl.TensorArray(), tl.TensorArray(), list[Tensor]()
        views: list[tuple[Tensor, Tensor]] = []
        for q, (more, less, start, change) in zip(queries, rounds, strict=True):
            for pair in (next(new) for _ in range(more)):
                keys.append(pair[0])
                values.append(pair[1])
                plain.append(pair)
            if change == "branch":
                keys, values = copy.copy(keys), copy.copy(values)
            elif change == "write":
                pair = next(new)
                plain[-1] = pair
                keys.write(len(keys) - 1, pair[0])
                values.write(len(values) - 1, pair[1])
            elif change == "view" and arrays:
                views.append((keys[-1:], keys[-1:].detach().clone()))
            start = min(start, len(plain) - 1)
            k, v = torch.stack(plain[start:]).unbind(1)
            outs.append(attend_past(q, keys, values, Sight(0.7), start) if arrays else whole(q, k, v, Sight(0.7)))
            left = max(len(plain) - less, 0)
            del plain[left:]
            keys.truncate(left)
            values.truncate(left)
        assert all(torch.equal(view, was) for view, was in views)
        return torch.stack(outs)

    inputs, found = (given_, queries), []
    for out in (run(True), run(False)):
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        first = torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)
        again = torch.autograd.grad((out * weights).sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(torch.stack([(x * x).sum() for x in again]).sum(), inputs)
        found.append((out, *first, *second))
    for got, true in zip(*found, strict=True):
        torch.testing.assert_close(got, true, atol=1e-11, rtol=1e-11)


def test_bytes_grow_with_the_drafts_that_are_taken_back() -> None:
    def held(rounds: int) -> int:
        x = torch.randn(3 * rounds, 2, 2, 5, requires_grad=True)
        q = torch.randn(2, 3, 4, 5)

        def run() -> Tensor:
            keys, values, outs = tl.TensorArray(capacity=100), tl.TensorArray(capacity=100), []
            for drafts in (x * 1).split(3):
                outs.append(attend_past(q, keys.extend(drafts), values.extend(drafts), Sight(1.0)))
                keys.truncate(len(keys) - 2)
                values.truncate(len(values) - 2)
            return torch.stack(outs)

        return memory.saved_bytes(run)

    few, more, most = held(16), held(32), held(64)
    assert most - more == 2 * (more - few)
