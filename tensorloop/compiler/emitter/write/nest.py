"""A group of walks as loops: elementwise values in registers, reductions in accumulators, tails under a mask."""

import dataclasses
from collections.abc import Callable

import torch

from tensorloop.compiler.emitter.ir.arrays import Array, Region
from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Point, Reduce, identity
from tensorloop.compiler.emitter.write.fuse import WalkGroup
from tensorloop.compiler.emitter.write.memory import Memory, RowRange
from tensorloop.compiler.lengths import Length, Size


def lanes_for(size: Size, most: int) -> int:
    """Lanes of vectors along a dim: no more than its size, rounded up to a power of two."""
    return most if isinstance(size, Length) else min(most, 1 << (size - 1).bit_length())


class Nest:
    """Writes the loops of kernels that walk the same elements."""

    def __init__(self, memory: Memory, group: WalkGroup, stored: set[Region], rows: RowRange | None) -> None:
        self.memory, self.code, self.math = memory, memory.code, memory.math
        self.walks, self.stored, self.rows = group.walks, stored, rows
        self.order = _order(group)
        self.space = [group.space[d] for d in self.order]
        self.over = {self.order.index(d) for d in group.over}
        self.row = self.order.index(rows.dim) if rows is not None else None
        dtypes = {a.dtype for walk in group.walks for a in (*walk.reads(), *walk.writes()) if a.dtype != torch.bool}
        self.width = memory.target.lanes(dtypes or {torch.float32})
        self.arrays: dict[Array, Array] = {}
        self._collapse(group)
        self.lane = len(self.space) - 1 if self.space else None
        if self.over and self.lane is not None and self.lane in self.over:
            self._prefer_kept()
        if self.lane is not None:
            self.width = lanes_for(self.space[self.lane], self.width)
        else:
            self.width = 1
        # A thread's share of the lanes' dim begins anywhere: the size of the whole says nothing of its vectors.
        if self.lane is not None and self.row == self.lane and self.rows is not None:
            self.width = memory.target.lanes(dtypes or {torch.float32})

    def _collapse(self, group: WalkGroup) -> None:
        """Neighbouring dims that every array walks as one become one."""
        every = {a for walk in group.walks for a in (*walk.reads(), *walk.writes())}
        view = {a: (tuple(a.strides[d] for d in self.order)) for a in every}
        n = len(self.space) - 1
        self.factor = 1
        while n > 0:
            # Index (i, j) lies at i * s[n - 1] + j * s[n]: with this stride, at (i * size + j) * s[n], as in one dim.
            # It must hold of every array of the nest, for they share the loop; broadcast along both dims it does.
            together = all(s[n - 1] == s[n] * self.space[n] for s in view.values())
            if together and ((n - 1 in self.over) == (n in self.over)) and n != self.row and not self._argument(group):
                if n - 1 == self.row:  # row r is now the elements r * factor to (r + 1) * factor
                    self.factor *= self.space[n]
                self.space[n - 1] *= self.space.pop(n)
                view = {a: (*s[: n - 1], *s[n:]) for a, s in view.items()}
                self.over = {d - (d >= n) for d in self.over}
                if self.row is not None and self.row > n - 1:
                    self.row -= 1
            n -= 1
        for array, strides in view.items():
            self.arrays[array] = Array(array.buffer, tuple(self.space), strides, array.offset)

    def _argument(self, group: WalkGroup) -> bool:
        return any(isinstance(walk, Reduce) and walk.how.startswith("arg") for walk in group.walks)

    def _prefer_kept(self) -> None:
        """Lanes along a kept dim, where more arrays lie along that than along the last."""
        kept = [d for d in range(len(self.space)) if d not in self.over]
        reads = [self.arrays[a] for walk in self.walks for a in walk.reads()]

        def along(dim: int) -> int:
            return sum(a.strides[dim] == 1 for a in reads)

        best = max(kept, key=along, default=None)
        if best is not None and along(best) > along(len(self.space) - 1):
            self.lane = best

    # loops

    def emit(self) -> None:
        """All of it."""
        index: list[Index] = [0] * len(self.space)
        kept = [d for d in range(len(self.space)) if d not in self.over and d != self.lane]
        self._outer(kept, index)

    def _bounds(self, dim: int) -> tuple[Index, Index]:
        if dim == self.row and self.rows is not None:
            return self.code.times(self.rows.low, self.factor), self.code.times(self.rows.high, self.factor)
        return 0, self.code.sized(self.space[dim])

    def _outer(self, dims: list[int], index: list[Index]) -> None:
        if dims:
            start, stop = self._bounds(dims[0])
            with self.code.loop(start, stop) as loop:
                index[dims[0]] = loop.index
                self._outer(dims[1:], index)
            return
        reduced = [d for d in range(len(self.space)) if d in self.over]
        if not self.over:
            self._lanes(index, lambda mask: self._body(index, mask))
        elif self.lane in self.over:  # each lane has a part of the sum: they are taken together at the end
            self._finish(
                self._reduced([d for d in reduced if d != self.lane], index, self._begin(), None, True),
                index,
                None,
                True,
            )
        else:

            def column(mask: Value | None) -> None:
                for d in reduced:
                    index[d] = 0
                self._finish(self._reduced(reduced, index, self._begin(), mask, False), index, mask, False)

            self._lanes(index, column)

    def _lanes(self, index: list[Index], body: Callable[[Value | None], object]) -> None:
        """The body for whole vectors along the lanes' dim, then for what is left."""
        code, lane, width = self.code, self.lane, self.width
        if lane is None:
            body(None)
            return
        start, stop = self._bounds(lane)
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

    # elementwise

    def _body(self, index: list[Index], mask: Value | None) -> dict[Array, Value]:
        """Every walk's value at an index; gives those that reductions take."""
        known: dict[Array, Value] = {}
        taken: dict[Array, Value] = {}

        def value(array: Array) -> Value:
            here = self.arrays[array]
            # What an earlier walk of the nest gives is here already, under its place, and so is what was read once:
            # no walk reads what a later one writes (`_meeting`), so a place has one value in a turn.
            if here not in known:
                known[here] = self.memory.load(here, index, self.lane, self.width, mask)
            return known[here]

        for walk in self.walks:
            if isinstance(walk, Reduce):
                taken[walk.array] = value(walk.array)
                continue
            out = self.arrays[walk.out]
            if isinstance(walk, Point):
                made = walk.function(self.math, *(value(a) for a in walk.ins))
            else:
                near = dataclasses.replace(walk, source=self.arrays[walk.source])
                places = [value(a) for a in walk.indices]
                if mask is not None:  # what lies in lanes of no use may be anything
                    places = [self.math.where(mask, one, self.math.like(one, 0)) for one in places]
                made = self.memory.chosen(near, places, index, self.lane, self.width, mask)
            known[out] = made
            if out.buffer in self.stored:
                self.memory.store(made, out, index, self.lane, mask)
        return taken

    # reductions

    def _reductions(self) -> list[Reduce]:
        return [walk for walk in self.walks if isinstance(walk, Reduce)]

    def _begin(self) -> list[Value]:
        """What the accumulators hold before anything."""
        made = []
        for walk in self._reductions():
            kind = KINDS[walk.array.dtype]
            made.append(self.code.constant(kind, identity(walk.how, walk.array.dtype), self.width))
            if walk.how.startswith("arg"):
                made.append(self.code.constant("i64", -1, self.width))  # no place yet: the first element is better
        return made

    def _reduced(
        self, dims: list[int], index: list[Index], held: list[Value], mask: Value | None, lanes: bool
    ) -> list[Value]:
        code = self.code
        if dims:
            with code.loop(*self._bounds(dims[0]), 1, held) as loop:
                index[dims[0]] = loop.index
                loop.carry(self._reduced(dims[1:], index, loop.values, mask, lanes))
            return loop.results
        if not lanes:
            return self._step(index, held, mask, None)
        assert self.lane is not None
        stop, width = self._bounds(self.lane)[1], self.width
        if not isinstance(stop, int):
            return self._reduced_lanes(self.lane, stop, index, held)
        whole = stop - stop % width
        if whole:
            with code.loop(0, whole, width, held) as loop:
                index[self.lane] = loop.index
                loop.carry(self._step(index, loop.values, None, self.lane))
            held = loop.results
        if whole < stop:
            index[self.lane] = whole
            held = self._step(index, held, code.lanes("i1", [whole + n < stop for n in range(width)]), self.lane)
        return held

    def _reduced_lanes(self, lane: int, stop: Index, index: list[Index], held: list[Value]) -> list[Value]:
        """The accumulators after a dim of a size that is known when the loop runs: the tail may have no lanes."""
        code, width = self.code, self.width
        whole = code.op(f"and i64 {stop}, {-width}", "i64").text
        with code.loop(0, whole, width, held) as loop:
            index[lane] = loop.index
            loop.carry(self._step(index, loop.values, None, lane))
        if width == 1:
            return loop.results
        index[lane] = whole
        rest = code.splat(code.op(f"sub i64 {stop}, {whole}", "i64"), width)
        mask = code.compare("slt", code.lanes("i64", range(width)), rest)
        return self._step(index, loop.results, mask, lane)

    def _step(self, index: list[Index], held: list[Value], mask: Value | None, along: int | None) -> list[Value]:
        """The accumulators after one more vector; reduced lanes outside of the mask stay as they were."""
        taken, left, made = self._body(index, mask), iter(held), []
        for walk in self._reductions():
            value, before = taken[walk.array], next(left)
            keep = mask if along is not None else None
            if walk.how.startswith("arg"):
                place, where = self._place(walk, index, along), next(left)
                better = self._better(walk.how, value, before, where)
                if keep is not None:
                    better = self.code.binary("and", better, keep)
                made += [self.math.where(better, value, before), self.math.where(better, place, where)]
                continue
            after = self._combine(walk.how, before, value)
            made.append(after if keep is None else self.math.where(keep, after, before))
        return made

    def _place(self, walk: Reduce, index: list[Index], along: int | None) -> Value:
        (dim,) = self.over
        place = Value(str(index[dim]), "i64")
        wide = self.code.splat(place, self.width) if isinstance(index[dim], str) else None
        wide = wide or self.code.constant("i64", int(index[dim]), self.width)
        return (
            self.math.add(wide, self.code.lanes("i64", range(self.width)))
            if along is not None and self.width > 1
            else wide
        )

    def _better(self, how: str, value: Value, before: Value, where: Value) -> Value:
        """Beyond what is held, or the first to come, or the first NaN."""
        math, code = self.math, self.code
        beyond = math.compare("gt" if how == "argmax" else "lt", value, before)
        if value.floating:
            # NaN is beyond all numbers in torch; the first one stays, as nothing compares with it.
            fresh = code.binary("and", math.isnan(value), math.invert(math.isnan(before)))
            beyond = code.binary("or", beyond, fresh)
        return code.binary("or", beyond, math.compare("lt", where, math.like(where, 0)))

    def _combine(self, how: str, a: Value, b: Value) -> Value:
        math = self.math
        if how in ("any", "all"):
            return math.bit("or" if how == "any" else "and", a, b)
        functions = {"sum": math.add, "prod": math.mul, "amax": math.maximum, "amin": math.minimum}
        return functions[how](a, b)

    def _finish(self, held: list[Value], index: list[Index], mask: Value | None, lanes: bool) -> None:
        """The accumulators' lanes taken together where they were reduced, and stored."""
        left = iter(held)
        for d in self.over:
            index[d] = 0
        for walk in self._reductions():
            value = next(left)
            where = next(left) if walk.how.startswith("arg") else None
            if lanes:
                value, where = self._across(walk.how, value, where)
            made = value if where is None else where
            kind = KINDS[walk.out.dtype]
            self.memory.store(
                self.math.cast(made, kind), self.arrays[walk.out], index, None if lanes else self.lane, mask
            )

    def _across(self, how: str, value: Value, where: Value | None) -> tuple[Value, Value | None]:
        code, width = self.code, value.width
        if where is not None:
            best, place = code.extract(value, 0), code.extract(where, 0)
            for n in range(1, width) if width > 1 else ():
                other, there = code.extract(value, n), code.extract(where, n)
                better = self._prefer(how, other, there, best, place)
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
            value, width = self._combine(how, *parts), half
        return value, None

    def _prefer(self, how: str, other: Value, there: Value, best: Value, place: Value) -> Value:
        """Whether another lane's best goes before this one's: larger, or NaN, or as large and earlier."""
        math, code = self.math, self.code
        usable = math.compare("ge", there, math.like(there, 0))
        beyond = math.compare("gt" if how == "argmax" else "lt", other, best)
        same = math.compare("eq", other, best)
        if other.floating:
            beyond = code.binary("or", beyond, code.binary("and", math.isnan(other), math.invert(math.isnan(best))))
            same = code.binary("or", same, code.binary("and", math.isnan(other), math.isnan(best)))
        earlier = code.binary("and", same, math.compare("lt", there, place))
        chosen = code.binary("or", beyond, earlier)
        chosen = code.binary("or", chosen, math.compare("lt", place, math.like(place, 0)))
        return code.binary("and", chosen, usable)


def _order(group: WalkGroup) -> list[int]:
    """Dims with the output's strides falling, so that lanes run along memory; reduced ones last among equals."""
    weight = []
    for dim in range(len(group.space)):
        strides = [
            abs(a.strides[dim]) for walk in group.walks for a in (*walk.writes(), *walk.reads()) if a.strides[dim]
        ]
        weight.append(min(strides, default=1 << 60) if dim not in group.over else 0)
    inner = sorted((d for d in range(len(group.space)) if d in group.over), key=lambda d: -_least(group, d))
    outer = sorted((d for d in range(len(group.space)) if d not in group.over), key=lambda d: -weight[d])
    return outer + inner


def _least(group: WalkGroup, dim: int) -> int:
    reads = [abs(a.strides[dim]) for walk in group.walks for a in walk.reads() if a.strides[dim]]
    return min(reads, default=1 << 60)
