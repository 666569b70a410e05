"""What is done to scores and weights of packed and padded rows, held to its formulas row by row."""

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop._torch.dispatch import tree_leaves, tree_map_only
from tensorloop.attention import attention, engine, strips
from tensorloop.kernels import scores
from tensorloop.kernels.scores import ScorePlaces
from tensorloop.kernels.sight import Sight
from tensorloop.packed import PackedTensor
from tensorloop.testing import assert_matches_reference
from tests.support.attention_cases import block_mask, by_head, tensors
from tests.support.attention_scores import alibi, definition, kinds, learnt, some_are_hidden
from tests.support.devices import HERE

KINDS = list(kinds(1, 1, 1, 1, (1, 1)))


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows suffice for a bucket, few weights for a strip, so that small cases have some."""
    monkeypatch.setattr(strips, "FEW", 2)
    monkeypatch.setattr(strips, "_TOGETHER", 4)
    monkeypatch.setattr(engine, "_CACHED", 300)


def ours(q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], k_lens: list[int], options: dict[str, Any]) -> Tensor:
    if "relative" in options:
        options = options | {"relative": (PackedTensor(options["relative"][0], q_lens), options["relative"][1])}
    out: Any = attention(PackedTensor(q, q_lens), PackedTensor(k, k_lens), PackedTensor(v, k_lens), **options)
    return out.values


def theirs(q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], k_lens: list[int], options: dict[str, Any]) -> Tensor:
    out = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for b, (x, y, z) in enumerate(zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)):
        given = dict(options)
        if "bias" in given:
            bias = given["bias"][b] if given["bias"].dim() == 4 else given["bias"]
            given["bias"] = bias[..., : len(x) if bias.shape[1] > 1 else None, : len(y)]
        if "relative" in given:
            given["relative"] = given["relative"][0].split(q_lens)[b], given["relative"][1]
        out.append(definition(x, y, z, b, **given))
    return torch.cat(out)


def both(
    q_lens: list[int], k_lens: list[int], options: dict[str, Any], heads: int, shared: int, width: int = 3
) -> None:
    n, m = sum(q_lens), sum(k_lens)
    inputs: Any = tensors((n, heads, width), (m, shared, width), (m, shared, 2))
    run = (functools.partial(f, q_lens=q_lens, k_lens=k_lens) for f in (ours, theirs))
    one, other = ((lambda q, k, v, options, f=f: f(q, k, v, options=options)) for f in run)
    assert_matches_reference(one, other, *inputs, options)


LENS = st.lists(st.tuples(*[st.one_of(st.integers(0, 9), st.integers(31, 35))] * 2), max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@given(lens=LENS, heads=st.sampled_from([(1, 1), (4, 2)]))
@settings(max_examples=12)
@pytest.mark.few("hidden", "all", "relative far")
def test_packed_rows(kind: str, lens: list[tuple[int, int]], heads: tuple[int, int]):
    q_lens, k_lens = [n for n, _ in lens], [m for _, m in lens]
    longest = max(q_lens, default=0), max(k_lens, default=0)
    both(q_lens, k_lens, kinds(heads[0], 3, sum(q_lens), len(lens), longest)[kind], *heads)


NEAR = st.fixed_dictionaries(
    {"causal": st.booleans()},
    optional={"window": st.integers(1, 50), "chunk": st.integers(1, 40)},
)


@given(lens=LENS, near=NEAR, left=st.one_of(st.none(), st.integers(0, 4)), equal=st.booleans())
@settings(max_examples=60)
def test_windows_and_chunks(lens: list[tuple[int, int]], near: dict[str, Any], left: int | None, equal: bool):
    q_lens, k_lens = [n for n, _ in lens], [n if equal else m for n, m in lens]
    both(q_lens, k_lens, near | ({"left_chunks": left} if "chunk" in near else {}), 2, 1)


@pytest.mark.parametrize("kind", [*KINDS, "chunks"])
@pytest.mark.parametrize("sizes", [(7, 7), (9, 4), (0, 3), (3, 0), (1, 1), (2, 40)])
def test_padded(kind: str, sizes: tuple[int, int]):
    rows, heads, (new, seen) = 3, 4, sizes
    options: dict[str, Any] = {"chunk": 3, "left_chunks": 0}
    if kind in KINDS:
        options = kinds(heads, 3, rows * new, rows, sizes)[kind]
    inputs = tensors((rows, new, heads, 3), (rows, seen, 2, 3), (rows, seen, 2, 2))

    def padded(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        if "relative" in options:
            p, r = options["relative"]
            options = options | {"relative": (p.view(rows, new, heads, 3), r)}
        return attention(q, k, v, **options)

    def row_by_row(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        out = theirs(flat[0], flat[1], flat[2], [new] * rows, [seen] * rows, options)
        return out.view(rows, new, heads, 2)

    assert_matches_reference(padded, row_by_row, *inputs, options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few("hidden", "bias of entries", "relative far")
def test_derivatives_of_both_orders(kind: str):
    lens = [2, 0, 3]
    options = kinds(2, 2, 5, 3, (3, 3))[kind]
    more = [x for x in tree_leaves(options) if isinstance(x, Tensor)]

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        found = iter(more)
        given = tree_map_only(Tensor, lambda _: next(found), options)
        return ours(q, k, v, lens, lens, given)

    inputs = (*tensors((5, 2, 2), (5, 1, 2), (5, 1, 2)), *more)
    assert torch.autograd.gradcheck(run, inputs)
    if kind in ("all", "hidden", "bias of entries", "sinks"):
        assert torch.autograd.gradgradcheck(run, inputs)
    plain = [x.detach() for x in inputs]
    cotangent = torch.randn(5, 2, 2, dtype=torch.float64)
    grads = torch.func.vjp(run, *plain)[1](cotangent)
    torch.testing.assert_close(list(grads), list(torch.autograd.grad(run(*inputs), inputs, cotangent)))


@pytest.mark.parametrize("lens", [[5], [3, 2, 4, 0, 1], [40, 2]])
def test_what_a_score_mod_closes_over_gets_its_gradient(lens: list[int]):
    """A leaf, and what is made of it: neither counts twice."""
    n = sum(lens)
    q, k, v, w = tensors((n, 2, 3), (n, 1, 3), (n, 1, 3), (7, 2))
    found = []
    for run in (ours, theirs):
        first, second = learnt(w), learnt(w.cos() * 2)
        out = run(q, k, v, lens, lens, {"score_mod": lambda s, *x, f=first, g=second: f(g(s, *x), *x), "causal": True})
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        first = torch.autograd.grad((out.sin() * weights).sum(), (q, k, v, w), create_graph=True)
        found.append((out, *first, *torch.autograd.grad(first[-1].square().sum(), (q, w))))
    torch.testing.assert_close(*found)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(q, k, v, lens, lens, {"score_mod": learnt(w)}), theirs(q, k, v, lens, lens, {"score_mod": learnt(w)})
        )


def test_a_captured_tensor_that_changes_before_backward_is_seen():
    q, w = tensors((1, 3, 2, 2), (7, 2))
    out = attention(q, q, q, score_mod=learnt(w))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_learnt_table_in_a_loop(checkpoints: int | None):
    lens = [3, 0, 4]
    w = tensors((7, 2))[0]
    x = PackedTensor(tensors((7, 2, 3))[0], lens)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]

    def body(i: int, values: Tensor) -> Tensor:
        p = PackedTensor(values @ turn, lens)
        return attention(p, p, p, score_mod=learnt(w), window=2).values

    found = []
    for plan in (None, checkpoints):
        out = tl.fori_loop(0, 4, body, x.values, checkpoints=plan)
        found.append(torch.autograd.grad(out.sin().sum(), (w, x.values)))
    out = x.values
    for _ in range(4):
        out = theirs(*(out @ turn,) * 3, lens, lens, {"score_mod": learnt(w), "window": 2})
    found.append(torch.autograd.grad(out.sin().sum(), (w, x.values)))
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])


@pytest.mark.parametrize("H", [None, 2])
def test_with_a_block_mask(H: int | None):
    """Positions that a score_mod and a bias meet are those within the row."""
    mask = block_mask(by_head, None, H, 12, 12)
    lens = [12, 5, 0, 9]
    n, (bias, p, r) = sum(lens), tensors((4, 2, 12, 12), (26, 2, 3), (11, 2, 3))
    inputs = tensors((n, 2, 3), (n, 1, 3), (n, 1, 3))
    i, j, h = torch.arange(12)[:, None], torch.arange(12), torch.arange(2)[:, None, None]
    hidden = ~by_head(torch.tensor(0), h if H else torch.tensor(0), i, j).expand(2, 12, 12)

    def row_by_row(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        options = options | {"bias": options["bias"].masked_fill(hidden, -torch.inf)}
        return theirs(q, k, v, lens, lens, options)

    assert_matches_reference(
        lambda q, k, v, options: ours(q, k, v, lens, lens, options | {"block_mask": mask}),
        row_by_row,
        *inputs,
        {"bias": bias, "relative": (p, r), "score_mod": alibi},
    )
    x = tensors((2, 12, 2, 3))[0]
    out = attention(x, x, x, block_mask=mask, score_mod=alibi)
    wanted = [
        definition(y, y, y, b, score_mod=alibi, bias=torch.zeros(2, 12, 12).masked_fill(hidden, -torch.inf))
        for b, y in enumerate(x)
    ]
    torch.testing.assert_close(out, torch.stack(wanted))


def factors_of(seed: int, rows: int, heads: int, new: int, seen: int, dropout: float) -> Tensor:
    places = ScorePlaces.dense(torch.Size((rows, heads, new, seen)), HERE)
    return scores.keep(Sight(dropout=dropout, seed=seed, ends=False), places, torch.float64)


@pytest.mark.parametrize("lens", [[5], [3, 2, 4, 0, 1], [40, 2], [33, 3, 2, 1]])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.extended("lens0", "lens2")
def test_dropout_is_the_same_in_backward_and_in_every_derivative(lens: list[int], causal: bool):
    n = sum(lens)
    inputs = tensors((n, 4, 3), (n, 2, 3), (n, 2, 2))
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 62, ()))
    factors = factors_of(seed, len(lens), 4, max(lens), max(lens), 0.3)

    def row_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
        return torch.cat(
            [
                definition(row[0], row[1], row[2], b, causal=causal, factors=factors[b, :, : lens[b], : lens[b]])
                for b, row in enumerate(rows)
            ]
        )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return ours(q, k, v, lens, lens, {"dropout": 0.3, "causal": causal})

    assert_matches_reference(run, row_by_row, *inputs)
    if n < 6 and causal:
        assert torch.autograd.gradgradcheck(run, inputs)


def test_dropout_leaves_its_share_and_differs_from_call_to_call():
    for dropout in (0.1, 0.5):
        kept = factors_of(12345, 4, 8, 64, 64, dropout) > 0
        for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
            share = kept.double().mean(dims)
            spread = math.sqrt(dropout * (1 - dropout) * share.numel() / kept.numel())
            assert (share - (1 - dropout)).abs().max() < 5 * spread
        together = (kept[:, :, :-1] == kept[:, :, 1:]).double().mean()  # neighbours know nothing of each other
        assert abs(float(together) - (1 - 2 * dropout * (1 - dropout))) < 0.01
    x = tensors((1, 8, 2, 3))[0]
    assert not torch.equal(attention(x, x, x, dropout=0.5), attention(x, x, x, dropout=0.5))
    # What is dropped of a row does not depend on the others.
    p = PackedTensor(torch.randn(9, 2, 3), [4, 5])
    torch.manual_seed(1)
    both_rows = attention(p, p, p, dropout=0.5)
    torch.manual_seed(1)
    alone = p[:1]
    torch.testing.assert_close(attention(alone, alone, alone, dropout=0.5).values, both_rows.values[:4])


def test_a_layer_that_drops_weights_drops_them_while_it_trains():
    layer = torch.nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    p = PackedTensor(torch.randn(5, 4), [3, 2])
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(layer(p, p, p, need_weights=False)[0].values)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    layer.eval()
    assert torch.equal(*(layer(p, p, p, need_weights=False)[0].values for _ in range(2)))


def test_scores_that_hide_all_give_zeros():
    x = tensors((1, 6, 2, 3))[0]
    out = attention(x, x, x, score_mod=some_are_hidden)
    assert out[:, 4].eq(0).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all()
    out = attention(x, x, x, score_mod=lambda s, *_: torch.zeros_like(s))  # no score depends on q or k
    torch.testing.assert_close(out, x.mean(1, keepdim=True).expand(x.shape))
    torch.testing.assert_close(torch.autograd.grad(out[0, 0].sum(), x)[0], torch.full_like(x, 1 / 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype):
    x = torch.randn(2, 40, 2, 8, dtype=dtype).requires_grad_()
    bias = torch.randn(2, 40, 40, dtype=dtype).requires_grad_()
    out = attention(x, x, x, bias=bias, score_mod=alibi, causal=True)
    assert out.dtype is dtype
    wanted = torch.stack(
        [
            definition(y.float(), y.float(), y.float(), b, bias=bias.float(), score_mod=alibi, causal=True)
            for b, y in enumerate(x)
        ]
    )
    close: Any = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(out.float(), wanted, **close)
    first, second = (torch.autograd.grad(y.float().sin().sum(), (x, bias)) for y in (out, wanted))
    torch.testing.assert_close(first, second, **close)


def test_empty_batches():
    x = tensors((0, 3, 2, 4))[0]
    assert attention(x, x, x, score_mod=alibi, bias=torch.zeros(2, 3, 3), window=2).shape == (0, 3, 2, 4)
    p = PackedTensor(tensors((0, 2, 4))[0], [])
    table = torch.randn(5, 2, 4, dtype=torch.float64).requires_grad_()
    for y in (p, PackedTensor(p.values, [0, 0])):
        out = attention(y, y, y, relative=(y, table), dropout=0.5, chunk=4)
        assert torch.autograd.grad(out.values.sum(), table)[0].eq(0).all()


@pytest.mark.parametrize("options", [{}, {"compact": True}, {"checkpoints": 2}, {"compact": True, "checkpoints": 2}])
def test_rows_that_look_into_a_packed_context_and_leave(options: dict[str, Any]):
    lens, limits = [3, 0, 5, 1], torch.tensor([2, 5, 0, 4])
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]

    def run(h: Tensor, values: Tensor, slopes: Tensor, lens: list[int], limits: Tensor, **options: Any) -> Tensor:
        def body(carry: Any, context: Any) -> Any:
            x, n = carry
            q = PackedTensor((x @ turn).unflatten(-1, (2, 3)), torch.ones(len(x), dtype=torch.int64))
            mod = lambda score, b, h, i, j: score - slopes[h] * j  # noqa: E731
            seen: Any = attention(q, context["memory"], context["memory"], score_mod=mod)
            return torch.sin(x @ turn) + seen.values.flatten(1), n + 1

        context = {"memory": PackedTensor(values, lens), "limits": limits}
        start = (h, torch.zeros(len(h), dtype=torch.int64))
        return tl.while_loop(lambda c, context: c[1] < context["limits"], body, start, context=context, **options)[0]

    def row_by_row(h: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        rows = enumerate(values.split(lens))
        return torch.cat([run(h[b : b + 1], x, slopes, [lens[b]], limits[b : b + 1]) for b, x in rows])

    inputs = tensors((4, 6), (9, 2, 3), (2,))
    assert_matches_reference(
        lambda h, values, slopes: run(h, values, slopes, lens, limits, **options), row_by_row, *inputs
    )
