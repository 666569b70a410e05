"""Schedules that say where: the best cost over several levels, which loops carry them out, what is refused."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import schedule
from tensorloop.loop.checkpoint.snapshots import Snapshots
from tensorloop.memory import collector_off, saved
from tensorloop.schedule import (
    Advance,
    Binomial,
    Drop,
    Forward,
    Hierarchy,
    Level,
    Restore,
    Schedule,
    Snapshot,
    advances,
)
from tests.support.schedule_checks import Machine, reversal

Costs = tuple[tuple[int | None, float, float], ...]  # slots, write, read, memory first


def costs_of(plan: Hierarchy) -> Costs:
    return (plan.memory, 0.0, 0.0), *((x.slots, x.write, x.read) for x in plan.levels)


def cost(plan: Hierarchy, length: int) -> float:
    """Extra steps, writes and reads of a schedule, its rules checked and its slots counted."""
    by_place = {None: 0, **{x.place: i for i, x in enumerate(plan.levels, 1)}}
    costs, machine, total = costs_of(plan), Machine(length, plan.k), 0.0
    level: dict[int, int] = {}
    used = Counter[int]()
    for phase in (lambda: plan.sweep(length), lambda: plan.reverse(length, sorted(machine.held))):
        for action in phase():
            machine.do(action)
            if isinstance(action, Snapshot):
                here = level[action.step] = by_place[action.place]
                used[here] += 1
                assert used[here] <= (costs[here][0] or math.inf), f"{action}: no slot is free"
                total += costs[here][1]
            elif isinstance(action, Restore):
                total += costs[level[action.step]][2]
            elif isinstance(action, Drop):
                used[level.pop(action.step)] -= 1
        assert machine.at in (length, None)
        machine.at = None
    assert machine.left == 0
    assert not machine.held
    return total + machine.extra


# -- the optimum, by definition


@cache
def best(costs: Costs, level: int, n: int, free: int | None) -> float:
    """To reverse n steps from the working state, held nowhere, with free slots at a level and all at faster ones."""
    if n == 1:
        return 0
    if level < 0:
        return math.inf
    down = best(costs, level - 1, n, costs[level - 1][0])
    return down if free == 0 else min(down, costs[level][1] + best_held(costs, level, n, free and free - 1))


@cache
def best_held(costs: Costs, level: int, n: int, free: int | None) -> float:
    """The same where that state is held at this level."""
    if n == 1:
        return 0
    read = costs[level][2]
    splits = (m + best(costs, level, n - m, free) + read + best_held(costs, level, m, free) for m in range(1, n))
    return min(best(costs, level - 1, n, costs[level - 1][0]), min(splits))


@cache
def best_sweep(costs: Costs, level: int, n: int, free: int | None) -> float:
    """The same where all n steps are first run to the end."""
    if level < 0:
        return math.inf
    down = best_sweep(costs, level - 1, n, costs[level - 1][0])
    if free == 0:
        return down
    rest, (_, write, read) = free and free - 1, costs[level]
    splits = (m + best_sweep(costs, level, n - m, rest) + read + best_held(costs, level, m, rest) for m in range(1, n))
    return min(down, write + min([n + read + best_held(costs, level, n, rest), *splits]))


def optimum(plan: Hierarchy, length: int) -> float:
    costs = costs_of(plan)
    return best_sweep(costs, len(costs) - 1, length, costs[-1][0])


State = tuple[frozenset[tuple[int, int]], int, int, bool]  # held (step, level), working state, steps left, sweeping


def exhaustive(costs: Costs, length: int) -> float:
    """The least cost over all orders of actions whatever: Dijkstra's search."""
    start: State = (frozenset(), 0, length, True)
    paid: dict[State, float] = {start: 0}
    queue: list[tuple[float, int, State]] = [(0, 0, start)]
    number = itertools.count(1)
    while queue:
        so_far, _, (held, at, left, sweeping) = heapq.heappop(queue)
        if left == 0:
            return so_far
        if so_far > paid[held, at, left, sweeping]:
            continue
        after: list[tuple[float, State]] = [(0, (held - {x}, at, left, sweeping)) for x in held]
        if 0 <= at < length:
            after.append((1, (held, at + 1, left, sweeping and at + 1 < length)))
            for level, (slots, write, _) in enumerate(costs):
                if sum(x[1] == level for x in held) < (math.inf if slots is None else slots):
                    after.append((write, (held | {(at, level)}, at, left, sweeping)))
        if not sweeping:
            after += [(costs[level][2], (held, step, left, False)) for step, level in held]
            if at == left - 1:
                after.append((0, (held, -1, left - 1, False)))
        for more, state in after:
            if so_far + more < paid.get(state, math.inf):
                paid[state] = so_far + more
                heapq.heappush(queue, (so_far + more, next(number), state))
    raise AssertionError("no order reverses the loop")


SMALL: list[tuple[int, list[tuple[int | None, float, float]]]] = [
    (1, [(1, 0.5, 0.5)]),
    (1, [(2, 0.5, 0.25)]),
    (1, [(None, 2.0, 1.0)]),
    (2, [(1, 0.25, 1.25)]),
    (1, [(2, 0.0, 2.0)]),
    (2, [(2, 3.0, 0.0)]),
    (1, [(1, 0.25, 0.25), (1, 1.0, 1.0)]),
]


def hierarchy(folder: Path, memory: int, levels: list[tuple[int | None, float, float]]) -> Hierarchy:
    places = ["cpu", folder][-len(levels) :]
    made = [Level(p, slots, write=w, read=r) for p, (slots, w, r) in zip(places, levels, strict=True)]
    return Hierarchy(memory, *made)


@pytest.mark.parametrize(("memory", "levels"), SMALL)
def test_no_order_of_actions_is_better(memory: int, levels: Any, tmp_path: Path) -> None:
    plan = hierarchy(tmp_path, memory, levels)
    for length in range(1, 6):
        assert exhaustive(costs_of(plan), length) == optimum(plan, length) == cost(plan, length)


def test_the_optimum_at_longer_lengths(tmp_path: Path) -> None:
    drawn = random.Random(0)
    prices = [0.0, 0.25, 1.0, 2.5, 7.0]
    for _ in range(12):
        levels = [
            (drawn.choice([None, 1, 2, 3]), drawn.choice(prices), drawn.choice(prices))
            for _ in range(drawn.choice([1, 1, 2]))
        ]
        plan = hierarchy(tmp_path, drawn.randint(1, 4), levels)
        for length in (1, 2, 3, 7, 16, 33):
            assert cost(plan, length) == pytest.approx(optimum(plan, length)), (plan, length)


def test_levels_that_cost_nothing_are_more_memory(tmp_path: Path) -> None:
    for memory, slots in ((1, 1), (3, 4), (2, 9)):
        free = hierarchy(tmp_path, memory, [(slots, 0.0, 0.0)])
        for length in (1, 5, 30, 77):
            assert advances(free, length) == advances(Binomial(memory + slots), length)


def test_levels_that_cost_too_much_are_left_alone(tmp_path: Path) -> None:
    plan = hierarchy(tmp_path, 3, [(None, 1e6, 1e6)])
    for length in (1, 7, 40):
        assert [*plan.sweep(length)] == [*Binomial(3).sweep(length)]
        assert cost(plan, length) == advances(Binomial(3), length)


def test_disk_revolve_by_its_published_recurrences(tmp_path: Path) -> None:
    """Any number of slots on a disk: Opt_1 needs no further writes in what was read (Aupy et al., theorem 1).

    Opt_1(l) = min(Opt_0(l), min_j j + Opt_0(l - j) + r + Opt_1(j)), with Revolve's Opt_0; the sweep is a sum of such.
    """
    slots, write, read = 3, 2.5, 1.5

    def opt_0(n: int) -> float:
        return reversal(n, slots)

    @cache
    def opt_1(n: int) -> float:
        return min([opt_0(n), *(m + opt_0(n - m) + read + opt_1(m) for m in range(1, n))])

    @cache
    def opt(n: int) -> float:
        in_memory = float(advances(Binomial(slots), n))
        return min(
            [in_memory, write + n + read + opt_1(n), *(write + m + opt(n - m) + read + opt_1(m) for m in range(1, n))]
        )

    plan = hierarchy(tmp_path, slots, [(None, write, read)])
    for n in (1, 4, 15, 40, 90):
        assert cost(plan, n) == opt(n)


def test_a_trace() -> None:
    plan = Hierarchy(1, Level("cpu", 1, write=0.5, read=0.5))
    assert [*plan.sweep(4)] == [Snapshot(0, "cpu"), Advance(0, 2), Snapshot(2), Advance(2, 4)]
    assert advances(plan, 4) == advances(Binomial(2), 4) == 6


@pytest.mark.parametrize("length", [513, 1000, 1024, 3001])
def test_long_loops_are_counted_in_blocks(length: int) -> None:
    plan = Hierarchy(4, Level("cpu", write=2, read=2))
    assert cost(plan, length) < 0.7 * advances(Binomial(4), length)
    few = Hierarchy(4, Level("cpu", 3, write=2, read=2))
    assert cost(few, length) < advances(Binomial(4), length)


def test_no_steps_and_the_number_of_slots() -> None:
    plan = Hierarchy(2, Level("cpu", 3))
    assert ([*plan.sweep(0)], [*plan.reverse(0, [])], plan.k) == ([], [], 5)
    assert Hierarchy(2, Level("cpu")).k is None


# -- loops


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Files go with the last reference, not when a collector runs."""
    with collector_off():
        yield


ANGLE = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64, requires_grad=True)
CARRY = 2 * 8


def turned(checkpoints: Any, steps: int = 40, compile: Any = False, seen: Callable[[], None] = lambda: None) -> Tensor:
    def body(i: int, h: Tensor) -> Tensor:
        seen()
        return torch.sin(h @ ANGLE) + h.roll(1)

    start = torch.ones(1, 2, dtype=torch.float64)
    return tl.fori_loop(0, steps, body, start, checkpoints=checkpoints, compile=compile).sum()


def test_eight_in_memory_and_the_rest_on_disk(tmp_path: Path) -> None:
    plan = Hierarchy(3, Level(tmp_path, 6, write=0.5, read=0.5))
    expected = torch.autograd.grad(turned(None), ANGLE)
    files: list[int] = []

    @tl.loop.pure
    def look() -> None:
        files.append(len(list(tmp_path.rglob("*.pt"))))

    loss = turned(plan, seen=look)
    swept = [x for x in plan.sweep(40) if isinstance(x, Snapshot)]
    on_disk = sum(x.place == tmp_path for x in swept)
    assert files[-1] == on_disk > 0
    assert saved(lambda: turned(plan)).bytes <= (3 + 1) * CARRY  # and init
    torch.testing.assert_close(torch.autograd.grad(loss, ANGLE, retain_graph=True), expected)
    assert len(files) == 40 + advances(plan, 40)
    assert max(files) <= 6
    torch.testing.assert_close(torch.autograd.grad(loss, ANGLE), expected)
    del loss
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("steps", [1, 2, 17, 40])
def test_compiled_loops_too(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorloop.loop.compiled.run import blocks

    monkeypatch.setattr(blocks, "MOST_STEPS", 3)
    for plan in (Hierarchy(2, Level("cpu", 3, write=0.5, read=0.5)), Hierarchy(1, Level("cpu", 2), Level(tmp_path))):
        found = torch.autograd.grad(turned(plan, steps, "strict"), ANGLE)
        torch.testing.assert_close(found, torch.autograd.grad(turned(None, steps), ANGLE))
    assert not [*tmp_path.rglob("*.pt")]


def test_the_first_carry_stays_where_the_sweep_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another backward: what a reversal moves to memory goes when it has ended."""
    begun: list[Snapshots] = []
    begin = Snapshots.__init__

    def watched(self: Snapshots, *args: Any) -> None:
        begin(self, *args)
        begun.append(self)

    monkeypatch.setattr(Snapshots, "__init__", watched)
    plan = Hierarchy(4, Level(tmp_path, write=0.1, read=4))
    assert [Drop(0), Snapshot(0)] in map(list, itertools.pairwise(plan.reverse(40, sorted(swept_steps(plan, 40)))))
    loss = turned(plan)
    first = torch.autograd.grad(loss, ANGLE, retain_graph=True)
    (snapshots,) = begun
    assert snapshots.by_step == {}
    assert [x.name for x in tmp_path.rglob("*.pt")] == ["1.pt"]
    assert snapshots.initial.stored.path is not None
    torch.testing.assert_close(torch.autograd.grad(loss, ANGLE), first)


def swept_steps(plan: Schedule, length: int) -> list[int]:
    return [x.step for x in plan.sweep(length) if isinstance(x, Snapshot)]


class Everywhere(Schedule):
    """Somebody's own, for any length: every state in another place."""

    def __init__(self, places: list[Any]) -> None:
        self.places = places

    def sweep(self, length: int | None) -> Iterator[Forward]:
        for step in itertools.count() if length is None else range(length):
            yield Snapshot(step, self.places[step % len(self.places)])
            yield Advance(step, step + 1)


@pytest.mark.parametrize("compile", [False, "strict"])
def test_a_schedule_of_the_users_says_where(compile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorloop.loop.compiled.run import blocks

    monkeypatch.setattr(blocks, "MOST_STEPS", 1)
    (tmp_path / "other").mkdir()
    plan = Everywhere([None, "cpu", tmp_path, str(tmp_path / "other")])
    start = torch.ones(1, 2, dtype=torch.float64), torch.zeros((), dtype=torch.int64)

    def run(checkpoints: Any) -> Tensor:
        last, _ = tl.while_loop(
            lambda c: c[1] < 9,
            lambda c: (torch.sin(c[0] @ ANGLE) + c[0].roll(1), c[1] + 1),
            start,
            checkpoints=checkpoints,
            compile=compile,
        )
        return last.sum()

    loss = run(plan)
    counts = [len([*(tmp_path / below).glob("tensorloop-*/*.pt")]) for below in (".", "other")]
    assert counts == [2, 2]
    torch.testing.assert_close(torch.autograd.grad(loss, ANGLE), torch.autograd.grad(run(None), ANGLE))
    del loss
    assert [x.name for x in tmp_path.iterdir()] == ["other"]


def test_a_folder_that_is_gone_or_was_never_there(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    plan = Hierarchy(1, Level(gone, write=0, read=0))
    gone.rmdir()
    with pytest.raises(OSError, match="gone"):
        turned(plan)


# -- refusals


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Hierarchy(0, Level("cpu")), ValueError, "Hierarchy: memory must be at least 1, got 0"),
        (lambda: Hierarchy(2.0, Level("cpu")), TypeError, "Hierarchy: memory must be an int"),  # pyright: ignore
        (lambda: Hierarchy(8), ValueError, "Hierarchy: give at least one Level; in memory alone it is Binomial(8)"),
        (lambda: Hierarchy(8, "cpu"), TypeError, "levels[0] must be a Level, got str 'cpu'"),  # pyright: ignore
        (lambda: Level(None), TypeError, "Level: place must be"),  # pyright: ignore
        (lambda: Level("no_such_folder"), ValueError, "Level: place is 'no_such_folder', which is no folder"),
        (lambda: Level(3), TypeError, 'Level: place must be "cpu" or a folder, got int 3'),  # pyright: ignore
        (lambda: Level("cpu", 0), ValueError, "Level: slots must be at least 1, got 0"),
        (lambda: Level("cpu", write=-1), ValueError, "Level: write must be a number of steps, 0 or more, got -1"),
        (lambda: Level("cpu", read=math.nan), ValueError, "Level: read must be a number of steps, 0 or more, got nan"),
        (lambda: Level("cpu", read="1"), TypeError, "Level: read must be a number of steps, got str"),  # pyright: ignore
        (lambda: Hierarchy(2, Level("cpu")).sweep(None), ValueError, "Hierarchy.sweep: length is None, but"),
        (lambda: Hierarchy(2, Level("cpu")).reverse(9, [0]), ValueError, "held must be the snapshots of sweep(9)"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_how_they_look() -> None:
    assert repr(Hierarchy(8, Level("cpu", 200))) == "Hierarchy(8, Level('cpu', 200, write=1.0, read=1.0))"
    assert repr(Snapshot(3)) == "Snapshot(step=3)"
    assert repr(Snapshot(3, Path("d"))) == "Snapshot(step=3, place='d')"
    assert schedule.Snapshot(3) == Snapshot(3, None) != Snapshot(3, "cpu")
