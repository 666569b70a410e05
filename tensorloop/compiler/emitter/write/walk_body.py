"""What a group of walks does at one index: elementwise values in registers, reductions in accumulators."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from tensorloop.compiler.emitter.ir.code import KINDS, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Point, Reduce, identity
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.elements import Memory, RowRange
from tensorloop.compiler.emitter.write.fuse import WalkGroup


class WalkBody:
    """Writes what a group of walks does at one index: values, stores, and the accumulators of reductions.

    `order` is that of the dims from the outermost on; which loops go over them is for others to say.
    """

    def __init__(
        self, memory: Memory, group: WalkGroup, stored: set[Region], rows: RowRange | None, order: Sequence[int]
    ) -> None:
        self.memory, self.code, self.math = memory, memory.code, memory.math
        self.walks, self.stored, self.rows, self.order = group.walks, stored, rows, order
        self.space = [group.space[d] for d in order]
        self.over = {order.index(d) for d in group.over}
        self.row = order.index(rows.dim) if rows is not None else None
        dtypes = {a.dtype for walk in group.walks for a in (*walk.reads(), *walk.writes()) if a.dtype != torch.bool}
        self.most = memory.target.lanes(dtypes or {torch.float32})
        self.lane: int | None = None
        self.width = 1
        self.arrays: dict[Array, Array] = {}
        self._collapse(group)

    def _collapse(self, group: WalkGroup) -> None:
        """Joins neighbouring dims that every array walks as one."""
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

    def bounds(self, dim: int) -> tuple[Index, Index]:
        """Returns where a loop along a dim begins and ends."""
        if dim == self.row and self.rows is not None:
            return self.code.times(self.rows.low, self.factor), self.code.times(self.rows.high, self.factor)
        return 0, self.code.sized(self.space[dim])

    # elementwise

    def body(self, index: list[Index], mask: Value | None) -> dict[Array, Value]:
        """Writes every walk at an index; returns the values that reductions take."""
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

    def reductions(self) -> list[Reduce]:
        """The walks that reduce."""
        return [walk for walk in self.walks if isinstance(walk, Reduce)]

    def begin(self) -> list[Value]:
        """Returns the values that the accumulators begin with."""
        made = []
        for walk in self.reductions():
            kind = KINDS[walk.array.dtype]
            made.append(self.code.constant(kind, identity(walk.how, walk.array.dtype), self.width))
            if walk.how.startswith("arg"):
                made.append(self.code.constant("i64", -1, self.width))  # no place yet: the first element is better
        return made

    def step(self, index: list[Index], held: list[Value], mask: Value | None, along: int | None) -> list[Value]:
        """The accumulators after one more vector; reduced lanes outside of the mask stay as they were."""
        taken, left, made = self.body(index, mask), iter(held), []
        for walk in self.reductions():
            value, before = taken[walk.array], next(left)
            keep = mask if along is not None else None
            if walk.how.startswith("arg"):
                place, where = self._place(walk, index, along), next(left)
                better = self._better(walk.how, value, before, where)
                if keep is not None:
                    better = self.code.binary("and", better, keep)
                made += [self.math.where(better, value, before), self.math.where(better, place, where)]
                continue
            after = self.combine(walk.how, before, value)
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
        """Whether a value replaces the one held: it is beyond that, the first to come, or the first NaN."""
        math, code = self.math, self.code
        beyond = math.compare("gt" if how == "argmax" else "lt", value, before)
        if value.floating:
            # NaN is beyond all numbers in torch; the first one stays, as nothing compares with it.
            fresh = code.binary("and", math.isnan(value), math.invert(math.isnan(before)))
            beyond = code.binary("or", beyond, fresh)
        return code.binary("or", beyond, math.compare("lt", where, math.like(where, 0)))

    def combine(self, how: str, a: Value, b: Value) -> Value:
        """Combines two parts of a reduction."""
        math = self.math
        if how in ("any", "all"):
            return math.bit("or" if how == "any" else "and", a, b)
        functions = {"sum": math.add, "prod": math.mul, "amax": math.maximum, "amin": math.minimum}
        return functions[how](a, b)

    def finish(
        self,
        held: list[Value],
        index: list[Index],
        lane: int | None,
        mask: Value | None,
        across: Callable[[str, Value, Value | None], tuple[Value, Value | None]] | None = None,
    ) -> None:
        """Stores the accumulators, whose parts `across` takes together first where there are several."""
        left = iter(held)
        for d in self.over:
            index[d] = 0
        for walk in self.reductions():
            value = next(left)
            where = next(left) if walk.how.startswith("arg") else None
            if across is not None:
                value, where = across(walk.how, value, where)
            made = value if where is None else where
            kind = KINDS[walk.out.dtype]
            self.memory.store(self.math.cast(made, kind), self.arrays[walk.out], index, lane, mask)

    def prefer(self, how: str, other: Value, there: Value, best: Value, place: Value) -> Value:
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


def order_of(group: WalkGroup) -> list[int]:
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
