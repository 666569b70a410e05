"""Steps that look known and are not: what one of them does by itself, another does otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.memory import track

T = 40
D = torch.float64
PLANS: list[Any] = [
    1,
    3,
    T,
    tl.Checkpoints(k=4, residuals=5),
    *(tl.Checkpoints(budget=b) for b in (600, 1000, 5000, 10**9)),
]
pytestmark = pytest.mark.eager_only("no step of a compiled loop is run by Python")


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, dtype=D, requires_grad=True), torch.randn(3, 3, dtype=D, requires_grad=True)


def plain(body: Any, h: Tensor, xs: Tensor) -> Tensor:
    for x in xs:
        h, _ = body(h, x)
    return h


@torch.library.custom_op("tensorloop_tests::seldom", mutates_args=())
def seldom(x: Tensor) -> Tensor:
    return x + torch.rand(3, dtype=D) if bool(x.sum() > 0) else x.clone()


DRAWS: dict[str, Any] = {
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(x, torch.full_like(x, 0.5)),
    "an operator": seldom,
}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_steps_that_draw_where_others_draw_nothing(name: str, plan: Any) -> None:
    h, w = given()
    xs = torch.zeros(T, 3, dtype=D)
    xs[10:] = 3

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w + 0.1 * h * DRAWS[name](x)), None

    torch.manual_seed(1)
    expected = torch.autograd.grad(plain(body, h, xs).sum(), (h, w))
    torch.manual_seed(1)
    found = torch.autograd.grad(tl.scan(body, h, xs, checkpoints=plan)[0].sum(), (h, w))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("asked", [Tensor.is_contiguous, lambda x: x.stride()[0] > 1])
def test_every_step_sees_slices_of_one_kind(asked: Any, plan: Any) -> None:
    """Copies, in all steps: gradients are those of the values that came out."""
    h, w = given()
    xs = torch.randn(3, T, dtype=D).t()

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w * 0.3 + x * (1.0 if asked(x) else 2.0)), h.sum()

    values = tl.scan(body, h, xs.clone(memory_format=torch.contiguous_format), checkpoints=1)
    found = tl.scan(body, h, xs, checkpoints=plan)
    torch.testing.assert_close(found, values)
    torch.testing.assert_close(torch.autograd.grad(found[0].sum(), w), torch.autograd.grad(values[0].sum(), w))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_steps_that_ask_where_a_slice_lies_are_given_copies_throughout(plan: Any) -> None:
    h, w = given()
    xs = torch.randn(100, 3, dtype=D)

    def body(h: Tensor, x: Tensor, far: int = 200) -> Any:
        return torch.tanh(h @ w * 0.3 + x * (1.0 if x.storage_offset() > far else 2.0)), h.sum()

    found = tl.scan(body, h, xs, checkpoints=plan)
    values = tl.scan(lambda h, x: body(h, x, 10**6), h, xs, checkpoints=1)
    torch.testing.assert_close(found, values)
    torch.testing.assert_close(torch.autograd.grad(found[1].sum(), w), torch.autograd.grad(values[1].sum(), w))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_branch_that_an_earlier_call_took_is_looked_at_again(plan: Any) -> None:
    """What is closed over is used in one step alone, and that step is late."""
    h, w = given()
    v = torch.full((3,), 0.5, dtype=D, requires_grad=True)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w + x * (v if float(x[0]) > 5 else 1.0)), None

    often, seldom = torch.randn(T, 3, dtype=D) * 6, torch.randn(T, 3, dtype=D).clamp(-1, 1)
    seldom[T - 4] = 6
    for xs in (often, often, seldom):
        expected = torch.autograd.grad(plain(body, h, xs).sum(), (h, w, v))
        found = torch.autograd.grad(tl.scan(body, h, xs, checkpoints=plan)[0].sum(), (h, w, v), materialize_grads=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_views_whose_base_changes_after_them_are_no_other_steps(plan: Any) -> None:
    h, w = given()

    def body(h: Tensor, x: Tensor) -> Any:
        z = h @ w * 0.3 + x
        v = z[:]
        z.mul_(0.5)
        return v, None

    xs = torch.randn(T, 3, dtype=D)
    expected = torch.autograd.grad(plain(body, h, xs).sum(), (h, w))
    found = torch.autograd.grad(tl.scan(body, h, xs, checkpoints=plan)[0].sum(), (h, w))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("budget", range(1000, 3000, 200))
def test_a_checkpoint_of_torchs_around_a_budget(budget: int) -> None:
    h, w = given()
    xs = torch.randn(8, 3, dtype=D, requires_grad=True)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w + x * torch.sigmoid(h)), None

    def loop(h: Tensor, xs: Tensor) -> Tensor:
        return tl.scan(body, h, xs, checkpoints=tl.Checkpoints(budget=budget))[0].sum()

    expected = torch.autograd.grad(plain(body, h, xs).sum(), (h, xs, w))
    found = torch.autograd.grad(checkpoint(loop, h, xs, use_reentrant=False), (h, xs, w))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("budget", [12_000, 20_000, 100_000])
def test_a_budget_holds_where_the_first_carry_has_no_gradient(budget: int, recorded: bool) -> None:
    n, w = 200, torch.randn(200, 200) * 0.05
    theta, xs = torch.randn(n, requires_grad=True), torch.randn(500, n)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(torch.sigmoid(torch.tanh(h @ w + x))) + theta, None

    with track() as tracker:
        h, _ = tl.scan(body, torch.zeros(n, requires_grad=recorded), xs, checkpoints=tl.Checkpoints(budget=budget))
        live = tracker.live
        h.sum().backward()
    assert live <= budget + n * 4 * 2  # beside the last carry
    assert tracker.peak <= budget + n * 4 * 16


@pytest.mark.parametrize("budget", [300_000, 1_000_000])
def test_outputs_that_residuals_hold_are_counted(budget: int) -> None:
    w, xs = torch.randn(8, requires_grad=True), torch.randn(200, 8)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h * w + x)
        return h, h.repeat(2000) + 0.0

    with track() as tracker:
        out = tl.scan(body, torch.zeros(8, requires_grad=True), xs, checkpoints=tl.Checkpoints(budget=budget))
    assert out[1].nbytes == 12_800_000
    assert tracker.live <= out[1].nbytes + budget


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_replays_have_the_default_dtype_of_the_loop(plan: Any) -> None:
    h, w = given()
    xs = torch.randn(T, 3, dtype=D)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h @ w * 0.3 * (torch.tensor(0.1).double() * 1e9).frac() + x), None

    expected = torch.autograd.grad(plain(body, h, xs).sum(), (h, w))
    out, _ = tl.scan(body, h, xs, checkpoints=plan)
    torch.set_default_dtype(D)
    try:
        found = torch.autograd.grad(out.sum(), (h, w))
        assert torch.get_default_dtype() is D
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)
