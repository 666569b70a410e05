"""`Budgeted`: the fewest extra steps that a number of bytes allows, where a step's residuals are many carries.

A segment of the loop begins at a state that is held. Either what all its steps save for their gradient (their
*residuals*) fits into the bytes that are left, where that state need not be held any more: then it is run once, with
residuals, and reversed. Or it is split: the first part is advanced over, the state between is held, the later part is
reversed with the bytes that are left then, and after it the first part with all of them again. It is Revolve's
recursion, with stretches of steps at its ends in place of single ones: with i states held beside that of step 0, the
last of them included, `longest(i, 0)` steps are reversed at once, and steps that are advanced over at most q times make
segments of

    longest(i, q) = longest(i, q - 1) + longest(i + 1, q)
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

from tensorloop._common.saved import saved
from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Release, Restore, Snapshot, as_count
from tensorloop.schedule.base import Schedule

_CLOSELY = 48  # segments up to so long are split where splits near by cost no less, too


_ROLLING = 16  # stretches of residuals that a loop of unknown length keeps, of which the oldest goes first
_WORTH = 16  # times as many steps as residuals fit: from there on they are not kept on the way, only room for them


@saved("budget", "carry", "residuals")
class Budgeted(Schedule):
    """The fewest extra steps that a number of bytes allows: residuals are kept where they fit, and carries elsewhere.

    All steps are taken to be of one size. The sweep keeps the residuals of the last steps, so that those are not run
    again; a loop whose residuals all fit has no extra steps. Where the length is not known, it keeps those of the steps
    just done, and lets the oldest go (`Release`) when there is no more room.

    Args:
        budget: int, bytes for what is kept: carries, that of step 0 not included, and residuals.
        carry: int, bytes of one carry.
        residuals: int, bytes that one step saves for its gradient.

    Extra steps: within 5 % of the optimum (for T up to 200, beside a search through all orders); with an unknown length
    some 4 % more than with a known one (median), where the residuals of three steps fit.
    Cost: O(T) of time, bytes for as many numbers as carries fit, or T.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument below 0, residuals below 1, or a budget that has no room for those of one step.

    Source: after Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, Optimal checkpointing for heterogeneous
    chains, for steps that are alike.

    Example:
        >>> plan = tl.schedule.Budgeted(40, carry=1, residuals=8)
        >>> list(plan.sweep(12))[-2:]
        [Snapshot(step=8), Advance(start=8, stop=12, keep=True)]
        >>> [tl.schedule.advances(tl.schedule.Budgeted(n, 1, 8), 12) for n in (8, 16, 40, 96)]
        [66, 11, 8, 0]
    """

    def __init__(self, budget: int, carry: int, residuals: int) -> None:
        self.budget = as_count(budget, 0, "Budgeted", "budget")
        self.carry = as_count(carry, 0, "Budgeted", "carry")
        self.residuals = as_count(residuals, 1, "Budgeted", "residuals")
        if self.budget < self.residuals:
            raise ValueError(
                f"Budgeted: budget must have room for the residuals of one step, {self.residuals} bytes; got {budget}"
            )

    def sweep(self, length: int | None) -> Iterator[Forward]:
        """Yields the actions of the forward pass.

        Args:
            length: int, the number of steps; None where it is not known.

        Returns:
            An iterator of `tl.schedule.Forward` actions; without a length it does not end.

        Raises: TypeError, ValueError (length is below 0).
        """
        if length is None:
            yield from _Rolling(self).sweep()
            return
        length = as_count(length, 0, "Budgeted.sweep", "length")
        if not length:
            return
        sizes, start, held = _Sizes(self, length), 0, 0
        yield Snapshot(0)
        while length - start > sizes.longest(held, 0):
            middle = start + sizes.split(length - start, held)
            yield Advance(start, middle)
            yield Snapshot(middle)
            start, held = middle, held + 1
        yield Advance(start, length, keep=True)

    def reverse(self, length: int, held: Sequence[int]) -> Iterator[Action]:
        """Yields the actions of the backward pass.

        Args:
            length: int, the number of steps that were taken.
            held: sequence of int, the steps of the snapshots that the sweep left.

        Returns:
            An iterator of `tl.schedule.Action`.

        Raises: TypeError, ValueError: as of every schedule.
        """
        steps = self._checked(length, held)
        if steps and steps[-1] == length:
            yield Drop(steps.pop())
        sizes, end, at = _Sizes(self, length), length, None
        while steps:
            start, more = steps[-1], len(steps) - 1
            if at != start:
                yield Restore(start)
            n = end - start
            if n <= sizes.longest(more, 0):
                yield Drop(steps.pop())
                yield Backward(start, n)
                end, at = start, None
                continue
            middle = start + sizes.split(n, more)
            yield Advance(start, middle)
            at = middle
            if end - middle <= sizes.longest(more + 1, 0):
                yield Backward(middle, end - middle)
                end, at = middle, None
            else:
                yield Snapshot(middle)
                steps.append(middle)


class _Sizes:
    """How long segments may be, for one length of a loop."""

    def __init__(self, plan: Budgeted, length: int) -> None:
        spare, carry = plan.budget - plan.residuals, plan.carry
        most = length if carry == 0 else min(length, spare // carry)
        at_once = [(plan.budget - i * carry) // plan.residuals for i in range(most + 1)]
        self._longest = [[at_once[0], *at_once]]  # by q and i
        self._closely = functools.cache(self._search)
        self.cost = functools.cache(self._at_best)

    def longest(self, i: int, q: int) -> int:
        """The longest segment, with i states held, whose steps are advanced over at most q times."""
        if q < 0 or i >= len(self._longest[0]):
            return 0
        while len(self._longest) <= q:
            sums = itertools.accumulate(reversed(self._longest[-1]))
            self._longest.append([*sums][::-1])
        return self._longest[q][i]

    def split(self, n: int, i: int) -> int:
        """How many steps of a segment, too long to be reversed at once, to advance over."""
        if n <= _CLOSELY:
            return self._closely(n, i)[1]
        least, most = self._bounds(n, i)
        return max(least, most)

    def _bounds(self, n: int, i: int) -> tuple[int, int]:
        """The fewest and the most steps of the first part for which no step of either is advanced over once more."""
        q = 1
        while self.longest(i, q) < n:
            q += 1
        least = max(self.longest(i, q - 2), n - self.longest(i + 1, q), 1)
        return least, max(min(self.longest(i, q - 1), n - self.longest(i + 1, q - 1), n - 1), 1)

    def _at_best(self, n: int, i: int) -> float:
        """The extra steps of a segment, at best: all that is beyond `longest(i, q)` is advanced over once more."""
        total, q = 0, 0
        while (most := self.longest(i, q)) < n:
            if not self.longest(i + 1, 0):
                return total + n * (n - 1) // 2 if most else math.inf
            total, q = total + n - most, q + 1
        return total

    def _search(self, n: int, i: int) -> tuple[float, int]:
        """(the extra steps of a segment, the split that takes so many), the best of a few splits."""
        if n <= self.longest(i, 0):
            return 0, 0
        if not self.longest(i + 1, 0):
            return math.inf, 1
        least, most = self._bounds(n, i)
        middles = {least, most, max(most - 1, 1), (least + most) // 2, max(n - self.longest(i + 1, 0), 1)}
        return min((self._cost(n, middle, i), middle) for middle in middles)

    def _cost(self, n: int, middle: int, i: int) -> float:
        return middle + self._closely(middle, i)[0] + self._closely(n - middle, i + 1)[0]


class _Rolling:
    """Where snapshots and residuals are, of a loop that has come so far and may end now."""

    def __init__(self, plan: Budgeted) -> None:
        self.plan = plan
        self.held: list[int] = []  # snapshots before what is kept
        self.kept: deque[tuple[int, int]] = deque()  # stretches whose residuals are kept, each behind the other
        self.free = plan.budget
        self.at_once = plan.budget // plan.residuals
        self.let_go = 0  # stretches, since snapshots were priced
        self.dropping: list[int] = []  # snapshots to drop, the last one first
        self.sizes = _Sizes(plan, 1)
        self.sized = 1  # up to which length they are right

    def sweep(self) -> Iterator[Forward]:
        """Stretches of a few steps, each with a snapshot before it."""
        start, steps = 0, max(self.at_once // _ROLLING, 1)
        while True:
            need = self._of(start, start + steps)
            yield from self._make_room(start, need)
            yield Snapshot(start)
            yield Advance(start, start + steps, keep=self._keeps(start))
            self.kept.append((start, start + steps))
            self.free -= need
            start += steps

    def _keeps(self, start: int) -> bool:
        return start < _WORTH * self.at_once

    def _of(self, start: int, stop: int) -> int:
        """Bytes of a stretch: its residuals, and the state before them."""
        return (stop - start) * self.plan.residuals + (self.plan.carry if start else 0)

    def _make_room(self, end: int, need: int) -> Iterator[Forward]:
        """Gives up what costs least for its bytes, until there is room."""
        while self.free < need and (self.kept or len(self.held) > 1):
            if not self.dropping and (not self.kept or self.let_go > max(8, len(self.held) // 4)):
                self.dropping, self.let_go = self._cheapest(end), 0
            if self.dropping:
                step = self.dropping.pop()
                self.held.remove(step)
                self.free += self.plan.carry
                yield Drop(step)
            else:
                yield from self._let_go()

    def _let_go(self) -> Iterator[Forward]:
        """Lets the oldest residuals go, and the snapshot before them where the segment before has room for more."""
        while self.sized < self.kept[-1][1]:
            self.sized *= 2
            self.sizes = _Sizes(self.plan, self.sized)
        start, stop = self.kept.popleft()
        self.let_go += 1
        self.free += self._of(start, stop)
        if self._keeps(start):
            yield Release(start, stop)
        if self.held and stop - self.held[-1] <= self.sizes.longest(len(self.held) - 1, 0):
            yield Drop(start)
        else:
            self.free -= self.plan.carry if start else 0
            self.held.append(start)

    def _cheapest(self, end: int) -> list[int]:
        """The snapshots that cost least to drop, an eighth, no two of them neighbours.

        Only those that cost less than residuals of as many bytes, of which each step runs once more, while there are
        any of those.
        """
        bounds = [*self.held, self.kept[0][0] if self.kept else end]
        worth = self.plan.carry / self.plan.residuals if self.kept else math.inf
        chosen, taken = list[int](), set[int]()
        for price, i in sorted(self._prices(bounds)):
            if price >= worth or len(chosen) >= max(len(bounds) // 8, 1):
                break
            if taken.isdisjoint((i - 1, i + 1)):
                taken.add(i)
                chosen.append(bounds[i])
        return chosen[::-1]

    def _prices(self, bounds: list[int]) -> Iterator[tuple[float, int]]:
        """Yields how many more steps run without each snapshot, and its place: it gives later segments a carry more."""
        cost, last, saved = self.sizes.cost, len(bounds) - 2, 0.0
        for i in range(last, 0, -1):
            before, step, after = bounds[i - 1 : i + 2]
            here = cost(after - step, i)
            yield cost(after - before, i - 1) - cost(step - before, i - 1) - here - saved, i
            saved += here - cost(after - step, i - 1)
