"""`tl.schedule.Budgeted`: its rules, its bytes, and its extra steps beside the best there is."""

import functools
import itertools
import math
import random

import pytest

from tensorloop import schedule
from tensorloop.schedule import Advance, Backward, Budgeted, Drop, Snapshot
from tests.support.schedule_checks import run, swept


def optimum(length: int, budget: int, carry: int, residuals: int) -> float:
    """The fewest extra steps of any order: a step at a segment's beginning may keep its residuals, too."""

    @functools.cache
    def fewest(n: int, room: int, own: int) -> float:  # own: bytes of the state that it begins with
        if n * residuals <= room + own:
            return 0
        best = fewest(n - 1, room - residuals, 0) if room >= residuals else math.inf
        for first in range(1, n):
            if (n - first) * residuals <= room:
                best = min(best, first + fewest(first, room, own))
            elif room >= carry:
                best = min(best, first + fewest(n - first, room - carry, carry) + fewest(first, room, own))
        return best

    return fewest(length, budget, 0)


def most_bytes(plan: Budgeted, length: int) -> int:
    """The most bytes that are kept at once: carries beyond that of step 0, and residuals."""
    held, residuals, most = set[int](), 0, 0
    for action in [*plan.sweep(length), *plan.reverse(length, [*swept(plan, length).held])]:
        match action:
            case Snapshot(step):
                held.add(step)
            case Drop(step):
                held.remove(step)
            case Advance(start, stop, True):
                residuals = stop - start
                held.discard(start)  # which the residuals hold in any case
                most = max(most, (len(held) - (0 in held)) * plan.carry + residuals * plan.residuals)
                held.add(start)
                continue
            case Backward(_, steps):
                residuals = steps
            case _:
                continue
        beyond = len(held) - (0 in held)
        most = max(most, beyond * plan.carry + (residuals * plan.residuals if isinstance(action, Backward) else 0))
    return most


def cases(count: int, longest: int) -> list[tuple[int, int, int, int]]:
    draw, found = random.Random(0), []
    for _ in range(count):
        length, carry = draw.randint(1, longest), draw.randint(0, 6)
        residuals = max(carry, 1) * draw.randint(1, 6) + draw.randint(0, 3)
        share = draw.choice([1, 0.5, 0.2, 0.1, 0.05, 0.01]) * draw.random()
        found.append((length, residuals + int(share * length * residuals), carry, residuals))
    return found


@pytest.mark.parametrize(
    ("count", "longest"), [(150, 40), pytest.param(60, 200, marks=pytest.mark.extended)], ids=["short", "long"]
)
def test_few_more_steps_than_the_best_order(count: int, longest: int) -> None:
    for length, budget, carry, residuals in cases(count, longest):
        plan = Budgeted(budget, carry, residuals)
        best = optimum(length, budget, carry, residuals)
        done = run(plan, length)
        assert done.extra == schedule.advances(plan, length)
        assert best <= done.extra <= best + math.ceil(0.05 * best), (length, budget, carry, residuals)
        assert most_bytes(plan, length) <= budget


def test_more_bytes_are_never_more_steps() -> None:
    for length in (7, 64, 200):
        extra = [schedule.advances(Budgeted(budget, 2, 7), length) for budget in range(7, 7 * length + 8)]
        assert extra[-1] == 0
        assert all(later <= before * 1.05 for before, later in itertools.pairwise(extra))


def test_long_loops_are_planned_at_once() -> None:
    plan = Budgeted(2**20, carry=2**10, residuals=2**13)
    assert schedule.advances(plan, 10**5) <= 10**5 * 2.1
    assert len([*plan.sweep(10**5)]) < 10**4


def test_a_loop_that_ended_early_is_reversed_from_what_is_there() -> None:
    plan = Budgeted(60, 1, 10)
    held = [action.step for action in plan.sweep(40) if isinstance(action, Snapshot)]
    for taken in range(1, 40):
        there = [step for step in held if step < taken]
        machine = swept(plan, 40)
        machine.length = machine.left = taken
        machine.held, machine.at = set(there), None
        for action in plan.reverse(taken, there):
            machine.do(action)
        assert machine.left == 0
        assert not machine.held


def test_without_carries_to_count_each_step_runs_at_most_twice() -> None:
    assert schedule.advances(Budgeted(10, 0, 10), 50) == 49
    assert schedule.advances(Budgeted(499, 0, 10), 50) == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((9, 1, 10), ValueError, "budget must have room for the residuals of one step, 10 bytes; got 9"),
        ((9, -1, 3), ValueError, "carry must be at least 0, got -1"),
        ((9, 1, 0), ValueError, "residuals must be at least 1, got 0"),
        ((9.5, 1, 3), TypeError, "budget must be an int, got float 9.5"),
        ((True, 1, 3), TypeError, "budget must be an int, got bool True"),
    ],
)
def test_what_is_refused(given, error, message) -> None:
    with pytest.raises(error, match=f"Budgeted: {message}"):
        Budgeted(*given)


def test_step_zero_must_be_held() -> None:
    with pytest.raises(ValueError, match="held must contain step 0"):
        list(Budgeted(9, 1, 3).reverse(4, [2]))


def test_an_unknown_length_costs_little() -> None:
    """In calls of the body, where the residuals of three steps fit."""
    ratios = []
    for length, budget, carry, residuals in cases(200, 200):
        if budget >= 3 * residuals:
            plan = Budgeted(budget, carry, residuals)
            known, found = (
                schedule.advances(plan, length),
                schedule.forecast(plan, length, carry, residuals, known=False),
            )
            assert run(plan, length, known=False).extra == found.advances
            assert found.bytes <= budget
            ratios.append((length + found.advances) / (length + known))
    assert len(ratios) > 80
    assert max(ratios) < 1.4
    assert sum(ratios) / len(ratios) < 1.05


def test_an_unknown_length_is_planned_as_fast_as_it_runs() -> None:
    plan = Budgeted(400, 1, 4)
    assert sum(1 for _ in itertools.islice(plan.sweep(None), 50_000)) == 50_000
