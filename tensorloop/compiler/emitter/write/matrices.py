"""Kernels that go matrix by matrix: how the batch is walked, and the numbers of the matrices at hand.

Neighbouring matrices of the batch are lanes: what is written here for one is done for as many at once. Small matrices
are held as values, all loops over them written out; larger ones lie in memory of the thread's own. Which algorithm is
which is in `factorings`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value, llvm_type
from tensorloop.compiler.emitter.ir.failures import CHECK, note
from tensorloop.compiler.emitter.ir.kernels import Check, Matrix
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.write.elements import Memory, RowRange, walked
from tensorloop.compiler.step import Unsupported

# Sides up to which loops are written out: text of some hundred instructions. What is not here never is.
UNROLLED = {"cholesky": 8, "triangular": 10, "permute": 8, "lu": 5}
WORK = 2**16  # bytes that a thread's matrices take: they stay in the second cache


class LaneChoice(NamedTuple):
    """The choice of lanes: which dim of the batch has them, how many, and whether all loops are written out."""

    lane: int | None
    width: int
    unrolled: bool


def layout(kernel: Matrix, target: Machine) -> LaneChoice:
    """Chooses lanes: the longest vectors, at half their worth where elements are not neighbours in memory."""
    dtype = kernel.outs[0].dtype
    most = target.lanes({dtype})
    unrolled = max(kernel.ins[-1].shape[kernel.batch :]) <= UNROLLED.get(kernel.how, 0)
    while not unrolled and most > 1 and elements(kernel) * dtype.itemsize * most > WORK:
        most //= 2
    best = (1.0, -1, 1)
    for dim, size in enumerate(kernel.space):
        width = min(most, 1 << (size.bit_length() - 1))
        near = all(array.strides[dim] in (0, 1) for array in (*kernel.ins, *kernel.outs))
        best = max(best, (width * (1.0 if near else 0.5), dim, width))
    return LaneChoice(best[1] if best[2] > 1 else None, best[2], unrolled)


def elements(kernel: Matrix) -> int:
    """Numbers that one matrix needs in memory while it is at hand."""
    rows, *columns = kernel.ins[-1].shape[kernel.batch :]
    size = math.prod([rows, *columns])
    return {"exp": 6 * size, "eigh": 2 * size + 1, "qr": size + rows + rows * rows}.get(kernel.how, size)


def work_of(kernel: Matrix, target: Machine) -> Region | None:
    """Returns memory for the matrices that one thread is at; None where they are held as values."""
    found = layout(kernel, target)
    return None if found.unrolled else Region("scratch", 0, elements(kernel) * found.width, kernel.outs[0].dtype)


def number_checks(units: Sequence[object], target: Machine) -> tuple[Check, ...]:
    """Gives matrices a place to work in, and what may fail a number."""
    found: list[Check] = []
    for unit in units:
        if isinstance(unit, Matrix):
            unit.work = work_of(unit, target)
            if unit.check is not None:
                unit.check = unit.check._replace(number=len(found))
                found.append(unit.check)
    if len(found) > 2**CHECK:
        raise Unsupported(f"{len(found)} operations that fail where a matrix is singular")
    return tuple(found)


class Cells:
    """A table of numbers, one of each lane; an index is a number, or the name of one where it lies in memory."""

    def __init__(self, matrices: "Matrices", columns: int, base: str | None) -> None:
        self.matrices, self.columns, self.base = matrices, columns, base
        self.held: dict[Index, Value] = {}

    def _place(self, row: Index, column: Index) -> Index:
        code = self.matrices.code
        return code.add(code.times(row, self.columns), column)

    def get(self, row: Index, column: Index = 0) -> Value:
        """Returns the number in a row and a column."""
        place, m = self._place(row, column), self.matrices
        if self.base is None:
            return self.held[place]
        where = m.code.pointer(self.base, m.code.times(place, m.size * m.width))
        return m.code.op(f"load {llvm_type(m.kind, m.width)}, ptr {where}, align {m.size}", m.kind, m.width)

    def put(self, value: Value, row: Index, column: Index = 0) -> None:
        """Writes a number into a row and a column."""
        place, m = self._place(row, column), self.matrices
        if self.base is None:
            self.held[place] = value
            return
        where = m.code.pointer(self.base, m.code.times(place, m.size * m.width))
        m.code.line(f"store {value.type} {value.text}, ptr {where}, align {m.size}")


class Matrices:
    """Writes a kernel: `algorithm` is called with this for the matrices at hand, one or as many as there are lanes."""

    def __init__(
        self,
        memory: Memory,
        kernel: Matrix,
        rows: RowRange | None,
        algorithm: Callable[["Matrices"], None],
        failed: str,
    ) -> None:
        self.memory, self.code, self.math, self.kernel, self.rows = memory, memory.code, memory.math, kernel, rows
        self.algorithm, self.failed = algorithm, failed
        self.lane, self.most, self.unrolled = layout(kernel, memory.target)
        self.kind, self.size = KINDS[kernel.outs[0].dtype], kernel.outs[0].dtype.itemsize
        self.index: list[Index] = []
        self.width, self._used = 1, 0

    def emit(self) -> None:
        """Writes the whole kernel."""
        self._walk([], 1)

    def _walk(self, index: list[Index], width: int) -> None:
        code, dim = self.code, len(index)
        if dim == self.kernel.batch:
            self.index, self.width, self._used = index, width, 0
            self.algorithm(self)
            return
        low, high = walked(self.rows, dim, self.kernel.space[dim])
        if dim != self.lane:
            with code.loop(low, high) as loop:
                self._walk([*index, loop.index], width)
            return
        # Whole vectors, and what is left one by one: no lane is ever empty.
        if isinstance(low, int) and isinstance(high, int):
            middle: Index = high - (high - low) % self.most
        else:
            count = code.op(f"sub i64 {high}, {low}", "i64").text
            middle = code.add(low, code.op(f"and i64 {count}, {-self.most}", "i64").text)
        for start, stop, step in ((low, middle, self.most), (middle, high, 1)):
            if start != stop:
                with code.loop(start, stop, step) as loop:
                    self._walk([*index, loop.index], step)

    # what algorithms are written in

    def read(self, number: int, *place: Index) -> Value:
        """A number of an input."""
        array = self.kernel.ins[number]
        return self.memory.load(array, (*self.index, *place), self.lane if self.width > 1 else None, self.width, None)

    def write(self, value: Value, number: int, *place: Index) -> None:
        """A number of an output."""
        array = self.kernel.outs[number]
        value = self.math.cast(self.code.splat(value, self.width), KINDS[array.dtype])
        self.memory.store(value, array, (*self.index, *place), self.lane if self.width > 1 else None, None)

    def cells(self, rows: int, columns: int = 1) -> Cells:
        """Makes room for a matrix."""
        if self.unrolled:
            return Cells(self, columns, None)
        assert self.kernel.work is not None
        base = self.code.pointer(self.memory.pointers[self.kernel.work], self._used * self.width * self.size)
        self._used += rows * columns
        return Cells(self, columns, base)

    def each(self, low: Index, high: Index, body: Callable[[Index], None]) -> None:
        """Runs the body for each index."""
        if self.unrolled:
            assert isinstance(low, int)
            assert isinstance(high, int)
            for i in range(low, high):
                body(i)
        elif low != high:
            with self.code.loop(low, high) as loop:
                body(loop.index)

    def fold(
        self, low: Index, high: Index, first: Sequence[Value], body: Callable[..., Sequence[Value]]
    ) -> Sequence[Value]:
        """body(index, *values) -> the next values, from the first ones on."""
        values = list(first)
        if self.unrolled:
            assert isinstance(low, int)
            assert isinstance(high, int)
            for i in range(low, high):
                values = list(body(i, *values))
            return values
        if low == high:
            return values
        with self.code.loop(low, high, 1, values) as loop:
            loop.carry(body(loop.index, *loop.values))
        return loop.results

    def constant(self, value: float, kind: str | None = None) -> Value:
        """A number in every lane."""
        return self.code.constant(kind or self.kind, value, self.width)

    def lanes(self, index: Index) -> Value:
        """An index in every lane."""
        if isinstance(index, str):
            return self.code.splat(Value(index, "i64"), self.width)
        return self.constant(index, "i64")  # pyright: ignore[reportArgumentType]

    def less(self, a: Value, b: Value, total: Value) -> Value:
        """Returns total - a b, rounded once."""
        return self.math.fma(self.math.neg(a), b, total)

    def first(self, info: Value, bad: Value, index: Index) -> Value:
        """Returns the first index that is bad, counted from 1; 0 for none."""
        new = self.math.bit("and", bad, self.math.compare("eq", info, self.math.like(info, 0)))
        return self.math.where(new, self.lanes(self.code.add(index, 1)), info)

    def largest(self, value: Value) -> Value:
        """Returns the largest of all lanes."""
        lanes = [value] if value.width == 1 else [self.code.extract(value, n) for n in range(value.width)]
        found = lanes[0]
        for lane in lanes[1:]:
            found = self.math.maximum(found, lane)
        return found

    def note(self, info: Value) -> None:
        """Says what is not 0 where a loop looks for what failed."""
        check, code = self.kernel.check, self.code
        if check is None:
            return
        flat: Index = 0
        for i, size in zip(self.index, self.kernel.space, strict=True):
            flat = code.add(code.times(flat, size), i)
        # The lanes' dim may be any: its neighbours are so many matrices apart.
        apart = 1
        for size in self.kernel.space[(self.lane or 0) + 1 :] if self.width > 1 else ():
            apart *= size
        with code.when(self.math.compare("ne", self.largest(info), Value("0", "i64"))):
            for n in range(self.width):
                one = info if self.width == 1 else code.extract(info, n)
                with code.when(code.compare("ne", one, Value("0", "i64"))):
                    note(code, self.failed, check.number, code.add(flat, n * apart), one)
