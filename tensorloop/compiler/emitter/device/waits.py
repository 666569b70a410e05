"""Before which parts of a step lanes wait for each other: where one meets what another one touched since the last wait.

A loop is gone through step by step until nothing is new: what is read at the beginning of a step was written at the end
of the one before, and a carry's two places change from step to step. So a loop whose lanes never meet has no wait.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorloop.compiler.emitter.device.lanes import LaneShare
from tensorloop.compiler.emitter.ir.arrays import Array, Region
from tensorloop.compiler.emitter.ir.kernels import Gather, Matmul, Matrix, Reduce
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup

Piece = tuple[object, ...]
FIRST: Piece = ("first",)  # what the first lane alone touches
STEPS = 4  # places change with every second step, and a slice of an output is met one step later


class LaneTouch(NamedTuple):
    """Memory that a part of a step touches: which lane has which element; None where a lane may have any.

    `array` has all that is touched, and more; None where it may be all of the buffer.
    """

    buffer: Region
    piece: Piece | None
    writes: bool
    array: Array | None = None


class Waits(NamedTuple):
    """Whether lanes wait: before each part of a step, before it asks whether to go on, before the last carry leaves."""

    before: list[bool]
    asking: bool
    leaving: bool

    @property
    def a_step(self) -> int:
        """How often they do in a step."""
        return sum(self.before) + self.asking


def canonical(array: Array, order: Sequence[int]) -> Piece | None:
    """The place of each number of a walk over dims in that order; None where two of them may be one place."""
    merged: list[tuple[int, int]] = []
    for d in order:
        size, stride = array.shape[d], array.strides[d]
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    reach = 0
    for size, stride in sorted(merged, key=lambda pair: pair[1]):
        if stride <= reach:
            return None
        reach += (size - 1) * stride
    return (*merged, array.offset)


def touches(unit: Unit, share: LaneShare, stored: set[Region]) -> list[LaneTouch]:
    """What a unit touches that a step writes; scratch that is not stored is in registers."""
    written = set(unit.writes())
    found = []
    for array in (*unit.reads(), *written):
        buffer = array.buffer
        if buffer.kind == "carry" or (buffer.written and (buffer.kind != "scratch" or buffer in stored)):
            box = array if isinstance(unit, WalkGroup) and not _is_gathered(unit, array) else None
            found.append(LaneTouch(buffer, _piece(unit, array, share), array in written, box))
    if isinstance(unit, Matrix) and unit.work is not None:
        found.append(LaneTouch(unit.work, FIRST, True))
    return found


def _is_gathered(unit: WalkGroup, array: Array) -> bool:
    return any(isinstance(walk, Gather) and array is walk.source for walk in unit.walks)


def are_apart(a: Array, b: Array) -> bool:
    """Whether two parts of a buffer have no element in common: one behind the other, or columns of the same rows."""
    strides = {stride for array in (a, b) for stride in array.strides if stride > 1}
    return any(_far(_within(a, row), _within(b, row)) for row in (*strides, max(1, a.buffer.numel)))


def _far(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is not None and b is not None and (a[1] < b[0] or b[1] < a[0])


def _within(array: Array, row: int) -> tuple[int, int] | None:
    """The first and the last of the places of each row of so many that an array has; None where it has no such."""
    # A step along a dim whose stride is a multiple of a row leaves the place in the row as it is.
    pairs = [(n, step) for n, step in zip(array.shape, array.strides, strict=True) if n > 1 and step % row]
    low = array.offset % row
    high = low + sum((n - 1) * step for n, step in pairs)
    return (low, high) if high < row and all(step > 0 for _, step in pairs) else None


def _piece(unit: Unit, array: Array, share: LaneShare) -> Piece | None:
    walks = unit.walks if isinstance(unit, WalkGroup) and share.team > 1 else ()
    led = any(isinstance(walk, Reduce) and array is walk.out for walk in walks)  # by the first lane of each team
    if share.by == "first" or (share.count <= 1 and (share.team == 1 or led)):
        return FIRST
    if share.by == "lines" or (share.team > 1 and not led):
        return None
    if isinstance(unit, Matmul):
        whole = array is unit.out or array is unit.addend
        space = unit.out.shape
    else:
        assert isinstance(unit, WalkGroup)
        whole = not _is_gathered(unit, array) and not any(array.strides[d] for d in unit.over)
        space = unit.space
    if not whole or any(array.shape[d] != space[d] for d in share.order):
        return None
    place = canonical(array, share.order)
    # Blocks of rows are numbered by block: the same lanes have the same elements only in blocks of one height.
    return None if place is None else (share.tall, share.team, share.rows, *place)


class WaitPlanner:
    """Goes through the parts of a step and remembers what was touched since the lanes last met."""

    def __init__(self, step: LoweredStep, places: Mapping[Region, tuple[int, int]]) -> None:
        self.step, self.places = step, places  # where scratch begins and ends
        self.touched: list[tuple[object, LaneTouch]] = []

    def plan(
        self, parts: Sequence[Sequence[LaneTouch]], first: Sequence[LaneTouch], last: Sequence[LaneTouch]
    ) -> Waits:
        """`first` is touched before the first step, `last` when all are done."""
        going = self.step.going
        asks = [] if going is None or going.buffer.kind == "value" else [LaneTouch(going.buffer, None, False)]
        stations = [*parts, asks, last]
        waits = [False] * len(stations)
        while True:
            held = [*waits]
            self._go(stations, first, waits)
            if held == waits:
                break
        # A wait that came early may be of no use beside one that came later.
        for n in range(len(waits)):
            without = [*waits[:n], False, *waits[n + 1 :]]
            if waits[n] and self._go(stations, first, [*without]) == without:
                waits = without
        return Waits(waits[:-2], *waits[-2:])

    def _go(self, stations: Sequence[Sequence[LaneTouch]], first: Sequence[LaneTouch], waits: list[bool]) -> list[bool]:
        """Some steps with these waits, to which those are added that lack; the last station is not met in each step."""
        self.touched = [(self._key(one.buffer, -1), one) for one in first]
        for turn in range(STEPS):
            for n, touched in enumerate(stations[:-1]):
                waits[n] = self._meet(touched, turn, waits[n])
            # Its carry is what the next step would read.
            waits[-1] = waits[-1] or self._clashes(stations[-1], turn + 1)
        return waits

    def _meet(self, touched: Sequence[LaneTouch], turn: int, waits: bool) -> bool:
        """Notes what is touched now; whether lanes must wait before."""
        waits = waits or self._clashes(touched, turn)
        # After a wait all that was done before is seen by all: only what is touched now can clash with what follows.
        self.touched = [*([] if waits else self.touched), *((self._key(one.buffer, turn), one) for one in touched)]
        return waits

    def _clashes(self, touched: Sequence[LaneTouch], turn: int) -> bool:
        return any(self._clash(self._key(a.buffer, turn), a, *b) for a in touched for b in self.touched)

    def _key(self, buffer: Region, turn: int) -> object:
        """Which memory a buffer is at a step."""
        kind, n = buffer.kind, buffer.index
        if kind == "carry":
            after = self.step.next[n].buffer
            if after.kind == "next":
                return "pair", n, (turn + 1) % 2
            return ("out", after.index, turn - 1) if after.kind == "out" else buffer
        if kind == "next":
            return "pair", n, turn % 2
        return ("out", n, turn) if kind == "out" else (kind, n) if kind == "sum" else buffer

    def _clash(self, here: object, a: LaneTouch, there: object, b: LaneTouch) -> bool:
        if not (a.writes or b.writes):
            return False
        if here == there:
            if a.piece is not None and a.piece == b.piece:
                return False
            return a.array is None or b.array is None or not are_apart(a.array, b.array)
        # Scratch buffers that are not needed at one time share memory: writing one destroys the other.
        if a.buffer not in self.places or b.buffer not in self.places:
            return False
        (low, end), (other, behind) = self.places[a.buffer], self.places[b.buffer]
        return low < behind and other < end


def whole_touches(array: Array, share: LaneShare, *, writes: bool) -> list[LaneTouch]:
    """A buffer copied, element by element as `share` has it."""
    place = canonical(array, share.order)
    piece = None if place is None else FIRST if share.count <= 1 else (1, 1, share.rows, *place)
    return [LaneTouch(array.buffer, piece, writes)]
