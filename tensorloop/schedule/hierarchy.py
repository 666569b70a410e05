"""`Hierarchy`: snapshots in memory and in slower places, each where it pays."""

import functools
import math
import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorloop._common.arguments import as_place, describe
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import saved
from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Restore, Snapshot, as_count
from tensorloop.schedule.base import Schedule
from tensorloop.schedule.spans import reverse_segments
from tensorloop.schedule.tables import Costs, SweepPlan, less, plan_of


@saved("place", "slots", "write", "read")
class Level:
    """A place for the snapshots of a `Hierarchy` that is slower than memory: the CPU's memory, or a folder.

        tl.schedule.Level(folder, 200, write=4, read=4)  # 200 MB a carry, 1 GB/s, 50 ms a step: 0.2 s are 4 steps

    Args:
        place: "cpu", or a folder that is there (str or Path).
        slots: int, how many snapshots there may be at once. None (default): any number.
        write: float, the time of one write, in steps of the loop; default 1.
        read: float, the time of one read, in steps of the loop; default 1.

    Raises:
        TypeError: an argument of another type.
        ValueError: slots < 1, a cost that is negative or not finite, no such folder.

    Example:
        >>> tl.schedule.Level("cpu", 64, write=0.2, read=0.2)
        Level('cpu', 64, write=0.2, read=0.2)
    """

    @named("Level")
    def __init__(self, place: str | Path, slots: int | None = None, *, write: float = 1.0, read: float = 1.0) -> None:
        found = as_place(place, "place")
        if found is None:
            raise WrongType('place must be "cpu" or a folder; what stays in memory is the first argument of Hierarchy')
        self.place = found
        self.slots = None if slots is None else as_count(slots, 1, "Level", "slots")
        self.write, self.read = _as_cost(write, "write"), _as_cost(read, "read")

    @classmethod
    def __restored__(cls, place: str | Path, slots: int | None, write: float, read: float) -> "Level":
        made = cls("cpu", slots, write=write, read=read)
        made.place = place if place == "cpu" else Path(place)  # which this machine need not have
        return made

    def __repr__(self) -> str:
        return f"Level({str(self.place)!r}, {self.slots}, write={self.write}, read={self.read})"


def _as_cost(x: Any, what: str) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise WrongType(f"{what} must be a number of steps, got {describe(x)}")
    if not 0 <= (cost := float(x)) < math.inf:
        raise WrongValue(f"{what} must be a number of steps, 0 or more, got {x}")
    return cost


@saved("memory", "levels")
class Hierarchy(Schedule):
    """Keeps some snapshots in memory and the others in slower places, at the least total cost; for known lengths.

        tl.schedule.Hierarchy(8, tl.schedule.Level(folder, 200))  # 8 in memory, 200 on disk

    Args:
        memory: int, the most snapshots in memory.
        levels: one or more `Level`, from fast to slow.

    The cost, which is extra steps, writes and reads, is the least there is for up to 512 steps (Disk-Revolve,
    H-Revolve). Of a longer loop the slower levels take states at multiples of T / 512 alone.
    Cost: when a length is met first, some 20 ms for each level, and for each slot of a level where their number binds;
    the last lengths are remembered. Then amortised O(1) of time an action.

    Raises:
        TypeError: memory is no int, a level is no Level.
        ValueError: memory < 1, no level.

    Source: Aupy, Herrmann, Hovland and Robert 2016, Optimal multistage algorithm for adjoint computation; Herrmann and
    Pallez 2020, H-Revolve.

    Example:
        >>> plan = tl.schedule.Hierarchy(2, tl.schedule.Level("cpu", write=0.5, read=0.5))
        >>> tl.schedule.advances(plan, 30), tl.schedule.advances(tl.schedule.Binomial(2), 30)
        (33, 133)
    """

    def __init__(self, memory: int, *levels: Level) -> None:
        self.memory = as_count(memory, 1, "Hierarchy", "memory")
        if not levels:
            raise ValueError(f"Hierarchy: give at least one Level; in memory alone it is Binomial({memory})")
        for i, level in enumerate(levels):
            if not isinstance(level, Level):
                raise TypeError(f"Hierarchy: levels[{i}] must be a Level, got {describe(level)}")
        self.levels = levels
        slots = [level.slots for level in levels]
        self.k = None if None in slots else self.memory + sum(n for n in slots if n is not None)

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; it must be known, as the placement depends on it.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is None or below 0).
        """
        if length is None:
            raise ValueError(
                "Hierarchy.sweep: length is None, but this placement depends on it; use Online(k) or Periodic(every), "
                "or a schedule of your own whose Snapshots have a place"
            )
        return _sweep(self._plan(length, "sweep"), self._places)

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        """Yields the actions that reverse what `sweep(length)` left.

        Args:
            length: int, the number of steps.
            held: sequence of int, the steps of the snapshots of `sweep(length)`, in any order.

        Returns:
            An iterator of `tl.schedule.Action`.

        Raises: TypeError, ValueError (`held` are not the snapshots of that sweep).
        """
        plan = self._plan(length, "reverse")
        if sorted(held) != plan.steps():
            raise ValueError(
                f"Hierarchy.reverse: held must be the snapshots of sweep({length}), {plan.steps()}; got {sorted(held)}"
            )
        return _reverse(plan, self._places, self.memory)

    @property
    def _places(self) -> list[Any]:
        return [level.place for level in self.levels]

    def _plan(self, length: int, method: str) -> SweepPlan:
        length = as_count(length, 0, f"Hierarchy.{method}", "length")
        return _plan(self.memory, tuple(Costs(x.slots, x.write, x.read) for x in self.levels), length)

    @classmethod
    def __restored__(cls, memory: int, levels: Sequence[Level]) -> "Hierarchy":
        return cls(memory, *levels)

    def __repr__(self) -> str:
        return f"Hierarchy({', '.join(map(repr, (self.memory, *self.levels)))})"


@functools.lru_cache(maxsize=16)
def _plan(memory: int, levels: tuple[Costs, ...], length: int) -> SweepPlan:
    """The best plan; where it needs no more slots than there are, that for any number, which is found at once."""
    plan = plan_of(memory, [costs._replace(slots=None) for costs in levels], length)
    return plan if _fits(plan, memory, levels) else plan_of(memory, levels, length)


def _fits(plan: SweepPlan, memory: int, levels: tuple[Costs, ...]) -> bool:
    numbers_of = range(len(levels))
    held: dict[int, Any] = {}
    used = Counter[Any]()
    for actions in (_sweep(plan, numbers_of), _reverse(plan, numbers_of, memory)):
        for action in actions:
            if isinstance(action, Snapshot):
                held[action.step] = action.place
                used[action.place] += 1
                level: Any = action.place
                if level is not None and used[level] > (levels[level].slots or math.inf):
                    return False
            elif isinstance(action, Drop):
                used[held.pop(action.step)] -= 1
    return True


def _sweep(plan: SweepPlan, places: Sequence[Any]) -> Iterator[Forward]:
    for part in plan.parts:
        start, end = plan.at(part.start), plan.at(part.start + part.blocks)
        yield Snapshot(start, places[part.level - 1])
        yield Advance(start, end)
    for start, length in zip(plan.steps(slower=False), plan.segments, strict=True):
        yield Snapshot(start)
        yield Advance(start, start + length)


def _reverse(plan: SweepPlan, places: Sequence[Any], memory: int) -> Iterator[Action]:
    yield from reverse_segments(plan.length, plan.steps(slower=False), memory)
    stack = [*plan.parts]
    while stack:
        part = stack.pop()
        start = plan.at(part.start)
        if part.level == 0:
            yield from _reverse_in_memory(start, plan.at(part.start + part.blocks), memory)
            continue
        table = plan.tables[part.level - 1]
        if not part.held:
            if table.down[part.blocks] <= table.written(part.blocks, part.slots):
                stack.append(plan.lowered(part))
            else:
                yield Snapshot(start, places[part.level - 1])
                stack.append(part._replace(held=True, slots=less(part.slots)))
            continue
        if not part.here:
            yield Restore(start)
        if (middle := table.middle(part.blocks, part.slots)) is None:
            yield Drop(start)
            stack.append(plan.lowered(part))
        else:
            yield Advance(start, plan.at(part.start + middle))
            stack.append(part._replace(blocks=middle, here=False))
            rest = part._replace(start=part.start + middle, blocks=part.blocks - middle)
            stack.append(rest._replace(held=False, here=True))


def _reverse_in_memory(start: int, end: int, slots: int) -> Iterator[Action]:
    """From the working state at `start`, which is held nowhere, with all slots in memory free."""
    if end - start == 1:
        yield Backward(start)
    else:
        yield Snapshot(start)
        yield from reverse_segments(end, [start], slots, start)
