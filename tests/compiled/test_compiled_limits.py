"""The limits in docs/api/loop.md, of compiled loops: how they may differ from eager ones, and no more than that."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tests.support.devices import HERE

D = torch.float64


def gradient(body: Any, init: Tensor, compile: Any, length: int = 2) -> Tensor:
    given = init.clone().requires_grad_()
    return torch.autograd.grad(tl.scan(body, given, length=length, compile=compile)[1].sum(), given)[0]


def test_rows_that_stop_may_require_a_gradient_that_is_zero():
    start, limits = torch.ones(2, dtype=D, requires_grad=True), torch.tensor([3, 1])

    def run(compile: Any) -> Tensor:
        init = torch.ones(2, dtype=D), start, torch.zeros(2, dtype=torch.int64)
        return tl.while_loop(
            lambda s: s[2] < limits, lambda s: (s[0].sin(), s[0] * 2, s[2] + 1), init, compile=compile
        )[1]

    eager, compiled = run(False), run("strict")
    assert (eager.requires_grad, compiled.requires_grad) == (False, True)
    torch.testing.assert_close(compiled.detach(), eager)
    assert not torch.autograd.grad(compiled.sum(), start)[0].any()


def test_equal_numbers_may_stand_in_another_order_and_values_do_not():
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]], dtype=D)
    body = lambda h, x: (h + x.topk(2)[0].sum(), x.sort()[0])  # noqa: E731
    found, expected = (tl.scan(body, torch.zeros((), dtype=D), x, compile=c) for c in ("strict", False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_fits_into_no_integer_becomes_one_all_the_same():
    body = lambda h, _: (h, (h * 1e300).long())  # noqa: E731
    ys = tl.scan(body, torch.tensor([1.0, -1.0, torch.nan, 0.0], dtype=D), length=1, compile="strict")[1]
    assert ys.dtype is torch.int64
    assert ys[0, 3] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_two_byte_norms_are_no_further_from_the_formula(dtype: torch.dtype):
    x = (torch.randn(4, 8, 6, generator=torch.Generator(HERE).manual_seed(0)) * 3 + 30).to(dtype)
    weights = torch.linspace(-1, 1, x.numel(), dtype=D).reshape(x.shape)

    def off(compile: Any) -> Tensor:
        given = x.clone().requires_grad_()
        ys = tl.scan(lambda h, x: (h, F.group_norm(x, 2)), torch.zeros(()), given[None], compile=compile)[1]
        return (torch.autograd.grad((ys.to(D) * weights).sum(), given)[0].to(D) - exact).abs().max()

    given = x.to(D).requires_grad_()
    exact = torch.autograd.grad((F.group_norm(given, 2) * weights).sum(), given)[0]
    assert exact.abs().max() > 0.01
    assert off("strict") <= off(False)


def test_polar_of_no_length_has_the_gradient_of_the_formula():
    body = lambda h, _: (h, torch.polar(h, torch.full_like(h, 0.5)).real)  # noqa: E731
    lengths = torch.tensor([2.0, 0.0, -1.0], dtype=D)
    cosine = torch.full((3,), 0.5, dtype=D).cos()
    torch.testing.assert_close(gradient(body, lengths, "strict", 1), cosine)
    torch.testing.assert_close(gradient(body, lengths, False, 1), cosine * torch.tensor([1.0, 0.0, -1.0], dtype=D))


def test_prod_of_an_infinite_factor_has_the_gradient_of_the_formula():
    body = lambda h, _: (h, h.prod())  # noqa: E731
    factors = torch.tensor([2.0, torch.inf, 3.0], dtype=D)
    assert gradient(body, factors, "strict", 1)[1] == 6
    assert gradient(body, factors, False, 1)[1].isnan()


def test_large_slots_of_arrays_of_two_lengths():
    def body(carry: Any, _: None) -> Any:
        h, a, b = carry
        a.append(h)
        b.append(h * 2)
        return (h * 0.5 + a[-2][0] + b[-2][0], a, b), None

    def run(compile: Any) -> Tensor:
        h = torch.ones(2**20 + 8)
        arrays = [tl.TensorArray.unstack(h.expand(n, -1).clone()) for n in (2, 3)]
        return tl.scan(body, (h, *arrays), length=2, compile=compile)[0][0]

    torch.testing.assert_close(run(True), run(False))


@pytest.mark.parametrize("inside", [False, True], ids=["of all steps", "in the loop"])
def test_an_index_out_of_range_is_the_error_that_torch_raises(inside: bool):
    xs = torch.tensor([[1, 2], [0, 5]])
    readers = {
        "gather": lambda h, x: h.gather(0, x),
        "embedding": lambda h, x: F.embedding(x, h[:, None]),
        "loss": lambda h, x: F.nll_loss(h.expand(2, 3), x),
        "index": lambda h, x: h[x],
    }
    for read in readers.values():
        body = lambda h, x, read=read: (h * 0.9, read(h if inside else h * 0, x + (h[0] * 0).long() * inside))  # noqa: E731
        with pytest.raises((IndexError, RuntimeError)) as eager:
            tl.scan(body, torch.ones(3), xs)
        with pytest.raises(eager.type):
            tl.scan(body, torch.ones(3), xs, compile="strict")
