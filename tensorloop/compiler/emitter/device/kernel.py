"""The whole loop as one kernel's text: all steps by one launch, lanes of a group meeting where they must.

A group has its own rows of all that has rows; what has none it computes for itself, as each thread of the CPU does.
Scratch memory is the group's own, with room for its rows alone.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from tensorloop.compiler.emitter.device.device_math import DeviceMath
from tensorloop.compiler.emitter.device.devices import MOST_ARGUMENTS, MOST_LANES, WARP, Device
from tensorloop.compiler.emitter.device.lane_product import LaneProduct
from tensorloop.compiler.emitter.device.lane_walk import LaneWalk
from tensorloop.compiler.emitter.device.lanes import Elements, GroupRows, LaneShare, share_lanes
from tensorloop.compiler.emitter.device.waits import Touch, WaitPlanner, touches, whole_touches
from tensorloop.compiler.emitter.ir.arrays import Array, Region, contiguous
from tensorloop.compiler.emitter.ir.code import Code, Index
from tensorloop.compiler.emitter.ir.kernels import CallOut, Gather, Matmul, Matrix, Point, Scatter
from tensorloop.compiler.emitter.lower import growing
from tensorloop.compiler.emitter.lower.lowering import LoweredStep, copied
from tensorloop.compiler.emitter.write import in_order
from tensorloop.compiler.emitter.write.bounds import check_rows, find_bounds
from tensorloop.compiler.emitter.write.factorings import ALGORITHMS
from tensorloop.compiler.emitter.write.function import operations_of
from tensorloop.compiler.emitter.write.fuse import (
    Unit,
    WalkGroup,
    drop_unread,
    find_stored,
    group_walks,
    join_additions,
    split_by_readers,
)
from tensorloop.compiler.emitter.write.matmul import turn_product
from tensorloop.compiler.emitter.write.matrices import Matrices, work_of
from tensorloop.compiler.emitter.write.memory import Memory, RowRange
from tensorloop.compiler.emitter.write.rows import share_rows
from tensorloop.compiler.emitter.write.scratch import LINE, find_lives, line, place_scratch
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.step import Unsupported

ENOUGH_LANES = 256  # of a group, where nobody says how many: more wait longer for each other than they gain


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceText:
    """A kernel's module, and what a caller must know to launch it.

    The kernel `run` takes addresses, in this order: invariants in the layouts of the step, constants, dense copies of
    `packed`, sequences, carry, outs, sums, the last carry, and two words of status (steps done; whether an index was
    out of range), zero before; then the number of steps, an i64 of at least one; then, unless scratch is `local`,
    the address of `groups` times `scratch` bytes.

    Args:
        module: LLVM's text.
        lanes: of a group, which the launch must have.
        groups: as many, too.
        scratch: bytes a group needs beside its registers.
        local: whether these are shared memory, of a size that the launch says.
        rows: how many are shared out among groups; 0 for none.
        work: operations a step, roughly.
        barriers: how often lanes wait for each other in a step.
        apart: numbers of the sums of which each group has its own, one behind the other, zero before; the caller adds
            them up. None where there is one group.
        packed: matrices that stay the same, of which the caller hands over copies with neighbouring columns: parts of
            invariants and constants, as their buffers say.
        idle: what the first lane of a group does alone.
        checks_indices: whether a step may say that an index is out of range.
        asks: whether a loop may end before its last step.
        bounds: conditions on lengths of arrays, as those of `LoopText`.
    """

    module: str
    lanes: int
    groups: int
    scratch: int
    local: bool
    rows: int
    work: int
    barriers: int
    apart: tuple[int, ...]
    packed: tuple[Array, ...]
    idle: tuple[str, ...]
    checks_indices: bool
    asks: bool
    bounds: tuple[Length, ...] = ()


def device_text(step: LoweredStep, device: Device) -> DeviceText:
    """Returns a step's text for a device; raises `Unsupported` where it has none."""
    return KernelWriter(step, device).text()


class KernelWriter:
    """A step's kernels put together for a device, and their text."""

    def __init__(self, step: LoweredStep, device: Device) -> None:
        _refuse(step)
        self.step, self.device, self.machine = step, device, device.machine
        kept = {array.buffer for array in (*step.outs, *step.next, *step.sums)}
        kept |= {step.going.buffer} if step.going is not None else set()
        kernels = [growing.ordered(kernel) for kernel in drop_unread(step.kernels, kept)]
        kernels = [turn_product(kernel) if isinstance(kernel, Matmul) else kernel for kernel in kernels]
        self.units: list[Unit] = group_walks(split_by_readers(join_additions(kernels, kept), kept))
        self.bounds = find_bounds(self.units, step.source.graph.nodes, step.source.growth)
        self.stored = find_stored(self.units, kept)
        for unit in self.units:
            if isinstance(unit, Matrix):
                if unit.check is not None:
                    raise Unsupported(f"{unit.check.name}, which fails where a matrix is singular")
                unit.work = work_of(unit, self.machine)
        self.packed = _packed(self.units)
        self.split = share_rows(step, self.units, {})
        self.rows = self._rows()
        if self.rows is None:
            self.split = None
        self.dims = [None if self.split is None else self.split.dims[n] for n in range(len(self.units))]
        self.pairs = [n for n, array in enumerate(step.next) if array.buffer.kind == "next"]
        self.lanes = self._lanes()
        self.shares = [share_lanes(*pair, self.rows, self.lanes) for pair in zip(self.units, self.dims, strict=True)]
        self.offsets, self.scratch = self._place()
        self.local = self.scratch <= device.local
        self._plan()

    def _rows(self) -> GroupRows | None:
        """What each group has of the rows; None where one group has all."""
        if self.split is None:
            return None
        check_rows(self.units, self.split.dims, self.split.count)
        share = -(-self.split.count // max(1, self.device.groups))
        groups = -(-self.split.count // share)
        return GroupRows(self.split.count, share, groups) if groups > 1 else None

    def _lanes(self) -> int:
        """As the device says, or enough for the unit with most elements."""
        lanes = self.device.lanes_a_group
        if not lanes:
            most = 1
            for unit, dim in zip(self.units, self.dims, strict=True):
                part = self.rows.share / self.rows.count if self.rows is not None and dim is not None else 1
                size = math.prod(unit.space) if isinstance(unit, WalkGroup | Matrix) else unit.writes()[0].numel
                most = max(most, math.ceil(part * size))
            lanes = min(ENOUGH_LANES, -(-most // WARP) * WARP)
        if not 0 < lanes <= MOST_LANES:
            raise Unsupported(f"{lanes} lanes of a group, of which there are at most {MOST_LANES}")
        return lanes

    # scratch

    def has_rows(self, buffer: Region) -> bool:
        """Whether each group has a part of a buffer."""
        return self.split is not None and self.split.buffers.get(buffer, False)

    def _room(self, buffer: Region) -> int:
        """Bytes that a group needs of a buffer: of its own rows, where it has rows."""
        assert isinstance(buffer.bytes, int)
        if self.rows is not None and self.has_rows(buffer):
            return line(buffer.bytes // self.rows.count * self.rows.share)
        return line(buffer.bytes)

    def _place(self) -> tuple[dict[Region, int], int]:
        """Offsets of scratch buffers; those of carries come first."""

        def moved(unit: Unit) -> list[Region]:
            return [unit.work] if isinstance(unit, Matrix) and unit.work is not None else []

        lives = find_lives(self.units, self.stored, moved, self.step.going)
        end = sum(2 * self._room(self.step.next[n].buffer) for n in self.pairs)
        places, total = place_scratch(lives, end, self._room)
        return places, max(LINE, total) + self.device.own_scratch(self.lanes)

    def _plan(self) -> None:
        """Where lanes wait."""
        step, first, last = self.step, list[Touch](), list[Touch]()
        for n, array in enumerate(step.carry):
            if array.numel:
                after, share = step.next[n], self._whole(array)
                first += whole_touches(_same(after.buffer, array), share, writes=True) if n in self.pairs else []
                last += whole_touches(_same(array.buffer, array), share, writes=False)
        parts = [touches(unit, share, self.stored) for unit, share in zip(self.units, self.shares, strict=True)]
        ranges = {buffer: (at, at + self._room(buffer)) for buffer, at in self.offsets.items()}
        self.waits = WaitPlanner(step, ranges).plan(parts, first, last)

    def _whole(self, array: Array) -> LaneShare:
        """How lanes share a carry that is copied."""
        group = _copying(array)
        return share_lanes(group, 0 if self.has_rows(array.buffer) else None, self.rows, self.lanes)

    # text

    def text(self) -> DeviceText:
        """The module."""
        step = self.step
        for n, one in enumerate(self.packed.values()):
            one.buffer.index = n
        code, names = Code(), _Names(step, len(self.packed))
        if len(names.all) > MOST_ARGUMENTS:
            raise Unsupported(f"{len(names.all)} tensors, of which a kernel takes at most {MOST_ARGUMENTS}")
        groups = 1 if self.rows is None else self.rows.groups
        self.device.begin(code, self.lanes, groups, self.scratch, self.local)
        _KernelBody(self, code, names).write()
        apart = tuple(n for n in range(len(step.sums)) if self.is_apart(n))
        idle = [type(unit).__name__ for unit, share in zip(self.units, self.shares, strict=True) if share.by == "first"]
        return DeviceText(
            self.device.module(code, names.all, self.lanes, self.local),
            self.lanes,
            groups,
            self.scratch,
            self.local,
            0 if self.rows is None else self.rows.count,
            sum(map(operations_of, self.units)),
            self.waits.a_step,
            apart,
            tuple(self.packed),
            tuple(idle),
            any(map(_checks_indices, self.units)),
            step.going is not None,
            tuple(self.bounds),
        )

    def is_apart(self, n: int) -> bool:
        """Whether each group has a sum of its own."""
        return self.split is not None and self.step.sums[n].buffer in self.split.apart


class _Names:
    """Names of the kernel's addresses, in their order."""

    def __init__(self, step: LoweredStep, packed: int) -> None:
        counts = {
            "invariant": len(step.invariants),
            "constant": len(step.constants),
            "packed": packed,
            "sequence": len(step.sequences),
            "first": len(step.carry),
            "out": len(step.outs),
            "sum": len(step.sums),
            "last": len(step.carry),
        }
        self.of = {(kind, n): f"%{kind}.{n}" for kind, count in counts.items() for n in range(count)}
        self.all = [*self.of.values(), "%status"]


class _Pointers(dict[Region, str]):
    """Names by buffer: of scratch its place, else by kind and index."""

    def __init__(self, names: dict[tuple[str, int], str]) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, buffer: Region) -> str:
        if buffer.kind == "value":
            return "poison"
        return self.names[buffer.kind, buffer.index]


class LaneMemory(Memory):
    """Memory whose functions are those of a device."""

    def __init__(self, code: Code, target: Device, pointers: dict[Region, str], error: str) -> None:
        super().__init__(code, target.machine, pointers, error)
        self.math = DeviceMath(code)


class _KernelBody:
    """Writes a kernel's lines."""

    def __init__(self, writer: KernelWriter, code: Code, names: _Names) -> None:
        self.writer, self.code, self.given, self.step = writer, code, names.of, writer.step
        self.device, self.rows = writer.device, writer.rows
        self.low: Index = 0
        self.high: Index = 0
        self.shifts: dict[int, Index] = {}

    def write(self) -> None:
        """All of it."""
        code, step, waits = self.code, self.step, self.writer.waits
        self._bounds()
        self.leads = code.op("icmp eq i64 %lane, 0", "i1")
        self.first_group = code.op("icmp eq i64 %group, 0", "i1")
        pairs = self._pairs()
        begin = self._begin(pairs)
        names = dict(self.given)
        for n, array in enumerate(step.sums):
            if self.writer.is_apart(n):
                names["sum", n] = code.pointer(names["sum", n], code.times("%group", array.buffer.bytes))
        places = {buffer: self._scratch(buffer, at) for buffer, at in self.writer.offsets.items()}
        if step.source.reverse:
            code.line("%last.step = sub i64 %steps, 1")
        before = code.block
        code.line("br label %step")
        code.label("step")
        turn = code.phi("%turn", "i64", "0", before)
        carried = [code.phi(code.name("carry"), "ptr", one, before) for one in begin]
        following = {n: code.phi(code.name("next"), "ptr", one, before) for n, (one, _) in pairs.items()}
        names |= {("carry", n): phi.name for n, phi in enumerate(carried)}
        names |= {("next", n): phi.name for n, phi in following.items()}
        memory = self._memory(names, places)
        for n in range(len(self.writer.units)):
            if waits.before[n]:
                self.device.wait(code)
            self._unit(memory, n)
        after = [memory.pointers[array.buffer] for array in step.next]
        # A carry has two places. The step has read one and written the other, which is read next.
        swapped = {}
        for n, (one, other) in pairs.items():
            same = code.op(f"icmp eq ptr {following[n].name}, {one}", "i1").text
            swapped[n] = code.op(f"select i1 {same}, ptr {other}, ptr {one}", "ptr").text
        done = code.op("add nsw i64 %turn, 1", "i64").text
        more = code.op(f"icmp slt i64 {done}, %steps", "i1")
        if step.going is not None:
            # All lanes of a group, and all groups, read the same: else some would wait for others that have left.
            if waits.asking:
                self.device.wait(code)
            more = code.binary("and", more, memory.load(step.going.squeeze(), (), None, 1, None))
        latch = code.block
        code.line(f"br i1 {more.text}, label %step, label %finish")
        turn.close(done, latch)
        for phi, end in zip(carried, after, strict=True):
            phi.close(end, latch)
        for n, phi in following.items():
            phi.close(swapped[n], latch)
        code.label("finish")
        self._finish(after, done)

    def _bounds(self) -> None:
        """The rows of this group."""
        code, rows = self.code, self.rows
        if rows is None:
            return
        self.low = code.times("%group", rows.share)
        self.high = code.add(self.low, rows.share)
        if not rows.even:
            fits = code.op(f"icmp slt i64 {self.high}, {rows.count}", "i1").text
            self.high = code.op(f"select i1 {fits}, i64 {self.high}, i64 {rows.count}", "i64").text

    def _scratch(self, buffer: Region, offset: int) -> str:
        """Where row 0 of a scratch buffer would lie, so that this group's first row lies at the offset."""
        code, rows = self.code, self.rows
        place = code.pointer("%scratch", offset)
        if rows is None or not self.writer.has_rows(buffer):
            return place
        assert isinstance(buffer.bytes, int)
        size = buffer.bytes // rows.count
        if size not in self.shifts:
            self.shifts[size] = code.times(self.low, -size)
        return code.pointer(place, self.shifts[size])

    def _pairs(self) -> dict[int, tuple[str, str]]:
        """Two places for each carry that has none in an output."""
        made, offset = {}, 0
        for n in self.writer.pairs:
            buffer = self.step.next[n].buffer
            size = self.writer._room(buffer)
            made[n] = self._scratch(buffer, offset), self._scratch(buffer, offset + size)
            offset += 2 * size
        return made

    def _begin(self, pairs: dict[int, tuple[str, str]]) -> list[str]:
        """Where each carry is read at the first step: what takes turns in scratch memory is copied into it."""
        begin = []
        for n, array in enumerate(self.step.carry):
            first = self.given["first", n]
            if n in pairs:
                self._copy(array, first, pairs[n][1])
            begin.append(pairs[n][1] if n in pairs else first)
        return begin

    def _memory(self, names: dict[tuple[str, int], str], places: dict[Region, str]) -> Memory:
        """Where everything lies at this step."""
        code, step = self.code, self.step
        index = code.op("sub i64 %last.step, %turn", "i64").text if step.source.reverse else "%turn"
        for kind, arrays in (("sequence", step.sequences), ("out", step.outs)):
            for n, array in enumerate(arrays):
                size = array.numel * array.dtype.itemsize
                names[kind, n] = code.pointer(self.given[kind, n], code.times(index, size))
        pointers = _Pointers(names)
        pointers.update(places)
        return LaneMemory(code, self.device, pointers, code.pointer("%status", 8))

    def _range(self, dim: int | None) -> RowRange | None:
        return None if self.rows is None or dim is None else RowRange(str(self.low), str(self.high), dim)

    def _unit(self, memory: Memory, n: int) -> None:
        """One unit, as its lanes share it."""
        writer = self.writer
        unit, dim, share = writer.units[n], writer.dims[n], writer.shares[n]
        rows = self._range(dim)
        conditions = []
        if any(array.buffer.kind == "sum" for array in unit.writes()) and dim is None and self.rows is not None:
            conditions.append(self.first_group)  # each group has computed it, one adds it
        if share.by == "first":
            conditions.append(self.leads)
        with contextlib.ExitStack() as blocks:
            for condition in conditions:
                blocks.enter_context(self.code.when(condition))
            self._write(memory, unit, rows, share)

    def _write(self, memory: Memory, unit: Unit, rows: RowRange | None, share: LaneShare) -> None:
        lanes = self.writer.lanes
        if isinstance(unit, WalkGroup):
            LaneWalk(memory, unit, self.writer.stored, rows, share, lanes).emit(self.device)
        elif isinstance(unit, Matmul):
            right = self.writer.packed.get(unit.b, unit.b)
            LaneProduct(memory, unit, right, rows, share, lanes).emit()
        elif isinstance(unit, Matrix):
            Matrices(memory, unit, rows, ALGORITHMS[unit.how], "poison").emit()
        else:
            assert not isinstance(unit, CallOut)
            self._lines(memory, unit, rows, share)

    def _lines(
        self, memory: Memory, unit: "Scatter | in_order.Running", rows: RowRange | None, share: LaneShare
    ) -> None:
        """A scatter or a running sum, a line along its dim each lane."""
        bounds = (rows.low, rows.high) if share.rows and rows is not None else None
        shape = unit.index.shape if isinstance(unit, Scatter) else unit.array.shape

        def line_at(places: list[Index]) -> None:
            index: list[Index] = [0] * len(shape)
            for d, place in zip(share.order, places, strict=True):
                index[d] = place
            if not isinstance(unit, Scatter):
                in_order.running_line(memory, unit, index, None, 1, None)
                return
            with self.code.loop(0, shape[unit.dim]) as loop:
                index[unit.dim] = loop.index
                in_order.scatter_one(memory, unit, index)

        Elements(self.code, share.sizes, bounds, share.count).each(self.writer.lanes, line_at)

    def _finish(self, after: Sequence[str], done: str) -> None:
        """The last carry into the caller's memory, and the number of steps."""
        code = self.code
        if self.writer.waits.leaving:
            self.device.wait(code)
        with code.when(code.binary("and", self.leads, self.first_group)):
            code.line(f"store i64 {done}, ptr %status, align 8")
        for n, array in enumerate(self.step.carry):
            own = self.rows is None or self.writer.has_rows(array.buffer)
            with contextlib.nullcontext() if own else code.when(self.first_group):
                self._copy(array, after[n], self.given["last", n])

    def _copy(self, array: Array, source: str, place: str) -> None:
        if not array.numel:
            return
        group = _copying(array)
        (point,) = group.walks
        pointers = {point.reads()[0].buffer: source, point.writes()[0].buffer: place}
        memory = LaneMemory(self.code, self.device, pointers, "poison")
        rows = self._range(0) if self.writer.has_rows(array.buffer) else None
        share = self.writer._whole(array)
        LaneWalk(memory, group, {point.writes()[0].buffer}, rows, share, self.writer.lanes).emit(self.device)


def _refuse(step: LoweredStep) -> None:
    """Raises where a step has what no device text has a form of."""
    if step.called:
        raise Unsupported(f"{step.called[0].target}, which torch does", step.called[0])
    arrays = (*step.carry, *step.sequences)
    if step.source.growth or any(array.buffer.kind in ("array", "prefix") for array in arrays):
        raise Unsupported("a TensorArray in the carry")


def _packed(units: Sequence[Unit]) -> dict[Array, Array]:
    """Right operands that stay the same and whose columns are no neighbours, and the copies in which they are."""
    found: dict[Array, Array] = {}
    for unit in units:
        if not isinstance(unit, Matmul) or unit.b.buffer.kind not in ("invariant", "constant"):
            continue
        if unit.b.strides[-1] != 1 and unit.b.shape[-1] > 1:
            region = Region("packed", 0, unit.b.numel, unit.b.dtype)
            found.setdefault(unit.b, contiguous(region, unit.b.shape))
    return found


def _same(buffer: Region, array: Array) -> Array:
    return contiguous(buffer, array.shape)


def _copying(array: Array) -> WalkGroup:
    """A copy of a dense array, for others to say of what."""
    a, b = (contiguous(Region("copy", n, array.numel, array.dtype), array.shape) for n in range(2))
    return WalkGroup(array.shape, [Point("copy", copied, (a,), b)])


def _checks_indices(unit: Unit) -> bool:
    return isinstance(unit, Scatter) or (
        isinstance(unit, WalkGroup) and any(isinstance(walk, Gather) for walk in unit.walks)
    )
