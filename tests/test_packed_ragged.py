"""Ragged operations on plain tensors: the eager kernels and the differentiable layer above, against loops over rows."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tensorloop import _ragged
from tensorloop.kernels import eager

LENS = st.lists(st.integers(0, 5), max_size=5)
MIXED = [3, 0, 4, 1]
FULL = [3, 4, 1]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


def offsets_of(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)])


def by_row(values: Tensor, offsets: Tensor, fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The reference: `fn` of each row alone. Named `segments` in a specification."""
    return [fn(values[a:b]) for a, b in itertools.pairwise(offsets.tolist())]


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_zeros(0, *like.shape[1:])


def joined(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(rows) if rows else like[:0]


REDUCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sum": (_ragged.sum, lambda x: x.sum(0)),
    "mean": (_ragged.mean, lambda x: x.mean(0)),
    "logsumexp": (_ragged.logsumexp, lambda x: x.logsumexp(0)),
    "amax": (_ragged.amax, lambda x: x.amax(0) if len(x) else x.new_zeros(x.shape[1:])),
    "amin": (lambda x, o: _ragged.amax(x, o, "min"), lambda x: x.amin(0) if len(x) else x.new_zeros(x.shape[1:])),
    "max": (
        lambda x, o: _ragged.extreme(x, o, "max")[0],
        lambda x: x.max(0)[0] if len(x) else x.new_zeros(x.shape[1:]),
    ),
}
SHAPED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (_ragged.softmax, lambda x: x.softmax(0)),
    "log_softmax": (_ragged.log_softmax, lambda x: x.log_softmax(0)),
    "cumsum": (_ragged.cumsum, lambda x: x.cumsum(0)),
    "flip": (_ragged.flip, lambda x: x.flip(0)),
}
ALL = {name: fn for name, (fn, _) in (REDUCTIONS | SHAPED).items()} | {
    "pad": lambda x, o: _ragged.pad(x, o, 5),
    "pad with 7": lambda x, o: _ragged.pad(x, o, 5, 7.0),
    "gather": lambda x, o: _ragged.gather(x, torch.tensor([7, 0, 0, 3, 7, 7])),
    "gather in order": lambda x, o: _ragged.gather(x, torch.tensor([0, 0, 3, 7]), in_order=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REDUCTIONS)
@given(lens=LENS)
def test_reductions_are_those_of_each_row(name: str, dtype: torch.dtype, lens: list[int]):
    fn, row = REDUCTIONS[name]
    offsets, x = offsets_of(lens), torch.randn(sum(lens), 2, 3, dtype=dtype, requires_grad=True)
    got, want = fn(x, offsets), stacked(by_row(x, offsets, row), x)
    torch.testing.assert_close(got, want, equal_nan=True)
    weight = torch.randn_like(got)
    weight[got.isnan()] = 0
    if sum(lens):
        grads = (torch.autograd.grad((y.nan_to_num(0) * weight).sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SHAPED)
@given(lens=LENS)
def test_running_operations_are_those_of_each_row(name: str, dtype: torch.dtype, lens: list[int]):
    fn, row = SHAPED[name]
    offsets, x = offsets_of(lens), torch.randn(sum(lens), 2, 3, dtype=dtype, requires_grad=True)
    got, want = fn(x, offsets), joined(by_row(x, offsets, row), x)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(got)
    if sum(lens):
        torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, want)))


@given(lens=LENS)
def test_pack_and_pad(lens: list[int]):
    offsets, x = offsets_of(lens), torch.randn(sum(lens), 3)
    steps = max(lens, default=0) + 1
    padded = _ragged.pad(x, offsets, steps, -2.0)
    assert padded.shape == (len(lens), steps, 3)
    assert torch.equal(_ragged.pack(padded, offsets, len(x)), x)
    behind = torch.arange(steps) >= offsets.diff()[:, None]
    assert bool((padded[behind] == -2).all())


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_first_and_second_order(name: str):
    offsets = offsets_of(FULL if name == "mean" else MIXED)  # the mean of no entries is NaN, its derivative too
    x = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    fn = ALL[name]

    def f(x: Tensor) -> Tensor:
        return fn(x, offsets).nan_to_num(0, 0, 0)

    assert gradcheck(f, x)
    assert gradcheck(f, x, check_forward_ad=True, check_backward_ad=False)
    assert gradgradcheck(f, x)


def test_gradients_of_pack_and_spread():
    offsets = offsets_of(MIXED)
    padded = torch.randn(4, 5, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for fn, x in ((lambda x: _ragged.pack(x, offsets, 8), padded), (lambda x: _ragged.spread(x, offsets, 8), rows)):
        assert gradcheck(fn, x, check_forward_ad=True)
        assert gradgradcheck(fn, x)
    (grad,) = torch.autograd.grad(_ragged.pack(padded, offsets, 8).sum(), padded)
    assert grad.sum() == 2 * 8
    assert bool((grad[1] == 0).all())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_vmap_is_a_loop(name: str, batch_dim: int):
    fn, offsets = ALL[name], offsets_of(MIXED)
    xs = torch.randn(3, 8, 2, dtype=torch.float64)
    want = torch.stack([fn(x, offsets) for x in xs])
    got = torch.vmap(lambda x: fn(x, offsets), in_dims=batch_dim)(xs.movedim(0, batch_dim))
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_function_transforms(name: str):
    fn, offsets = ALL[name], offsets_of(FULL if name == "mean" else MIXED)
    x, v = torch.randn(2, 8, 2, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return fn(x, offsets).nan_to_num(0, 0, 0).square().sum()

    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(f)(x), want)
    torch.testing.assert_close(torch.func.jvp(f, (x,), (v,))[1], (want * v).sum())
    rows = torch.vmap(torch.func.grad(f))(torch.stack([x, v]))
    torch.testing.assert_close(rows[0], want)
    torch.testing.assert_close(torch.func.hessian(f)(x).shape, torch.Size([8, 2, 8, 2]))


@pytest.mark.parametrize("name", ALL)
def test_batched_gradients(name: str):
    fn, offsets = ALL[name], offsets_of(FULL)
    x = torch.randn(8, 2, requires_grad=True)
    y = fn(x, offsets)
    weights = torch.randn(3, *y.shape)
    (got,) = torch.autograd.grad(y, x, weights, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(y, x, weight, retain_graph=True)[0] for weight in weights]
    torch.testing.assert_close(got, torch.stack(want))


def test_forward_mode_of_the_softmax_gradient():
    offsets = offsets_of(MIXED)
    y, dy = torch.randn(2, 8, 2, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(y, dy)
        out = _ragged._softmax_grad(dual, dual, offsets)
        _, tangent = forward_ad.unpack_dual(out)
    step = 1e-6
    ends = [_ragged._softmax_grad(y + s * dy, y + s * dy, offsets) for s in (step, -step)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), atol=1e-7, rtol=1e-6)


def test_equal_entries_share_the_gradient_of_amax_and_max_takes_the_first():
    offsets = offsets_of([3, 1])
    x = torch.tensor([2.0, 2.0, 1.0, 5.0], requires_grad=True)
    (shared,) = torch.autograd.grad(_ragged.amax(x, offsets).sum(), x)
    (first,) = torch.autograd.grad(_ragged.extreme(x, offsets, "max")[0].sum(), x)
    assert shared.tolist() == [0.5, 0.5, 0, 1]
    assert first.tolist() == [1, 0, 0, 1]


def test_an_infinite_maximum_has_its_gradient():
    x = torch.tensor([torch.inf, 1.0, -torch.inf], requires_grad=True)
    out = _ragged.amax(x, offsets_of([2, 1]))
    assert out.tolist() == [torch.inf, -torch.inf]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [1, 0, 1]


def test_a_row_of_minus_infinity():
    offsets = offsets_of([2, 2])
    x = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf], requires_grad=True)
    out = _ragged.logsumexp(x, offsets)
    assert out.tolist() == [-torch.inf, 0]
    (grad,) = torch.autograd.grad(out[1] + out[0], x)
    assert grad.tolist() == [0, 0, 1, 0]
    assert _ragged.softmax(x, offsets).isnan().tolist() == [True, True, False, False]


def test_large_scores_keep_their_digits():
    x = torch.tensor([1e5, 1e5 + 1.0, 3.0])
    torch.testing.assert_close(
        _ragged.log_softmax(x, offsets_of([2, 1])), torch.cat([x[:2].log_softmax(0), x.new_zeros(1)])
    )


def test_nothing_of_one_row_reaches_another():
    offsets = offsets_of([2, 3])
    x = torch.tensor([torch.nan, torch.inf, 1.0, 2.0, 3.0])
    assert _ragged.cumsum(x, offsets)[2:].tolist() == [1, 3, 6]
    assert _ragged.sum(x, offsets)[1] == 6
    assert bool(_ragged.softmax(x, offsets)[2:].isfinite().all())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
@pytest.mark.parametrize("lens", [MIXED, [], [0, 0], [6]], ids=str)
def test_eager_kernels_take_every_dtype(dtype: torch.dtype, lens: list[int]):
    offsets = offsets_of(lens)
    x = (torch.randn(sum(lens), 2) * 3).to(dtype)
    best, where = eager.segment_max(x, offsets, 0)
    least, _ = eager.segment_min(x, offsets, 0)
    for b, row in enumerate(by_row(x, offsets, lambda x: x)):
        if not len(row):
            assert where[b].tolist() == [-1, -1]
            assert not best[b].any()
            continue
        wide = row.to(torch.float64)
        assert torch.equal(best[b].double(), wide.amax(0))
        assert torch.equal(least[b].double(), wide.amin(0))
        for f in range(2):
            assert where[b, f] - offsets[b] == int((wide[:, f] == wide[:, f].max()).nonzero()[0])
    assert torch.equal(eager.pack_rows(eager.pad_rows(x, offsets, 6, 0), offsets, len(x)), x)
    assert torch.equal(eager.gather_rows(x, torch.arange(len(x))), x)
    if dtype is not torch.bool:
        total = stacked(by_row(x, offsets, lambda x: x.double().sum(0).to(dtype)), x)
        torch.testing.assert_close(eager.segment_sum(x, offsets), total)
        running = joined(by_row(x, offsets, lambda x: x.cumsum(0).to(dtype)), x)
        torch.testing.assert_close(eager.segment_cumsum(x, offsets), running)


def test_sums_of_half_precision_are_taken_in_float32():
    x = torch.ones(4096, 1, dtype=torch.float16)
    assert eager.segment_sum(x, offsets_of([4096])).item() == 4096
    assert eager.segment_cumsum(x, offsets_of([4096]))[-1].item() == 4096


def test_nan_is_the_extreme_of_its_row():
    x = torch.tensor([[1.0], [torch.nan], [3.0], [2.0]])
    for kernel in (eager.segment_max, eager.segment_min):
        best, where = kernel(x, offsets_of([3, 1]), 0)
        assert best[0].isnan().all()
        assert where.tolist() == [[1], [3]]


def test_a_batched_index_is_refused():
    with pytest.raises(TypeError, match="the index is batched by vmap"):
        torch.vmap(lambda i: _ragged.gather(torch.ones(3), i))(torch.zeros(2, 2, dtype=torch.int64))
