"""Before which parts of a step lanes wait for each other: where one meets what another one touched since the last wait.

A loop is gone through step by step until nothing is new: what is read at the beginning of a step was written at the end
of the one before, and a carry's two places change from step to step. So a loop whose lanes never meet has no wait.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorloop.compiler.emitter.device.touches import LaneTouch, SlotTouch, Touch
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.lower.lowering import LoweredStep

STEPS = 4  # places change with every second step, and a slice of an output is met one step later


class Waits(NamedTuple):
    """Whether lanes wait: before each part of a step, before it asks whether to go on, before the last carry leaves.

    `starting` is a wait before the first step.
    """

    before: list[bool]
    asking: bool
    leaving: bool
    starting: bool = False

    @property
    def a_step(self) -> int:
        """Returns how often lanes wait in a step."""
        return sum(self.before) + self.asking


class WaitPlanner:
    """Goes through the parts of a step and remembers what was touched since the lanes last met."""

    def __init__(self, step: LoweredStep, places: Mapping[Region, tuple[int, int]], steps: int = STEPS) -> None:
        self.step, self.places, self.steps = step, places, steps  # `places`: where scratch begins and ends
        self.touched: list[tuple[object, int, Touch]] = []
        self.known: dict[tuple[bool, int, int], bool] = {}  # two touches, by whether they are of the same memory

    def plan(self, parts: Sequence[Sequence[Touch]], first: Sequence[Touch], last: Sequence[Touch]) -> Waits:
        """Plans where lanes wait; `first` is touched before the first step, `last` when all are done."""
        going = self.step.going
        asks = [] if going is None or going.buffer.kind == "value" else [LaneTouch(going.buffer, False, None)]
        stations = [*parts, asks, last]
        waits = [False] * len(stations)
        while True:
            held = [*waits]
            self._go(stations, (), waits)
            if held == waits:
                break
        # One wait before the first step is less than one in each.
        starting = self._go(stations, first, [*waits]) != waits
        first = () if starting else first
        # A wait that came early may be of no use beside one that came later.
        for n in range(len(waits)):
            without = [*waits[:n], False, *waits[n + 1 :]]
            if waits[n] and self._go(stations, first, [*without]) == without:
                waits = without
        *before, asking, leaving = waits
        return Waits(before, asking, leaving, starting)

    def _go(self, stations: Sequence[Sequence[Touch]], first: Sequence[Touch], waits: list[bool]) -> list[bool]:
        """Goes through some steps and adds the waits that lack; the last station is not met in each step."""
        self.touched = [(self._key(one.buffer, -1), -1, one) for one in first]
        for turn in range(self.steps):
            for n, touched in enumerate(stations[:-1]):
                waits[n] = self._meet(touched, turn, waits[n])
            # Its carry is what the next step would read.
            waits[-1] = waits[-1] or self._clashes(stations[-1], turn + 1)
        return waits

    def _meet(self, touched: Sequence[Touch], turn: int, waits: bool) -> bool:
        """Notes what is touched now; whether lanes must wait before."""
        waits = waits or self._clashes(touched, turn)
        # After a wait all that was done before is seen by all: only what is touched now can clash with what follows.
        now = [(self._key(one.buffer, turn), turn, one) for one in touched]
        self.touched = [*([] if waits else self.touched), *now]
        return waits

    def _clashes(self, touched: Sequence[Touch], turn: int) -> bool:
        return any(self._clash((self._key(a.buffer, turn), turn, a), b) for a in touched for b in self.touched)

    def _key(self, buffer: Region, turn: int) -> object:
        """Returns a key for the memory that a buffer is at a step."""
        kind, n = buffer.kind, buffer.index
        if kind == "carry":
            after = self.step.next[n].buffer
            if after.kind == "next":
                return "pair", n, (turn + 1) % 2
            return ("out", after.index, turn - 1) if after.kind == "out" else buffer
        if kind == "next":
            return "pair", n, turn % 2
        return ("out", n, turn) if kind == "out" else (kind, n) if kind == "sum" else buffer

    def _clash(self, now: tuple[object, int, Touch], then: tuple[object, int, Touch]) -> bool:
        (here, turn, a), (there, before, b) = now, then
        if not (a.writes or b.writes):
            return False
        same = here == there
        if isinstance(a, SlotTouch) or isinstance(b, SlotTouch):  # whose memory is shared with no other buffer
            return same and (not isinstance(a, SlotTouch) or a.meets(turn, b, before, self.step.source.growth))
        if (same, id(a), id(b)) not in self.known:
            self.known[same, id(a), id(b)] = a.meets(b) if same else a.overlaps(b, self.places)
        return self.known[same, id(a), id(b)]
