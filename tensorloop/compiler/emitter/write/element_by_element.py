"""Kernels that go element after element: scatters, and sums along a dim."""

from collections.abc import Callable, Sequence

from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Running, Scatter, identity
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.write.elements import Memory, RowRange, walked
from tensorloop.compiler.lengths import Length


def _join(math: Math, how: str) -> Callable[[Value, Value], Value]:
    return {"sum": math.add, "prod": math.mul, "amax": math.maximum, "amin": math.minimum}[how]


def write_scatter(memory: Memory, kernel: Scatter, rows: RowRange | None) -> None:
    """Writes a scatter in the index's order; what is out of range is noted and left out."""
    code, shape = memory.code, kernel.index.shape

    def walk(index: list[Index]) -> None:
        if len(index) < len(shape):
            dim = len(index)
            with code.loop(*walked(rows, dim, code.sized(shape[dim]))) as loop:
                walk([*index, loop.index])
            return
        scatter_one(memory, kernel, index)

    walk([])


def scatter_one(memory: Memory, kernel: Scatter, index: Sequence[Index]) -> None:
    """Writes one element of the index."""
    code, math = memory.code, memory.math
    size = code.constant("i64", kernel.out.shape[kernel.dim], 1)
    raw = math.cast(memory.load(kernel.index, index, None, 1, None), "i64")
    wrapped = memory.wrapped(raw, size) if kernel.wraps else raw
    good = code.compare("ult", wrapped, size)
    memory.note(good)
    # One element after the other, as later ones win and additions meet: no two lanes may write one place at once.
    with code.when(good):
        place = [wrapped.text if d == kernel.dim else i for d, i in enumerate(index)]
        value = memory.load(kernel.source, index, None, 1, None)
        if kernel.how:
            before = memory.load(kernel.out, place, None, 1, None)
            kind = KINDS[kernel.out.dtype]
            # Rounded to two bytes after each addition, as torch does.
            inner = "float" if kind in ("half", "bfloat") else kind
            value = math.cast(_join(math, kernel.how)(math.cast(before, inner), math.cast(value, inner)), kind)
        memory.store(value, kernel.out, place, None, None)


def write_running(memory: Memory, kernel: Running, rows: RowRange | None) -> None:
    """Writes every line along the dim from its beginning; lanes are neighbouring lines, where there are such."""
    code, shape = memory.code, kernel.array.shape
    others = [dim for dim in range(len(shape)) if dim != kernel.dim]
    # Lines do not meet, so neighbouring ones are lanes; but not along the rows, of which a thread has any number.
    fixed = bool(others) and not isinstance(shape[others[-1]], Length)
    lane = others[-1] if fixed and (rows is None or others[-1] != rows.dim) else None
    width = memory.target.lanes({kernel.out.dtype}) if lane is not None else 1
    width = min(width, 1 << (shape[lane] - 1).bit_length()) if lane is not None else 1

    def line(index: list[Index], mask: Value | None) -> None:
        running_line(memory, kernel, index, lane, width, mask)

    def walk(index: list[Index], left: list[int]) -> None:
        if not left:
            line(index, None)
            return
        dim = left[0]
        if dim == lane and width > 1:
            whole = shape[dim] - shape[dim] % width
            if whole:
                with code.loop(0, whole, width) as loop:
                    index[dim] = loop.index
                    line(index, None)
            if whole < shape[dim]:
                index[dim] = whole
                line(index, code.lanes("i1", [whole + n < shape[dim] for n in range(width)]))
            return
        with code.loop(*walked(rows, dim, code.sized(shape[dim]))) as loop:
            index[dim] = loop.index
            walk(index, left[1:])

    walk([0] * len(shape), others)


def running_line(
    memory: Memory, kernel: Running, index: list[Index], lane: int | None, width: int, mask: Value | None
) -> None:
    """A line along the dim, or as many neighbouring ones as there are lanes."""
    code, math, kind = memory.code, memory.math, KINDS[kernel.out.dtype]
    join = _join(math, kernel.how)
    first = code.constant(kind, identity(kernel.how, kernel.out.dtype), width)
    with code.loop(0, code.sized(kernel.array.shape[kernel.dim]), 1, [first]) as loop:
        index[kernel.dim] = loop.index
        value = memory.load(kernel.array, index, lane, width, mask)
        total = join(loop.values[0], value)
        memory.store(total, kernel.out, index, lane, mask)
        loop.carry([total])
