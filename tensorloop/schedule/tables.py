"""The least cost of reversing a loop with snapshots at several levels, and the sweep that begins it.

The rules that hold for the best order (Aupy et al. 2016 for two levels, Herrmann and Pallez 2020 for more; compared
with a search through all orders of actions): a segment whose first state lies at some level is reversed with snapshots
of that level and of faster ones, and once it has come down to a faster level, it needs the slower ones no more. So two
costs are enough at each level, of n blocks with c free slots there and all slots of the faster levels:

- held(n, c), where the first state is held there already: either it comes down, or it stays, some blocks are advanced
  over, what comes after them is reversed, and the first state is read again for those;
- free(n, c), where it is held nowhere: either it comes down, or it is written, with a slot less.

The sweep has a pair of its own, as it must come to the end before anything is reversed. In memory, where nothing is
written or read, both are Revolve's, which have closed forms.
"""

import math
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from tensorloop.schedule.spans import binomial_segments, cost

BLOCKS = 512  # of a longer loop; the tables grow with their square


class Costs(NamedTuple):
    """The slots of a level and the costs of a write and a read there, without where the level is."""

    slots: int | None
    write: float
    read: float


class Part(NamedTuple):
    """Blocks that are to be reversed with the slots of a level that are free, and all of faster levels."""

    level: int  # 0 is memory
    start: int
    blocks: int
    slots: int | None
    held: bool  # whether its first state is held there
    here: bool  # whether that is the working state


class SweepPlan(NamedTuple):
    """The snapshots that a sweep leaves, in blocks but for those in memory, and the tables for the rest."""

    length: int
    size: int  # of a block, in steps
    tables: "Sequence[Table]"  # of the slower levels
    parts: list[Part]  # from snapshot to snapshot there, the first one first
    segments: list[int]  # the lengths of those in memory, which come after them

    def at(self, block: int) -> int:
        """The step that a block begins with."""
        return min(block * self.size, self.length)

    def steps(self, *, slower: bool = True) -> list[int]:
        """Returns the steps of the sweep's snapshots, or of those in memory alone where `slower` is False."""
        at, found = self.length - sum(self.segments), [self.at(part.start) for part in self.parts if slower]
        for length in self.segments:
            found.append(at)
            at += length
        return found

    def lowered(self, part: Part) -> Part:
        """The part's blocks at the next faster level."""
        slots = self.tables[part.level - 2].costs.slots if part.level > 1 else None
        return part._replace(level=part.level - 1, slots=slots, held=False, here=True)


Row = list[float]  # by the number of blocks


class Table:
    """The costs of one level. `down`, `swept_down`: those without it; `size`: steps of a block."""

    def __init__(self, costs: Costs, down: Row, swept_down: Row, size: int) -> None:
        self.costs, self.down, self.swept_down, self.size = costs, down, swept_down, size
        self.free: dict[int | None, Row] = {}
        self.swept: dict[int | None, Row] = {}
        self._held: dict[int | None, Row] = {}
        self._again: dict[int | None, Row] = {}  # of blocks that are advanced over, and reversed last
        self._swept_held: dict[int | None, Row] = {}
        slots = costs.slots
        for c in [None] if slots is None else range(slots + 1):
            self._fill(c)

    def _fill(self, c: int | None) -> None:
        tables = self.free, self.swept, self._held, self._again, self._swept_held
        free, swept, held, again, swept_held = (table.setdefault(c, [math.inf]) for table in tables)
        for n in range(1, len(self.down)):
            held.append(min(self.down[n], min(_splits(again, free, n), default=math.inf)))
            again.append(n * self.size + self.costs.read + held[n])
            swept_held.append(min(again[n], min(_splits(again, swept, n), default=math.inf)))
            free.append(min(self.down[n], self.written(n, c)))
            swept.append(min(self.swept_down[n], self.swept_written(n, c)))

    def written(self, n: int, c: int | None) -> float:
        """The cost where the first state is written here."""
        return math.inf if c == 0 else self.costs.write + self._held[less(c)][n]

    def swept_written(self, n: int, c: int | None) -> float:
        """The cost of a sweep where the first state is written here."""
        return math.inf if c == 0 else self.costs.write + self._swept_held[less(c)][n]

    def middle(self, n: int, c: int | None) -> int | None:
        """How many blocks to advance over from a first state that stays; None where it comes down."""
        return _cheaper(self.down[n], _splits(self._again[c], self.free[c], n))

    def swept_middle(self, n: int, c: int | None) -> int | None:
        """How many blocks there are before the next snapshot of a sweep; None where there is none."""
        return _cheaper(self._again[c][n], _splits(self._again[c], self.swept[c], n))


def less(c: int | None) -> int | None:
    """A slot less; of any number, any number."""
    return None if c is None else c - 1


def _splits(again: Row, after: Row, n: int) -> "map[float]":
    """The costs of n blocks, split after 1, 2 ..., n - 1."""
    return map(add, again[1:n], after[n - 1 : 0 : -1])


def _cheaper(whole: float, splits: "map[float]") -> int | None:
    found = list(splits)
    best = min(found, default=math.inf)
    return None if whole <= best else found.index(best) + 1


def plan_of(memory: int, levels: Sequence[Costs], length: int) -> SweepPlan:
    """The best plan for a length."""
    size = max(1, -(-length // BLOCKS))
    blocks = -(-length // size)
    down = [math.inf, *(float(cost(n * size, memory)) for n in range(1, blocks + 1))]
    swept_down = [math.inf, *_swept_in_memory(blocks, size, memory)]
    tables: list[Table] = []
    for costs in levels:
        table = Table(costs, down, swept_down, size)
        tables.append(table)
        down, swept_down = table.free[costs.slots], table.swept[costs.slots]
    parts, at = _sweep(tables, blocks)
    rest = length - min(at * size, length)
    return SweepPlan(length, size, tables, parts, binomial_segments(rest, memory) if rest else [])


def _swept_in_memory(blocks: int, size: int, memory: int) -> Row:
    """A step costs the least level that reaches it."""
    found: Row = []
    total = level = 0
    for step in range(1, blocks * size + 1):
        while math.comb(memory + level, memory) - 1 < step:
            level += 1
        total += level
        if step % size == 0:
            found.append(float(total))
    return found


def _sweep(tables: Sequence[Table], blocks: int) -> tuple[list[Part], int]:
    """(the parts between snapshots at slower levels, where the rest begins)."""
    parts: list[Part] = []
    start = 0
    for level in range(len(tables), 0, -1):
        table = tables[level - 1]
        c = table.costs.slots
        while blocks and table.swept_written(blocks, c) < table.swept_down[blocks]:
            c = less(c)
            middle = table.swept_middle(blocks, c) or blocks
            parts.append(Part(level, start, middle, c, held=True, here=False))
            start, blocks = start + middle, blocks - middle
    return parts, start
