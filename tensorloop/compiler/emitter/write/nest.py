"""A group of walks as loops: vectors along one dim, tails under a mask."""

from collections.abc import Callable

from tensorloop.compiler.emitter.ir.code import Index, Value
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.write.elements import Memory, RowRange
from tensorloop.compiler.emitter.write.fuse import WalkGroup
from tensorloop.compiler.emitter.write.walk_body import WalkBody, order_of
from tensorloop.compiler.lengths import Length, Size


def lanes_for(size: Size, most: int) -> int:
    """Lanes of vectors along a dim: no more than its size, rounded up to a power of two."""
    return most if isinstance(size, Length) else min(most, 1 << (size - 1).bit_length())


class Nest(WalkBody):
    """Writes the loops of kernels that walk the same elements."""

    def __init__(self, memory: Memory, group: WalkGroup, stored: set[Region], rows: RowRange | None) -> None:
        super().__init__(memory, group, stored, rows, order_of(group))
        self.lane = len(self.space) - 1 if self.space else None
        if self.over and self.lane is not None and self.lane in self.over:
            self._prefer_kept()
        if self.lane is not None:
            self.width = lanes_for(self.space[self.lane], self.most)
        # A thread's share of the lanes' dim begins anywhere: the size of the whole says nothing of its vectors.
        if self.lane is not None and self.row == self.lane and self.rows is not None:
            self.width = self.most

    def _prefer_kept(self) -> None:
        """Puts lanes along a kept dim where more arrays lie along that than along the last."""
        kept = [d for d in range(len(self.space)) if d not in self.over]
        reads = [self.arrays[a] for walk in self.walks for a in walk.reads()]

        def along(dim: int) -> int:
            return sum(a.strides[dim] == 1 for a in reads)

        best = max(kept, key=along, default=None)
        if best is not None and along(best) > along(len(self.space) - 1):
            self.lane = best

    # loops

    def emit(self) -> None:
        """Writes the whole nest of loops."""
        index: list[Index] = [0] * len(self.space)
        kept = [d for d in range(len(self.space)) if d not in self.over and d != self.lane]
        self._outer(kept, index)

    def _outer(self, dims: list[int], index: list[Index]) -> None:
        if dims:
            start, stop = self.bounds(dims[0])
            with self.code.loop(start, stop) as loop:
                index[dims[0]] = loop.index
                self._outer(dims[1:], index)
            return
        reduced = [d for d in range(len(self.space)) if d in self.over]
        if not self.over:
            self._lanes(index, lambda mask: self.body(index, mask))
        elif self.lane in self.over:  # each lane has a part of the sum: they are taken together at the end
            held = self._reduced([d for d in reduced if d != self.lane], index, self.begin(), None, True)
            self.finish(held, index, None, None, self._across)
        else:

            def column(mask: Value | None) -> None:
                for d in reduced:
                    index[d] = 0
                self.finish(self._reduced(reduced, index, self.begin(), mask, False), index, self.lane, mask)

            self._lanes(index, column)

    def _lanes(self, index: list[Index], body: Callable[[Value | None], object]) -> None:
        """Runs the body for whole vectors along the lanes' dim, then for what is left."""
        code, lane, width = self.code, self.lane, self.width
        if lane is None:
            body(None)
            return
        start, stop = self.bounds(lane)
        if isinstance(start, int) and isinstance(stop, int):
            whole = stop - stop % width
            if whole:
                with code.loop(start, whole, width) as loop:
                    index[lane] = loop.index
                    body(None)
            if whole < stop:  # the lanes behind the end are masked: there is no memory for them
                index[lane] = whole
                body(code.lanes("i1", [whole + n < stop for n in range(width)]))
            return
        count = code.op(f"sub i64 {stop}, {start}", "i64").text
        whole = code.op(f"and i64 {count}, {-width}", "i64").text  # the width is a power of two: rounds down to it
        middle = code.add(start, whole)
        with code.loop(start, middle, width) as loop:
            index[lane] = loop.index
            body(None)
        rest = code.op(f"sub i64 {stop}, {middle}", "i64")
        with code.when(code.op(f"icmp sgt i64 {rest.text}, 0", "i1")):
            index[lane] = middle
            numbers = code.lanes("i64", range(width)) if width > 1 else None
            body(code.compare("slt", numbers, code.splat(rest, width)) if numbers else None)

    def _reduced(
        self, dims: list[int], index: list[Index], held: list[Value], mask: Value | None, lanes: bool
    ) -> list[Value]:
        code = self.code
        if dims:
            with code.loop(*self.bounds(dims[0]), 1, held) as loop:
                index[dims[0]] = loop.index
                loop.carry(self._reduced(dims[1:], index, loop.values, mask, lanes))
            return loop.results
        if not lanes:
            return self.step(index, held, mask, None)
        assert self.lane is not None
        stop, width = self.bounds(self.lane)[1], self.width
        if not isinstance(stop, int):
            return self._reduced_lanes(self.lane, stop, index, held)
        whole = stop - stop % width
        if whole:
            with code.loop(0, whole, width, held) as loop:
                index[self.lane] = loop.index
                loop.carry(self.step(index, loop.values, None, self.lane))
            held = loop.results
        if whole < stop:
            index[self.lane] = whole
            held = self.step(index, held, code.lanes("i1", [whole + n < stop for n in range(width)]), self.lane)
        return held

    def _reduced_lanes(self, lane: int, stop: Index, index: list[Index], held: list[Value]) -> list[Value]:
        """Returns the accumulators after a dim whose size is known at run time: the tail may have no lanes."""
        code, width = self.code, self.width
        whole = code.op(f"and i64 {stop}, {-width}", "i64").text
        with code.loop(0, whole, width, held) as loop:
            index[lane] = loop.index
            loop.carry(self.step(index, loop.values, None, lane))
        if width == 1:
            return loop.results
        index[lane] = whole
        rest = code.splat(code.op(f"sub i64 {stop}, {whole}", "i64"), width)
        mask = code.compare("slt", code.lanes("i64", range(width)), rest)
        return self.step(index, loop.results, mask, lane)

    def _across(self, how: str, value: Value, where: Value | None) -> tuple[Value, Value | None]:
        code, width = self.code, value.width
        if where is not None:
            best, place = code.extract(value, 0), code.extract(where, 0)
            for n in range(1, width) if width > 1 else ():
                other, there = code.extract(value, n), code.extract(where, n)
                better = self.prefer(how, other, there, best, place)
                best, place = self.math.where(better, other, best), self.math.where(better, there, place)
            return best, place
        while width > 1:  # halves onto each other: log2(width) steps, and a rounding that depends on the width alone
            half = width // 2
            parts = []
            for start in (0, half):
                lanes = ", ".join(f"i32 {start + n}" for n in range(half))
                text = f"shufflevector {value.type} {value.text}, {value.type} poison, <{half} x i32> <{lanes}>"
                parts.append(code.op(text, value.kind, half))
            if half == 1:
                parts = [code.extract(value, 0), code.extract(value, 1)]
            value, width = self.combine(how, *parts), half
        return value, None
