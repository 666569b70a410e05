"""Offsets, which decide what memory a kernel touches: looked at once more, as it takes but 2 us."""

from typing import Any

import numpy as np
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, inlined
from tensorloop.kernels.memory import array


def bounds_of(offsets: Tensor, n: int, name: str, longest: int | None = None) -> np.ndarray:
    """The offsets of n rows for the operation `name`, none of whose segments is longer than `longest`."""
    bounds = array(offsets)
    if not _are_bounds(bounds, n, n if longest is None else longest):
        limit = "" if longest is None else f" by at most {longest} a row"
        raise ValueError(f"{name}: offsets must rise from 0 to {n}{limit}, got {offsets}")
    return bounds


@compiled
def _are_bounds(bounds: Any, n: int, longest: int) -> bool:
    good = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == n
    for b in range(len(bounds) - 1):
        length = bounds[b + 1] - bounds[b]
        good &= 0 <= length <= longest
    return good


@inlined
def longest_of(begin: Any, end: Any, bounds: Any, each: Any) -> Any:
    """The longest of the rows begin // each to (end - 1) // each."""
    longest = 0
    for r in range(begin // each, (end - 1) // each + 1):
        longest = max(longest, bounds[r + 1] - bounds[r])
    return longest
