"""The whole loop as one function's text.

    void prepare(i64* table)                                  packs what stays the same
    void run(i64* table, i64 steps, i64 low, i64 high, char* scratch, i64 part)    rows low to high of every step
    void member(i64* job)                                     a thread: claims parts of the rows until none is left

Where rows meet, and a step is long, `run` is what thread `low` of `high` does, with the job's address as `part`.

The table holds addresses: invariants, constants, packed panels, sequences, carry, outs, sums, last carry, status; then
the lengths of arrays before the first step, and the greatest that they have before one.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tensorloop.compiler.emitter.ir.code import Code, Index, Value
from tensorloop.compiler.emitter.ir.failures import goes_on
from tensorloop.compiler.emitter.ir.kernels import CallOut, Check, Matmul, Matrix, Scatter
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.lower import growing
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write import calling, element_by_element, members
from tensorloop.compiler.emitter.write.bounds import check_rows, find_bounds
from tensorloop.compiler.emitter.write.elements import Memory, Pointers, RowRange
from tensorloop.compiler.emitter.write.factorings import ALGORITHMS
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.matmul import Panels, Product, pack, plan_panels
from tensorloop.compiler.emitter.write.matrices import Matrices, number_checks
from tensorloop.compiler.emitter.write.nest import Nest
from tensorloop.compiler.emitter.write.row_shares import RowShare, share_rows
from tensorloop.compiler.emitter.write.scratch import LINE, find_lives, line, place_scratch
from tensorloop.compiler.emitter.write.step_loop import Role, StepLoop, roles
from tensorloop.compiler.emitter.write.team import Planner, Team
from tensorloop.compiler.emitter.write.units import copying, find_grown, put_together
from tensorloop.compiler.lengths import Length

MANY = 1 << 30  # operations that a walk along an array counts as: threads share it out whatever its length
RUN = "ptr %table, i64 %steps, i64 %low, i64 %high, ptr %scratch, i64 %part"


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedCall:
    """An operation that torch does in a step, and where in scratch memory its operands begin."""

    kernel: CallOut
    places: Mapping[Region, int]


@dataclasses.dataclass(frozen=True, eq=False)
class LoopText:
    """A module, and what a caller must know of it."""

    module: str
    scratch: int  # bytes a thread
    packed: tuple[int, ...]  # bytes of each
    rows: int  # how many can be shared out among threads; 0 for none
    work: int  # operations a step, roughly
    apart: tuple[int, ...] = ()  # sums of which each part of the rows has its own, one behind the other
    growing: tuple[Length, ...] = ()  # further bytes, of what is as long as the longest arrays
    barriers: int = 0  # of a step whose rows meet, where threads do it together
    shared: int = 0  # operations of such a step that they share out, roughly
    checks: tuple[Check, ...] = ()  # of matrices, by number
    bounds: tuple[Length, ...] = ()  # of lengths, not below zero where each address is in its tensor
    calls: tuple[PlacedCall, ...] = ()  # of torch, in the order of a step


class LoopWriter:
    """A step's kernels put together, and their text."""

    gap = 0  # bytes left free behind each scratch buffer

    def __init__(self, step: LoweredStep, target: Machine) -> None:
        self.step, self.target = step, target
        self.units, self.stored = put_together(step)
        self.bounds = find_bounds(self.units, step.source.graph.nodes, step.source.growth)
        self.packed = plan_panels(self.units, target)
        self.checks = number_checks(self.units, target)
        work = [operations_of(unit) for unit in self.units]
        self.work = sum(work)
        # One thread does a step that calls torch, whose operations have threads of their own.
        self.calls = any(isinstance(unit, CallOut) for unit in self.units)
        self.split: RowShare | None = None if self.calls else share_rows(step, self.units, self.packed)
        if self.split is not None:
            check_rows(self.units, self.split.dims, self.split.count)
        self.fixed = [one for one in self.packed.values() if one.buffer.kind == "packed"]
        self.pairs = [n for n, array in enumerate(step.next) if array.buffer.kind == "next"]
        self.offsets, self.scratch = self._place()
        self.team: Team | None = None
        if self.split is None and not self.calls:
            found = Planner(self.packed, self.stored, self.offsets, target).plan(step, self.units, work)
            self.team = found if found is not None and target.worth_sharing(found.shared, found.barriers) else None
        self.growing = find_grown(self.units, self.stored)
        bits = f'"prefer-vector-width"="{target.bits}" "min-legal-vector-width"="{target.bits}"'
        self.attributes = f"nounwind {bits}"
        self.products: dict[str, str] = {}  # text -> name

    def _place(self) -> tuple[dict[Region, int], int]:
        """Offsets of scratch buffers, and how much there is of it."""
        end = sum(2 * self._room(self.step.next[n].buffer) for n in self.pairs)
        places, total = place_scratch(self._lives(), end, self._room)
        return places, max(total, LINE)

    def _lives(self) -> dict[Region, tuple[int, int]]:
        return find_lives(self.units, self.stored, self._moved, self.step.going)

    def _moved(self, unit: Unit) -> list[Region]:
        """Scratch that a unit needs beside its arrays: panels, and a place to work in."""
        arrays = [*unit.reads(), *unit.writes()]
        moved = [self.packed[a].buffer for a in arrays if a in self.packed]
        return [*moved, *([unit.work] if isinstance(unit, Matrix) and unit.work is not None else [])]

    def _room(self, buffer: Region) -> int:
        return line(buffer.bytes) + self.gap

    # text

    def text(self) -> LoopText:
        """The module."""
        step = self.step
        run, prepare = Code(), Code()
        self._run(run)
        self._prepare(prepare)
        declared = sorted({*run.declared.values(), *prepare.declared.values()})
        parts = [
            f'target triple = "{self.target.triple}"',
            *declared,
            f"define void @prepare(ptr %table) {self.attributes} {{\nentry:",
            *prepare.text,
            "  ret void\n}",
            f"define void @run({RUN}) {self.attributes} {{\nentry:",
            *run.text,
            "  ret void\n}",
            *(f"define internal void @{name}{text}" for text, name in self.products.items()),
            *([members.APART] if self.team is None else [*members.wait_text(self.target.triple), members.TOGETHER]),
        ]
        rows = self.split.count if self.split else 0
        sizes = tuple(one.buffer.bytes for one in self.fixed)
        more = tuple(one.bytes for one in self.growing if isinstance(one.bytes, Length))
        apart = tuple(n for n in range(len(step.sums)) if self._is_apart(n))
        barriers, shared = (0, 0) if self.team is None else (self.team.barriers, self.team.shared)
        module, held = "\n".join(parts) + "\n", tuple(self.bounds)
        calls = tuple(PlacedCall(unit, self.offsets) for unit in self.units if isinstance(unit, CallOut))
        first = module, self.scratch, sizes, rows, self.work, apart, more, barriers, shared
        return LoopText(*first, self.checks, held, calls)

    def _is_apart(self, n: int) -> bool:
        """Whether each part of the rows has a sum of its own."""
        return self.split is not None and self.step.sums[n].buffer in self.split.apart

    def _prepare(self, code: Code) -> None:
        memory = Memory(code, self.target, Pointers(self._addresses(code, "invariant", "constant", "packed")), "poison")
        for n, one in enumerate(self.fixed):
            one.buffer.index = n
            pack(memory, one)

    def _run(self, code: Code) -> None:
        """All steps: what is known before the first one, a turn of the loop, and the last carry."""
        step = self.step
        for n, one in enumerate(self.fixed):
            one.buffer.index = n
        given = self._addresses(code)
        place, status = len(given), _read_address(code, len(given))
        self._lengths(code, place + 1)
        shares = self._shares(code)
        leading = code.op("icmp eq i64 %low, 0", "i1") if self.split or self.team else None
        self.entry = calling.read_entry(code, status) if self.calls else ("", "")
        pairs = self._pairs(code)
        for n, array in enumerate(step.sums):
            if self._is_apart(n):
                given["sum", n] = code.pointer(given["sum", n], code.times("%part", array.buffer.bytes))
        first, last = ([given[kind, n] for n in range(len(step.carry))] for kind in ("first", "last"))
        loop = StepLoop(code, step, given, first, pairs)
        pointers = Pointers(loop.names)
        for buffer, offset in self.offsets.items():
            pointers[buffer] = code.pointer("%scratch", offset)
        pointers.update(self.scratch_pointers)
        memory = Memory(code, self.target, pointers, code.pointer(status, 8))
        for n, unit in enumerate(self.units):
            if self.team is not None and self.team.waits[n]:
                self._wait(code)
            self._unit(memory, n, unit, shares[n], leading)
        if self.team is not None:
            self._wait(code)
        after, done = loop.end(memory, *([goes_on(code, code.pointer(status, 16))] if self.checks else []))
        self._finish(memory, zip(after, last, strict=True), leading, f"store i64 {done}, ptr {status}, align 8")
        if self.calls:
            calling.write_end(code, status)

    def _addresses(self, code: Code, *kinds: str) -> dict[Role, str]:
        """Reads the addresses of these kinds, or all, from the table."""
        places = enumerate(roles(self.step, len(self.fixed)))
        return {role: _read_address(code, n) for n, role in places if not kinds or role[0] in kinds}

    def _lengths(self, code: Code, place: int) -> None:
        """Reads the lengths of arrays before the first step, and lays out the scratch that depends on the longest."""
        most = growing.at_start(code, place, len(self.step.source.growth))
        self.scratch_pointers: dict[Region, str] = {}
        offset: Index = self.scratch
        for buffer in self.growing:
            self.scratch_pointers[buffer] = code.pointer("%scratch", offset)
            size = growing.line(code, most, buffer)
            offset = code.add(offset, size, self.gap)

    def _pairs(self, code: Code) -> dict[int, tuple[str, str]]:
        """Two places for each carry that has none in an output."""
        made, offset = {}, 0
        for n in self.pairs:
            size = self._room(self.step.next[n].buffer)
            made[n] = code.pointer("%scratch", offset), code.pointer("%scratch", offset + size)
            offset += 2 * size
        return made

    def _shares(self, code: Code) -> list[RowRange | None]:
        """Returns the rows of each unit that this call computes; None stands for all of them."""
        if self.split is not None:
            dims = (self.split.dims[n] for n in range(len(self.units)))
            return [None if dim is None else RowRange("%low", "%high", dim) for dim in dims]
        if self.team is not None:
            cuts = self.team.cuts
            made = members.write_shares(code, [(cut.size, cut.grain) for cut in cuts if cut is not None])
            return [None if cut is None else RowRange(*made[cut.size, cut.grain], cut.dim) for cut in cuts]
        return [None] * len(self.units)

    def _wait(self, code: Code) -> None:
        code.line("call void @wait(i64 %part, i64 %high)")

    def _unit(self, memory: Memory, n: int, unit: Unit, rows: RowRange | None, leading: Value | None) -> None:
        """One unit, by as many threads as share it: those parts of it that are not shared out, by the first."""
        code = memory.code
        packed = self.packed.get(unit.b) if isinstance(unit, Matmul) else None
        # Where rows stay apart each thread computes for itself what has no rows, in scratch of its own. What would be
        # added several times, or, in a team, lies in memory that all share, the first thread does alone.
        adds = any(array.buffer.kind == "sum" for array in unit.writes())
        by_first = leading is not None and rows is None and (adds or self.team is not None)
        if packed is not None and packed.buffer.kind == "scratch":
            with code.when(leading) if leading is not None and self.team is not None else contextlib.nullcontext():
                pack(memory, packed)
            if self.team is not None and self.team.packing[n]:
                self._wait(code)
        with code.when(leading) if leading is not None and by_first else contextlib.nullcontext():
            if isinstance(unit, WalkGroup):
                Nest(memory, unit, self.stored, rows).emit()
            elif isinstance(unit, Matmul):
                self._product(memory, unit, packed, rows)
            elif isinstance(unit, CallOut):
                calling.write_call(code, *self.entry)
            elif isinstance(unit, Scatter):
                element_by_element.write_scatter(memory, unit, rows)
            elif isinstance(unit, Matrix):
                self._matrices(memory, unit, rows)
            else:
                element_by_element.write_running(memory, unit, rows)

    def _product(self, memory: Memory, unit: Matmul, packed: Panels | None, rows: RowRange | None) -> None:
        """A call of a function of its own: products of one shape share it, which is less to compile."""
        right = unit.b.buffer if packed is None else packed.buffer
        arrays = [unit.a, unit.out, *([] if unit.addend is None else [unit.addend])]
        with self._function("product", memory, [right, *(array.buffer for array in arrays)], rows) as (inner, own):
            Product(inner, unit, packed, own).emit()

    def _matrices(self, memory: Memory, unit: Matrix, rows: RowRange | None) -> None:
        """A call of a function of its own, which is told the step for the sake of its errors."""
        buffers = [array.buffer for array in (*unit.reads(), *unit.writes())]
        buffers += [] if unit.work is None else [unit.work]
        failed = f"ptr {memory.code.pointer(memory.error, 8)}" if unit.check is not None else ""
        more = {"%failed": failed, "%turn": "i64 %turn"} if failed else {}
        with self._function("matrices", memory, buffers, rows, more) as (inner, own):
            Matrices(inner, unit, own, ALGORITHMS[unit.how], "%failed").emit()

    @contextlib.contextmanager
    def _function(
        self,
        name: str,
        memory: Memory,
        touched: Sequence[Region],
        rows: RowRange | None,
        more: dict[str, str] | None = None,
    ) -> Iterator[tuple[Memory, RowRange | None]]:
        """A function of what is touched, whose text is written in this block, and a call of it."""
        buffers = [one for one in dict.fromkeys(touched) if one.kind != "value"]
        inner, more = Code(), more or {}
        pointers = {one: f"%p{n}" for n, one in enumerate(buffers)}
        # A number has no memory, and is never read through its pointer.
        pointers |= {one: "poison" for one in touched if one.kind == "value"}
        yield (
            Memory(inner, self.target, pointers, "poison"),
            None if rows is None else RowRange("%low", "%high", rows.dim),
        )
        memory.code.declared |= inner.declared
        own = [f"{given.partition(' ')[0]} {name}" for name, given in more.items()]
        arguments = ", ".join([*(f"ptr %p{n}" for n in range(len(buffers))), *own, "i64 %low, i64 %high"])
        text = f"({arguments}) {self.attributes} {{\nentry:\n" + "\n".join(inner.text) + "\n  ret void\n}"
        name = self.products.setdefault(text, f"{name}{len(self.products)}")
        low, high = (0, 0) if rows is None else (rows.low, rows.high)
        places = [f"ptr {memory.pointers[one]}" for one in buffers]
        given = ", ".join([*places, *more.values(), f"i64 {low}, i64 {high}"])
        memory.code.line(f"call void @{name}({given})")

    def _finish(self, memory: Memory, ends: Iterable[tuple[str, str]], leading: Value | None, count: str) -> None:
        """The last carry into the caller's memory: from where, to where. What has no rows, the first thread copies."""
        shared: list[WalkGroup] = []
        for array, (source, place) in zip(self.step.carry, ends, strict=True):
            if not array.numel or array.buffer.kind == "array":
                continue
            group = copying(array.squeeze())
            (x,), (y,) = group.reads(), group.writes()
            memory.pointers[x.buffer], memory.pointers[y.buffer] = source, place
            if self.split is not None and self.split.buffers[array.buffer]:
                Nest(memory, group, {y.buffer}, RowRange("%low", "%high", 0)).emit()
            else:
                shared.append(group)
        with contextlib.nullcontext() if leading is None else memory.code.when(leading):
            memory.code.line(count)
            for group in shared:
                Nest(memory, group, {array.buffer for array in group.writes()}, None).emit()


def _read_address(code: Code, place: int) -> str:
    return code.op(f"load ptr, ptr {code.pointer('%table', 8 * place)}, align 8", "ptr").text


def operations_of(unit: Unit, slots: int = MANY) -> int:
    """How much a unit does in a step, roughly, where arrays have so many slots."""
    if isinstance(unit, Matmul):
        return 2 * unit.out.numel * unit.a.shape[-1]
    if isinstance(unit, Matrix):
        return sum(array.numel for array in unit.outs) * max(unit.ins[0].shape[unit.batch :])
    if isinstance(unit, CallOut):
        return 0
    space = (
        unit.space if isinstance(unit, WalkGroup) else (unit.index if isinstance(unit, Scatter) else unit.array).shape
    )
    size = 8 * math.prod(slots if isinstance(n, Length) else n for n in space)
    return size * len(unit.walks) if isinstance(unit, WalkGroup) else size
