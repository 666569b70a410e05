"""A product of matrices by the lanes of a device: some rows of one column each, or one element by several lanes."""

from collections.abc import Sequence

from tensorloop.compiler.emitter.device.devices import Device
from tensorloop.compiler.emitter.device.lanes import Elements, LaneShare
from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Matmul
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.write.elements import Memory, RowRange

UNROLLED = 4  # steps along K in one turn
SUMS = 4  # sums of a lane side by side, for each of which the next addition waits some cycles
STAYS = ", !invariant.load !9"  # of a load of what no step writes: it may be done once for all steps


class LaneProduct:
    """Writes a product: `right` is b, or its dense copy."""

    def __init__(
        self, memory: Memory, kernel: Matmul, right: Array, rows: RowRange | None, share: LaneShare, lanes: int
    ) -> None:
        self.memory, self.code, self.kernel, self.right = memory, memory.code, kernel, right
        self.rows, self.share, self.lanes_a_group = rows, share, lanes
        self.depth = kernel.a.shape[-1]

    def emit(self, device: Device) -> None:
        """Writes the whole product."""
        code, share, rows = self.code, self.share, self.rows
        bounds: tuple[Index, Index] | None = None
        if share.rows and rows is not None:
            bounds = rows.low, rows.high
            if rows.dim == len(self.kernel.out.shape) - 2 and share.tall > 1:
                low, high = (code.op(f"udiv i64 {end}, {share.tall}", "i64").text for end in bounds)
                bounds = low, high
        elements = Elements(code, share.sizes, bounds, share.count)
        if share.team == 1:
            elements.each(self.lanes_a_group, self._block)
        elif elements.most:
            self._shared(device, elements)

    def _index(self, places: list[Index]) -> list[Index]:
        index: list[Index] = [0] * len(self.kernel.out.shape)
        for d, place in zip(self.share.order, places, strict=True):
            index[d] = place
        return index

    def _block(self, places: list[Index]) -> None:
        """Writes some rows of one column."""
        code, kernel, memory, tall = self.code, self.kernel, self.memory, self.share.tall
        index = self._index(places)
        index[-2] = code.times(index[-2], tall)
        outs = [(*index[:-2], code.add(index[-2], r), index[-1]) for r in range(tall)]
        held = [code.constant(KINDS[kernel.out.dtype], 0)] * tall
        if kernel.addend is not None:
            held = [memory.load(kernel.addend, place, None, 1, None) for place in outs]
        left = memory.address(kernel.a, (*index[:-1], 0))
        right = memory.address(self.right, (*index[:-2], 0, index[-1]))
        for place, value in zip(outs, self._along(left, right, held), strict=True):
            memory.store(value, kernel.out, place, None, None)

    def _shared(self, device: Device, elements: Elements) -> None:
        """Writes an element for each team: a lane takes every so many-th place along K, the first adds them all up."""
        code, kernel, memory, team = self.code, self.kernel, self.memory, self.share.team
        own = code.op(f"and i64 %lane, {team - 1}", "i64").text
        at = code.add(elements.start, code.op(f"lshr i64 %lane, {team.bit_length() - 1}", "i64").text)
        inside = code.op(f"icmp slt i64 {at}, {elements.stop}", "i1")
        # A team without an element makes the first one, too, and stores nothing: a shuffle wants all lanes.
        at = code.op(f"select i1 {inside.text}, i64 {at}, i64 {elements.start}", "i64").text
        index = self._index(elements.at(at)[0])
        left = memory.address(kernel.a, (*index[:-1], own))
        right = memory.address(self.right, (*index[:-2], own, index[-1]))
        (value,) = self._along(left, right, [code.constant(KINDS[kernel.out.dtype], 0)], team)
        distance = team
        while distance := distance // 2:
            value = memory.math.add(value, device.shuffle(code, value, distance))
        with code.when(code.binary("and", inside, code.op(f"icmp eq i64 {own}, 0", "i1"))):
            if kernel.addend is not None:
                value = memory.math.add(value, memory.load(kernel.addend, tuple(index), None, 1, None))
            memory.store(value, kernel.out, tuple(index), None, None)

    def _along(self, left: str, right: str, held: list[Value], apart: int = 1) -> list[Value]:
        """The sums after the whole depth, or after this group's rows where those are what is summed over.

        Each place along K is so far apart from the next.
        """
        code, rows = self.code, self.rows
        if rows is not None and rows.dim == len(self.kernel.out.shape):
            with code.loop(rows.low, rows.high, 1, held) as loop:
                loop.carry(self._turn(left, right, loop.index, 1, list(loop.values), 1))
            return loop.results
        depth, tall = self.depth // apart, len(held)
        whole = depth - depth % UNROLLED
        sums = max(1, SUMS // tall) if whole else 1
        held = held + [code.constant(value.kind, 0) for value in held] * (sums - 1)
        if whole:
            with code.loop(0, whole, UNROLLED, held) as loop:
                loop.carry(self._turn(left, right, loop.index, UNROLLED, list(loop.values), apart))
            held = loop.results
        if whole < depth:
            held = self._turn(left, right, whole, depth - whole, held, apart)
        while len(held) > tall:
            half = len(held) // 2
            held = [self.memory.math.add(a, b) for a, b in zip(held[:half], held[half:], strict=True)]
        return held

    def _turn(self, left: str, right: str, start: Index, count: int, held: Sequence[Value], apart: int) -> list[Value]:
        """The sums after some places along K, which take turns in them."""
        code, kernel, math, tall, held = self.code, self.kernel, self.memory.math, self.share.tall, [*held]
        kind, size = KINDS[kernel.out.dtype], kernel.out.dtype.itemsize
        stays = STAYS if self.right.buffer.kind in ("invariant", "constant", "packed") else ""
        down, along, step = (n * size for n in (*kernel.a.strides[-2:], self.right.strides[-2]))
        along, step = along * apart, step * apart
        a, b = code.pointer(left, code.times(start, along)), code.pointer(right, code.times(start, step))
        for n in range(count):
            y = code.op(f"load {kind}, ptr {code.pointer(b, n * step)}, align {size}{stays}", kind)
            first = n * tall % len(held)
            for r in range(tall):
                x = code.op(f"load {kind}, ptr {code.pointer(a, r * down + n * along)}, align {size}", kind)
                at = first + r
                held[at] = math.fma(x, y, held[at]) if x.floating else math.add(math.mul(x, y), held[at])
        return held
