"""A product of matrices by the lanes of a device: some rows of one column each, sums in registers."""

from tensorloop.compiler.emitter.device.lanes import Elements, LaneShare
from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Matmul
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.write.elements import Memory, RowRange

UNROLLED = 4  # steps along K in one turn
STAYS = ", !invariant.load !9"  # of a load of what no step writes: it may be done once for all steps


class LaneProduct:
    """Writes a product: `right` is b, or its dense copy."""

    def __init__(
        self, memory: Memory, kernel: Matmul, right: Array, rows: RowRange | None, share: LaneShare, lanes: int
    ) -> None:
        self.memory, self.code, self.kernel, self.right = memory, memory.code, kernel, right
        self.rows, self.share, self.lanes_a_group = rows, share, lanes
        self.depth = kernel.a.shape[-1]

    def emit(self) -> None:
        """Writes the whole product."""
        code, share, rows = self.code, self.share, self.rows
        bounds: tuple[Index, Index] | None = None
        if share.rows and rows is not None:
            bounds = rows.low, rows.high
            if rows.dim == len(self.kernel.out.shape) - 2 and share.tall > 1:
                low, high = (code.op(f"udiv i64 {end}, {share.tall}", "i64").text for end in bounds)
                bounds = low, high
        Elements(code, share.sizes, bounds, share.count).each(self.lanes_a_group, self._block)

    def _block(self, places: list[Index]) -> None:
        """Writes some rows of one column."""
        code, kernel, memory, tall = self.code, self.kernel, self.memory, self.share.tall
        index: list[Index] = [0] * len(kernel.out.shape)
        for d, place in zip(self.share.order, places, strict=True):
            index[d] = place
        index[-2] = code.times(index[-2], tall)
        outs = [(*index[:-2], code.add(index[-2], r), index[-1]) for r in range(tall)]
        held = [code.constant(KINDS[kernel.out.dtype], 0)] * tall
        if kernel.addend is not None:
            held = [memory.load(kernel.addend, place, None, 1, None) for place in outs]
        left = memory.address(kernel.a, (*index[:-1], 0))
        right = memory.address(self.right, (*index[:-2], 0, index[-1]))
        for place, value in zip(outs, self._along(left, right, held), strict=True):
            memory.store(value, kernel.out, place, None, None)

    def _along(self, left: str, right: str, held: list[Value]) -> list[Value]:
        """The sums after the whole depth, or after this group's rows where those are what is summed over."""
        code, rows = self.code, self.rows
        if rows is not None and rows.dim == len(self.kernel.out.shape):
            with code.loop(rows.low, rows.high, 1, held) as loop:
                loop.carry(self._turn(left, right, loop.index, 1, list(loop.values)))
            return loop.results
        whole = self.depth - self.depth % UNROLLED
        if whole:
            with code.loop(0, whole, UNROLLED, held) as loop:
                loop.carry(self._turn(left, right, loop.index, UNROLLED, list(loop.values)))
            held = loop.results
        return self._turn(left, right, whole, self.depth - whole, list(held)) if whole < self.depth else held

    def _turn(self, left: str, right: str, start: Index, count: int, held: list[Value]) -> list[Value]:
        code, kernel, math = self.code, self.kernel, self.memory.math
        kind, size = KINDS[kernel.out.dtype], kernel.out.dtype.itemsize
        stays = STAYS if self.right.buffer.kind in ("invariant", "constant", "packed") else ""
        down, along, step = (n * size for n in (*kernel.a.strides[-2:], self.right.strides[-2]))
        a, b = code.pointer(left, code.times(start, along)), code.pointer(right, code.times(start, step))
        for n in range(count):
            y = code.op(f"load {kind}, ptr {code.pointer(b, n * step)}, align {size}{stays}", kind)
            for r in range(self.share.tall):
                x = code.op(f"load {kind}, ptr {code.pointer(a, r * down + n * along)}, align {size}", kind)
                held[r] = math.fma(x, y, held[r]) if x.floating else math.add(math.mul(x, y), held[r])
        return held
