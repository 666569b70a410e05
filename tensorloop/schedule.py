"""Checkpoint schedules: which states of a loop to keep, and which steps to run again, to reverse it with few snapshots.

A backward pass needs the carries of T steps in reverse order. A schedule keeps at most k of them and has the others
computed again. It is an iterator of *actions* on step numbers and knows nothing of tensors: `sweep` is the forward
pass, `reverse` the backward pass, and somebody else carries them out.

- State t is the carry before step t; T is the state after the last step. A *snapshot* is a state that is kept.
- The *working state* is the one state that steps act on. It is not counted in k; the snapshot of step 0 is.
- The *extra steps* of a schedule are the steps of its Advances, the T of the sweep included. The run of each step just
  before its own reversal is not counted, as every schedule has T of those.
- With k snapshots a segment of up to C(k + r, k) steps is reversed such that no step is advanced over more than r
  times. r is the *level* below: everything here keeps the levels of all segments as equal as can be.

Sources: Griewank and Walther 2000 (Algorithm 799: Revolve) for the optimum where the length is known; Wang, Moin and
Iaccarino 2009 (Minimal repetition dynamic checkpointing) and Stumm and Walther 2010 (New algorithms for optimal online
checkpointing) for lengths that are not. `docs/schedules.md` has the figures.
"""

import abc
import functools
import math
import numbers
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advance:
    """Run steps start..stop-1 from the working state, which is at `start`; it is at `stop` afterwards."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the working state, which is at `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Make the snapshot of `step` the working state. The snapshot stays held."""

    step: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the snapshot of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run `step` with residuals from the working state, which is at `step`, and reverse it. That state is then lost."""

    step: int


Forward = Advance | Snapshot | Drop
Action = Forward | Restore | Backward


class Schedule(abc.ABC):
    """A way to reverse a loop; subclasses say in `sweep` which states the forward pass keeps.

    k: the most snapshots held at once, or None where nothing bounds them. Set it in the class or in `__init__`.
    `reverse` may be replaced too; as it is, it is the best there is for the snapshots that the sweep left.
    """

    k: int | None = None

    @abc.abstractmethod
    def sweep(self, length: int | None) -> Iterator[Forward]:
        """The actions of the forward pass over `length` steps, or without end where `length` is None.

        The first action is Snapshot(0). With a known length the Advances cover 0..length exactly and no snapshot is
        taken at `length`; a loop of length 0 has no actions. With None, whoever carries the actions out stops when the
        loop ends, be it in the middle of an Advance.
        """

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        """The actions that reverse steps length-1 .. 0, given the snapshots `held` after the sweep, in any order.

        As few extra steps as `held` and k allow (Revolve's optimum in each segment between two snapshots), and no more
        Snapshots than those need. Where k is None, each state of a segment is kept. Every snapshot is dropped by the
        end. A snapshot at `length` is dropped first: there is no such step.
        Cost: amortised O(1) of time an action; bytes for k numbers, or for the longest segment where k is None.
        Raises: TypeError, ValueError (`held` lacks step 0, reaches beyond `length`, or is more than k).
        """
        name = f"{type(self).__name__}.reverse"
        length = _whole(length, 0, name, "length")
        snapshots = sorted(set(held))
        if length and snapshots[:1] != [0]:
            raise ValueError(f"{name}: held must contain step 0, where the loop starts again; got {snapshots}")
        if snapshots and not 0 <= snapshots[0] <= snapshots[-1] <= length:
            raise ValueError(f"{name}: held must be steps from 0 to the length {length}; got {snapshots}")
        if self.k is not None and len(snapshots) > self.k:
            raise ValueError(f"{name}: {len(snapshots)} snapshots are held, but k is {self.k}; sweep() keeps too many")
        return _reverse(length, snapshots, self.k)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Binomial(Schedule):
    """The fewest extra steps that k snapshots allow, for loops of known length (Griewank and Walther 2000).

    Extra steps: T for T <= k; 2T - k for T < (k+1)(k+2)/2; about r T with C(k + r, k) = T beyond.
    Cost: O(k) of time for the sweep.
    Raises: TypeError, ValueError (k < 1; a length that is None).
    """

    def __init__(self, k: int) -> None:
        self.k = _whole(k, 1, "Binomial", "k")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """The forward pass over `length` steps, which must be known."""
        assert self.k is not None
        if length is None:
            raise ValueError(
                f"Binomial.sweep: length is None, but this placement depends on it; use Online({self.k}), "
                "which chooses as the loop goes"
            )
        return _in_segments(_binomial_segments(_whole(length, 0, "Binomial.sweep", "length"), self.k))


class Online(Schedule):
    """k snapshots for loops of any length, placed as the loop goes (after Wang, Moin and Iaccarino 2009).

    Extra steps: those of `Binomial` for T < (k+1)(k+2)/2, and always for k = 1; beyond, within a few per cent
    (`docs/schedules.md`), if the sweep is asked for no further action once the loop has ended.
    Cost: amortised about 1 us a step or less where T is large beside k; at most O(k log k) at one action.
    Raises: TypeError, ValueError (k < 1).
    """

    def __init__(self, k: int) -> None:
        self.k = _whole(k, 1, "Online", "k")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """The forward pass; `length` decides where it stops, not where snapshots are."""
        assert self.k is not None
        return _online(self.k, sys.maxsize if length is None else _whole(length, 0, "Online.sweep", "length"))


class Periodic(Schedule):
    """A snapshot every `every` steps; in reverse, all states of one such segment at a time.

    Extra steps: 2T - ceil(T / every), as no step is advanced over more than twice.
    Snapshots: at most ceil(T / every) + every - 1, fewest with `every` near the root of T.
    Raises: TypeError, ValueError (every < 1).
    """

    def __init__(self, every: int) -> None:
        self.every = _whole(every, 1, "Periodic", "every")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """The forward pass, of any length."""
        return _every(self.every, sys.maxsize if length is None else _whole(length, 0, "Periodic.sweep", "length"))


class StoreAll(Schedule):
    """A snapshot of every state: T snapshots, T extra steps, nothing run again but for its own reversal."""

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """The forward pass, of any length."""
        return _every(1, sys.maxsize if length is None else _whole(length, 0, "StoreAll.sweep", "length"))


def of(k: int, length: int | None) -> Schedule:
    """The schedule for at most k snapshots: `Binomial` where the length is known, `Online` where it is None.

    Raises: TypeError, ValueError (k < 1).
    """
    return Online(k) if length is None else Binomial(k)


def advances(schedule: Schedule, length: int, known: bool = True) -> int:
    """The extra steps of a schedule for `length` steps, the sweep included: counted by going through its actions.

    With `known=False` the sweep is not told the length and is asked for no further action once it has got there.
    Cost: O(1) of time an action. Raises: TypeError, ValueError (length < 0, and what the schedule raises).
    """
    length = _whole(length, 0, "advances", "length")
    at, total, held = 0, 0, set[int]()
    for action in schedule.sweep(length if known else None) if length else ():
        match action:
            case Advance(start, stop):
                at = min(stop, length)
                total += at - start
            case Snapshot(step):
                held.add(step)
            case Drop(step):
                held.remove(step)
        if at == length:
            break
    again = (action.stop - action.start for action in schedule.reverse(length, [*held]) if isinstance(action, Advance))
    return total + sum(again)


def _whole(x: Any, least: int, name: str, what: str) -> int:
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name}: {what} must be an int, got {type(x).__name__} {x!r}")
    if x < least:
        hint = "; the initial carry is the first snapshot" if what == "k" else ""
        raise ValueError(f"{name}: {what} must be at least {least}, got {x}{hint}")
    return int(x)


# -- segments


def _longest(slots: int, level: int) -> int:
    """The longest segment that is reversed with `slots` snapshots, its own start included, within this level."""
    return math.comb(slots + level, slots)


def _level(length: int, slots: int) -> tuple[int, int]:
    """How often, at most, the steps of a segment are advanced over; and the longest segment of that level."""
    if slots == 1:
        return length - 1, length
    level, longest = 0, 1
    while longest < length:
        level += 1
        longest = longest * (slots + level) // level
    return level, longest


@functools.lru_cache(maxsize=65536)
def _cost(length: int, slots: int) -> int:
    """The fewest steps to advance over in reversing a segment: level * length - C(slots + level, slots + 1)."""
    level, longest = _level(length, slots)
    return level * length - longest * level // (slots + 1)


def _split(length: int, slots: int | None) -> int:
    """How far into a segment of two steps or more its next snapshot is, for the fewest steps, then snapshots.

    Any middle with both parts within their levels gives the fewest steps. Of those, this one leaves to the later part
    all it can take in without more snapshots; compared with exhaustive search up to 300 steps and 8 slots.
    """
    if slots is None or slots >= length - 1:
        return 1
    if slots == 1:
        return length - 1
    level, _ = _level(length, slots)
    later = _longest(slots - 1, level - 1) + _longest(slots - 2, level - 1)
    return min(max(length - later, _longest(slots, level - 2)), _longest(slots, level - 1))


def _reverse(length: int, held: list[int], k: int | None) -> Iterator[Action]:
    """`held`, in order, is a stack: what is above its top is reversed already, `end` is where that begins."""
    if held and held[-1] == length:
        yield Drop(held.pop())
    end, at = length, None
    while held:
        start = held[-1]
        if at != start:
            yield Restore(start)
        if end - start == 1:
            yield Drop(held.pop())
            middle = start
        else:
            middle = start + _split(end - start, None if k is None else k - len(held) + 1)
            yield Advance(start, middle)
        at = middle
        if end - middle == 1:
            yield Backward(middle)
            end, at = middle, None
        else:
            held.append(middle)
            yield Snapshot(middle)


def _in_segments(lengths: list[int]) -> Iterator[Forward]:
    start = 0
    for length in lengths:
        yield Snapshot(start)
        yield Advance(start, start + length)
        start += length


def _every(every: int, end: int) -> Iterator[Forward]:
    for start in range(0, end, every):
        yield Snapshot(start)
        yield Advance(start, min(start + every, end))


def _binomial_segments(length: int, k: int) -> list[int]:
    """The lengths of the segments between the snapshots of the sweep, the first one first.

    The segment that begins at the j-th snapshot has k - j slots to be reversed with. One step more costs a segment as
    much as the level it then has, so the sum is least when all are as long as one level allows or on the way to the
    next. The way is shared in proportion: any sharing takes as many steps, this one hardly more snapshots than need be.
    """
    k = min(k, length)
    level = _level(length + 1, k)[0] - 1 if k else 0  # sum of _longest(1..k, level) = C(k + level + 1, k) - 1
    lengths = [_longest(slots, level - 1) if level else 0 for slots in range(1, k + 1)]
    growth = [_longest(slots, level) - n for slots, n in enumerate(lengths, 1)]
    rest, room = length - sum(lengths), sum(growth)
    for i, most in enumerate(growth):
        more = -(-rest * most // room)
        lengths[i] += more
        rest, room = rest - more, room - most
    return lengths[::-1]


# -- placement as the loop goes


def _online(k: int, end: int) -> Iterator[Forward]:
    if end == 0:
        return
    yield Snapshot(0)
    placement = _Placement(k)
    stop = 0
    while stop < end:
        start, stop = stop, min(placement.due(), end)
        yield Advance(start, stop)
        if stop < end:
            yield from map(Drop, placement.make_room(stop))
            yield Snapshot(stop)


class _Placement:
    """Where the snapshots of an online sweep are, knowing how far the loop has come and nothing of its length.

    The level is the one that the optimum for the present length has. While there are free slots, the last segment
    grows to what its slots can reverse within the level; then it gets a snapshot. When no slot is free, snapshots
    are dropped in the order of a *plan*:
    - at level 1 any two neighbours that fit into one segment of level 1 cost one step, the least there is. Merging
      from the front fills the segments exactly, if no snapshot steps over a boundary between full ones;
    - above, the merges that cost least if the loop ended now. Pricing all is O(k), so one pricing serves k / 8 drops,
      and once the loop is long, several slots are freed at a time: the last segment then grows for longer.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.held = [0]
        self.plan: list[int] = []  # snapshots to drop, the last one first
        self.level = 1
        self.limit = math.comb(k + 2, k) - 1  # the longest loop that the optimum reverses within the level
        self.boundary, self.room = k + 1, k  # next boundary between full segments of level 1, steps to the one after

    def due(self) -> int:
        """The step at which to take the next snapshot, if the loop gets there."""
        start = self.held[-1]
        if self.k == 1:
            return sys.maxsize
        if start < self.k - 1:
            return start + 1
        while start >= self.limit:
            self.level += 1
            self.limit = math.comb(self.k + self.level + 1, self.k) - 1
        reach = _longest(self.k - len(self.held) + 1, self.level)
        if self.level > 1:
            # Beyond its level a step in the last segment costs one more each; a merge costs more than that.
            return start + reach * 3 // 2
        while self.boundary <= start:
            self.boundary += self.room
            self.room -= 1
        return min(start + reach, self.boundary)

    def make_room(self, stop: int) -> list[int]:
        """Holds `stop`, and gives up what it returns for it."""
        dropped = []
        if len(self.held) == self.k:
            spare = self._spare(stop)
            while len(self.held) > self.k - spare:
                self.plan = self.plan or self._fitting(stop) or self._cheapest(stop)
                dropped.append(self.plan.pop())
                del self.held[bisect_left(self.held, dropped[-1])]
        self.held.append(stop)
        return dropped

    def _spare(self, stop: int) -> int:
        """How many slots to free at once.

        Slots that stand free could hold _longest(slots, level) - 1 steps a level lower, so leaving them free costs as
        many extra steps: below 1/500 of the steps so far.
        """
        spare = 1
        while self.level > 1 and spare < self.k // 2 and _longest(spare + 1, self.level) - 1 <= stop // 500:
            spare += 1
        return spare

    def _fitting(self, end: int) -> list[int]:
        """At level 1, the snapshots whose drop leaves all segments within the level."""
        if self.level > 1:
            return []
        start, room, plan = 0, self.k + 1, []
        for step, after in zip(self.held[1:], [*self.held[2:], end], strict=True):
            if after - start <= room:
                plan.append(step)
            else:
                start, room = step, room - 1
        return plan[::-1]

    def _cheapest(self, end: int) -> list[int]:
        """The k / 8 cheapest snapshots to drop, no two of them neighbours, as each price is that of one drop alone."""
        prices = sorted(zip(self._prices(end), range(len(self.held) - 1, 0, -1), strict=True))
        chosen: list[int] = []
        taken = set[int]()
        for _, i in prices:
            if taken.isdisjoint((i - 1, i + 1)):
                taken.add(i)
                chosen.append(self.held[i])
                if len(chosen) >= self.k // 8:
                    break
        return chosen[::-1]

    def _prices(self, end: int) -> Iterator[int]:
        """What the reversal costs more without each snapshot, the last one first, if the loop ends at `end`.

        A drop merges two segments and gives every later segment one slot more: `saved` is what that is worth.
        """
        bounds = [*self.held, end]
        slots, saved = self.k - len(self.held) + 1, 0
        here = _cost(end - self.held[-1], slots)
        for i in range(len(self.held) - 1, 0, -1):
            before, step, after = bounds[i - 1 : i + 2]
            earlier = _cost(step - before, slots + 1)
            yield _cost(after - before, slots + 1) - earlier - here - saved
            saved += here - _cost(after - step, slots + 1)
            here, slots = earlier, slots + 1
