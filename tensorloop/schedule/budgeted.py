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
from collections.abc import Iterator, Sequence

from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Restore, Snapshot, as_count
from tensorloop.schedule.base import Schedule

_CLOSELY = 48  # segments up to so long are split where splits near by cost no less, too


class Budgeted(Schedule):
    """The fewest extra steps that a number of bytes allows: residuals are kept where they fit, and carries elsewhere.

    All steps are taken to be of one size. The sweep keeps the residuals of the last steps, so that those are not run
    again; a loop whose residuals all fit has no extra steps.

    Args:
        budget: int, bytes for what is kept: carries, that of step 0 not included, and residuals.
        carry: int, bytes of one carry.
        residuals: int, bytes that one step saves for its gradient.

    Extra steps: within 5 % of the optimum (for T up to 200, beside a search through all orders).
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
            length: int, the number of steps; it must be known, as the placement depends on it.

        Returns:
            An iterator of `tl.schedule.Forward` actions.

        Raises: TypeError, ValueError (length is None or below 0).
        """
        if length is None:
            raise ValueError(
                "Budgeted.sweep: length is None, but this placement depends on it; use Blocks(Online(k), n)"
            )
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
