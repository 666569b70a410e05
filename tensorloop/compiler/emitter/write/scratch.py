"""Where scratch buffers lie: those that are not needed at one time share memory."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.fuse import Unit
from tensorloop.compiler.lengths import Length

LINE = 64  # bytes; buffers begin at such


def line(size: int) -> int:
    """A size in whole lines, of which there is at least one."""
    return -(-max(size, 1) // LINE) * LINE


def find_lives(
    units: Sequence[Unit], stored: set[Region], moved: Callable[[Unit], Sequence[Region]], going: Array | None
) -> dict[Region, tuple[int, int]]:
    """The first and the last unit that each scratch buffer is there for; `moved` are those of a unit's own."""
    lives: dict[Region, tuple[int, int]] = {}
    for n, unit in enumerate(units):
        own = moved(unit)
        for buffer in (*(array.buffer for array in (*unit.reads(), *unit.writes())), *own):
            if isinstance(buffer.numel, Length):  # behind all that has a place
                continue
            if buffer.kind == "scratch" and (buffer in stored or buffer in own):
                lives[buffer] = lives.get(buffer, (n, n))[0], n
    # The condition is read behind the last unit: nothing may have taken its memory by then.
    if going is not None and going.buffer in lives:
        lives[going.buffer] = lives[going.buffer][0], len(units)
    return lives


def place_scratch(
    lives: Mapping[Region, tuple[int, int]], start: int, room: Callable[[Region], int]
) -> tuple[dict[Region, int], int]:
    """Returns the offsets of scratch buffers, from `start` on, and where the last buffer ends."""
    places, end = dict[Region, int](), start
    there: dict[int, list[tuple[int, int]]] = defaultdict(list)  # unit -> where what has a place is there, and its end
    begins: list[tuple[int, int, int]] = []  # the same of all that has a place, each at its first unit; sorted
    for buffer, (first, last) in sorted(lives.items(), key=lambda item: -item[0].bytes):
        later = begins[bisect.bisect(begins, (first + 1,)) : bisect.bisect(begins, (last + 1,))]
        at, size = start, room(buffer)
        for low, high in sorted([*there[first], *(place[1:] for place in later)]):
            if at + size <= low:  # the first gap that it fits into, largest buffers first
                break
            at = max(at, high)
        places[buffer], end = at, max(end, at + size)
        bisect.insort(begins, (first, at, at + size))
        for n in range(first, last + 1):
            there[n].append((at, at + size))
    return places, end
