"""Online placement: how near the optimum it stays at every length, and what choosing costs."""

import itertools
import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorloop.schedule import Advance, Drop, Online, Snapshot, advances
from tensorloop.schedule.spans import cost
from tests.support.schedule_checks import optimum, reversal, run, swept


def levels(slots: int, longest: int, less: int) -> list[int]:
    """What each further step costs: the least r with C(slots + r, slots) - less >= n, for n = 1..longest; [0] is 0."""
    out, level = [0], 0
    for n in range(1, longest + 1):
        while math.comb(slots + level, slots) - less < n:
            level += 1
        out.append(level)
    return out


@cache
def reversals(slots: int, longest: int) -> list[int]:
    """`reversal(n, slots)` for n = 0..longest."""
    return list(itertools.accumulate(levels(slots, longest, 0)))


def optima(k: int, longest: int) -> list[int]:
    """`optimum(n, k)` for n = 0..longest: all segments together hold C(k + r, k) - 1 steps of up to r."""
    return list(itertools.accumulate(levels(k, longest, 1)))


def extra_steps(k: int, longest: int) -> list[int]:
    """What `Online(k)` takes for each length 0..longest: one sweep, each length being where it might have ended."""
    out, held = [0], list[int]()
    for action in Online(k).sweep(None):
        match action:
            case Snapshot(step):
                held.append(step)
            case Drop(step):
                held.remove(step)
            case Advance(start, stop):
                bounds = enumerate(itertools.pairwise(held))
                closed = sum(reversals(k - i, longest)[after - before] for i, (before, after) in bounds)
                last = reversals(k - len(held) + 1, longest)
                out += [n + closed + last[n - held[-1]] for n in range(start + 1, min(stop, longest) + 1)]
                if stop >= longest:
                    return out
    raise AssertionError("the sweep ended")


def test_the_oracles_agree():
    for k in range(1, 7):
        assert optima(k, 30)[1:] == [optimum(n, k) for n in range(1, 31)]
        assert reversals(k, 30)[1:] == [reversal(n, k) for n in range(1, 31)]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 32])
def test_extra_steps_are_those_of_each_length_by_itself(k: int):
    lengths = [*range(1, 60), 97, 300, 1000]
    every = extra_steps(k, 1000)
    assert [every[n] for n in lengths] == [advances(Online(k), n, known=False) for n in lengths]
    assert [every[n] for n in lengths] == [advances(Online(k), n) for n in lengths]


# k: the worst ratio to the optimum over T = 1..10000, the T where, the mean ratio; as in docs/schedules.md
RATIOS = {
    1: (1.0, 1, 1.0),
    2: (1.125, 10, 1.00488),
    3: (1.0976, 54, 1.01349),
    4: (1.0529, 208, 1.01098),
    5: (1.0597, 53, 1.01003),
    8: (1.0406, 157, 1.00609),
    32: (1.0243, 6533, 1.00452),
    128: (1.0062, 8760, 1.00059),
}


@pytest.mark.parametrize("k", RATIOS)
def test_ratio_to_the_optimum_at_every_length(k: int):
    longest = 10_000
    pairs = zip(extra_steps(k, longest)[1:], optima(k, longest)[1:], strict=True)
    ratios = [ours / best for ours, best in pairs]
    worst, mean = max(ratios), sum(ratios) / longest
    assert min(ratios) >= 1
    assert (round(worst, 4), ratios.index(worst) + 1, round(mean, 5)) == RATIOS[k]
    if k >= 8:
        assert worst <= 1.05
        assert mean <= 1.007


@pytest.mark.parametrize("k", [*range(1, 13), 32])
def test_the_optimum_as_long_as_it_runs_no_step_thrice_in_advance(k: int):
    longest = (k + 1) * (k + 2) // 2 - 1
    assert extra_steps(k, longest) == optima(k, longest)


def test_totals_that_other_libraries_state():
    """Equinox's, for the same convention: 2T - 4 with four slots, 19 and 22 for the others."""
    assert [advances(Online(4), n, known=False) for n in range(4, 15)] == [2 * n - 4 for n in range(4, 15)]
    assert advances(Online(2), 8, known=False) == 17 <= 19
    assert advances(Online(3), 11, known=False) == 21 <= 22


def test_trace():
    assert swept(Online(3), 9, known=False).done == [
        *(Snapshot(0), Advance(0, 1)),
        *(Snapshot(1), Advance(1, 2)),
        *(Snapshot(2), Advance(2, 4)),
        *(Drop(1), Snapshot(4), Advance(4, 6)),
        *(Drop(2), Snapshot(6), Advance(6, 7)),
        *(Drop(6), Snapshot(7), Advance(7, 9)),
    ]


def test_a_caller_who_asks_on_leaves_a_snapshot_at_the_end():
    assert swept(Online(3), 9, known=False, prompt=False).done[-2:] == [Drop(7), Snapshot(9)]
    assert run(Online(3), 9, known=False, prompt=False).done[0] == Drop(9)


def test_the_length_changes_nothing_but_the_end():
    for k, length in itertools.product(range(1, 8), range(1, 80)):
        assert swept(Online(k), length).done == swept(Online(k), length, known=False).done


@pytest.mark.parametrize("k", range(1, 13))
@pytest.mark.parametrize("prompt", [True, False])
def test_around_the_length_where_slots_fill_out_of_order(k: int, prompt: bool):
    bound = (k + 1) * (k + 2) // 2
    for length in (*range(max(bound - 2, 1), bound + 3), 5 * bound, 20 * bound):
        assert run(Online(k), length, known=False, prompt=prompt).most <= k


def test_snapshots_are_dropped_and_taken_out_of_time_order():
    done = swept(Online(3), 200, known=False).done
    dropped = [action.step for action in done if isinstance(action, Drop)]
    assert dropped != sorted(dropped)


@given(st.integers(1, 40), st.integers(0, 1500), st.booleans())
def test_rules(k: int, length: int, prompt: bool):
    done = run(Online(k), length, known=False, prompt=prompt)
    assert done.most <= k


def test_as_many_slots_as_steps_run_nothing_again():
    for k in (*range(1, 20), 1000):
        assert run(Online(k), k, known=False).extra == k


@pytest.mark.parametrize("k", [2, 8, 32, 128])
def test_choosing_gets_cheaper_the_longer_the_loop(k: int):
    """Evaluations of the cost of a segment, the bulk of the work, and actions: both well below one a step."""
    cost.cache_clear()
    actions = sum(1 for _ in Online(k).sweep(100_000))
    seen = cost.cache_info()
    assert seen.hits + seen.misses < 100_000
    assert actions < 20_000
