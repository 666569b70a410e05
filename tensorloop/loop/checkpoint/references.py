"""Whether somebody else holds an object, by the interpreter's count of references."""

import functools
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any


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
