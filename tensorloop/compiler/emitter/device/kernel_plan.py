"""What a kernel is made of: units and how lanes share them, places in scratch memory, waits."""

import math
from collections.abc import Container, Sequence

from tensorloop.compiler.emitter.device.devices import MOST_LANES, WARP, Device
from tensorloop.compiler.emitter.device.heads import Spread, spread
from tensorloop.compiler.emitter.device.lanes import MANY, GroupRows, LaneShare, share_lanes
from tensorloop.compiler.emitter.device.nearby import FIXED, NearMatrix, near_matrices, outs_are_copies, reading_near
from tensorloop.compiler.emitter.device.touches import LaneTouch, LaneTouches
from tensorloop.compiler.emitter.device.waits import STEPS, WaitPlanner
from tensorloop.compiler.emitter.ir.kernels import Matmul, Matrix, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, contiguous
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.bounds import check_rows, find_bounds
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.matrices import number_checks
from tensorloop.compiler.emitter.write.row_shares import share_rows
from tensorloop.compiler.emitter.write.scratch import LINE, find_lives, line, place_scratch
from tensorloop.compiler.emitter.write.units import copying, find_grown, put_together
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.step import Unsupported

ENOUGH_LANES = 256  # of a group, where nobody says how many: more wait longer for each other than they gain


class KernelPlan:
    """A step's kernels put together for a device: who does what, where it lies, and where lanes wait."""

    steps = STEPS  # that are gone through for waits

    def __init__(self, step: LoweredStep, device: Device) -> None:
        _refuse(step)
        self.device, self.machine = device, device.machine
        near = outs_are_copies(step)
        self._make(near)
        if near is not step and not self.local:  # a place beside an out is of use in fast memory alone
            self._make(step)
        self._plan()

    def _make(self, step: LoweredStep) -> None:
        """Makes the units, shares them out among lanes, and places their buffers."""
        self.part: Spread | None = None
        self._put_together(step)
        part = spread(step, self.device.groups)
        if part is not None and part.groups > self.groups:
            self.part, step = part, part.step
            self._put_together(step)
        self.bounds = find_bounds(self.units, step.source.graph.nodes, step.source.growth)
        self.checks = number_checks(self.units, self.machine)
        self.dims = [None if self.split is None else self.split.dims[n] for n in range(len(self.units))]
        self.pairs = [n for n, array in enumerate(step.next) if array.buffer.kind == "next"]
        self.lanes = self._lanes()
        self.near: dict[Array, NearMatrix] = {}
        self.offsets, self.scratch = self._place()
        self.local = self.scratch <= self.device.local
        if self.local:
            self._bring_near(self.device.local - self.scratch)
            self.offsets, self.scratch = self._place()
        # What text of a device needs for itself is not counted before: the same is near on each device with such room.
        self.scratch += self.device.own_scratch(self.lanes)
        self.shares = [self.share(*pair) for pair in zip(self.units, self.dims, strict=True)]
        self.packed = _packed(self.units, {x for cut in self.part.cuts for x in cut.steps} if self.part else ())
        self.grown = find_grown(self.units, self.stored)

    def _put_together(self, step: LoweredStep) -> None:
        """Makes the units, and finds their rows: a part of several heads is shared out already."""
        self.step = step
        self.units, self.stored = put_together(step)
        self.split = share_rows(step, self.units, {}) if self.part is None else None
        self.rows = self._rows()
        if self.rows is None:
            self.split = None

    @property
    def groups(self) -> int:
        """Returns how many groups there are."""
        return self.part.groups if self.part is not None else 1 if self.rows is None else self.rows.groups

    def moves(self, kind: str, n: int) -> list[int]:
        """Returns how many bytes further each group of several heads has its own of the caller's memory."""
        return [] if self.part is None else self.part.moves(kind, n)

    def _rows(self) -> GroupRows | None:
        """Returns how the groups share the rows; None where one group has all."""
        if self.split is None:
            return None
        check_rows(self.units, self.split.dims, self.split.count)
        share = -(-self.split.count // max(1, self.device.groups))
        groups = -(-self.split.count // share)
        return GroupRows(self.split.count, share, groups) if groups > 1 else None

    def share(self, unit: Unit, row: int | None) -> LaneShare:
        """Returns how the lanes of a group share a unit whose rows are along a dim."""
        return share_lanes(unit, row, self.rows, self.lanes)

    def _lanes(self) -> int:
        """Returns the lanes of a group: as the device says, or enough for the unit with most elements."""
        lanes = self.device.lanes_a_group
        if not lanes:
            most = 1
            for unit, dim in zip(self.units, self.dims, strict=True):
                part = self.rows.share / self.rows.count if self.rows is not None and dim is not None else 1
                most = max(most, math.ceil(part * elements_of(unit)))
            lanes = min(ENOUGH_LANES, -(-most // WARP) * WARP)
        if not 0 < lanes <= MOST_LANES:
            raise Unsupported(f"{lanes} lanes of a group, of which there are at most {MOST_LANES}")
        return lanes

    # scratch

    def has_rows(self, buffer: Region) -> bool:
        """Whether each group has a part of a buffer."""
        return self.split is not None and self.split.buffers.get(buffer, False)

    def room(self, buffer: Region) -> int:
        """Bytes that a group needs of a buffer: of its own rows, where it has rows."""
        assert isinstance(buffer.bytes, int)
        if self.rows is not None and self.has_rows(buffer):
            return line(buffer.bytes // self.rows.count * self.rows.share)
        return line(buffer.bytes)

    def _bring_near(self, room: int) -> None:
        """Chooses what stays in fast memory for all steps, the smallest first, and lets units read it there."""
        found = near_matrices(self.units, self.dims)
        for one in found.values():
            if one.row is not None and self.split is not None:
                self.split.buffers[one.right.buffer] = True
        for matrix, one in sorted(found.items(), key=lambda item: self.room(item[1].right.buffer)):
            if (room := room - self.room(one.right.buffer)) >= 0:
                self.near[matrix] = one
        self.units = [reading_near(unit, self.near) for unit in self.units]

    def _place(self) -> tuple[dict[Region, int], int]:
        """Returns the offsets of scratch buffers, and their end: carries come first, then matrices that stay."""

        def moved(unit: Unit) -> list[Region]:
            return [unit.work] if isinstance(unit, Matrix) and unit.work is not None else []

        lives = find_lives(self.units, self.stored, moved, self.step.going)
        end = sum(2 * self.room(self.step.next[n].buffer) for n in self.pairs)
        fixed: dict[Region, int] = {}
        for one in self.near.values():
            fixed[one.right.buffer] = end
            end += self.room(one.right.buffer)
        places, total = place_scratch(lives, end, self.room)
        return fixed | places, max(LINE, total)

    def _plan(self) -> None:
        """Decides where lanes wait."""
        step, first, last = self.step, list[LaneTouch](), list[LaneTouch]()
        touches = LaneTouches(self.lanes, self.rows, self.stored)
        for n, array in enumerate(step.carry):
            if array.numel and array.buffer.kind != "array":  # which stays where it is
                after, share = step.next[n], self.whole(array)
                if n in self.pairs:
                    here = Array(after.buffer, array.shape, array.strides)
                    first.append(touches.copy(here, share, writes=True))
                last.append(touches.copy(array, share, writes=False))
        first += [touch for one in self.near.values() for touch in touches.of(one.load, one.row, self.loading(one))]
        parts = [touches.of(*given) for given in zip(self.units, self.dims, self.shares, strict=True)]
        ranges = {buffer: (at, at + self.room(buffer)) for buffer, at in self.offsets.items()}
        self.waits = WaitPlanner(step, ranges, self.steps).plan(parts, first, last)

    def whole(self, array: Array) -> LaneShare:
        """Returns how lanes share a carry that is copied."""
        group = copying(array)
        return self.share(group, 0 if self.has_rows(array.buffer) else None)

    def loading(self, one: NearMatrix) -> LaneShare:
        """Returns how lanes share a matrix that is copied into fast memory."""
        return self.share(one.load, one.row)

    def is_apart(self, n: int) -> bool:
        """Whether each group has a sum of its own."""
        return self.split is not None and self.step.sums[n].buffer in self.split.apart


def _refuse(step: LoweredStep) -> None:
    """Raises where a step has what no device text has a form of."""
    if step.called:
        raise Unsupported(f"{step.called[0].target}, which torch does", step.called[0])


def elements_of(unit: Unit) -> int:
    """Returns how many elements a unit makes; along an array there are enough for all lanes."""
    if isinstance(unit, Scatter):
        return unit.source.numel
    size = math.prod(unit.space) if isinstance(unit, WalkGroup | Matrix) else unit.writes()[0].numel
    return MANY if isinstance(size, Length) else size


def _packed(units: Sequence[Unit], apart: Container[Region]) -> dict[Array, Array]:
    """Right operands that stay the same and whose columns are no neighbours, and the copies in which they are.

    Those of which each group has a part are left where they are.
    """
    found: dict[Array, Array] = {}
    for unit in units:
        if not isinstance(unit, Matmul) or unit.b.buffer.kind not in FIXED or unit.b.buffer in apart:
            continue
        if unit.b.strides[-1] != 1 and unit.b.shape[-1] > 1:
            region = Region("packed", 0, unit.b.numel, unit.b.dtype)
            found.setdefault(unit.b, contiguous(region, unit.b.shape))
    return found
