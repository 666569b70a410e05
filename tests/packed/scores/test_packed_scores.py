"""Scores between the entries of a row: products, what is done to them, and back, beside each row alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from tensorloop.packed import PackedTensor
from tensorloop.packed.scores.scores import PackedScores
from tests.support.devices import HERE

D = torch.float64
LENS, OTHER = [3, 0, 4, 1], [2, 1, 0, 5]
CASES = [(LENS, LENS), (LENS, OTHER), ([2, 2], [2, 2]), ([1], [3]), ([], [])]
LOWEST = torch.finfo(D).min


def make(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=D, requires_grad=True), lens)


def heads(p: Any) -> Any:
    return p.unflatten(-1, (2, -1)).transpose(1, 2)


def merge(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def scores(q: Any, k: Any) -> Any:
    return heads(q) @ heads(k).transpose(-2, -1) / 3


def fairseq(q: Any, k: Any, v: Any) -> Any:
    def joined(p: Any) -> Any:
        b, t, width = p.shape
        return p.view(b, t, 2, width // 2).transpose(1, 2).reshape(b * 2, t, width // 2)

    (b, t, width), s = q.shape, k.shape[1]
    weights = torch.bmm(joined(q), joined(k).transpose(1, 2)).view(b, 2, t, s) * 0.5
    weights = weights.view(b * 2, t, s).softmax(-1)
    return torch.bmm(weights, joined(v)).view(b, 2, t, width // 2).transpose(1, 2).reshape(b, t, width)


# (q, k, v) of 6 features, each row of them alone too.
PROGRAMS: dict[str, Any] = {
    "attention": lambda q, k, v: merge(scores(q, k).softmax(-1) @ heads(v)),
    "in float32 and back": lambda q, k, v: merge(F.softmax(scores(q, k), dim=-1, dtype=D).type_as(q) @ heads(v)),
    "matmul": lambda q, k, v: merge(torch.matmul(F.softmax(scores(q, k), -1).to(D), heads(v))),
    "by letters": lambda q, k, v: merge(
        torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", heads(q), heads(k)).softmax(-1), heads(v))
    ),
    "above the first key's": lambda q, k, v: merge(
        (lambda s: s.masked_fill(s < s[..., :1], -2.0) - s[:, :, :1] * s[..., :1])(scores(q, k)).softmax(-1) @ heads(v)
    ),
    "sums of features": lambda q, k, v: (  # additive attention, its features before both ragged dims
        torch.tanh(q.transpose(1, 2)[..., None] + k.transpose(1, 2)[:, :, None]).sum(1).softmax(-1) @ v
    ),
    "letters of time": lambda q, k, v: torch.einsum(
        "bnts,bsnd->btnd",
        torch.einsum("btnh,bsnh->bnts", q.unflatten(-1, (2, 3)), k.unflatten(-1, (2, 3))).softmax(-1),
        v.unflatten(-1, (2, 3)),
    ).flatten(2),
    "one head": lambda q, k, v: ((q @ k.transpose(1, 2)).softmax(-1) @ v),
    "batch of heads": fairseq,
    "joined heads": lambda q, k, v: merge(scores(q, k).flatten(0, 1).softmax(-1).unflatten(0, (-1, 2)) @ heads(v)),
    "log": lambda q, k, v: merge(F.log_softmax(scores(q, k), -1).exp() @ heads(v)),
    "by its sum": lambda q, k, v: merge((scores(q, k).exp() / scores(q, k).exp().sum(-1, keepdim=True)) @ heads(v)),
    "by logsumexp": lambda q, k, v: merge((scores(q, k) - scores(q, k).logsumexp(-1, True)).exp() @ heads(v)),
    "of mean heads": lambda q, k, v: scores(q, k).softmax(-1).mean(1) @ v,
    "turned": lambda q, k, v: merge(scores(k, q).transpose(-1, -2).softmax(-1) @ heads(v)),
    "over queries": lambda q, k, v: merge(scores(q, k).softmax(-2) @ heads(v)),
    "over heads": lambda q, k, v: merge(scores(q, k).softmax(1) @ heads(v)),
    "mixed heads": lambda q, k, v: merge(
        torch.einsum("bhij,hg->bgij", scores(q, k), torch.arange(4.0, dtype=D).view(2, 2)).softmax(-1) @ heads(v)
    ),
    "one of the heads": lambda q, k, v: scores(q, k)[:, 1].softmax(-1) @ v,
    "chunks of heads": lambda q, k, v: (scores(q, k).chunk(2, 1)[1].squeeze(1).sigmoid() @ v),
    "joined again": lambda q, k, v: merge(torch.cat(scores(q, k).split(1, 1), 1).tanh() @ heads(v)),
    "per query": lambda q, k, v: scores(q, k).sum(-1).transpose(1, 2) * q[..., :2],
    "a norm": lambda q, k, v: merge((scores(q, k) / (1 + scores(q, k).norm(dim=-1, keepdim=True))) @ heads(v)),
    "a bias of queries": lambda q, k, v: merge((scores(q, k) + q.sum(-1)[:, None, :, None]).softmax(-2) @ heads(v)),
    "a mask of keys": lambda q, k, v: merge(
        scores(q, k).masked_fill((k.sum(-1) > 0)[:, None, None, :], LOWEST).softmax(-1) @ heads(v)
    ),
    "of each pair": lambda q, k, v: (q.sum(-1)[:, :, None] - k.sum(-1)[:, None, :]).abs().neg().softmax(-1) @ v,
    "where": lambda q, k, v: merge(torch.where(scores(q, k) > 0, scores(q, k), -1.0) @ heads(v)),
    "added": lambda q, k, v: merge(torch.baddbmm(
        scores(q, k).flatten(0, 1), heads(q).flatten(0, 1), heads(k).flatten(0, 1).mT, beta=0.5, alpha=2.0
    ).unflatten(0, (-1, 2)) @ heads(v)),
    "in place": lambda q, k, v: merge((scores(q, k) * 1).mul_(2).add_(1).softmax(-1) @ heads(v)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("lens", CASES, ids=str)
def test_a_program_gives_what_it_gives_for_each_row_alone(name: str, lens: tuple[list[int], list[int]]) -> None:
    program = PROGRAMS[name]
    q, k, v = make(lens[0], 6), make(lens[1], 6), make(lens[1], 6)
    out = program(q, k, v)
    rows = [program(*(x[b][None] for x in (q, k, v)))[0] for b in range(len(lens[0]))]
    assert type(out) is PackedTensor
    if not rows:
        assert out.values.shape[0] == 0
        return
    want = torch.cat(rows)
    torch.testing.assert_close(out.values, want)
    leaves, cotangent = [q.values, k.values, v.values], torch.randn_like(want)
    ours, theirs = (
        torch.autograd.grad(y, leaves, cotangent, create_graph=True, allow_unused=True) for y in (out.values, want)
    )
    again = []
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(y) if x is None and y is not None else y)
    for parts in (ours, theirs):
        total: Any = sum(g.sin().sum() for g in parts if g is not None and g.requires_grad)
        again.append(torch.autograd.grad(total, leaves, allow_unused=True) if isinstance(total, Tensor) else None)
    if None not in again:
        for x, y in zip(*again, strict=True):  # pyright: ignore
            torch.testing.assert_close(torch.zeros(()) if x is None else x, torch.zeros(()) if y is None else y)


MASKS: dict[str, Any] = {
    "a bias": torch.randn(4, 4, dtype=D),
    "of heads": torch.randn(1, 2, 4, 4, dtype=D),
    "of rows": torch.randn(4, 1, 4, 4, dtype=D),
    "of keys": torch.randn(4, 1, 1, 4, dtype=D),
    "of queries": torch.randn(4, 1, 4, 1, dtype=D),
    "of rows alone": torch.randn(4, 1, 1, 1, dtype=D),
    "a number": torch.randn((), dtype=D),
    "one number": torch.randn(1, 1, dtype=D),
}


@pytest.mark.parametrize("name", MASKS)
def test_tensors_of_the_longest_rows_are_cut_to_rows(name: str) -> None:
    q, other = make(LENS, 6), MASKS[name].clone().requires_grad_()
    for run in (torch.add, torch.mul, lambda a, b: b - a, lambda a, b: a.masked_fill(b > 0, -1.0)):
        out: Any = run(scores(q, q), other)
        want = run(scores(q.pad(), q.pad()), other)
        flat = torch.cat([want[b, :, :n, :n].reshape(-1) for b, n in enumerate(LENS)])
        torch.testing.assert_close(out.flat, flat)
        if flat.requires_grad:
            cotangent = torch.randn_like(flat)
            ours, theirs = (
                torch.autograd.grad(y, [other, q.values], cotangent, allow_unused=True) for y in (out.flat, flat)
            )
            for x, y in zip(ours, theirs, strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("packed", ["queries", "keys"])
def test_padded_queries_with_packed_keys_and_the_other_way(packed: str) -> None:
    p, x = make(LENS, 6), torch.randn(4, 5, 6, dtype=D, requires_grad=True)
    q, k = (p, x) if packed == "queries" else (x, p)
    seen: Any = scores(q, k).softmax(-1) @ heads(k)
    by_letters = torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", heads(q), heads(k)), heads(k))
    plain: Any = scores(q, k) * 3 @ heads(k)
    for b in range(len(LENS)):
        one = (q[b], k[b])
        alone = scores(*(y[None] for y in one)).softmax(-1) @ heads(one[1][None])
        torch.testing.assert_close(
            (merge(seen)[b] if packed == "queries" else seen[b]), (merge(alone)[0] if packed == "queries" else alone[0])
        )
    torch.testing.assert_close(*((merge(y).values if packed == "queries" else y) for y in (by_letters, plain)))


def test_nothing_is_padded() -> None:
    q = make([1, 1, 1, 9], 6)
    s = scores(q, q)
    assert s.flat.shape == (2 * (3 + 81),)
    assert s.shape == (4, 2, None, None)
    assert [row.shape for row in s.unbind()] == [(2, 1, 1)] * 3 + [(2, 9, 9)]
    assert s.pad(-1).shape == (4, 2, 9, 9)
    assert s.pad(-1)[0, 0, 1, 1] == -1
    assert torch.equal(s[3], s.unbind()[3])
    assert (s.dtype, s.dim(), s.size(1), s.requires_grad, s.device) == (D, 4, 2, True, HERE)
    assert s.float().dtype is torch.float32
    assert s.equal(s + 0)
    assert torch.allclose(s, s + 1e-12)
    assert not s.equal(s * 2)
    (leaf,), spec = _pytree.tree_flatten(s)
    assert _pytree.tree_unflatten([leaf], spec).shape == s.shape
    assert repr(s).startswith("PackedScores((4, 2, *, *)")
    assert isinstance(F.dropout(s, 0.5), PackedScores)
    assert torch.equal(s.sum(), s.flat.sum())
    assert torch.equal(s.mean((-2, -1)), torch.stack([row.mean((-2, -1)) for row in s.unbind()]))
    assert s.max(-1).indices.transpose(1, 2).values.shape == (12, 2)
    assert s.amax(-1, keepdim=True).shape == (4, 2, None, 1)


def test_a_row_of_nan_stays_alone() -> None:
    for name, program in PROGRAMS.items():
        q, k, v = (make(LENS, 6) for _ in range(3))
        spoilt = [x.values.detach().clone() for x in (q, k, v)]
        for x in spoilt:
            x[3:7] = torch.nan
            x.requires_grad_()
        out = program(*(PackedTensor(x, LENS) for x in spoilt))
        sound = out[torch.tensor([0, 3])].values
        torch.testing.assert_close(sound, program(q, k, v)[torch.tensor([0, 3])].values, msg=name)
        for grad in torch.autograd.grad(sound.sin().sum(), spoilt, allow_unused=True):
            assert grad is None or not grad[[0, 1, 2, 7]].isnan().any(), name


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("other rows", lambda s, q, o: s @ heads(o), ValueError, "matmul: packed tensors of different lens"),
    ("other scores", lambda s, q, o: s + scores(q, o), ValueError, "different lens"),
    ("a mask", lambda s, q, o: s.masked_fill(torch.ones(4, 3) > 0, 0), ValueError, "masked_fill: .*longest row has 4"),
    ("mixed", lambda s, q, o: s.view(4, -1, 2), TypeError, "mixes queries or keys"),
    ("mixed heads", lambda s, q, o: s.view(2, 4, None, None), TypeError, "rows are of different lens"),
    ("flat", lambda s, q, o: s.flatten(1), TypeError, "keep the last two"),
    ("batch", lambda s, q, o: s.sum(0), TypeError, "first over the last dim"),
    ("padded values", lambda s, q, o: s @ torch.randn(4, 2, 4, 3, dtype=D), TypeError, "meets a padded one"),
    ("listed columns", lambda s, q, o: s[..., [0]], ValueError, "the last two dims take slices and numbers"),
    ("topk", lambda s, q, o: torch.topk(s, 2), ValueError, "topk: .*row"),
    ("quantiles", lambda s, q, o: s.quantile(torch.tensor([0.5], dtype=D), -1), TypeError, "quantile: several .*one q"),
    ("k", lambda s, q, o: s[:, :, 1:].kthvalue(5, -1), ValueError, "kthvalue: .*k is 5"),
    ("a number", lambda s, q, o: s[..., 1], IndexError, "out of"),
    ("joined", lambda s, q, o: torch.cat([s, s], 0), TypeError, "along dim 0 .*join what the scores are made of"),
    ("joined others", lambda s, q, o: torch.cat([s, scores(o, o)], -1), ValueError, "different lens"),
    ("repeated", lambda s, q, o: s.repeat(1, 1, 2, 1), TypeError, "repeat heads alone"),
    ("rolled", lambda s, q, o: s.roll(1), TypeError, "roll: "),
    ("padded", lambda s, q, o: F.pad(s, (0, 0) * 3 + (1, 0)), TypeError, "the batch stays"),
    ("order", lambda s, q, o: s.permute(1, 0, 2, 3), TypeError, "the batch stays first"),
    ("letters", lambda s, q, o: torch.einsum("bhij,bjd", s, q), TypeError, "einsum: .*write all letters"),
    ("no batch", lambda s, q, o: torch.einsum("bhij,bhjd->id", s, heads(q)), TypeError, "sums over the batch"),
    ("features last", lambda s, q, o: q[:, :, None] + o[:, None], TypeError, r"first: \(B, D, T\*, 1\)"),
    ("in place", lambda s, q, o: s[..., :1].add_(s), TypeError, "must be the scores, of all heads, queries and keys"),
    ("one entry", lambda s, q, o: s + torch.ones(2, 1, dtype=D) * o[:, :1, 0][:, None, None], ValueError, "lens"),
    ("dim", lambda s, q, o: s.softmax(4), IndexError, "out of range for scores of 4 dims"),
]


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    q = make(LENS, 6)
    with pytest.raises(kind, match=text):
        fn(scores(q, q), q, make(OTHER, 6))


def test_a_ragged_size_makes_scores_of_a_dim_of_size_1():
    """Not as many as the longest row has in every row: what sums over them would count padding."""
    x = PackedTensor(torch.randn(5, dtype=torch.float64, requires_grad=True), [2, 3])
    B, T = x.shape
    columns, rows = x.unsqueeze(1).expand(B, T, T), x.unsqueeze(2).expand(-1, -1, T)
    for b, row in enumerate(x.unbind()):
        n = len(row)
        assert torch.equal(columns[b], row.expand(n, n))
        assert torch.equal(rows[b], row[:, None].expand(n, n))
        assert torch.equal(columns.sum(1)[b], row * n)
    wide = x.view(B, T, 1).transpose(1, 2)[:, :, None].expand(B, 2, T, T)
    assert wide.shape == (2, 2, None, None)
    (grad,) = torch.autograd.grad(wide.sum(), x.values)
    assert grad.tolist() == [4, 4, 6, 6, 6]
    features = x.view(B, T, 1)
    for refused in (
        lambda: features[:, :, None].expand(B, T, T, 1),
        lambda: features[:, None].expand(-1, T, -1, -1),
        lambda: features.repeat(1, 1, T),
        lambda: features.transpose(1, 2).repeat(1, T, 1),
        lambda: wide.expand(4, 2, T, T),
        lambda: wide.expand(B, 2, 3, 3),
    ):
        with pytest.raises(TypeError, match=r"ragged dims|as often as rows are long|keep batch and last two"):
            refused()


# Scores (B, 2, T*, S*) -> scores, a view or values and places, which rows alone give too.
ON_ROWS: dict[str, Any] = {
    "moved": lambda x: x.movedim(1, -3).movedim((2, 3), (3, 2)),
    "flipped": lambda x: x.flip(-1),
    "flipped heads": lambda x: x.flip(1, 2),
    "expanded": lambda x: x[:, :1].expand_as(x).view_as(x),
    "rolled": lambda x: x.roll(1, -1) + x.roll((1, 2), dims=(2, 1)),
    "repeated": lambda x: x.repeat(1, 3, 1, 1),
    "sorted": lambda x: x.sort(-1, descending=True),
    "sorted queries": lambda x: x.sort(2),
    "sorted heads": lambda x: x.argsort(dim=1),
    "largest": lambda x: x.max(1),
    "the best": lambda x: x[:, :, :, :1].topk(1, dim=1),
    "keys": lambda x: x[..., 1:],
    "queries": lambda x: x[:, :, :-1],
    "both, every second": lambda x: x[:, 1, 1::2, :2],
    "as many as queries": lambda x: x[..., : x.shape[2]],
    "from there": lambda x: x[..., x.shape[2] :],
    "more": lambda x: F.pad(x, (1, 0, 0, 2), value=-1.0),
    "fewer": lambda x: F.pad(x, (0, -1)) if x.shape[0] else x,
    "joined": lambda x: torch.cat([x, 2 * x], -1).softmax(-1),
    "joined queries": lambda x: torch.cat([x, x[:, :, 1:]], 2),
    "a column of zeros": lambda x: torch.cat([torch.zeros(x.shape[0], 2, x.shape[2], 1, dtype=D), x], -1),
    "normalized": lambda x: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("name", ON_ROWS)
@pytest.mark.parametrize(("lens", "of_keys"), [(LENS, [2, 3, 1, 4]), ([2, 2], [2, 2]), ([1], [3]), ([], [])], ids=str)
def test_what_is_done_to_scores_is_done_to_each_row(name: str, lens: list[int], of_keys: list[int]):
    program, q, k = ON_ROWS[name], make(lens, 2, 3), make(of_keys, 2, 3)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    ours, theirs = program(scores), [program(row[None]) for row in scores.unbind()]
    both = zip(
        ours if isinstance(ours, tuple) else (ours,),
        zip(*theirs, strict=True) if isinstance(ours, tuple) else (theirs,),
        strict=False,
    )
    for found, rows in both:
        torch.testing.assert_close(list(found.unbind()), [row[0] for row in rows])
        if rows and found.dtype.is_floating_point:
            loss = torch.stack([(row.sin() * (b + 1)).sum() for b, row in enumerate(found.unbind())]).sum()
            alone = torch.stack([(row.sin() * (b + 1)).sum() for b, row in enumerate(rows)]).sum()
            torch.testing.assert_close(
                *(torch.autograd.grad(x, [q.values, k.values], retain_graph=True) for x in (loss, alone))
            )


# What orders the keys of each query or the queries of each key: numbers, or numbers and places.
ORDERED: dict[str, Any] = {
    "median": lambda x, dim: x.median(dim),
    "median, kept": lambda x, dim: torch.median(x, dim, keepdim=True),
    "nanmedian": lambda x, dim: x.nanmedian(dim),
    "kthvalue": lambda x, dim: x.kthvalue(1, dim),
    "kthvalue, kept": lambda x, dim: torch.kthvalue(-x, 1, dim, True),
    "quantile": lambda x, dim: x.quantile(0.3, dim),
    "quantile, kept": lambda x, dim: torch.quantile(x, 0.7, dim, keepdim=True, interpolation="midpoint"),
    "nanquantile": lambda x, dim: x.nanquantile(0.6, dim),
}


@pytest.mark.parametrize("dim", [-1, -2, 1])
@pytest.mark.parametrize("name", ORDERED)
def test_keys_and_queries_in_order_beside_a_row_of_nan(name: str, dim: int):
    q, k = make([3, 1, 2, 4], 2, 3), make([2, 3, 1, 4], 2, 3)
    with torch.no_grad():
        q.values[3] = torch.nan  # all of row 1
    scores: Any = torch.einsum("bihd,bjhd->bhij", q, k)
    found: Any = ORDERED[name](scores, dim)
    alone = [ORDERED[name](row[None], dim) for row in scores.unbind()]
    if not isinstance(found, tuple):
        found, alone = (found,), [(row,) for row in alone]
    for ours, theirs in zip(found, zip(*alone, strict=True), strict=True):
        rows = [0, 1, 2, 3] if ours.dtype.is_floating_point else [0, 2, 3]  # of several NaNs any is the place
        torch.testing.assert_close([ours.unbind()[b] for b in rows], [theirs[b][0] for b in rows], equal_nan=True)
    ours, theirs = list(found[0].unbind()), [row[0] for row in next(zip(*alone, strict=True))]
    for rows in ([0, 1, 2, 3], [0, 2, 3]):  # of all, and of those beside the NaN
        losses = (torch.stack([(side[b].sin() * (b + 1)).sum() for b in rows]).sum() for side in (ours, theirs))
        grads = [torch.autograd.grad(loss, [q.values, k.values], retain_graph=True) for loss in losses]
        torch.testing.assert_close(*grads, equal_nan=True)
    assert not grads[0][0][[0, 1, 2, 4, 5, 6, 7, 8, 9]].isnan().any()


def test_one_query_or_key_of_each_row():
    q, k = make([2, 1, 3], 2, 3), make([2, 4, 1], 2, 3)
    scores: Any = torch.einsum("bihd,bjhd->bhij", q, k)
    for b, row in enumerate(scores.unbind()):
        assert torch.equal(scores[:, :, 0][b], row[:, 0])
        assert torch.equal(scores[..., -1][b], row[..., -1])
        assert torch.equal(scores[:, :, 0, -1][b], row[:, 0, -1])
    assert scores[:, :, -1].lens.tolist() == k.lens.tolist()
    assert scores[..., 0].lens.tolist() == q.lens.tolist()


def test_two_ragged_dims_that_are_not_the_last_are_refused_also_of_equal_rows():
    x, y = make([2, 2], 4), make([3, 3], 4)
    with pytest.raises(TypeError, match="two ragged dims, not as the last ones"):
        torch.matmul(y.unsqueeze(1), x.unsqueeze(3))


def test_tables_beside_no_rows():
    x = make([], 3)
    scores = x @ x.transpose(1, 2)
    assert (scores + torch.zeros(0, 1, 1)).shape == (0, None, None)
    assert scores.masked_fill(torch.ones(0, 1, 0, dtype=torch.bool), 0).shape == (0, None, None)


def test_a_padded_tensor_of_one_step_is_cut_to_rows_of_none():
    q = make([0, 1], 6)
    s = torch.cat([scores(q, q), torch.ones(2, 2, q.shape[1], 1, dtype=D)], -1)
    assert [row.shape for row in s.unbind()] == [(2, 0, 1), (2, 1, 2)]
    two = scores(make([2, 1], 6), make([2, 1], 6))
    assert torch.equal(two[..., 0, None].unbind()[0], two.unbind()[0][..., :1])
