"""Where buffers lie in a function, and reading and writing their elements: vectors, lanes apart, under masks."""

from collections.abc import Sequence
from typing import NamedTuple

from tensorloop.compiler.emitter.ir.code import KINDS, Code, Index, Value, llvm_type, suffix_of
from tensorloop.compiler.emitter.ir.kernels import Gather
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import computed_in


class RowRange(NamedTuple):
    """The rows that a thread does of a unit: from `low` to `high`, names of two i64, of those along one dim."""

    low: str
    high: str
    dim: int


def walked(rows: RowRange | None, dim: int, size: Index) -> tuple[Index, Index]:
    """Where a loop along a dim begins and ends: at this thread's rows, or at all of them."""
    return (rows.low, rows.high) if rows is not None and rows.dim == dim else (0, size)


class Pointers(dict[Region, str]):
    """Names by buffer: of those with a place of their own, else by kind and index."""

    def __init__(self, names: dict[tuple[str, int], str]) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, buffer: Region) -> str:
        if buffer.kind == "value":
            return "poison"
        return self.names[buffer.kind, buffer.index]


class Memory:
    """Where buffers lie in this function, and reading and writing elements of them."""

    def __init__(self, code: Code, target: Machine, pointers: dict[Region, str], error: str) -> None:
        self.code, self.target, self.pointers, self.error = code, target, pointers, error
        self.math = Math(code)

    def address(self, array: Array, index: Sequence[Index]) -> str:
        """The address of one element."""
        code, size = self.code, array.dtype.itemsize
        offset = code.add(
            array.offset * size, *(code.times(i, s * size) for i, s in zip(index, array.strides, strict=True))
        )
        return code.pointer(self.pointers[array.buffer], offset)

    def load(self, array: Array, index: Sequence[Index], lane_dim: int | None, width: int, mask: Value | None) -> Value:
        """The elements at an index and those after it along one dim."""
        code, kind = self.code, KINDS[array.dtype]
        if array.buffer.kind == "value" and array.buffer.value is None:
            return self._places(array, index, lane_dim, width)
        if array.buffer.kind == "value":
            wide = code.constant(KINDS[computed_in(array.dtype)], array.buffer.value, width)
            return self.math.cast(wide, kind)
        memory = "i8" if kind == "i1" else kind  # torch has a byte for each bool
        stride = 0 if lane_dim is None or width == 1 else array.strides[lane_dim]
        base, align = self.address(array, index), array.dtype.itemsize
        if stride == 0:  # one element for all lanes: it is there whatever the mask says
            one = code.op(f"load {llvm_type(memory)}, ptr {base}, align {align}", memory)
            return code.splat(self._from_memory(one, kind), width)
        if stride == 1 and mask is None:
            made = code.op(f"load {llvm_type(memory, width)}, ptr {base}, align {align}", memory, width)
        elif stride == 1:
            made = self.masked("load", memory, width, base, align, mask)
        else:
            made = self.masked("gather", memory, width, self._lanes(base, stride * align, width), align, mask)
        return self._from_memory(made, kind)

    def _places(self, array: Array, index: Sequence[Index], lane_dim: int | None, width: int) -> Value:
        """Where elements lie in a buffer that has no memory, which is what they are."""
        code = self.code
        first = code.add(array.offset, *(code.times(i, s) for i, s in zip(index, array.strides, strict=True)))
        wide = (
            code.splat(Value(str(first), "i64"), width)
            if isinstance(first, str)
            else code.constant("i64", first, width)
        )
        if lane_dim is None or width == 1:
            return wide
        return self.math.add(wide, code.lanes("i64", [n * array.strides[lane_dim] for n in range(width)]))

    def _from_memory(self, value: Value, kind: str) -> Value:
        return self.math.compare("ne", value, self.math.like(value, 0)) if kind == "i1" else value

    def _lanes(self, base: str, step: int, width: int) -> str:
        offsets = self.code.lanes("i64", [n * step for n in range(width)])
        return self.code.op(f"getelementptr i8, ptr {base}, {offsets.type} {offsets.text}", "ptr", width).text

    def masked(self, how: str, kind: str, width: int, where: str, align: int, mask: Value | None) -> Value:
        """A load, or a gather from addresses of lanes: zero outside of the mask."""
        vector = llvm_type(kind, width)
        suffix = f"v{width}{suffix_of(kind)}"
        many = how == "gather"
        pointer = f"<{width} x ptr>" if many else "ptr"
        name = f"llvm.masked.{how}.{suffix}.{f'v{width}p0' if many else 'p0'}"
        mask = mask or self.code.constant("i1", 1, width)
        self.code.declare(name, vector, [pointer, "i32", mask.type, vector])
        call = (
            f"call {vector} @{name}({pointer} {where}, i32 {align}, {mask.type} {mask.text}, {vector} zeroinitializer)"
        )
        return self.code.op(call, kind, width)

    def store(
        self, value: Value, array: Array, index: Sequence[Index], lane_dim: int | None, mask: Value | None
    ) -> None:
        """Writes a value's lanes to an index and those after it along one dim; lanes outside of the mask are left."""
        code = self.code
        if value.kind == "i1":
            value = self.math.cast(value, "u8")
        width = value.width
        stride = 1 if lane_dim is None or width == 1 else array.strides[lane_dim]
        base, align = self.address(array, index), array.dtype.itemsize
        if mask is not None and width > 1 and mask.text == code.lanes("i1", [n == 0 for n in range(width)]).text:
            # LLVM stores four bytes of a vector of two-byte lanes that it has just narrowed, where one lane is left.
            value, width, mask = code.op(f"extractelement {value.type} {value.text}, i64 0", value.kind), 1, None
            stride = 1
        if stride == 1 and (mask is None or width == 1):
            code.line(f"store {value.type} {value.text}, ptr {base}, align {align}")
            return
        suffix = suffix_of(value.kind)
        mask = mask or code.constant("i1", 1, width)
        many = stride != 1
        where, pointer = (self._lanes(base, stride * align, width), f"<{width} x ptr>") if many else (base, "ptr")
        name = f"llvm.masked.{'scatter' if many else 'store'}.v{width}{suffix}.{f'v{width}p0' if many else 'p0'}"
        code.declare(name, "void", [value.type, pointer, "i32", mask.type])
        code.line(
            f"call void @{name}({value.type} {value.text}, {pointer} {where}, i32 {align}, {mask.type} {mask.text})"
        )

    def chosen(
        self,
        walk: Gather,
        values: Sequence[Value],
        index: Sequence[Index],
        lane_dim: int | None,
        width: int,
        mask: Value | None,
    ) -> Value:
        """Elements of `source` at indices that were read; one out of range is noted and reads the first."""
        code, math, size = self.code, self.math, walk.source.dtype.itemsize
        total: Value | None = None
        for value, step, length in zip(values, walk.steps, walk.sizes, strict=True):
            raw, size_of = math.cast(value, "i64"), code.constant("i64", length, width)
            wrapped = self.wrapped(raw, size_of) if walk.wraps else raw
            good = code.compare("ult", wrapped, size_of)
            self.note(good)
            # The call raises only when the loop is over, so the read must be a valid one now: the first element is
            # (`bounds` has it that there is one). An unsigned comparison finds indices below zero, too.
            wrapped = math.where(good, wrapped, math.like(wrapped, 0))
            part = math.mul(wrapped, math.like(wrapped, step * size))
            total = part if total is None else math.add(total, part)
        assert total is not None
        base, kind = self.address(walk.source, index), KINDS[walk.source.dtype]
        stride = 0 if lane_dim is None or width == 1 else walk.source.strides[lane_dim] * size
        memory = "i8" if kind == "i1" else kind
        if width == 1:
            where = code.pointer(base, total.text)
            return self._from_memory(code.op(f"load {llvm_type(memory)}, ptr {where}, align {size}", memory), kind)
        if stride:
            total = math.add(total, code.lanes("i64", [n * stride for n in range(width)]))
        where = code.op(f"getelementptr i8, ptr {base}, {total.type} {total.text}", "ptr", width).text
        return self._from_memory(self.masked("gather", memory, width, where, size, mask), kind)

    def wrapped(self, index: Value, size: Value) -> Value:
        """An index, from the end where it is below 0."""
        math = self.math
        return math.where(math.compare("lt", index, math.like(index, 0)), math.add(index, size), index)

    def note(self, good: Value) -> None:
        """Notes an index out of range: the call raises when the loop is over."""
        code = self.code
        bad = self.math.invert(good)
        if bad.width > 1:
            bits = code.op(f"bitcast {bad.type} {bad.text} to i{bad.width}", f"i{bad.width}")
            bad = code.op(f"icmp ne i{bad.width} {bits.text}, 0", "i1")
        with code.when(bad):
            code.line(f"store i64 1, ptr {self.error}, align 8")
