"""The recipe of an adaptive solver: solutions, gradients beside a Python loop's, rows, memory, what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from docs.examples.recipes import ode
from tensorloop import memory

TURN = torch.tensor([[0.0, 1.0], [-4.0, 0.0]], dtype=torch.float64)


def turning(t: Tensor, y: Tensor, speed: Tensor) -> Tensor:
    return speed[:, None] * (y @ TURN.T)


def turned(y: Tensor, angle: Tensor) -> Tensor:
    return (torch.linalg.matrix_exp(angle[:, None, None] * TURN) @ y[..., None])[..., 0]


def one_by_one(field: ode.Field, y: Tensor, begin: Tensor, end: Tensor, *args: Tensor, tol: float) -> ode.Solution:
    """The same steps as plain Python loops, a row at a time."""
    ys, counts = [], []
    for b in range(len(y)):
        solver, row = ode.Dopri5(field, tol, tol, y, guarded=True), (end[b : b + 1], *(a[b : b + 1] for a in args))
        state, count = solver.start(begin[b : b + 1], y[b : b + 1], *row[1:]), 0
        while solver.goes_on(state, row):
            state, count = solver.step(state, row), count + 1
        ys.append(state.y)
        counts.append(count)
    return ode.Solution(torch.cat(ys), torch.tensor(counts))


def problem(rows: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    begin, end, speed = torch.linspace(-1, 0, rows), torch.linspace(0.5, 4, rows), torch.linspace(0.3, 2.5, rows)
    return y, begin.double(), end.double(), speed.double()


def test_rows_take_steps_of_their_own_and_end_where_they_should():
    y, begin, end, speed = problem()
    for tol in (1e-4, 1e-7, 1e-10):
        found = ode.solve(turning, y, begin, end, speed, rtol=tol, atol=tol)
        assert (found.y - turned(y, speed * (end - begin))).abs().max() < 100 * tol
        expected = one_by_one(turning, y, begin, end, speed, tol=tol)
        torch.testing.assert_close(found.y, expected.y, rtol=1e-12, atol=1e-12)
        assert found.steps.tolist() == expected.steps.tolist()
        assert len(set(found.steps.tolist())) > 2


def test_a_tolerance_a_hundred_thousand_times_smaller_takes_about_ten_times_the_steps():
    y, begin, end, speed = problem()
    few, many = (ode.solve(turning, y, begin, end + 20, speed, rtol=tol, atol=tol).steps[-1] for tol in (1e-5, 1e-10))
    assert 7 < many / few < 13


@pytest.mark.parametrize(
    "options", [{}, {"compact": False}, {"checkpoints": 2}, {"checkpoints": 7}, {"checkpoints": 4, "compile": "strict"}]
)
@pytest.mark.extended("options2", "options3")
def test_gradients_are_those_of_a_python_loop(options: dict[str, Any]):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    y, begin, end, speed = problem()
    leaves = [x.requires_grad_() for x in (y, begin, end, speed)]

    def field(t: Tensor, y: Tensor, speed: Tensor) -> Tensor:
        return net(torch.cat([y, t[:, None].sin()], 1)) + turning(t, y, speed)

    def gradients(solution: ode.Solution) -> tuple[Tensor, ...]:
        return torch.autograd.grad(solution.y.square().sum(), [*leaves, *net.parameters()])

    found = gradients(ode.solve(field, y, begin, end, speed, rtol=1e-6, atol=1e-6, **options))
    expected = gradients(one_by_one(field, y, begin, end, speed, tol=1e-6))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_gradients_are_those_of_the_solution_as_far_as_it_is_exact():
    y, begin, end, speed = (x.requires_grad_() for x in problem())
    weights = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    found = ode.solve(turning, y, begin, end, speed, rtol=1e-9, atol=1e-9, checkpoints=5).y
    wanted = turned(y, speed * (end - begin))
    for a, b in zip(
        *(torch.autograd.grad((x * weights).sum(), (y, begin, end, speed)) for x in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_step_out_of_the_domain_leaves_no_nan():
    """sqrt(y) at y < 0: attempts that are too long are NaN; the gradients of all rows are those of the solution."""
    y = torch.tensor([[1.0], [4.0], [9.0]], dtype=torch.float64, requires_grad=True)
    rate = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    seen = []

    def falling(t: Tensor, y: Tensor) -> Tensor:
        seen.append(bool(y.isnan().any() or (y < 0).any()))
        return -rate * y.sqrt()

    found = ode.solve(falling, y, 0.0, torch.tensor([0.999, 1.999, 2.999]), rtol=1e-3, atol=1e-3, checkpoints=4).y
    grads = torch.autograd.grad(found.sum(), (y, rate))
    assert any(seen)
    assert all(g.isfinite().all() for g in grads)


def test_a_singularity_is_an_error_that_names_the_row():
    y = torch.tensor([[0.1], [1.0]], dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"row 1 has come to t=1 of 2 and cannot go on: h="):
        ode.solve(lambda t, y: y.square(), y, 0.0, 2.0)
    with pytest.raises(RuntimeError, match=r"row 0 has come to t=0 of 2 and cannot go on: h=nan"):
        ode.solve(lambda t, y: y.log(), -y, 0.0, 2.0)


def test_many_times():
    y, _, _, speed = problem()
    speed.requires_grad_()
    times = torch.tensor([0.0, 0.5, 0.6, 2.0], dtype=torch.float64)
    plain, kept = (ode.solve_at(turning, y, times, speed, rtol=1e-9, atol=1e-9, checkpoints=k) for k in (None, 2))
    torch.testing.assert_close(plain, torch.stack([turned(y, speed * t) for t in times]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(ys.square().sum(), speed) for ys in (plain, kept)))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_and_no_time(rows: int):
    y, begin, end, speed = problem(rows)
    found = ode.solve(turning, y, begin, end, speed, checkpoints=2)
    assert found.y.shape == (rows, 2)
    none = ode.solve(turning, y, begin, begin, speed)
    assert torch.equal(none.y, y)
    assert none.steps.tolist() == [0] * rows


def test_memory_stays_where_steps_become_many():
    y, begin, end, speed = problem(2)
    speed.requires_grad_()

    def held(longer: float, **options: Any) -> int:
        options |= {"rtol": 1e-5, "atol": 1e-5}
        return memory.saved_bytes(lambda: ode.solve(turning, y, begin, end * longer, speed, **options).y.sum())

    ratio: Callable[..., float] = lambda **options: held(4.0, **options) / held(1.0, **options)  # noqa: E731
    assert ratio() > 2.5
    assert ratio(checkpoints=8) < 1.5
    assert held(4.0, checkpoints=8) < held(4.0) / 19
