"""The tensors that one step of a body has met: held until the step is over, so that an id means one of them."""

import functools
import itertools
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

# Candidates and tensors seen that are no longer held for the step's sake.
Released = tuple[list[tuple[weakref.ref[Tensor], int | None]], dict[int, weakref.ref[Tensor]]]


class StepUse:
    """Collects what the torch functions of one step were given and gave."""

    __slots__ = ("candidates", "count", "first", "leads_out", "made", "seen")

    def __init__(self, captures: dict[int, Tensor]) -> None:
        self.seen = dict(captures)  # and arguments and results
        self.made: list[int] = []  # results
        self.candidates: list[tuple[Tensor, int | None]] = []  # may be captures: with their versions
        self.count = 0  # functions that gave a tensor
        self.leads_out = False  # whether its graph may lead to a capture
        self.first = 0  # the number of the first node that the step may make

    def mark(self) -> tuple[int, int]:
        """How much is known now."""
        return len(self.made), len(self.candidates)

    def release(self, mark: tuple[int, int]) -> Released:
        """Lets go of what was met since."""
        made, met = mark
        fresh = self.candidates[met:]
        keys = [*self.made[made:], *(id(x) for x, _ in fresh)]
        del self.candidates[met:]
        seen = {key: weakref.ref(self.seen.pop(key)) for key in keys if key in self.seen}
        return [(weakref.ref(x), version) for x, version in fresh], seen

    def take_back(self, mark: tuple[int, int], released: Released) -> None:
        """Holds what is still there again."""
        candidates, seen = released
        alive = {key: x for key, reference in seen.items() if (x := reference()) is not None}
        self.seen.update(alive)
        self.made[mark[0] :] = [key for key in self.made[mark[0] :] if key in alive]
        self.candidates += [(x, version) for reference, version in candidates if (x := reference()) is not None]


def find_held(keys: Iterable[int], seen: Mapping[int, Any], references: int) -> list[int]:
    """The keys of what somebody else holds too: what has more than so many references."""
    found = []
    for key in keys:
        x = seen[key]
        if sys.getrefcount(x) > references:
            found.append(key)
    return found


@functools.cache
def own_references() -> int:
    """How many `find_held` counts where nobody else holds a thing: 3, fewer where an interpreter borrows locals."""
    return next(n for n in itertools.count() if not find_held([0], {0: object()}, n))
