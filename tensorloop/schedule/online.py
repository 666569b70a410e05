"""`Online`: placement as the loop goes, for lengths that nobody knows."""

import math
import sys
from bisect import bisect_left
from collections.abc import Iterator

from tensorloop._common.saved import saved
from tensorloop.schedule.actions import Advance, Drop, Forward, Snapshot, as_count
from tensorloop.schedule.base import Schedule
from tensorloop.schedule.spans import cost, longest


@saved("k")
class Online(Schedule):
    """Places k snapshots as the loop goes, for loops of any length, known or not.

    Args:
        k: int, the most snapshots held at once, that of step 0 included.

    Extra steps: those of `Binomial` for T < (k+1)(k+2)/2, and always for k = 1; beyond, within a few per cent
    (`docs/schedules.md`), if the sweep is asked for no further action once the loop has ended.
    Cost: amortised about 1 us a step or less where T is large beside k; at most O(k log k) at one action.

    Raises:
        TypeError: k is no int.
        ValueError: k < 1.

    Source: after Wang, Moin and Iaccarino 2009, Minimal repetition dynamic checkpointing.

    Example:
        >>> tl.schedule.advances(tl.schedule.Online(8), 100), tl.schedule.advances(tl.schedule.Binomial(8), 100)
        (249, 248)
    """

    def __init__(self, k: int) -> None:
        self.k = as_count(k, 1, "Online", "k")

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps, or None: it says where the sweep stops, not where snapshots are.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is below 0).
        """
        assert self.k is not None
        return _online(self.k, sys.maxsize if length is None else as_count(length, 0, "Online.sweep", "length"))


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
        reach = longest(self.k - len(self.held) + 1, self.level)
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

        Slots that stand free could hold longest(slots, level) - 1 steps a level lower, so leaving them free costs as
        many extra steps: below 1/500 of the steps so far.
        """
        spare = 1
        while self.level > 1 and spare < self.k // 2 and longest(spare + 1, self.level) - 1 <= stop // 500:
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
        """Yields how much more the reversal costs without each snapshot, the last one first, if the loop ends at `end`.

        A drop merges two segments and gives every later segment one slot more: `saved` is what that is worth.
        """
        bounds = [*self.held, end]
        slots, saved = self.k - len(self.held) + 1, 0
        here = cost(end - self.held[-1], slots)
        for i in range(len(self.held) - 1, 0, -1):
            before, step, after = bounds[i - 1 : i + 2]
            earlier = cost(step - before, slots + 1)
            yield cost(after - before, slots + 1) - earlier - here - saved
            saved += here - cost(after - step, slots + 1)
            here, slots = earlier, slots + 1
