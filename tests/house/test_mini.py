"""The teaching copy in docs/examples has the real one's values, gradients and growth."""

from collections.abc import Callable

import torch
from torch import Tensor

import tensorloop as tl
from docs.examples import mini_tensorloop as mini


def rotation() -> Tensor:
    return torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0].requires_grad_()


def reads_its_past(make: Callable[[int], mini.TensorArray | tl.TensorArray], w: Tensor, xs: Tensor) -> Tensor:
    """A loss through an array that is written, and read as far as it goes, at each step."""
    states, h = make(len(xs)), xs[0]
    for x in xs:
        states.append(h)
        h = torch.sin(h @ w + x) + states.stack().mean(0)
    return h.square().sum() + states.stack().cos().sum()


def ours(n: int) -> mini.TensorArray:
    return mini.TensorArray(n, (4,), torch.float64)


def real(n: int) -> tl.TensorArray:
    return tl.TensorArray()


def test_an_array_agrees_with_the_real_one():
    torch.manual_seed(0)
    w, xs = rotation(), torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    found, expected = (
        [loss, *torch.autograd.grad(loss, (w, xs))] for loss in (reads_its_past(m, w, xs) for m in (ours, real))
    )
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(lambda w, xs: reads_its_past(ours, w, xs), (w, xs))


def test_an_array_takes_a_buffer_and_not_its_square():
    torch.manual_seed(0)
    w = rotation()

    def kept(T: int, make: Callable[[int], mini.TensorArray | tl.TensorArray]) -> int:
        xs = torch.randn(T, 4, dtype=torch.float64)
        return tl.memory.saved_bytes(lambda: reads_its_past(make, w, xs))

    assert kept(64, ours) < 2.1 * kept(32, ours)
    assert kept(64, ours) < 1.5 * kept(64, real)


def test_a_slot_that_nobody_reads_gets_no_gradient():
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    array = ours(2)
    array.append(2 * x)
    seen = array.stack()
    array.append(3 * x)
    seen.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4


def test_a_loop_agrees_with_the_real_one():
    torch.manual_seed(0)
    w, h = rotation(), torch.randn(4, dtype=torch.float64, requires_grad=True)

    def body(i: int, h: Tensor) -> Tensor:
        return torch.sin(h @ w + i)

    for n in (0, 1, 7, 12):
        expected = tl.fori_loop(0, n, body, h)
        found = mini.fori_loop(n, body, h, [w], k=3)
        torch.testing.assert_close(found, expected)
        if n:
            torch.testing.assert_close(
                torch.autograd.grad(found.sum(), (w, h)), torch.autograd.grad(expected.sum(), (w, h))
            )
    assert torch.autograd.gradcheck(
        lambda w, h: mini.fori_loop(7, lambda i, h: torch.sin(h @ w + i), h, [w], k=3), (w, h)
    )


def test_a_loop_keeps_k_carries_and_runs_each_step_twice():
    w, h, calls = rotation(), torch.randn(4, dtype=torch.float64, requires_grad=True), []

    def body(i: int, h: Tensor) -> Tensor:
        calls.append(i)
        return torch.sin(h @ w)

    kept = tl.memory.saved_bytes(lambda: mini.fori_loop(100, body, h, [w], 10))
    assert kept <= 10 * h.nbytes
    calls.clear()
    mini.fori_loop(100, body, h, [w], 10).sum().backward()
    assert sorted(calls) == sorted([*range(100)] * 2)
