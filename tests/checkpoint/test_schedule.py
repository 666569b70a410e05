"""Checkpoint schedules: exact traces, exact counts, the optimum, and the rules that every schedule keeps."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorloop import schedule
from tensorloop.schedule import (
    Action,
    Advance,
    Backward,
    Binomial,
    Drop,
    Forward,
    Online,
    Periodic,
    Restore,
    Schedule,
    Snapshot,
    StoreAll,
    advances,
)
from tests.support.schedule_checks import Broken, optimum, reversal, run, snapshots, swept


class Given(Schedule):
    """Snapshots at given steps."""

    def __init__(self, k: int | None, steps: Sequence[int]) -> None:
        self.k, self.steps = k, steps

    def sweep(self, length: int | None) -> Iterator[Forward]:
        end = 10**9 if length is None else length
        for start, stop in itertools.pairwise([*(step for step in self.steps if step < end), end]):
            yield Snapshot(start)
            yield Advance(start, stop)


# -- traces


def last_of(step: int) -> list[Action]:
    """A snapshot's last use."""
    return [Restore(step), Drop(step), Backward(step)]


def test_trace_of_binomial():
    assert swept(Binomial(3), 7).done == [
        *(Snapshot(0), Advance(0, 2)),
        *(Snapshot(2), Advance(2, 5)),
        *(Snapshot(5), Advance(5, 7)),
    ]
    assert run(Binomial(3), 7).done == [
        *(Restore(5), Advance(5, 6), Backward(6)),
        *last_of(5),
        *(Restore(2), Advance(2, 3), Snapshot(3), Advance(3, 4), Backward(4)),
        *last_of(3),
        *last_of(2),
        *(Restore(0), Advance(0, 1), Backward(1)),
        *last_of(0),
    ]


def test_trace_with_one_snapshot():
    for one in (Binomial(1), Online(1)):
        assert swept(one, 3).done == [Snapshot(0), Advance(0, 3)]
        assert run(one, 3).done == [
            *(Restore(0), Advance(0, 2), Backward(2)),
            *(Restore(0), Advance(0, 1), Backward(1)),
            *last_of(0),
        ]


def test_trace_with_more_snapshots_than_steps():
    for many in (Binomial(5), Online(5), StoreAll()):
        assert swept(many, 2).done == [Snapshot(0), Advance(0, 1), Snapshot(1), Advance(1, 2)]
        assert run(many, 2).done == [*last_of(1), *last_of(0)]


def test_trace_of_periodic():
    assert swept(Periodic(3), 7).done == [
        *(Snapshot(0), Advance(0, 3)),
        *(Snapshot(3), Advance(3, 6)),
        *(Snapshot(6), Advance(6, 7)),
    ]
    assert run(Periodic(3), 7).done == [
        *last_of(6),
        *(Restore(3), Advance(3, 4), Snapshot(4), Advance(4, 5), Backward(5)),
        *last_of(4),
        *last_of(3),
        *(Restore(0), Advance(0, 1), Snapshot(1), Advance(1, 2), Backward(2)),
        *last_of(1),
        *last_of(0),
    ]


def test_trace_of_a_schedule_of_the_users():
    mine = Given(2, [0, 3])
    assert swept(mine, 6).done == [Snapshot(0), Advance(0, 3), Snapshot(3), Advance(3, 6)]
    assert run(mine, 6).done == [
        *(Restore(3), Advance(3, 5), Backward(5)),
        *(Restore(3), Advance(3, 4), Backward(4)),
        *last_of(3),
        *(Restore(0), Advance(0, 1), Snapshot(1), Advance(1, 2), Backward(2)),
        *last_of(1),
        *last_of(0),
    ]


def test_a_snapshot_at_the_end_is_dropped_first():
    assert list(Given(3, [0]).reverse(2, [2, 0])) == [
        Drop(2),
        *(Restore(0), Advance(0, 1), Backward(1)),
        *last_of(0),
    ]
    assert list(Online(2).reverse(0, [0])) == [Drop(0)]


def test_no_steps():
    for each in (Binomial(3), Online(3), Periodic(3), StoreAll()):
        assert list(each.sweep(0)) == []
        assert list(each.reverse(0, [])) == []
        assert advances(each, 0) == 0
        if not isinstance(each, Binomial):
            assert advances(each, 0, known=False) == 0


# -- counts

COUNTS = [  # T, k, extra steps
    *[(100, 8, 248), (1000, 8, 4290), (10000, 8, 68568)],
    *[(100, 32, 168), (1000, 32, 2408), (10000, 32, 32864)],
    *[(100, 128, 100), (1000, 128, 1872), (10000, 128, 21488)],
]


@pytest.mark.parametrize(("length", "k", "extra"), COUNTS)
def test_counts_of_binomial(length: int, k: int, extra: int):
    done = run(Binomial(k), length)
    assert done.extra == extra == advances(Binomial(k), length)
    assert done.most == min(k, length)


@pytest.mark.parametrize("k", range(1, 7))
def test_binomial_is_the_optimum(k: int):
    for length in range(1, 31):
        assert run(Binomial(k), length).extra == optimum(length, k) == advances(Binomial(k), length)


State = tuple[frozenset[int], int, int, bool]  # held, working state (-1: none), steps left, sweeping


def exhaustive(length: int, k: int) -> int:
    """The fewest extra steps over all orders of actions whatever: Dijkstra's search."""
    start: State = (frozenset(), 0, length, True)
    paid: dict[State, int] = {start: 0}
    queue: list[tuple[int, int, State]] = [(0, 0, start)]
    number = itertools.count(1)
    while queue:
        cost, _, (held, at, left, sweeping) = heapq.heappop(queue)
        if left == 0:
            return cost
        if cost > paid[held, at, left, sweeping]:
            continue
        after: list[tuple[int, State]] = [(0, (held - {step}, at, left, sweeping)) for step in held]
        if 0 <= at < length:
            after.append((1, (held, at + 1, left, sweeping and at + 1 < length)))
            if len(held) < k:
                after.append((0, (held | {at}, at, left, sweeping)))
        if not sweeping:
            after += [(0, (held, step, left, False)) for step in held]
            if at == left - 1:
                after.append((0, (held, -1, left - 1, False)))
        for more, state in after:
            if cost + more < paid.get(state, math.inf):
                paid[state] = cost + more
                heapq.heappush(queue, (cost + more, next(number), state))
    raise AssertionError("no order reverses the loop")


@pytest.mark.parametrize("k", range(1, 4))
def test_no_order_of_actions_is_better_than_the_optimum(k: int):
    for length in range(1, 7):
        assert exhaustive(length, k) == optimum(length, k)


def test_a_reversal_takes_no_more_snapshots_than_it_needs():
    for slots, length in itertools.product(range(1, 6), range(1, 41)):
        done = run(Given(slots, [0]), length)
        assert done.extra == length + reversal(length, slots)
        assert done.snapshots == 1 + snapshots(length, slots)


@pytest.mark.parametrize("known", [True, False])
def test_one_snapshot_and_many_steps(known: bool):
    """Nothing recurses, and the work is that of the actions, not of the steps."""
    length = 100_000
    assert advances(schedule.of(1, length if known else None), length, known) == length + length * (length - 1) // 2


def test_many_steps():
    assert advances(Given(3, [0]), 30_000) == 30_000 + reversal_by_levels(30_000, 3)
    assert len(list(Binomial(10**9).sweep(1000))) == 2000
    assert advances(StoreAll(), 100_000) == 100_000


def reversal_by_levels(length: int, slots: int) -> int:
    """Each step costs its level more than the one before."""
    bounds = [1]
    while bounds[-1] < length:
        bounds.append(math.comb(slots + len(bounds), slots))
    return sum(level * (min(b, length) - a) for level, (a, b) in enumerate(itertools.pairwise(bounds), 1))


def test_periodic_counts():
    for length, every in itertools.product(range(1, 40), range(1, 12)):
        done = run(Periodic(every), length)
        segments = -(-length // every)
        assert done.extra == 2 * length - segments == run(Periodic(every), length, known=False).extra
        assert done.most <= segments + every - 1


def test_store_all_counts():
    done = run(StoreAll(), 20)
    assert (done.extra, done.most, done.snapshots) == (20, 20, 20)


# -- rules


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    size = draw(st.integers(1, 20))
    kinds: list[Callable[[], Schedule]] = [
        lambda: Binomial(size),
        lambda: Online(size),
        lambda: Periodic(size),
        StoreAll,
        lambda: Given(None, draw(steps)),
        lambda: (lambda chosen: Given(len(chosen) + size, chosen))(draw(steps)),
    ]
    steps = st.sets(st.integers(1, 150), max_size=20).map(lambda chosen: [0, *sorted(chosen)])
    return draw(st.sampled_from(kinds))()


@given(schedules(), st.integers(0, 150))
def test_every_schedule_keeps_the_rules(each: Schedule, length: int):
    assert run(each, length).extra == advances(each, length)


@given(schedules().filter(lambda each: not isinstance(each, Binomial)), st.integers(0, 150), st.booleans())
def test_without_the_length_too(each: Schedule, length: int, prompt: bool):
    done = run(each, length, known=False, prompt=prompt)
    if prompt:
        assert done.extra == advances(each, length, known=False)


@given(st.integers(1, 6), st.sets(st.integers(1, 29), max_size=5), st.integers(30, 40))
def test_a_sweep_of_any_kind_is_reversed_at_best(free: int, chosen: set[int], length: int):
    steps = [0, *sorted(chosen)]
    k = len(chosen) + free
    parts = [stop - start for start, stop in itertools.pairwise([*steps, length])]
    best = length + sum(reversal(part, k - i) for i, part in enumerate(parts))
    assert run(Given(k, steps), length).extra == best


class Wrong(Schedule):
    """Binomial(2) for four steps with one thing wrong in it."""

    def __init__(self, spoil: Callable[[list[Any]], Any], in_sweep: bool = False, k: int = 2) -> None:
        self.k, self.spoil, self.in_sweep = k, spoil, in_sweep

    def spoilt(self, actions: Iterator[Any], here: bool) -> Iterator[Any]:
        listed = list(actions)
        if here:
            self.spoil(listed)
        return iter(listed)

    def sweep(self, length: int | None) -> Iterator[Forward]:
        return self.spoilt(Binomial(2).sweep(length), self.in_sweep)

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        return self.spoilt(super().reverse(length, held), not self.in_sweep)


def test_the_right_one_of_the_wrong_ones():
    swept_right = [Snapshot(0), Advance(0, 2), Snapshot(2), Advance(2, 4)]
    assert list(Wrong(lambda _: None).sweep(4)) == swept_right
    assert run(Wrong(lambda _: None), 4).done == [
        *(Restore(2), Advance(2, 3), Backward(3)),
        *last_of(2),
        *(Restore(0), Advance(0, 1), Backward(1)),
        *last_of(0),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Wrong(lambda a: a.pop(0), in_sweep=True), "Advance(start=0, stop=2): comes first"),
        (Wrong(lambda a: a.pop(1), in_sweep=True), "Snapshot(step=2): the working state is at 0"),
        (Wrong(lambda a: a.pop(), in_sweep=True), "the sweep ended at 2"),
        (Wrong(lambda a: a.append(Snapshot(4)), in_sweep=True), "Snapshot(step=4): at the end"),
        (Wrong(lambda a: a.append(Advance(4, 5)), in_sweep=True), "Advance(start=4, stop=5): not a stretch"),
        (Wrong(lambda a: a.insert(2, Advance(2, 2)), in_sweep=True), "Advance(start=2, stop=2): not a stretch"),
        (Wrong(lambda a: a.insert(3, Snapshot(2)), in_sweep=True), "Snapshot(step=2): held already"),
        (Wrong(lambda a: a.insert(3, Restore(0)), in_sweep=True), "Restore(step=0): in the sweep"),
        (Wrong(lambda a: a.insert(2, Drop(1)), in_sweep=True), "Drop(step=1): not held"),
        (Wrong(lambda a: None, k=1), "Snapshot(step=2): 2 held, k is 1"),
        (Wrong(lambda a: a.pop(0)), "Advance(start=2, stop=3): the working state is at None"),
        (Wrong(lambda a: a.pop(1)), "Backward(step=3): the working state is at 2"),
        (Wrong(lambda a: a.pop(2)), "Backward(step=2): step 3 is next"),
        (Wrong(lambda a: a.insert(3, a[2])), "Backward(step=3): the working state is at None"),
        (Wrong(lambda a: a.insert(0, Drop(2))), "Restore(step=2): not held"),
        (Wrong(lambda a: a.pop(4)), "still held: [2]"),
        (Wrong(lambda a: a.pop()), "1 steps are not reversed"),
    ],
)
def test_a_broken_schedule_is_caught(wrong: Schedule, message: str):
    with pytest.raises(Broken) as caught:
        run(wrong, 4)
    assert str(caught.value).startswith(message)


# -- arguments


def test_of():
    assert repr(schedule.of(3, 10)) == "Binomial(k=3)"
    assert repr(schedule.of(3, 0)) == "Binomial(k=3)"
    assert repr(schedule.of(3, None)) == "Online(k=3)"


def test_k():
    assert (Binomial(3).k, Online(3).k, Periodic(3).k, StoreAll().k) == (3, 3, None, None)
    four: Any = np.int64(4)
    assert repr(Online(four)) == "Online(k=4)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Binomial(0), ValueError, "Binomial: k must be at least 1, got 0; the initial carry is the first sn"),
        (lambda: Online(-1), ValueError, "Online: k must be at least 1, got -1; the initial carry is the first snap"),
        (lambda: Periodic(0), ValueError, "Periodic: every must be at least 1, got 0"),
        (lambda: schedule.of(0, None), ValueError, "Online: k must be at least 1, got 0"),
        (lambda: schedule.of(0, 5), ValueError, "Binomial: k must be at least 1, got 0"),
        (lambda: Binomial(True), TypeError, "Binomial: k must be an int, got bool True"),
        (lambda: Online(np.True_), TypeError, "Online: k must be an int, got bool"),  # type: ignore[arg-type]
        (lambda: Online(2.0), TypeError, "Online: k must be an int, got float 2.0"),  # type: ignore[arg-type]
        (lambda: Periodic("2"), TypeError, "Periodic: every must be an int, got str '2'"),  # type: ignore[arg-type]
        (lambda: schedule.of(None, 5), TypeError, "Binomial: k must be an int, got NoneType"),  # type: ignore[arg-type]
        (lambda: Binomial(3).sweep(None), ValueError, "Binomial.sweep: length is None, but this placement depends on "),
        (lambda: Binomial(3).sweep(None), ValueError, "use Online(3), which chooses as the loop goes"),
        (lambda: Binomial(3).sweep(-1), ValueError, "Binomial.sweep: length must be at least 0, got -1"),
        (lambda: Online(3).sweep(True), TypeError, "Online.sweep: length must be an int, got bool True"),
        (lambda: Periodic(3).sweep(-2), ValueError, "Periodic.sweep: length must be at least 0, got -2"),
        (lambda: StoreAll().sweep(-2), ValueError, "StoreAll.sweep: length must be at least 0, got -2"),
        (lambda: Online(3).reverse(-1, []), ValueError, "Online.reverse: length must be at least 0, got -1"),
        (lambda: Online(3).reverse(5, []), ValueError, "Online.reverse: held must contain step 0, where the loop sta"),
        (lambda: StoreAll().reverse(5, [3, 1]), ValueError, "StoreAll.reverse: held must contain step 0"),
        (lambda: Online(3).reverse(5, [0, 6]), ValueError, "held must be steps from 0 to the length 5; got [0, 6]"),
        (lambda: Online(3).reverse(0, [-1]), ValueError, "held must be steps from 0 to the length 0; got [-1]"),
        (lambda: Online(2).reverse(5, [0, 1, 2]), ValueError, "Online.reverse: 3 snapshots are held, but k is 2; swe"),
        (lambda: advances(Online(2), -1), ValueError, "advances: length must be at least 0, got -1"),
        (lambda: advances(3, 5), TypeError, "advances: schedule must be a Schedule, got int 3; schedule.of makes one"),  # type: ignore[arg-type]
        (lambda: Schedule(), TypeError, "abstract"),  # type: ignore[abstract]
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str):
    """At the call, before the first action."""
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
