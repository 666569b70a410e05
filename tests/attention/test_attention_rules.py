"""Rules for what is seen of arrays (starts, windows, bias, softcap, dropout, chunks) against the plain form."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam, memory, reference
from tensorloop.testing import assert_matches_reference
from tests.support.attention_cases import tensors
from tests.support.beam_cases import BOS, EOS
from tests.support.devices import HERE

H, G, D, N = 4, 2, 3, 7
INF = float("inf")


def _sees(batch: tuple[int, ...], t: int, causal: bool, window: int | None, starts: Tensor | None) -> Tensor:
    """(rows, 1, t, n) by the words of the docstring, one pair at a time."""
    first = torch.zeros(batch, dtype=torch.int64) if starts is None else starts.expand(batch)
    sees = torch.zeros(*batch, 1, t, N, dtype=torch.bool).reshape(-1, 1, t, N)
    for b, start in enumerate(first.reshape(-1).tolist()):
        for i in range(t):
            own = N - t + i
            for j in range(N):
                sees[b, 0, i, j] = start <= j and not (causal and j > own) and (window is None or j > own - window)
    return sees


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, t: int | None = None, **given: Any
) -> Tensor:
    batch = q.shape[: -2 if t is None else -3]
    rows = (batch.numel(), t or 1, H, D)
    scores: dict[str, Any] = {"softcap": given.get("softcap") or 0.0}
    if bias is not None:
        shape = (*batch, H, N) if t is None else (*batch, H, t, N)
        scores["bias"] = bias.expand(shape).reshape(rows[0], H, t or 1, N)
    sees = _sees(batch, t or 1, given.get("causal", False), given.get("window"), given.get("starts"))
    k, v = (x.reshape(N, rows[0], *x.shape[-2:]).transpose(0, 1) for x in (k, v))
    out = reference.attention(q.reshape(rows), k, v, sees=sees, **scores)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, t: int | None = None, **given: Any) -> Tensor:
    return tl.attention(q, tl.TensorArray.unstack(k), tl.TensorArray.unstack(v), bias=bias, **given)


RULES: list[dict[str, Any]] = [
    {"starts": torch.tensor([0, 3])},
    {"starts": torch.tensor(2)},
    {"starts": torch.tensor([9, 6])},
    {"window": 1},
    {"window": 4, "starts": torch.tensor([5, 2])},
    {"window": 30},
    {"softcap": 1.5},
    {"softcap": 0.7, "window": 3, "starts": torch.tensor([6, 0])},
]


@pytest.mark.parametrize("t", [None, 1, 3, 7])
@pytest.mark.parametrize("given", RULES, ids=str)
def test_rules_are_those_of_the_plain_form(given: dict[str, Any], t: int | None):
    causal = {} if t is None else {"causal": t != 1}
    shape = (2, H, D) if t is None else (2, t, H, D)
    run = {"t": t, **given, **causal}
    assert_matches_reference(
        functools.partial(_ours, **run), functools.partial(_plain, **run),
        *tensors(shape, (N, 2, G, D), (N, 2, G, D + 1)),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (N,), (H, 1), (H, N), (1, H, N), (3, 1, 1), (2, 1, H, N), (2, 3, H, N)])
def test_a_bias_broadcasts_and_has_its_gradient(shape: tuple[int, ...]):
    given = {"starts": torch.tensor([[1], [4]]), "window": 5, "softcap": 2.0}
    batch = (2, 3)
    assert_matches_reference(
        functools.partial(_ours, **given), functools.partial(_plain, **given),
        *tensors((*batch, H, D), (N, *batch, G, D), (N, *batch, G, D), shape),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(N,), (3, N), (H, 3, N), (2, 1, 3, N), (2, H, 1, 1)])
def test_a_bias_of_several_tokens(shape: tuple[int, ...]):
    run = {"t": 3, "causal": True, "window": 4}
    assert_matches_reference(
        functools.partial(_ours, **run), functools.partial(_plain, **run),
        *tensors((2, 3, H, D), (N, 2, G, D), (N, 2, G, D), shape),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [(), (0,), (2, 1, 2)])
def test_batches_of_any_dims(batch: tuple[int, ...]):
    q, k, v = tensors((*batch, H, D), (N, *batch, G, D), (N, *batch, G, D))
    torch.testing.assert_close(_ours(q, k, v, window=3), _plain(q, k, v, window=3))


def test_inputs_that_are_not_contiguous_and_heads_that_are_not_shared():
    q, k, v = tensors((H, 2, D), (D, N, H, 2), (2, N, D, H))
    q, k, v = q.transpose(0, 1), k.permute(1, 3, 2, 0), v.permute(1, 0, 3, 2)
    starts = torch.tensor([[3, 9], [1, 9]])[:, 0]
    torch.testing.assert_close(_ours(q, k, v, starts=starts), _plain(q, k, v, starts=starts))


def test_an_array_without_slots_and_rows_that_see_nothing():
    array = tl.TensorArray(element_shape=(2, G, D), dtype=torch.float64)
    q = torch.ones(2, H, D, dtype=torch.float64, requires_grad=True)
    assert tl.attention(q, array, array, window=2).eq(0).all()
    k, v, bias = tensors((N, 2, G, D), (N, 2, G, D), (H, N))
    out = _ours(q, k, v, bias, starts=torch.tensor([N, 0]))
    assert out[0].eq(0).all()
    hidden = _ours(q, k, v, torch.full((N,), -INF, dtype=torch.float64))
    assert hidden.eq(0).all()
    for grad in torch.autograd.grad((out + hidden).square().sum(), (q, k, v, bias)):
        assert bool(grad.isfinite().all())


def loop_inputs(T: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(x, dtype=torch.float64) for x in ((T, 2, H, D), (T, 2, G, D), (T, 2, G, D), (H, T)))
    return tuple(x.requires_grad_() for x in (q, k, v, bias))


def in_a_loop(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, checkpoints: int | None = None) -> Tensor:
    """Each step is fed by the one before; keys and values are turned."""
    starts = torch.tensor([0, 2])

    def body(carry: Any, xs: Any) -> Any:
        y, keys, values = carry
        q, k, v, bias = xs
        keys, values = keys.append(torch.sin(k + y.mean())), values.append(torch.cos(v - y.mean()))
        bias = bias[:, : len(keys)]
        y: Any = tl.attention(q, keys, values, starts=starts, window=4, bias=bias, softcap=2.0)
        return (y, keys, values), y

    carry = q.new_zeros(2, H, D), tl.TensorArray(), tl.TensorArray()
    return tl.scan(body, carry, (q, k, v, bias.expand(len(q), -1, -1)), checkpoints=checkpoints)[1]


def plain_loop(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    y, keys, values, out = q.new_zeros(2, H, D), [], [], []
    for t in range(len(q)):
        keys.append(torch.sin(k[t] + y.mean()))
        values.append(torch.cos(v[t] - y.mean()))
        place = torch.arange(t + 1)
        sees = (place >= torch.tensor([0, 2])[:, None]) & (place > t - 4)
        y = reference.attention(
            q[t][:, None], torch.stack(keys, 1), torch.stack(values, 1), sees=sees[:, None, None], softcap=2.0,
            bias=bias[None, :, None, : t + 1],
        )[:, 0]  # fmt: skip
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_first_and_second_derivatives_in_a_loop(checkpoints: int | None):
    found = []
    for run in (functools.partial(in_a_loop, checkpoints=checkpoints), plain_loop):
        inputs = loop_inputs(6)
        out = run(*inputs)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((x * x).sum() for x in first), inputs)  # pyright: ignore[reportArgumentType, reportCallIssue]
        found.append((out.detach(), [x.detach() for x in first], second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def test_gradcheck_of_all_rules():
    q, k, v, bias = (x.requires_grad_() for x in tensors((2, H, D), (N, 2, G, D), (N, 2, G, D), (2, H, N)))

    def run(*x: Tensor) -> Tensor:
        torch.manual_seed(5)  # the same weights are dropped
        return _ours(*x, starts=torch.tensor([1, 0]), window=6, softcap=1.5, dropout=0.4)

    assert torch.autograd.gradcheck(run, (q, k, v, bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, bias), fast_mode=True)


def test_dropout_keeps_the_mean_and_follows_the_generator():
    q, k, v = torch.randn(200, H, D), torch.randn(N, 200, G, D), torch.ones(N, 200, G, D)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return _ours(q, k, v, dropout=0.3)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert abs(float(run(0).mean()) - 1) < 0.05
    assert float(run(0).std()) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_and_autocast(dtype: torch.dtype):
    bound: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.02, "rtol": 0.02}
    q, k, v, bias = (
        x.detach().to(dtype).requires_grad_() for x in tensors((2, H, D), (N, 2, G, D), (N, 2, G, D), (H, N))
    )
    given: dict[str, Any] = {"window": 5, "softcap": 2.0}
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    true = _plain(*wide, **given)
    wanted = torch.autograd.grad(true.sin().sum(), wide)
    out = _ours(q, k, v, bias, **given)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), true, **bound)
    for got, x in zip(torch.autograd.grad(out.sin().sum(), (q, k, v, bias)), wanted, strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), x, **bound)
    if dtype is not torch.float32:
        with torch.autocast(HERE.type, dtype):
            cast = _ours(*(x.float() for x in (q, k, v, bias)), **given)
        assert cast.dtype is dtype
        torch.testing.assert_close(cast, out)


def test_under_function_transforms():
    q, k, v, bias = (x.detach() for x in tensors((2, H, D), (N, 2, G, D), (N, 2, G, D), (H, N)))

    def total(run: Callable[..., Tensor]) -> Any:
        return torch.func.grad(lambda x: run(*x, window=4, softcap=2.0).sin().sum())((q, k, v, bias))

    torch.testing.assert_close(total(_ours), total(_plain))


def test_bytes_of_steps_grow_with_the_steps():
    def held(T: int) -> int:
        q, k, v = torch.randn(T, 2, H, D), torch.randn(T, 2, G, D), torch.randn(T, 2, G, D)

        def run() -> Tensor:
            keys, values = tl.TensorArray(capacity=T), tl.TensorArray(capacity=T)
            starts, out = torch.tensor([0, 3]), []
            q_, k_, v_ = (x.requires_grad_() for x in (q, k, v))
            for t in range(T):
                keys.append(k_[t].sin())
                values.append(v_[t].sin())
                out.append(tl.attention(q_[t], keys, values, starts=starts, window=6, softcap=2.0, dropout=0.1))
            return torch.stack(out)

        return memory.saved_bytes(run)

    few, more, most = held(16), held(32), held(64)
    assert most - more == 2 * (more - few)


# -- hypotheses of a search, whose slots are read through their ancestry

ROWS, SIZE, V, SLOTS = 2, 3, 4, 2


def search_inputs() -> list[Tensor]:
    generator = torch.Generator(HERE).manual_seed(0)
    shapes = [(V, G * D), (G * D, V), *[(G * D, G * D)] * 3, *[(SLOTS, ROWS, G, D)] * 2, (2, G, 16)]
    return [torch.randn(*x, dtype=torch.float64, generator=generator).requires_grad_() for x in shapes]


def search(
    given: list[Tensor], rules: dict[str, Any], kind: str, plain: bool, checkpoints: int | None = None
) -> Tensor:
    """The scores of hypotheses that attend by these rules, with a prompt or not; `plain`: of slots that are read."""
    embedding, readout, of_q, of_k, of_v, prompt_k, prompt_v, bias = given

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        keys, values = carry
        x = embedding[tokens]
        q, k, v = (torch.sin(x @ w).unflatten(-1, (G, D)) for w in (of_q, of_k, of_v))
        keys.append(k)
        values.append(v)
        n = len(keys)
        more = dict(rules)
        if "bias" in more:
            more["bias"] = {
                "heads": bias[0, :, :n],
                "rows": bias[:, None, :, :n],
                "all": bias.sum(0)[None, None, :, :n].expand(ROWS, SIZE, -1, -1),
            }[more["bias"]]
        if plain:
            slots = [x[:].flatten(1, 2) for x in (keys, values)]
            sees = torch.ones(ROWS, SIZE, n, dtype=torch.bool)
            place = torch.arange(n)
            if "starts" in more:
                sees &= place >= more["starts"][..., None]
            if "window" in more:
                sees &= place >= n - more["window"]
            added = more["bias"].expand(ROWS, SIZE, G, n).flatten(0, 1)[:, :, None] if "bias" in more else 0.0
            out = reference.attention(
                q.flatten(0, 1)[:, None], *(x.transpose(0, 1) for x in slots), sees=sees.flatten(0, 1)[:, None, None],
                bias=added, softcap=more.get("softcap", 0.0),
            ).view(q.shape)  # fmt: skip
        else:
            out = tl.attention(q, keys, values, **more)
        return carry, torch.log_softmax((x + out.flatten(-2)) @ readout, -1)

    prompt = [tl.TensorArray.unstack(x) for x in (prompt_k, prompt_v)]
    return beam.beam_search(
        step, prompt if kind == "prompt" else [tl.TensorArray(), tl.TensorArray()], batch_size=ROWS, beam_size=SIZE,
        bos_id=BOS, eos_id=EOS, max_steps=6, stop="never", checkpoints=checkpoints,
    ).scores  # fmt: skip


OF_SEARCHES: dict[str, dict[str, Any]] = {
    "starts": {"starts": torch.tensor([[0], [2]])},
    "starts of each": {"starts": torch.tensor([[0, 1, 2], [3, 0, 0]])},
    "window": {"window": 3},
    "softcap": {"softcap": 1.2},
    "bias": {"bias": "heads"},
    "bias of rows": {"bias": "rows", "window": 4},
    "bias of each": {"bias": "all", "starts": torch.tensor([[1]])},
}


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("kind", ["prompt", "none"])
@pytest.mark.parametrize("rule", OF_SEARCHES)
@pytest.mark.few
def test_hypotheses_attend_by_rules(rule: str, kind: str, checkpoints: int | None):
    given, found, rules = search_inputs(), [], OF_SEARCHES[rule]
    wanted = [x for i, x in enumerate(given) if (kind == "prompt" or i not in (5, 6)) and ("bias" in rules or i != 7)]
    for plain in (False, True):
        scores = search(given, rules, kind, plain, checkpoints)
        first = torch.autograd.grad(scores.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), wanted)
        found.append((scores.detach(), [x.detach() for x in first], second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    again = torch.autograd.grad(search(given, rules, kind, False, checkpoints).square().sum(), wanted)  # by the kernels
    torch.testing.assert_close(list(again), found[1][1], rtol=1e-9, atol=1e-9)


def test_hypotheses_drop_the_same_weights_again():
    given = search_inputs()

    def run(*x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return search(list(x), {"dropout": 0.4, "starts": torch.tensor([[0], [1]])}, "prompt", False)

    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("rule", ["window", "softcap", "bias", "dropout", "starts"])
def test_bytes_of_searches_grow_with_the_steps(rule: str):
    kinds: dict[str, Any] = OF_SEARCHES | {"dropout": {"dropout": 0.2}, "bias": {"bias": torch.randn(G, 1)}}
    fixed = kinds[rule]
    w = [torch.randn(4, G * D), torch.randn(G * D, 4), *(torch.randn(G * D, G * D) for _ in range(3))]

    def held(steps: int) -> int:
        embedding, readout, *weights = (x.clone().requires_grad_() for x in w)

        def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
            x = embedding[tokens]
            q, k, v = (torch.sin(x @ w).unflatten(-1, (G, D)) for w in weights)
            out: Any = tl.attention(q, carry[0].append(k), carry[1].append(v), **fixed)
            log_probs = torch.log_softmax((x + out.flatten(-2)) @ readout, -1)
            return carry, torch.nn.functional.pad(log_probs, (0, 1), value=-INF)  # no end

        def run() -> Tensor:
            return beam.beam_search(
                step, [tl.TensorArray(), tl.TensorArray()], batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=4,
                max_steps=steps,
            ).scores  # fmt: skip

        return memory.saved(run).bytes

    few, more, most = held(16), held(32), held(64)
    assert most - more < 2.05 * (more - few)
