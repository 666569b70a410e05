"""`tl.schedule.forecast`: the figures of a schedule, beside an interpreter and beside loops that run."""

import pytest
import torch

import tensorloop as tl
from tensorloop import schedule
from tensorloop.schedule import Binomial, Blocks, Budgeted, Online, Periodic, Schedule, StoreAll
from tests.support.schedule_checks import bytes_of_a_step, run

PLANS = [Binomial(4), Online(3), Periodic(5), StoreAll(), Budgeted(90, 2, 7), Budgeted(900, 1, 9)]
PLANS += [Blocks(Binomial(3), 4)]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_figures_are_those_of_the_actions(plan: Schedule) -> None:
    for length in (0, 1, 2, 17, 60):
        found, done = schedule.forecast(plan, length), run(plan, length)
        assert (found.length, found.advances, found.snapshots) == (length, done.extra, done.most)
        assert found.advances == schedule.advances(plan, length)


def test_bytes_beside_those_of_the_loop() -> None:
    carry, residuals = 3, 10
    assert schedule.forecast(StoreAll(), 20, carry, residuals).bytes == 18 * carry + residuals
    assert schedule.forecast(Binomial(4), 100, carry, residuals).bytes == 3 * carry + residuals
    for budget in (10, 25, 60, 140, 199, 200):
        found = schedule.forecast(Budgeted(budget, carry, residuals), 20, carry, residuals)
        assert residuals <= found.bytes <= budget
    assert (found.bytes, found.kept, found.advances) == (200, 20, 0)


def test_it_is_what_a_loop_does() -> None:
    """Calls of the body and bytes kept, of a loop whose steps keep nothing in the sweep, as they count."""
    x, calls = torch.randn(8, 16, requires_grad=True), list[int]()

    def body(i: int, h: torch.Tensor) -> torch.Tensor:
        calls.append(i)
        return torch.tanh(torch.sin(h))

    def loop(plan: object) -> torch.Tensor:
        return tl.fori_loop(0, 40, body, x, checkpoints=plan)  # pyright: ignore[reportArgumentType]

    least, residuals, _, carry = bytes_of_a_step(loop)
    for more in (0, 3 * carry, 12 * carry):
        said = schedule.forecast(Budgeted(residuals + more, carry, residuals), 40, carry, residuals)
        calls.clear()
        loop(tl.Checkpoints(budget=least + more)).sum().backward()
        # This loop counts, so that its steps are watched, and those that the forecast keeps run again.
        assert len(calls) == 40 + said.advances + said.kept


def test_a_line_and_a_picture(tmp_path) -> None:
    found = schedule.forecast(Budgeted(100_000, 1000, 5000), 100, 1000, 5000)
    assert repr(found) == (
        "100 steps, the residuals of 19 kept: 81 extra (0.81 a step), at most 7 snapshots and 100,000 bytes"
    )
    assert repr(schedule.forecast(Binomial(2), 3)) == "3 steps: 4 extra (1.33 a step), at most 2 snapshots"
    figure = found.plot()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {
        *("run for the carry", "run, residuals kept", "run again with residuals, and reversed"),
        *("reversed from kept residuals", "a snapshot is kept"),
    }
    figure.savefig(tmp_path / "plan.png")
    schedule.forecast(Binomial(2), 0).plot(title="nothing")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((4, 3), TypeError, "schedule must be a Schedule, got int 4"),
        ((Binomial(2), -1), ValueError, "length must be at least 0, got -1"),
        ((Binomial(2), 3, -1), ValueError, "carry must be at least 0, got -1"),
        ((Binomial(2), 3, 1, 2.5), TypeError, "residuals must be an int, got float 2.5"),
    ],
)
def test_what_is_refused(given, error, message) -> None:
    with pytest.raises(error, match=f"forecast: {message}"):
        schedule.forecast(*given)
