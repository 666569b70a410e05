"""Segments between two snapshots: how long they may be, what reversing them costs, and how it goes (Revolve)."""

import functools
import math
from collections.abc import Iterator, Sequence

from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Forward, Restore, Snapshot


def longest(slots: int, level: int) -> int:
    """The longest segment that is reversed with `slots` snapshots, its own start included, within this level."""
    return math.comb(slots + level, slots)


def level_of(length: int, slots: int) -> tuple[int, int]:
    """How often, at most, the steps of a segment are advanced over; and the longest segment of that level."""
    if slots == 1:
        return length - 1, length
    level, longest = 0, 1
    while longest < length:
        level += 1
        longest = longest * (slots + level) // level
    return level, longest


@functools.lru_cache(maxsize=65536)
def cost(length: int, slots: int) -> int:
    """The fewest steps to advance over in reversing a segment: level * length - C(slots + level, slots + 1)."""
    level, longest = level_of(length, slots)
    return level * length - longest * level // (slots + 1)


def split(length: int, slots: int | None) -> int:
    """How far into a segment of two steps or more its next snapshot is, for the fewest steps, then snapshots.

    Any middle with both parts within their levels gives the fewest steps. Of those, this one leaves to the later part
    all it can take in without more snapshots; compared with exhaustive search up to 300 steps and 8 slots.
    """
    if slots is None or slots >= length - 1:
        return 1
    if slots == 1:
        return length - 1
    level, _ = level_of(length, slots)
    later = longest(slots - 1, level - 1) + longest(slots - 2, level - 1)
    return min(max(length - later, longest(slots, level - 2)), longest(slots, level - 1))


def reverse_segments(length: int, held: Sequence[int], k: int | None, at: int | None = None) -> Iterator[Action]:
    """`held`, in order, is a stack: what is above its top is reversed already, `end` is where that begins.

    `at` is where the working state is.
    """
    held = [*held]
    if held and held[-1] == length:
        yield Drop(held.pop())
    end = length
    while held:
        start = held[-1]
        if at != start:
            yield Restore(start)
        if end - start == 1:
            yield Drop(held.pop())
            middle = start
        else:
            middle = start + split(end - start, None if k is None else k - len(held) + 1)
            yield Advance(start, middle)
        at = middle
        if end - middle == 1:
            yield Backward(middle)
            end, at = middle, None
        else:
            held.append(middle)
            yield Snapshot(middle)


def in_segments(lengths: list[int]) -> Iterator[Forward]:
    """A sweep with a snapshot at the start of each segment."""
    start = 0
    for length in lengths:
        yield Snapshot(start)
        yield Advance(start, start + length)
        start += length


def binomial_segments(length: int, k: int) -> list[int]:
    """The lengths of the segments between the snapshots of the sweep, the first one first.

    The segment that begins at the j-th snapshot has k - j slots to be reversed with. One step more costs a segment as
    much as the level it then has, so the sum is least when all are as long as one level allows or on the way to the
    next. The way is shared in proportion: any sharing takes as many steps, this one hardly more snapshots than need be.
    """
    k = min(k, length)
    level = level_of(length + 1, k)[0] - 1 if k else 0  # sum of longest(1..k, level) = C(k + level + 1, k) - 1
    lengths = [longest(slots, level - 1) if level else 0 for slots in range(1, k + 1)]
    growth = [longest(slots, level) - n for slots, n in enumerate(lengths, 1)]
    rest, room = length - sum(lengths), sum(growth)
    for i, most in enumerate(growth):
        more = -(-rest * most // room)
        lengths[i] += more
        rest, room = rest - more, room - most
    return lengths[::-1]
