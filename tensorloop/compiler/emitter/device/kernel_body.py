"""A kernel's lines: the rows of a group, the carry's two places, a step's units, and the last carry."""

import contextlib
from collections.abc import Sequence

from tensorloop.compiler.emitter.device.device_math import DeviceMath
from tensorloop.compiler.emitter.device.devices import Device
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.device.lane_product import LaneProduct
from tensorloop.compiler.emitter.device.lane_walk import LaneWalk
from tensorloop.compiler.emitter.device.lanes import Elements, LaneShare, split_index
from tensorloop.compiler.emitter.ir.code import Code, Index
from tensorloop.compiler.emitter.ir.kernels import CallOut, Matmul, Matrix, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower import growing
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write import element_by_element
from tensorloop.compiler.emitter.write.elements import Memory, Pointers, RowRange
from tensorloop.compiler.emitter.write.factorings import ALGORITHMS
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.matrices import Matrices
from tensorloop.compiler.emitter.write.step_loop import StepLoop, roles
from tensorloop.compiler.emitter.write.units import copying

LINE_BYTES = 128  # of a device's first cache
GROWN = "%grown"  # where scratch begins that is as long as arrays


class Names:
    """Names of the kernel's addresses and of its numbers, in their order."""

    def __init__(self, step: LoweredStep, packed: int, grown: bool) -> None:
        self.of = {(kind, n): f"%{kind}.{n}" for kind, n in roles(step, packed)}
        self.all = [*self.of.values(), "%status", *([GROWN] if grown else [])]
        self.numbers = ["%steps", *(f"%start.{n}" for n in range(len(step.source.growth)))]


class LaneMemory(Memory):
    """Memory whose functions are those of a device."""

    def __init__(self, code: Code, target: Device, pointers: dict[Region, str], error: str) -> None:
        super().__init__(code, target.machine, pointers, error)
        self.math = DeviceMath(code, target)


class KernelBody:
    """Writes a kernel's lines."""

    def __init__(self, plan: KernelPlan, code: Code, names: Names) -> None:
        self.plan, self.code, self.given, self.step = plan, code, dict(names.of), plan.step
        self.device, self.rows = plan.device, plan.rows
        self.low: Index = 0
        self.high: Index = 0
        self.shifts: dict[int, Index] = {}

    def write(self) -> None:
        """All of it."""
        code, step, waits = self.code, self.step, self.plan.waits
        self._bounds()
        self.leads = code.op("icmp eq i64 %lane, 0", "i1")
        self.first_group = code.op("icmp eq i64 %group, 0", "i1")
        self._take_part()
        pairs = self._pairs()
        begin = self._begin(pairs)
        places = {buffer: self._scratch(buffer, at) for buffer, at in self.plan.offsets.items()} | self._grown()
        self._load(places)
        for n, array in enumerate(step.sums):
            if self.plan.is_apart(n):
                self.given["sum", n] = code.pointer(self.given["sum", n], code.times("%group", array.buffer.bytes))
        if waits.starting:
            self.device.wait(code)
        loop = StepLoop(code, step, self.given, begin, pairs)
        pointers = Pointers(loop.names)
        pointers.update(places)
        self._fetch_ahead(loop)
        memory = LaneMemory(code, self.device, pointers, code.pointer("%status", 8))
        for n in range(len(self.plan.units)):
            if waits.before[n]:
                self.device.wait(code)
            self._unit(memory, n)
        # All lanes of a group, and all groups, read the same condition: else some would wait for others that have left.
        if waits.asking:
            self.device.wait(code)
        self._finish(*loop.end(memory))

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

    def _take_part(self) -> None:
        """Where this group has its heads, and its rows of them, in the memory of the caller."""
        if self.plan.part is None:
            return
        code, number, places = self.code, "%group", list[str]()
        for cut in reversed(self.plan.part.cuts):
            places.insert(0, code.op(f"urem i64 {number}, {cut.groups}", "i64").text)
            number = code.op(f"udiv i64 {number}, {cut.groups}", "i64").text
        for (kind, n), name in self.given.items():
            for place, move in zip(places, self.plan.moves(kind, n), strict=True):
                if move:
                    self.given[kind, n] = name = code.pointer(name, code.times(place, move))

    def _scratch(self, buffer: Region, offset: int) -> str:
        """Where row 0 of a scratch buffer would lie, so that this group's first row lies at the offset."""
        code, rows = self.code, self.rows
        place = code.pointer("%scratch", offset)
        if rows is None or not self.plan.has_rows(buffer):
            return place
        assert isinstance(buffer.bytes, int)
        size = buffer.bytes // rows.count
        if size not in self.shifts:
            self.shifts[size] = code.times(self.low, -size)
        return code.pointer(place, self.shifts[size])

    def _grown(self) -> dict[Region, str]:
        """Where scratch lies that is as long as the longest arrays: all rows of a slot, or what a group has alone."""
        code, places, at = self.code, dict[Region, str](), "%grown"
        most = [self._longest(k, more) for k, more in enumerate(self.step.source.growth)]
        for buffer in self.plan.grown:
            size = growing.line(code, most, buffer)
            own = self.rows is not None and not self.plan.has_rows(buffer)
            groups = self.rows.groups if own and self.rows is not None else 1
            places[buffer] = code.pointer(at, code.op(f"mul i64 %group, {size}", "i64").text) if own else at
            at = code.pointer(at, code.times(size, groups))
        code.lengths = []  # those of a step are known in it
        return places

    def _longest(self, k: int, more: int) -> str:
        """How long an array is at the step at which it is longest."""
        if more <= 0:
            return f"%start.{k}"
        after = self.code.op("sub i64 %steps, 1", "i64").text
        return self.code.op(f"add i64 %start.{k}, {self.code.times(after, more)}", "i64").text

    def _pairs(self) -> dict[int, tuple[str, str]]:
        """Two places for each carry that has none in an output."""
        made, offset = {}, 0
        for n in self.plan.pairs:
            buffer = self.step.next[n].buffer
            size = self.plan.room(buffer)
            made[n] = self._scratch(buffer, offset), self._scratch(buffer, offset + size)
            offset += 2 * size
        return made

    def _begin(self, pairs: dict[int, tuple[str, str]]) -> list[str]:
        """Where each carry is read at the first step: what takes turns in scratch memory is copied into it."""
        begin = []
        for n, array in enumerate(self.step.carry):
            first = self.given["first", n]
            if n in pairs:
                self._copy(self._outside(n), first, array, pairs[n][1])
            begin.append(pairs[n][1] if n in pairs else first)
        return begin

    def _load(self, places: dict[Region, str]) -> None:
        """Matrices that stay, into fast memory: neighbours are read by neighbouring lanes."""
        for matrix, one in self.plan.near.items():
            pointers = {**places, matrix.buffer: self.given[matrix.buffer.kind, matrix.buffer.index]}
            memory = LaneMemory(self.code, self.device, pointers, "poison")
            written, share = {one.right.buffer}, self.plan.loading(one)
            LaneWalk(memory, one.load, written, self._range(one.row), share, self.plan.lanes).emit(self.device)

    def _range(self, dim: int | None) -> RowRange | None:
        return None if self.rows is None or dim is None else RowRange(str(self.low), str(self.high), dim)

    def _fetch_ahead(self, loop: StepLoop) -> None:
        """Asks for what the next step reads of its inputs, while this one computes: a line for each lane."""
        code, step, lanes = self.code, self.step, self.plan.lanes
        more = code.op(f"icmp slt i64 {code.op('add nsw i64 %turn, 1', 'i64').text}, %steps", "i1").text
        for n, array in enumerate(step.sequences):
            size = array.buffer.bytes
            if array.buffer.kind != "sequence" or not isinstance(size, int):
                continue
            begin, end, part = 0, size, size
            if self.rows is not None and self.plan.has_rows(array.buffer):
                row = size // self.rows.count
                begin, end, part = code.times(self.low, row), code.times(self.high, row), row * self.rows.share
            runs, apart = 1, 0
            if self.plan.part is not None:
                runs, apart, part = self.plan.part.runs(array.buffer)
                end = part
            lines = -(-part // LINE_BYTES)
            if not 0 < lines * runs <= lanes:  # a lane asks for one line
                continue
            # Behind the last step this one's input is asked for again: there is no other.
            ahead = code.op(f"select i1 {more}, i64 {-size if step.source.reverse else size}, i64 0", "i64").text
            run, line = split_index(code, "%lane", (runs, lines)) if runs > 1 else (0, "%lane")
            at = code.add(begin, code.times(line, LINE_BYTES), code.times(run, apart))
            inside = f"icmp slt i64 %lane, {runs * lines}" if runs > 1 else f"icmp slt i64 {at}, {end}"
            with code.when(code.op(inside, "i1")):
                self.device.fetch(code, code.pointer(code.pointer(loop.names["sequence", n], ahead), at))

    def _unit(self, memory: Memory, n: int) -> None:
        """One unit, as its lanes share it."""
        plan = self.plan
        unit, dim, share = plan.units[n], plan.dims[n], plan.shares[n]
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
        lanes = self.plan.lanes
        if isinstance(unit, WalkGroup):
            LaneWalk(memory, unit, self.plan.stored, rows, share, lanes).emit(self.device)
        elif isinstance(unit, Matmul):
            right = self.plan.packed.get(unit.b, unit.b)
            LaneProduct(memory, unit, right, rows, share, lanes).emit(self.device)
        elif isinstance(unit, Matrix):
            failed = memory.code.pointer("%status", 16) if unit.check is not None else "poison"
            Matrices(memory, unit, rows, ALGORITHMS[unit.how], failed).emit()
        else:
            assert not isinstance(unit, CallOut)
            self._lines(memory, unit, rows, share)

    def _lines(
        self, memory: Memory, unit: "Scatter | element_by_element.Running", rows: RowRange | None, share: LaneShare
    ) -> None:
        """A scatter or a running sum, a line along its dim each lane."""
        bounds = (rows.low, rows.high) if share.rows and rows is not None else None
        shape = unit.index.shape if isinstance(unit, Scatter) else unit.array.shape

        def line_at(places: list[Index]) -> None:
            index: list[Index] = [0] * len(shape)
            for d, place in zip(share.order, places, strict=True):
                index[d] = place
            if not isinstance(unit, Scatter):
                element_by_element.running_line(memory, unit, index, None, 1, None)
                return
            with self.code.loop(0, shape[unit.dim]) as loop:
                index[unit.dim] = loop.index
                element_by_element.scatter_one(memory, unit, index)

        Elements(self.code, share.sizes, bounds, share.count).each(self.plan.lanes, line_at)

    def _finish(self, after: Sequence[str], done: str) -> None:
        """The last carry into the caller's memory, and the number of steps."""
        code = self.code
        if self.plan.waits.leaving:
            self.device.wait(code)
        with code.when(code.binary("and", self.leads, self.first_group)):
            code.line(f"store i64 {done}, ptr %status, align 8")
        for n, array in enumerate(self.step.carry):
            if array.buffer.kind == "array":
                continue
            own = (self.plan.groups == 1) or self.plan.has_rows(array.buffer) or any(self.plan.moves("last", n))
            with contextlib.nullcontext() if own else code.when(self.first_group):
                self._copy(array, after[n], self._outside(n), self.given["last", n])

    def _outside(self, n: int) -> Array:
        """A carry as it lies in the caller's memory."""
        return self.step.carry[n] if self.plan.part is None else self.plan.part.outside[n]

    def _copy(self, array: Array, source: str, out: Array, place: str) -> None:
        if not array.numel:
            return
        group = copying(array, out)
        (point,) = group.walks
        pointers = {point.reads()[0].buffer: source, point.writes()[0].buffer: place}
        memory = LaneMemory(self.code, self.device, pointers, "poison")
        rows = self._range(0) if self.plan.has_rows(array.buffer) else None
        share = self.plan.whole(array)
        LaneWalk(memory, group, {point.writes()[0].buffer}, rows, share, self.plan.lanes).emit(self.device)
