"""Order within rows: sort, topk, kthvalue, medians, quantiles against those of every row alone, and their gradients."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorloop import reference
from tensorloop.packed import Dim, PackedTensor

D = torch.float64
LENS = st.lists(st.integers(0, 5), max_size=4)
FILLED = st.lists(st.integers(1, 5), max_size=4)


def packed(lens: list[int], *features: int, ties: bool = False) -> PackedTensor:
    values = torch.randint(0, 3, (sum(lens), *features)).to(D) if ties else torch.randn(sum(lens), *features, dtype=D)
    return PackedTensor(values.requires_grad_(), lens)


def same_gradients(p: PackedTensor, got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, equal_nan=True)
    if want.numel() and want.requires_grad:
        weight = torch.randn_like(want)
        grads = [
            torch.autograd.grad((x.nan_to_num(0) * weight).sum(), p.values, retain_graph=True)[0] for x in (got, want)
        ]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("descending", [False, True])
@settings(max_examples=25)
@given(lens=LENS, ties=st.booleans())
def test_sort_keeps_rows_and_is_stable(descending: bool, lens: list[int], ties: bool) -> None:
    p = packed(lens, 2, 2, ties=ties)
    values, indices = p.sort(1, descending=descending, stable=True)
    options: Any = {"dim": 0, "descending": descending, "stable": True}
    same_gradients(p, values.values, reference.within(lambda row: torch.sort(row, **options).values, p.values, lens))
    want = reference.within(lambda row: torch.sort(row, **options).indices, p.values.detach(), lens)
    assert torch.equal(indices.values, want.to(torch.int64))
    assert torch.equal(p.argsort(1, descending).values, indices.values)
    assert torch.equal(p.gather(1, indices).values, values.values)


def test_ways_to_write_a_sort() -> None:
    time, sort, argsort = Dim("time", [3, 0, 4]), *(cast(Any, f) for f in (torch.sort, torch.argsort))
    p: Any = PackedTensor(torch.randn(7, 3, dtype=D), time)
    whole = p.sort(1).values.values
    for dim in (time, "time", -2):
        assert torch.equal(p.sort(dim).values.values, whole)
        assert isinstance(dim, str) or torch.equal(sort(p, dim=dim, stable=True).values.values, whole)
        assert torch.equal(p.sort(stable=True, dim=dim)[0].values, whole)
    for got in (p.sort(), p.sort(-1), p.sort(2, False), p.sort(stable=True), sort(p, stable=True, dim=2)):
        assert torch.equal(got.values.values, p.values.sort(-1).values)
        assert torch.equal(got.indices.values, p.values.sort(-1).indices)
    assert torch.equal(p.argsort().values, p.values.argsort(-1))
    assert torch.equal(argsort(p, dim=-1, descending=True, stable=True).values, p.values.argsort(-1, True))
    assert p[..., 0].sort().values[2].tolist() == sorted(p[2][:, 0].tolist())


def test_numbers_of_other_kinds_are_sorted() -> None:
    for values in (torch.tensor([3, 1, 2, 5, 4]), torch.tensor([True, False, True, True, False])):
        got = PackedTensor(values, [3, 2]).sort(1).values
        assert torch.equal(got.values, torch.cat([values[:3].sort().values, values[3:].sort().values]))
    nan = PackedTensor(torch.tensor([torch.nan, 1.0, torch.inf, 2.0]), [3, 1])
    torch.testing.assert_close(
        nan.sort(1).values.values, torch.tensor([1.0, torch.inf, torch.nan, 2.0]), equal_nan=True
    )


PICKS: dict[str, Callable[[Any, int], Any]] = {
    "median": lambda x, d: torch.median(x, d),
    "nanmedian": lambda x, d: x.nanmedian(d),
    "kthvalue": lambda x, d: torch.kthvalue(x, 1, d),
    "kthvalue at the end": lambda x, d: x.kthvalue(1, dim=d, keepdim=False),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", PICKS)
@settings(max_examples=15)
@given(lens=FILLED)
def test_what_is_picked_and_where_it_is(name: str, dim: int, lens: list[int]) -> None:
    fn, p = PICKS[name], packed(lens, 2, 3)
    if not lens:
        assert fn(p, dim).values.shape == (0, 2, 3)
        return
    got = fn(p, dim)
    same_gradients(p, got.values, reference.reduce(lambda x, _: fn(x, 0).values, p.values, lens, (dim,)))
    if dim == 1:
        assert torch.equal(got.indices, reference.reduce(lambda x, _: fn(x, 0).indices, p.values, lens))
    else:
        for t, row in enumerate(got.indices[:, 0, 0].tolist()):
            assert p[row, t][0, 0] == got.values[t, 0, 0]


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_medians_beside_nan(dim: Any) -> None:
    values = torch.randn(9, 3, dtype=D)
    values[[0, 4, 5, 6, 8], [0, 1, 1, 1, 2]] = torch.nan
    p = PackedTensor(values, [3, 1, 5])
    for name in ("median", "nanmedian"):
        got = getattr(p, name)() if dim is None else getattr(p, name)(dim).values
        if dim is None or dim == 2:
            want = getattr(values, name)() if dim is None else getattr(values, name)(1).values
            got = got if dim is None else got.values
        else:
            want = reference.reduce(lambda x, _, name=name: getattr(x, name)(0).values, values, [3, 1, 5], (dim,))
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("interpolation", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
@settings(max_examples=10)
@given(lens=FILLED, dim=st.integers(0, 1), nan=st.booleans(), several=st.booleans())
def test_quantiles(name: str, interpolation: Any, lens: list[int], dim: int, nan: bool, several: bool) -> None:
    values = torch.randn(sum(lens), 2, dtype=D)
    if nan:
        values[torch.rand(values.shape) < 0.2] = torch.nan
    p = PackedTensor(values.requires_grad_(), lens)
    q: Any = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=D) if several else 0.4

    def run(x: Any, d: int, keepdim: bool = False) -> Tensor:
        return getattr(torch, name)(x, q, d, keepdim, interpolation=interpolation)

    got = run(p, dim)
    if not lens:
        assert got.shape == ((4, 0, 2) if several else (0, 2))
        return
    want = reference.reduce(lambda x, _: run(x, 0).movedim(0, -1) if several else run(x, 0), p.values, lens, (dim,))
    same_gradients(p, got, want.movedim(-1, 0) if several else want)
    assert torch.equal(run(p, dim, True).squeeze(dim + several).nan_to_num(9), got.nan_to_num(9))


def test_quantiles_of_features_and_of_everything() -> None:
    p = packed([3, 0, 4], 3)
    assert torch.equal(p.quantile(0.3, 2).values, p.values.quantile(0.3, 1))
    assert torch.equal(p.quantile(0.3, -1, True).values, p.values.quantile(0.3, 1, True))
    assert torch.equal(p.quantile(0.3), p.values.quantile(0.3))
    assert p.quantile(torch.tensor([0.3, 0.5], dtype=D), keepdim=True).shape == (2, 1, 1, 1)
    assert p[..., 0].quantile(0.5, keepdim=True).shape == (1, 1)
    q = torch.tensor(0.3, dtype=D, requires_grad=True)
    full = p[[0, 2]]
    got, want = full.quantile(q, 1).sum(), torch.stack([row.quantile(q, 0) for row in full]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, q)[0] for x in (got, want)))


@settings(max_examples=20)
@given(lens=st.lists(st.integers(2, 5), max_size=4), largest=st.booleans())
def test_topk_over_the_ragged_dim(lens: list[int], largest: bool) -> None:
    p = packed(lens, 2)
    got = p.topk(2, 1, largest=largest)
    assert got.values.shape == (len(lens), 2, 2)
    if lens:
        rows = [row.topk(2, 0, largest=largest) for row in p]
        same_gradients(p, got.values, torch.stack([x.values for x in rows]))
        assert torch.equal(got.indices, torch.stack([x.indices for x in rows]))
        steps = [x for x in reference.at_steps(p.values, lens) if len(x) == len(lens)]
        every = p[:, : len(steps)].topk(min(2, len(lens)), 0).values
        assert torch.equal(every, torch.stack([x.topk(min(2, len(lens)), 0).values for x in steps], 1))
    assert p.topk(0, 1).values.shape == (len(lens), 0, 2)


def test_second_derivatives_and_vmap() -> None:
    lens = [3, 1, 4]

    def f(values: Tensor) -> Tensor:
        p = PackedTensor(values, lens)
        return (p.sort(1).values * p).sum(1) + p.quantile(0.3, 1) ** 2 + p.median(1).values * p.topk(1, 1).values[:, 0]

    values = torch.randn(8, 2, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(f, values)
    many = torch.randn(3, 8, 2, dtype=D)
    torch.testing.assert_close(torch.vmap(f)(many), torch.stack([f(x) for x in many]))


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("rows", lambda p: p.sort(0), TypeError, r"sort: dim 0 is the batch dim; rows .* p\[torch.argsort\(key\)\]"),
    ("msort", lambda p: torch.msort(p), TypeError, "msort: it sorts along dim 0"),
    ("topk", lambda p: p.topk(2, 1), ValueError, r"topk: row 1 has 0 entries, k is 2; .* p.sort\(1, descending=True\)"),
    ("topk rows", lambda p: p.topk(4, 0), ValueError, "topk: 3 rows reach t = 0, k is 4"),
    ("topk less", lambda p: p.topk(-1, 1), ValueError, "topk: k must be at least 0, got -1"),
    ("kthvalue", lambda p: p.kthvalue(0, 1), ValueError, "kthvalue: k must be at least 1, got 0"),
    ("kthvalue 1", lambda p: p.kthvalue(1, 1), ValueError, "kthvalue: row 1 has 0 entries, k is 1"),
    ("median", lambda p: p.median(1), ValueError, r"median: row 1 is empty and has no median; .* p\[p.lens > 0\]"),
    ("nanmedian", lambda p: p.nanmedian(1), ValueError, "nanmedian: row 1 is empty and has no median"),
    ("quantile", lambda p: p.quantile(0.5, 1), ValueError, "quantile: row 1 is empty and has no quantile"),
    ("q", lambda p: p.quantile(1.5, 1), ValueError, r"quantile: q must be from 0 to 1, got 1.5"),
    ("dtype of q", lambda p: p.quantile(torch.tensor(0.5).half(), 1), TypeError, "q must be a number or a tensor of"),
    ("dims of q", lambda p: p.quantile(torch.ones(1, 1, dtype=D), 1), ValueError, r"q must be a number or \(Q,\)"),
    ("whole", lambda p: p.long().quantile(0.5, 1), TypeError, "it needs float32 or float64, got torch.int64"),
    ("how", lambda p: p.quantile(0.5, 1, interpolation="x"), ValueError, "interpolation must be linear, .* got 'x'"),
    ("features", lambda p: p.quantile(torch.ones(2, dtype=D), 2), TypeError, "one q at a time, and stack them"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_has_no_order(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(packed([3, 0, 4, 1], 2))
