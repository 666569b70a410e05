"""Rarer forms of operations: other orders of a norm, halves, numbers instead of rows, rows too long to compare."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE

T = 3
Body = Callable[[Tensor, Tensor], Any]
NORM = torch.linalg.vector_norm
AT = torch.tensor([3, 0, 2, 1])
GAIN = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

BODIES: dict[str, Body] = {  # of two (4, 6) tensors
    "norm of order 0": lambda h, x: (h.sin() + x, NORM(h, 0, -1)),
    "norm of order 1": lambda h, x: (h.sin() + x * NORM(h, 1, -1, True), h),
    "norm of order 3": lambda h, x: (h.sin() + x * NORM(h, 3, (0, 1)), h),
    "largest in size": lambda h, x: (h.sin() + x * NORM(h, math.inf, 0), h),
    "smallest in size": lambda h, x: (h.sin() + x * NORM(h, -math.inf), h),
    "norm in double": lambda h, x: (h.sin() + x * NORM(h.float(), 2, 0, dtype=torch.float64), h),
    "norm of a number": lambda h, x: (h.sin() + x * NORM(h[0, 0]), h),
    "root mean squares": lambda h, x: (F.rms_norm(h + x, [6], GAIN), F.rms_norm(h, [4, 6])),
    "gelu by tanh": lambda h, x: (F.gelu(h, approximate="tanh") + x, h),
    "deviation": lambda h, x: (h.sin() + x / (1 + h.std(-1, keepdim=True)), torch.std(h, 0, correction=0)),
    "order of a number": lambda h, x: (h.sin() + x * h[0, 0].sort()[0], h[0, 0].sort()),
    "k-th of a number": lambda h, x: (h.sin() + x * h[0, 0].kthvalue(1)[0], h[0, 0].kthvalue(1)),
    "largest of a number": lambda h, x: (h.sin() + x * h[0, 0].max(0)[0], h[0, 0].min(0)),
    "ints in order": lambda h, x: (
        h.sin() + x * (9 * h).long().topk(2, -1).values.sum() * 0.01, (9 * h).long().topk(2, -1, largest=False).values),
    "the smallest of many ints": lambda h, x: (h.sin() + x * (9 * h).long().topk(1, -1, largest=False).values, h),
    "in order, 200 of them": lambda h, x: (h.sin() + x, h.flatten().repeat(9).sort(stable=True)),
    "softmax of a number": lambda h, x: (h.sin() + x * h[0, 0].softmax(0), h[0, 1].log_softmax(0)),
    "logsumexp of a number": lambda h, x: (h.sin() + x * h[0, 0].logsumexp(0), h),
    "along a dim of a number": lambda h, x: (h.sin() + x, [h[0, 0].mean(-1, True), h[0, 0].var(0, correction=0)]),
    "sum of a number": lambda h, x: (h.sin() + x * h[0, 0].mean(), h[0, 0].sum(0)),
    "larger one": lambda h, x: (torch.max(h, x.sin()), torch.min(h, x)),
    "products and sums": lambda h, x: (
        torch.addbmm(x, h[None], h.t()[None] @ x[None]).sin(), torch.addr(x, x[:, 0], x[0])),
    "over everything": lambda h, x: (
        h.sin() + x * h.amax((0, 1)) - h.long().amin(1, keepdim=True), (h.argmax(), h.prod(), (h > -9).all())),
    "of bools": lambda h, x: (h.sin() + x * (h > 0).amax(1, keepdim=True), (h > 0).amin(1)),
    "largest of one, by its place": lambda h, x: (h.sin() + x, F.adaptive_max_pool1d(x[:, :1][None], 1)[0]),
    "numbers": lambda h, x: (h.sin() + x * h[0, 0].cumsum(0), [h[0, 0].amax(), h[0, 0].flip(0), h[0, 0].prod(0)]),
    "an element of a number": lambda h, x: (h.sin() + x, [h[0, 0].gather(0, AT[1]), h[0, 0].index_select(0, AT[1:2])]),
    "nothing": lambda h, x: (
        h.sin() + x + h[:, :0].sum() + h[:, :0] @ x[:0], [F.layer_norm(x[:, :0], [0]), h[:, :0].softmax(1)]),
    "joined with nothing": lambda h, x: (h.sin() + x, torch.cat([h.new_zeros(0), h], 1)),
    "scatters": lambda h, x: (h.index_select(0, AT).sin() + x, [
        x.scatter_add(1, AT.repeat(4, 1), h[:, :4]), h.scatter(1, AT.repeat(4, 1), x[:, :4]),
        torch.select_scatter(h, x[:, 0], 1, 2), torch.slice_scatter(h, x[:, :2], 1, 2, 4)]),
    "places that move": lambda h, x: (h.sin() + x, [
        h.gather(1, (x.abs() * 50).long() % 6), h.index_select(0, (x[:, 0].abs() * 50).long() % 4),
        AT.index_select(0, (x[:, 0].abs() * 50).long() % 4), h.index_select(1, (x[:, 0].abs() * 50).long() % 4)]),
    "a kernel that moves": lambda h, x: (h.sin() + x, F.conv1d(h[None], x[:2, None, :3].expand(2, 4, 3))),
    "a bias that moves": lambda h, x: (h.sin() + x, F.conv1d(h[None], h.new_ones(2, 4, 3), x[:2, 0])),
    "several dtypes": lambda h, x: (h.sin() + x, [torch.where(h > 0, h.float(), x), h.float() * x, h.long() * x]),
    "distances": lambda h, x: (h.sin() + x * torch.dist(h, x), torch.cdist(h, x)),
    "linear": lambda h, x: (F.linear(h, x.t() @ x, x[0]).sin(), h),
}  # fmt: skip


def outcome(body: Body, dtype: torch.dtype, compile: Any) -> tuple[list[Tensor], list[Any]]:
    torch.manual_seed(0)
    h = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    xs = torch.randn(T, 4, 6, dtype=dtype, requires_grad=True)
    outputs = tree_leaves(tl.scan(body, h, xs, compile=compile))
    loss = sum((y * torch.arange(1, y.numel() + 1).view(y.shape).cos()).sum() for y in outputs if y.requires_grad)
    return outputs, list(torch.autograd.grad(loss, [h, xs]))  # pyright: ignore


@pytest.mark.parametrize("name", BODIES)
def test_equal_to_the_eager_loop(name: str):
    expected, expected_grads = outcome(BODIES[name], torch.float64, False)
    found, grads = outcome(BODIES[name], torch.float64, "strict")
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


KERNEL = torch.randn(4, 4, 3, generator=torch.Generator(HERE).manual_seed(1)) * 0.4
HALVES: dict[str, Body] = {
    "root mean squares": lambda h, x: (F.rms_norm(h + x, [6]), F.rms_norm(h, [6], GAIN.to(h.dtype), 1e-3)),
    "conv": lambda h, x: (torch.sin(F.conv1d(h, KERNEL.to(h.dtype), padding=1) + x), h),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_as_near_as_their_last_bits(name: str, dtype: torch.dtype):
    expected, expected_grads = outcome(HALVES[name], dtype, False)
    found, grads = outcome(HALVES[name], dtype, "strict")
    tolerance = 30 * torch.finfo(dtype).eps  # three steps, and gradients summed over a row
    check_equal(found, expected, tolerance)
    check_equal(grads, expected_grads, tolerance)


def test_a_variance_of_one_row_is_torchs():
    def body(h: Tensor, x: Tensor) -> Any:
        return h.sin() + x, (h[:1].detach().var(0), h.detach().var(0, correction=4), h[0, 0].detach().var())

    with pytest.warns(UserWarning, match="degrees of freedom"):
        expected, _ = outcome(body, torch.float64, False)
    with pytest.warns(UserWarning, match="degrees of freedom"):  # of the step that is looked at
        found, _ = outcome(body, torch.float64, "strict")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


CALLED: dict[str, Body] = {  # of forms that machine code has not
    "a frame that does not count": lambda h, x: (F.avg_pool2d(h[None], 3, 1, 1, False, False)[0] + x, h),
    "none of the largest": lambda h, x: (h.sin() + x + h.topk(0, -1).values.sum(), h),
    "200 in order": lambda h, x: (h.sin() + x * h.flatten().repeat(9).sort(stable=True).values[0], h),
    "17 of 200": lambda h, x: (h.sin() + x * h.flatten().repeat(9).topk(17).values.sum(), h),
    "k-th of 200": lambda h, x: (h.sin() + x * h.flatten().repeat(9).kthvalue(5).values, h),
    "windows cut off": lambda h, x: (h.sin() + x * F.avg_pool2d(h[None], 4, ceil_mode=True).sum(), h),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_torch_does_in_the_middle_of_a_step(name: str):
    expected, expected_grads = outcome(CALLED[name], torch.float64, False)
    found, grads = outcome(CALLED[name], torch.float64, "strict")
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


@pytest.mark.filterwarnings(
    "ignore::tensorloop.loop.compiled.front.NotCompiledWarning"
)  # torch 2.11 cannot take it apart
def test_a_pool_of_windows_too_large_to_compare():
    def body(h: Tensor, x: Tensor) -> Any:
        return h.sin() + x * F.max_pool2d(F.pad(h[None], (3, 3, 3, 3)), 6)[0].sum(), h

    (expected, expected_grads), (found, grads) = (outcome(body, torch.float64, compile) for compile in (False, True))
    check_equal([*found, *grads], [*expected, *expected_grads], 1e-11)


@pytest.mark.parametrize("right", [False, True])
def test_the_place_of_one_number_in_a_row(right: bool):
    def body(h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.searchsorted(torch.softmax(h, -1).cumsum(-1), u, right=right).clamp(max=3)
        return torch.tanh(h + torch.nn.functional.one_hot(place, 4) + u), place

    xs, init = torch.rand(6, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    found, expected = (tl.scan(body, init, xs, compile=compile) for compile in ("strict", False))
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])
