"""Reductions and running operations over the ragged dim, the batch dim, and both with feature dims."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorloop import reference
from tensorloop.packed import PackedTensor

LENS = st.lists(st.integers(0, 4), max_size=4)
MIXED = [3, 0, 4, 1]


def packed(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=torch.float64, requires_grad=True), lens)


def reduced(p: PackedTensor, dim: tuple[int, ...], fn: reference.Reduction) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # std of an empty row
        return reference.reduce(fn, p.values, p.lens.tolist(), dim)


REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, d: x.sum(d),
    "nansum": lambda x, d: torch.nansum(x, d),
    "mean": lambda x, d: x.mean(d),
    "nanmean": lambda x, d: torch.nanmean(x, d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "std": lambda x, d: x.std(d),
    "var": lambda x, d: torch.var(x, d, correction=0),
    "var_mean": lambda x, d: sum(torch.var_mean(x, d)),
    "any": lambda x, d: (x > 1).any(d),
    "all": lambda x, d: (x > -1).all(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "vector_norm 1": lambda x, d: torch.linalg.vector_norm(x, 1, d),
    "sum of ints": lambda x, d: (x > 0).sum(d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x > 0, d),
}


@pytest.mark.parametrize("dim", [(1,), (0,), (1, 2), (0, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=20)
@given(lens=LENS)
def test_reductions(name: str, dim: tuple[int, ...], lens: list[int]):
    fn, p = REDUCTIONS[name], packed(lens, 2, 3)
    got, want = fn(p, dim), reduced(p, dim, fn)
    torch.testing.assert_close(got, want, equal_nan=True)
    if got.requires_grad and got.numel() and want.requires_grad:
        weight = torch.where(want.isnan(), 0, torch.randn_like(want))
        a, b = (torch.autograd.grad((x * weight).sum(), p.values)[0] for x in (got, want))
        # A row of one entry has no std: its derivative is NaN, here or there.
        torch.testing.assert_close(a.nan_to_num(0), b.nan_to_num(0))


@pytest.mark.parametrize("dim", [1, 0, (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["amax", "amin"])
@settings(max_examples=20)
@given(lens=st.lists(st.integers(1, 4), max_size=4))
def test_extremes(name: str, dim: Any, lens: list[int]):
    p = packed(lens, 2, 3)
    dims = dim if isinstance(dim, tuple) else (dim,)
    got = getattr(p, name)(dim)
    want = reduced(p, dims, lambda x, d: getattr(x, name)(d))
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    if want.numel():
        torch.testing.assert_close(*(torch.autograd.grad((x * weight).sum(), p.values)[0] for x in (got, want)))


@pytest.mark.parametrize("name", ["max", "min"])
@settings(max_examples=20)
@given(lens=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_extremes_and_where_they_are(name: str, lens: list[int]):
    p = packed(lens, 2)
    got = getattr(p, name)(1)
    want = [getattr(row, name)(0) for row in p.unbind()]
    assert torch.equal(got.values, torch.stack([w.values for w in want]))
    assert torch.equal(got.indices, torch.stack([w.indices for w in want]))
    assert torch.equal(getattr(torch, f"arg{name}")(p, 1), got.indices)
    best, row = getattr(p, name)(0)
    assert torch.equal(best, torch.stack([getattr(x, name)(0).values for x in reference.at_steps(p.values, lens)]))
    for t in range(p.max_len):
        for f in range(2):
            assert p[int(row[t, f]), t][f] == best[t, f]


def test_keepdim():
    p = packed(MIXED, 2, 3)
    for dim in (1, 0, (1, 2), (0, 1), (0, 1, 2, 3), 2, (2, 3)):
        got = p.sum(dim, keepdim=True)
        dims = dim if isinstance(dim, tuple) else (dim,)
        want = tuple(1 if d in dims else n for d, n in enumerate((4, 4 if 0 in dims else None, 2, 3)))
        assert tuple(got.shape) == want
    assert torch.equal((p - p.mean(1, keepdim=True)).sum(1).abs() < 1e-12, torch.ones(4, 2, 3, dtype=torch.bool))


def test_over_everything():
    p = packed(MIXED, 2)
    for fn in (torch.sum, torch.mean, torch.std, torch.max, torch.min, torch.prod, torch.amax, torch.var_mean):
        got, want = fn(p), fn(p.values)  # pyright: ignore
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(p.sum((0, 1)), p.values.sum(0))
    torch.testing.assert_close(p.std((0, 1)), p.values.std(0))
    torch.testing.assert_close(p.logsumexp((0, 1, 2)), p.values.logsumexp((0, 1)))


def test_empty_rows():
    p = packed(MIXED, 2)
    assert p.sum(1)[1].tolist() == [0, 0]
    assert p.mean(1)[1].isnan().all()
    assert p.std(1)[1].isnan().all()
    assert p.logsumexp(1)[1].tolist() == [-torch.inf] * 2
    assert p.softmax(1)[1].shape == (0, 2)
    for fn in (lambda: p.amax(1), lambda: p.max(1), lambda: p.argmax(1), lambda: torch.amin(p, 1)):  # pyright: ignore
        with pytest.raises(ValueError, match=r"row 1 is empty and has no m\w+imum"):
            fn()
    got = p.amax(1, initial=-9.0)
    assert got[1].tolist() == [-9, -9]
    assert torch.equal(got[2], p[2].amax(0))
    assert p.amin(1, initial=9.0)[1].tolist() == [9, 9]
    assert bool((p.amax(1, initial=50.0) == 50).all())
    (grad,) = torch.autograd.grad(p.amax(1, initial=50.0).sum(), p.values)
    assert not grad.any()


def test_a_batch_of_no_rows():
    p = packed([], 2)
    assert p.sum(1).shape == (0, 2)
    assert p.sum(0).shape == (0, 2)
    assert p.amax(1).shape == (0, 2)
    assert p.softmax(1).shape == (0, None, 2)
    assert p.pad().shape == (0, 0, 2)
    assert p.mean().isnan()


RUNNING: dict[str, Callable[[Any, int], Any]] = {
    "softmax": lambda x, d: x.softmax(d),
    "F.softmax": lambda x, d: torch.nn.functional.softmax(x, dim=d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "softmin": lambda x, d: torch.nn.functional.softmin(x, d),
    "cumsum": lambda x, d: x.cumsum(d),
    "normalize": lambda x, d: torch.nn.functional.normalize(x, dim=d),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", RUNNING)
@settings(max_examples=20)
@given(lens=LENS)
def test_running(name: str, dim: int, lens: list[int]):
    fn, p = RUNNING[name], packed(lens, 2)
    got = fn(p, dim)
    want = reference.within(lambda x: fn(x, 0), p.values, lens, dim)
    torch.testing.assert_close(got.values, want)
    if want.numel():
        weight = torch.randn_like(want)
        torch.testing.assert_close(*(torch.autograd.grad((x * weight).sum(), p.values)[0] for x in (got.values, want)))


def test_flip():
    p = packed(MIXED, 2)
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(p.flip(1), p, strict=True))
    assert all(torch.equal(a, b.flip(0, 1)) for a, b in zip(p.flip(1, 2), p, strict=True))
    assert all(torch.equal(a, b.flip(0, 1)) for a, b in zip(torch.flip(p, (-1, 1)), p, strict=True))  # pyright: ignore
    with pytest.raises(TypeError, match="flip: dim 0 would put rows in another order"):
        p.flip(0)


def test_integers_and_dtypes():
    p = PackedTensor(torch.tensor([3, 1, 2, 5], dtype=torch.int32), [2, 0, 2])
    assert p.sum(1).dtype is torch.int64
    assert p.cumsum(1).values.tolist() == [3, 4, 2, 7]
    assert p.sum(1, dtype=torch.float32).tolist() == [4, 0, 7]
    assert p.mean(1, dtype=torch.float32)[0] == 2
    assert p[p.lens > 0].amax(1).tolist() == [3, 5]
    with pytest.raises(TypeError, match=r"mean: a mean needs floating point, got torch.int32; give dtype="):
        p.mean(1)
    half = PackedTensor(torch.ones(4, dtype=torch.float16), [4])
    assert half.softmax(1, dtype=torch.float32).dtype is torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        assert half.to(dtype).logsumexp(1).dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_wide_inside(dtype: torch.dtype):
    p = PackedTensor(torch.full((3000, 2), 100, dtype=dtype) * torch.rand(3000, 2).to(dtype), [2000, 1000])
    functions: Any = torch.mean, torch.std, torch.norm, lambda x, dim: F.normalize(x, dim=dim).sum(dim)
    for fn in functions:
        got, want = fn(p, dim=1), torch.stack([fn(row, dim=0) for row in p.unbind()])
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, rtol=0.02, atol=0)
    ones = PackedTensor(torch.ones(70_000, 1, dtype=dtype), [70_000])
    assert ones.mean(1).item() == 1


def test_complex_numbers():
    p = PackedTensor(torch.randn(8, 2, dtype=torch.complex128, requires_grad=True), [3, 0, 5])
    rows = [row for row in p.unbind() if len(row)]
    functions: Any = torch.mean, torch.std, torch.var, torch.norm
    for fn in functions:
        got = torch.stack(list(fn(p, dim=1)[[0, 2]]))
        want = torch.stack([fn(row, dim=0) for row in rows])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(x.abs().sum(), p.values)[0] for x in (got, want)))


def test_deviation_of_equal_entries_has_slope_0():
    p = PackedTensor(torch.zeros(8, 2, requires_grad=True), [3, 4, 1])
    (grad,) = torch.autograd.grad(p.std(1, correction=0).sum() + p.norm(2, 1).sum(), p.values)
    assert grad.count_nonzero() == 0


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # torch's, of a row by itself
@pytest.mark.parametrize("dim", [1, (1, 2)])
@pytest.mark.parametrize("correction", [-1, 0, 1, 1.5, 2, 3, 5, 9])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_row_with_fewer_entries_than_the_correction_is_as_torch_has_it(
    dtype: torch.dtype, name: str, correction: float, dim: Any
):
    """inf where the entries differ, NaN where they do not; the gradient is torch's, too."""
    lens = [0, 1, 2, 3, 2, 5]
    values = torch.randn(sum(lens), 2, dtype=dtype)
    values[6:8] = 1  # equal ones
    values.requires_grad_()
    fn: Any = getattr(torch, name)
    got = fn(PackedTensor(values, lens), dim=dim, correction=correction)
    within = 0 if dim == 1 else (0, 1)
    want = [fn(row, dim=within, correction=correction) for row in values.split(lens)]
    pairs = [*zip(got, zip(*want, strict=True), strict=True)] if "_" in name else [(got, want)]
    pairs = [(x, torch.stack(list(y))) for x, y in pairs]
    torch.testing.assert_close(*zip(*pairs, strict=True), equal_nan=True)
    grads = [torch.autograd.grad(x.sin().sum(), values)[0] for x in pairs[0]]
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("name", ["std", "var", "norm", "mean"])
def test_whole_numbers_are_refused_where_torch_does(name: str):
    p = PackedTensor(torch.ones(8, 2, dtype=torch.int64), MIXED)
    with pytest.raises(TypeError, match="floating point"):
        getattr(p, name)(dim=1)


def test_second_order():
    p = packed(MIXED, 2)

    def f(values: Tensor) -> Tensor:
        q = PackedTensor(values, MIXED)
        q = (q.softmax(1) * q).cumsum(1).flip(1) - q.sum(1, keepdim=True)
        return q.logsumexp((1, 2))[[0, 2, 3]] + q.softmax(0).sum(1)[[0, 2, 3]].sum(-1)

    assert torch.autograd.gradgradcheck(f, p.values)
