"""Ragged operations on plain tensors: the eager kernels and the differentiable layer above, against the reference."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from tensorloop import reference
from tensorloop.kernels.eager import rows as eager_rows
from tensorloop.kernels.eager import segment_reductions as eager
from tensorloop.packed.rows import segment_reduce, segments
from tensorloop.reference import offsets_of

LENS = st.lists(st.integers(0, 5), max_size=5)
MIXED = [3, 0, 4, 1]
FULL = [3, 4, 1]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)


Op = Callable[[Tensor, Tensor], Tensor]
Spec = Callable[[Tensor, list[int]], Tensor]

REDUCTIONS: dict[str, tuple[Op, Spec]] = {
    "sum": (segments.sum, reference.segment_sum),
    "mean": (segments.mean, reference.segment_mean),
    "logsumexp": (segment_reduce.logsumexp, reference.segment_logsumexp),
    "amax": (segment_reduce.amax, reference.segment_max),
    "amin": (lambda x, o: segment_reduce.amax(x, o, "min"), reference.segment_min),
    "max": (lambda x, o: segment_reduce.extreme(x, o, "max")[0], reference.segment_max),
}
SHAPED: dict[str, tuple[Op, Spec]] = {
    "softmax": (segment_reduce.softmax, reference.segment_softmax),
    "log_softmax": (segment_reduce.log_softmax, reference.segment_log_softmax),
    "cumsum": (segments.cumsum, reference.segment_cumsum),
    "flip": (segments.flip, reference.flip),
}
ALL = {name: fn for name, (fn, _) in (REDUCTIONS | SHAPED).items()} | {
    "pad": lambda x, o: segments.pad(x, o, 5),
    "pad with 7": lambda x, o: segments.pad(x, o, 5, 7.0),
    "gather": lambda x, o: segments.gather(x, torch.tensor([7, 0, 0, 3, 7, 7])),
    "gather in order": lambda x, o: segments.gather(x, torch.tensor([0, 0, 3, 7]), in_order=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REDUCTIONS | SHAPED)
@given(lens=LENS)
def test_operations_are_those_of_each_row(name: str, dtype: torch.dtype, lens: list[int]):
    fn, spec = (REDUCTIONS | SHAPED)[name]
    x = torch.randn(sum(lens), 2, 3, dtype=dtype, requires_grad=True)
    got, want = fn(x, offsets_of(lens)), spec(x, lens)
    torch.testing.assert_close(got, want, equal_nan=True)
    weight = torch.randn_like(got)
    weight[got.isnan()] = 0
    if sum(lens):
        grads = (torch.autograd.grad((y.nan_to_num(0) * weight).sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("fill", [0, -2.0])
@given(lens=LENS)
def test_pack_and_pad(fill: float, lens: list[int]):
    x = torch.randn(sum(lens), 3, requires_grad=True)
    steps = max(lens, default=0) + 1
    padded, want = segments.pad(x, offsets_of(lens), steps, fill), reference.pad(x, lens, steps, fill)
    assert torch.equal(padded, want)
    back, same = segments.pack(padded, offsets_of(lens), len(x)), reference.pack(want, lens)
    assert torch.equal(back, same)
    if sum(lens):
        weight, other = torch.randn_like(padded), torch.randn_like(back)
        pairs = ((padded, back), (want, same))
        grads = (torch.autograd.grad((a * weight).sum() + (b * other).sum(), x)[0] for a, b in pairs)
        torch.testing.assert_close(*grads)


@given(lens=LENS, data=st.data())
def test_spread_and_gather(lens: list[int], data: st.DataObject):
    rows, x = torch.randn(len(lens), 3, requires_grad=True), torch.randn(sum(lens), 3, requires_grad=True)
    index = data.draw(st.lists(st.integers(0, sum(lens) - 1), max_size=9)) if sum(lens) else []
    spread, gathered = (
        segments.spread(rows, offsets_of(lens), sum(lens)),
        segments.gather(x, torch.tensor(index).long()),
    )
    pairs = ((spread, reference.spread(rows, lens)), (gathered, reference.gather_rows(x, index)))
    for (got, want), leaf in zip(pairs, (rows, x), strict=True):
        assert torch.equal(got, want)
        weight = torch.randn_like(want)
        torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), leaf)[0] for y in (got, want)))


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
    for fn, x in ((lambda x: segments.pack(x, offsets, 8), padded), (lambda x: segments.spread(x, offsets, 8), rows)):
        assert gradcheck(fn, x, check_forward_ad=True)
        assert gradgradcheck(fn, x)
    (grad,) = torch.autograd.grad(segments.pack(padded, offsets, 8).sum(), padded)
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
        out = segment_reduce._softmax_grad(dual, dual, offsets)
        _, tangent = forward_ad.unpack_dual(out)
    step = 1e-6
    ends = [segment_reduce._softmax_grad(y + s * dy, y + s * dy, offsets) for s in (step, -step)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), atol=1e-7, rtol=1e-6)


def test_equal_entries_share_the_gradient_of_amax_and_max_takes_the_first():
    offsets = offsets_of([3, 1])
    x = torch.tensor([2.0, 2.0, 1.0, 5.0], requires_grad=True)
    (shared,) = torch.autograd.grad(segment_reduce.amax(x, offsets).sum(), x)
    (first,) = torch.autograd.grad(segment_reduce.extreme(x, offsets, "max")[0].sum(), x)
    assert shared.tolist() == [0.5, 0.5, 0, 1]
    assert first.tolist() == [1, 0, 0, 1]


def test_an_infinite_maximum_has_its_gradient():
    x = torch.tensor([torch.inf, 1.0, -torch.inf], requires_grad=True)
    out = segment_reduce.amax(x, offsets_of([2, 1]))
    assert out.tolist() == [torch.inf, -torch.inf]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [1, 0, 1]


def test_a_row_of_minus_infinity():
    offsets = offsets_of([2, 2])
    x = torch.tensor([-torch.inf, -torch.inf, 0.0, -torch.inf], requires_grad=True)
    out = segment_reduce.logsumexp(x, offsets)
    assert out.tolist() == [-torch.inf, 0]
    (grad,) = torch.autograd.grad(out[1] + out[0], x)
    assert grad.tolist() == [0, 0, 1, 0]
    assert segment_reduce.softmax(x, offsets).isnan().tolist() == [True, True, False, False]


def test_large_scores_keep_their_digits():
    x = torch.tensor([1e5, 1e5 + 1.0, 3.0])
    torch.testing.assert_close(
        segment_reduce.log_softmax(x, offsets_of([2, 1])), torch.cat([x[:2].log_softmax(0), x.new_zeros(1)])
    )


def test_nothing_of_one_row_reaches_another():
    offsets = offsets_of([2, 3])
    x = torch.tensor([torch.nan, torch.inf, 1.0, 2.0, 3.0])
    assert segments.cumsum(x, offsets)[2:].tolist() == [1, 3, 6]
    assert segments.sum(x, offsets)[1] == 6
    assert bool(segment_reduce.softmax(x, offsets)[2:].isfinite().all())


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
@pytest.mark.parametrize("lens", [MIXED, [], [0, 0], [6]], ids=str)
def test_eager_kernels_take_every_dtype(dtype: torch.dtype, lens: list[int]):
    at = offsets_of(lens)
    x = (torch.randn(sum(lens), 2) * 3).to(dtype)
    best, where = eager.segment_max(x, at, 0)
    least, _ = eager.segment_min(x, at, 0)
    assert torch.equal(best.double(), reference.segment_max(x.double(), lens))
    assert torch.equal(least.double(), reference.segment_min(x.double(), lens))
    for b, row in enumerate(x.split(lens)):
        first = [int((row[:, f] == row[:, f].max()).nonzero()[0]) + int(at[b]) if len(row) else -1 for f in range(2)]
        assert where[b].tolist() == first
    assert torch.equal(eager_rows.pack_rows(eager_rows.pad_rows(x, at, 6, 0), at, len(x)), x)
    assert torch.equal(eager_rows.gather_rows(x, torch.arange(len(x))), x)
    if dtype is not torch.bool:
        total = reference.segment_sum(x.to(torch.float64), lens).to(dtype)
        torch.testing.assert_close(eager.segment_sum(x, at), total)
        running = reference.within(lambda row: row.cumsum(0).to(dtype), x, lens)
        torch.testing.assert_close(eager.segment_cumsum(x, at), running)


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
        torch.vmap(lambda i: segments.gather(torch.ones(3), i))(torch.zeros(2, 2, dtype=torch.int64))
    x = torch.randn(3, 2)
    with pytest.raises(TypeError, match="the index is batched by vmap"):
        torch.vmap(lambda order: segments.permute(x, order, order))(torch.tensor([[0, 1, 2], [2, 1, 0]]))
    with pytest.raises(TypeError, match="the index is batched by vmap"):
        torch.vmap(lambda places: segments.collect(x, places))(torch.tensor([[0, 1], [2, 1]]))
