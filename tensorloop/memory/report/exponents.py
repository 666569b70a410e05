"""The power of T that bytes follow."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

KINK = 0.5
"""Powers that differ by more, from three sizes to the next three, are not those of one curve."""


def exponent(Ts: Sequence[int], sizes: Sequence[float]) -> float:
    """Slope of the least-squares line through (log T, log size), sizes of 0 left out.

    0 where all sizes are; NaN where only one is left.
    """
    if not any(sizes):
        return 0.0
    some = [(math.log(T), math.log(n)) for T, n in zip(Ts, sizes, strict=True) if n > 0]
    return statistics.linear_regression(*zip(*some, strict=True)).slope if len(some) > 1 else math.nan


def marginal(Ts: Sequence[int], sizes: Sequence[int]) -> float:
    """The p of a + b T^p through three points, by bisection: the ratio of the two increments rises with p."""
    if len(Ts) < 3:
        return exponent(Ts, sizes)
    first, second = (b - a for a, b in pairwise(sizes))
    if first == second == 0:
        return 0.0
    if first < 0:  # bytes that fall: the same p with a negative b
        first, second = -first, -second
    low, high = -4.0, 8.0
    near, far = (math.log(b / a) for a, b in pairwise(Ts))
    for _ in range(60):
        p = (low + high) / 2 or 1e-9
        ratio = math.exp(p * near) * math.expm1(p * far) / math.expm1(p * near)
        low, high = (p, high) if second > ratio * first else (low, p)
    return (low + high) / 2


def settled(Ts: Sequence[int], sizes: Sequence[int]) -> float:
    """`marginal` at the end; the slope between the last two sizes where the last four are no a + b T^p.

    A peak is the largest of several moments. One that stays the same (the gradients of the weights, say) gives way to
    one that grows with T: a kink, which a + b T^p takes for a high power. Three sizes cannot tell the two.
    """
    found = marginal(Ts[-3:], sizes[-3:])
    if len(Ts) > 3 and abs(found - marginal(Ts[-4:-1], sizes[-4:-1])) > KINK:
        return exponent(Ts[-2:], sizes[-2:])
    return found


def line_exponent(Ts: Sequence[int], sizes: Sequence[int]) -> float:
    """The power that the bytes of a line follow: free of a constant where they rise, the plain fit where they do not.

    A line that has bytes at one T alone has exponent 0.
    """
    if len(Ts) > 2 and all(a < b for a, b in pairwise(sizes[-3:])):
        return settled(Ts, sizes)
    found = exponent(Ts, sizes)
    return 0.0 if math.isnan(found) else found
