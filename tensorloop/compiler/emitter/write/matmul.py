"""Products of matrices: tiles of some rows by some vectors, in registers over the whole depth.

b is read as it lies where its columns are neighbours, else from panels: (N / W, K, W), zeros behind the last column.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value, llvm_type
from tensorloop.compiler.emitter.ir.kernels import Matmul
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.elements import Memory, RowRange, walked
from tensorloop.compiler.emitter.write.fuse import Unit

UNROLLED = 4  # steps along K in one turn


@dataclasses.dataclass(eq=False)
class Panels:
    """b laid out once, or at every step where it changes: `buffer` holds (*batch, N / W, K, W)."""

    source: Array
    buffer: Region
    width: int

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch dims that differ in memory; 1 for those that are broadcast."""
        pairs = zip(self.source.shape[:-2], self.source.strides[:-2], strict=True)
        return tuple(size if stride else 1 for size, stride in pairs)

    @property
    def panels(self) -> int:
        """Returns how many panels one matrix has."""
        return -(-self.source.shape[-1] // self.width)

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the elements from one matrix to the next along each batch dim."""
        size, made = self.panels * self.source.shape[-2] * self.width, []
        for length, stride in zip(reversed(self.batch), reversed(self.source.strides[:-2]), strict=True):
            made.append(size if stride else 0)
            size *= length
        return tuple(reversed(made))


def turn_product(kernel: Matmul) -> Matmul:
    """(b.T @ a.T).T where that is faster: an invariant left operand, or columns too few for a vector."""
    fixed = ("invariant", "constant")
    m, n = kernel.out.shape[-2:]
    a, b = kernel.a.buffer.kind in fixed, kernel.b.buffer.kind in fixed
    # A right operand is packed once a loop if it stays the same, a left one never is.
    if not ((a and not b) or (a == b and n < 4 <= m)):
        return kernel
    if kernel.out.buffer.kind != "scratch" and n > 1:
        return kernel

    def swap(array: Array) -> Array:
        return Array(
            array.buffer,
            (*array.shape[:-2], array.shape[-1], array.shape[-2]),
            (*array.strides[:-2], array.strides[-1], array.strides[-2]),
            array.offset,
        )

    return Matmul(swap(kernel.b), swap(kernel.a), swap(kernel.out), swap(kernel.addend) if kernel.addend else None)


def lanes(kernel: Matmul, target: Machine) -> int:
    """Columns in a vector."""
    return min(target.lanes({kernel.out.dtype}), 1 << (kernel.out.shape[-1] - 1).bit_length())


def plan_panels(units: Sequence[Unit], target: Machine) -> dict[Array, Panels]:
    """The right operands that are packed: what stays the same over the loop, and what lies the wrong way round."""
    found: dict[Array, Panels] = {}
    for unit in units:
        if not isinstance(unit, Matmul):
            continue
        width, b = lanes(unit, target), unit.b
        fixed = b.buffer.kind in ("invariant", "constant")
        if (b.strides[-1] != 1 and width > 1) or (fixed and unit.out.shape[-1] > width):
            made = Panels(b, Region("packed" if fixed else "scratch", 0, 0, b.dtype), width)
            made.buffer.numel = math.prod(made.batch) * made.panels * b.shape[-2] * width
            found.setdefault(b, made)
    return found


class Product:
    """Writes the code of one product of matrices."""

    def __init__(self, memory: Memory, kernel: Matmul, packed: Panels | None, rows: RowRange | None) -> None:
        self.memory, self.code, self.kernel, self.packed = memory, memory.code, kernel, packed
        self.rows = rows
        self.width = lanes(kernel, memory.target)
        self.m, self.n = kernel.out.shape[-2:]
        self.k = kernel.a.shape[-1]
        self.vectors = -(-self.n // self.width)
        self.tall, self.wide = self._tile(memory.target)

    def _tile(self, target: Machine) -> tuple[int, int]:
        """Rows and vectors of a tile: as few instructions as registers allow, for these very sizes."""
        room, best = target.registers, (float("inf"), 0, 1, 1)
        rows = self.m
        if self.rows is not None and self.rows.dim == len(self.kernel.out.shape) - 2:
            rows = max(1, -(-self.m // 2))  # a thread's share, of two
        for tall in range(1, 13 if room > 16 else 7):
            for wide in range(1, 9 if tall < 4 else 4):
                # The tile's sums stay in registers beside a row of b's vectors and one element of a; else they would go
                # to memory and back at each step of the depth.
                if tall * wide + wide + 1 > room or tall > rows or wide > self.vectors:
                    continue
                cost = 0.0
                for height, times in ((tall, rows // tall), (rows % tall, 1 if rows % tall else 0)):
                    for breadth, repeats in (
                        (wide, self.vectors // wide),
                        (self.vectors % wide, 1 if self.vectors % wide else 0),
                    ):
                        # Multiplications, or loads where these are more; below eight the latency of one is not hidden.
                        cost += times * repeats * max(height * breadth, height + breadth, 8)
                best = min(best, (cost, -tall * wide, tall, wide))
        return best[2], best[3]

    def emit(self) -> None:
        """Writes the whole product: batch dims, blocks of columns, rows."""
        self._batch([], list(self.kernel.out.shape[:-2]))

    def _batch(self, index: list[Index], left: list[int]) -> None:
        if left:
            with self.code.loop(*walked(self.rows, len(index), left[0])) as loop:
                self._batch([*index, loop.index], left[1:])
            return
        if self.rows is not None and self.rows.dim == len(self.kernel.out.shape) - 1:
            self._columns(index)
            return
        whole, rest = divmod(self.vectors, self.wide)
        ragged = self.n % self.width != 0  # the last vector has lanes behind the last column, under a mask
        if ragged and not rest:
            whole, rest = whole - 1, self.wide
        if whole:
            with self.code.loop(0, whole * self.wide, self.wide) as loop:
                self._rows(index, loop.index, self.wide, False)
        if rest:
            self._rows(index, whole * self.wide, rest, ragged)

    def _columns(self, index: list[Index]) -> None:
        """Writes columns low to high: whole vectors, and the last of all, which may have fewer lanes."""
        code, rows, whole = self.code, self.rows, self.n // self.width
        assert rows is not None
        low, high = (code.op(f"udiv i64 {end}, {self.width}", "i64").text for end in (rows.low, rows.high))
        count = code.op(f"sub i64 {high}, {low}", "i64").text
        middle = code.add(low, code.times(code.op(f"udiv i64 {count}, {self.wide}", "i64").text, self.wide))
        for start, stop, wide in ((low, middle, self.wide), (middle, high, 1)):
            with code.loop(start, stop, wide) as loop:
                self._rows(index, loop.index, wide, False)
        if self.n % self.width:
            with code.when(code.op(f"icmp eq i64 {rows.high}, {self.n}", "i1")):
                self._rows(index, whole, 1, True)

    def _rows(self, index: list[Index], vector: Index, wide: int, ragged: bool) -> None:
        code, tall = self.code, self.tall
        if self.rows is not None and self.rows.dim == len(index):
            low, high = self.rows.low, self.rows.high
            count = code.op(f"sub i64 {high}, {low}", "i64").text
            turns = code.op(f"udiv i64 {count}, {tall}", "i64").text
            row: Index = code.add(low, code.times(turns, tall))
            with code.loop(low, row, tall) as loop:
                self._tile_at(index, loop.index, vector, tall, wide, ragged)
            rest = code.op(f"sub i64 {high}, {row}", "i64").text
            # What is left is below `tall`, and known when it runs: each power of two is done once if its bit is set.
            size = 1 << (tall.bit_length() - 1)
            while size:
                if size < tall:
                    some = code.op(f"and i64 {rest}, {size}", "i64").text
                    after = code.add(row, some)
                    with code.loop(row, after, size) as loop:
                        self._tile_at(index, loop.index, vector, size, wide, ragged)
                    row = after
                size //= 2
            return
        whole = self.m - self.m % tall
        if whole:
            with code.loop(0, whole, tall) as loop:
                self._tile_at(index, loop.index, vector, tall, wide, ragged)
        if whole < self.m:
            self._tile_at(index, whole, vector, self.m - whole, wide, ragged)

    def _tile_at(self, index: list[Index], row: Index, vector: Index, tall: int, wide: int, ragged: bool) -> None:
        code, kernel, kind, size = self.code, self.kernel, KINDS[self.kernel.out.dtype], self.kernel.out.dtype.itemsize
        column = code.times(vector, self.width)
        last = code.lanes("i1", [n < self.n % self.width for n in range(self.width)]) if ragged else None
        masks = [last if n == wide - 1 else None for n in range(wide)]
        places = [
            [(*index, code.add(row, r), code.add(column, n * self.width)) for n in range(wide)] for r in range(tall)
        ]
        dim = len(kernel.out.shape) - 1
        zero = code.constant(kind, 0, self.width)
        held = [zero] * (tall * wide)
        if kernel.addend is not None:
            held = [
                self.memory.load(kernel.addend, place, dim, self.width, masks[n])
                for line in places
                for n, place in enumerate(line)
            ]
        left = self.memory.address(kernel.a, (*index, row, 0))
        right, step, across, fill = self._right(index, vector, column, masks)
        ms, ks = kernel.a.strides[-2] * size, kernel.a.strides[-1] * size

        def turn(start: Index, count: int, held: list[Value]) -> list[Value]:
            a = code.pointer(left, code.times(start, ks))
            b = code.pointer(right, code.times(start, step))
            for n in range(count):
                row_of_b = [fill(code.pointer(b, n * step + c * across), c) for c in range(wide)]
                for r in range(tall):
                    one = code.op(f"load {kind}, ptr {code.pointer(a, r * ms + n * ks)}, align {size}", kind)
                    many = code.splat(one, self.width)
                    for c in range(wide):
                        held[r * wide + c] = self._more(many, row_of_b[c], held[r * wide + c])
            return held

        held = self._along(turn, held)
        for r, line in enumerate(places):
            for n, place in enumerate(line):
                self.memory.store(held[r * wide + n], kernel.out, place, dim, masks[n])

    def _along(self, turn: Callable[[Index, int, list[Value]], list[Value]], held: list[Value]) -> list[Value]:
        """The accumulators after the whole depth, or after this thread's rows where those are what is summed over."""
        code = self.code
        # This dim, behind those of the product, is the depth: each thread adds up its rows into a sum of its own.
        if self.rows is not None and self.rows.dim == len(self.kernel.out.shape):
            count = code.op(f"sub i64 {self.rows.high}, {self.rows.low}", "i64").text
            middle = code.add(self.rows.low, code.op(f"and i64 {count}, {-UNROLLED}", "i64").text)
            for start, stop, step in ((self.rows.low, middle, UNROLLED), (middle, self.rows.high, 1)):
                with code.loop(start, stop, step, held) as loop:
                    loop.carry(turn(loop.index, step, list(loop.values)))
                held = loop.results
            return held
        whole = self.k - self.k % UNROLLED
        if whole:
            with code.loop(0, whole, UNROLLED, held) as loop:
                loop.carry(turn(loop.index, UNROLLED, list(loop.values)))
            held = loop.results
        return turn(whole, self.k - whole, list(held)) if whole < self.k else held

    def _more(self, a: Value, b: Value, total: Value) -> Value:
        math = self.memory.math
        return math.fma(a, b, total) if a.floating else math.add(math.mul(a, b), total)

    def _right(self, index: list[Index], vector: Index, column: Index, masks: list[Value | None]):
        """(where b's block begins, bytes to the next k, bytes to the next vector, a load)."""
        code, size, kind = self.code, self.kernel.out.dtype.itemsize, KINDS[self.kernel.out.dtype]
        if self.packed is not None:
            panel = self.k * self.width * size
            offset = [code.times(i, s * size) for i, s in zip(index, self.packed.steps, strict=True)]
            base = code.pointer(self.memory.pointers[self.packed.buffer], code.add(*offset, code.times(vector, panel)))
            vector_type = llvm_type(kind, self.width)

            def whole(pointer: str, n: int) -> Value:
                return code.op(f"load {vector_type}, ptr {pointer}, align {size}", kind, self.width)

            return base, self.width * size, panel, whole
        b = self.kernel.b
        base = self.memory.address(b, (*index, 0, column))

        def masked(pointer: str, n: int) -> Value:
            mask = masks[n]
            if mask is None:
                return code.op(f"load {llvm_type(kind, self.width)}, ptr {pointer}, align {size}", kind, self.width)
            return self.memory.masked("load", kind, self.width, pointer, size, mask)

        return base, b.strides[-2] * size, self.width * size, masked


def pack(memory: Memory, packed: Panels) -> None:
    """Writes the panels."""
    code, source, width = memory.code, packed.source, packed.width
    k, n = source.shape[-2:]
    kind, size = KINDS[source.dtype], source.dtype.itemsize
    dim = len(source.shape) - 1
    base = memory.pointers[packed.buffer]

    def matrix(index: list[Index], left: list[int], offset: Index) -> None:
        if left:
            with code.loop(0, left[0]) as loop:
                more = code.times(loop.index, packed.steps[len(index)] * size)
                matrix([*index, loop.index], left[1:], code.add(offset, more))
            return
        whole = n // width
        if whole:
            with code.loop(0, whole) as loop:
                panel(index, loop.index, offset, None)
        if n % width:
            panel(index, whole, offset, code.lanes("i1", [c < n % width for c in range(width)]))

    def panel(index: list[Index], number: Index, offset: Index, mask: Value | None) -> None:
        with code.loop(0, k) as loop:
            value = memory.load(source, (*index, loop.index, code.times(number, width)), dim, width, mask)
            # A load of one element for all lanes goes by no mask, and panels hold zeros behind the last column.
            if mask is not None and source.strides[dim] == 0:
                value = memory.math.where(mask, value, code.constant(kind, 0, width))
            place = code.add(offset, code.times(number, k * width * size), code.times(loop.index, width * size))
            code.line(f"store {value.type} {value.text}, ptr {code.pointer(base, place)}, align {size}")

    if packed.buffer.numel:
        matrix([], list(packed.batch), 0)
