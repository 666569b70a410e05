"""How a group's lanes share a unit: which elements each has, and the loop over them."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

from tensorloop.compiler.emitter.device.devices import WARP
from tensorloop.compiler.emitter.ir.code import Code, Index, Value
from tensorloop.compiler.emitter.ir.kernels import Matmul, Reduce, Running, Scatter
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.walk_body import order_of
from tensorloop.compiler.lengths import Length, Size, grows
from tensorloop.compiler.step import Unsupported

TALL = 8  # rows of a product that a lane does at once: each element of b is read once for them
LONG = 16  # elements of a reduction that several lanes share however many results there are
MANY = 1 << 20  # that there may be along an array


@dataclasses.dataclass(frozen=True)
class GroupRows:
    """Rows low to high of `count` are a group's: `share` of them, fewer in the last group unless they are `even`."""

    count: int
    share: int
    groups: int

    @property
    def even(self) -> bool:
        """Whether each group has as many rows."""
        return self.share * self.groups == self.count


@dataclasses.dataclass(frozen=True)
class LaneShare:
    """Element n of the dims `order`, the outermost first, is lane n's, modulo the lanes of a group.

    A dim as long as an array comes first: then a lane's elements of one slot are the same at every length.

    by: "walk", "product", "lines" (each along `unit.dim`), or "first" where the first lane does all of it.
    rows: whether the first dim, or the one behind that of slots, is that of rows, of which a group has its own.
    count: elements of a group, at most.
    team: lanes that share one element of a reduction or a product, each a part of what is summed up.
    tall: rows of a product that are one element.
    """

    by: str
    order: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    rows: bool = False
    count: Size = 1
    team: int = 1
    tall: int = 1


def share_lanes(unit: Unit, row: int | None, rows: GroupRows | None, lanes: int) -> LaneShare:
    """Returns how lanes share a unit whose rows are along the dim `row`."""
    if isinstance(unit, WalkGroup):
        return _walk(unit, row, rows, lanes)
    if isinstance(unit, Matmul):
        return _product(unit, row, rows, lanes)
    if isinstance(unit, Scatter | Running):
        shape = unit.index.shape if isinstance(unit, Scatter) else unit.array.shape
        if grows(shape):
            raise Unsupported(f"{type(unit).__name__} over a size that changes from step to step")
        order = _rows_first([d for d in range(len(shape)) if d != unit.dim], row)
        return _made("lines", order, shape, row, rows)
    return LaneShare("first")


def _made(
    by: str, order: Sequence[int], space: Sequence[int], row: int | None, rows: GroupRows | None, **more: int
) -> LaneShare:
    has_rows = rows is not None and row is not None and row in order
    sizes = tuple(space[d] for d in order)
    inner = math.prod(sizes)
    if has_rows and rows is not None:
        inner = math.prod(space[d] for d in order if d != row) * rows.share
    # A unit that has rows in dims of another kind (a product that sums over them) is walked whole by each group.
    return LaneShare(by, tuple(order), sizes, has_rows, inner, **more)


def _rows_first(order: list[int], row: int | None) -> list[int]:
    return order if row is None or row not in order else [row, *(d for d in order if d != row)]


def walking_order(unit: WalkGroup, row: int | None) -> list[int]:
    """Dims as they lie in memory, those of rows first, and before them one as long as an array."""
    order = _rows_first(order_of(unit), row)
    return sorted(order, key=lambda d: not isinstance(unit.space[d], Length))


def _walk(unit: WalkGroup, row: int | None, rows: GroupRows | None, lanes: int) -> LaneShare:
    kept = [d for d in walking_order(unit, row) if d not in unit.over]
    made = _made("walk", kept, unit.space, row, rows)
    if not unit.over:
        return made
    length: Size = math.prod(unit.space[d] for d in unit.over)
    length = MANY if isinstance(length, Length) else length
    near = all(any(walk.array.strides[d] == 1 for d in unit.over) for walk in unit.walks if isinstance(walk, Reduce))
    most = min(WARP, lanes)
    if near and length >= LONG:  # neighbouring lanes read neighbours in memory
        team = min(most, _below(length))
    elif 2 * made.count <= lanes and length > 1:  # else most lanes would have nothing to do
        team = min(most, _below(length), _below(lanes // max(1, made.count)))
    else:
        team = 1
    return dataclasses.replace(made, team=team)


def _divides(n: int) -> int:
    """Returns the largest power of two of which n is a multiple."""
    return n & -n


def _below(n: int) -> int:
    """Returns the largest power of two that is not larger than n."""
    return 1 << (max(1, n).bit_length() - 1)


def _product(unit: Matmul, row: int | None, rows: GroupRows | None, lanes: int) -> LaneShare:
    shape = list(unit.out.shape)
    m = len(shape) - 2
    order = _rows_first(list(range(len(shape))), row)
    here = shape[m]
    if rows is not None and row == m:
        here = rows.share if rows.even else 1  # a block of rows lies in one group
    made = _made("product", order, shape, row, rows)
    tall = max(t for t in range(1, TALL + 1) if here % t == 0 and (t == 1 or made.count >= t * lanes))
    shape[m] //= tall
    sizes = tuple(shape[d] for d in order)
    team = 1
    # Neighbouring lanes then read other rows of b: that pays where those lie in fast memory, in other banks of it.
    if unit.b.buffer.kind == "near" and row != len(shape) and 0 < made.count <= lanes:
        team = min(WARP, _below(lanes), _below(lanes // made.count), _divides(unit.a.shape[-1]))
    return dataclasses.replace(made, sizes=sizes, count=made.count // tall, tall=tall, team=team)


def split_index(code: Code, number: Index, sizes: Sequence[Size]) -> list[Index]:
    """An element's number as an index of dims from the outermost on."""
    index: list[Index] = [0] * len(sizes)
    # Division takes a device four times as long where it is of eight bytes.
    kind = "i32" if math.prod(sizes) < 2**31 else "i64"
    rest = number
    left = [n for n in range(1, len(sizes)) if sizes[n] != 1]
    if not left or isinstance(rest, int):
        for n in reversed(left):
            assert isinstance(rest, int)
            rest, index[n] = divmod(rest, sizes[n])
        return [rest, *index[1:]] if sizes else []
    if kind == "i32":
        rest = code.op(f"trunc i64 {rest} to i32", kind).text

    def wide(x: str) -> str:
        return x if kind == "i64" else code.op(f"zext i32 {x} to i64", "i64").text

    for n in reversed(left):
        index[n] = wide(code.op(f"urem {kind} {rest}, {sizes[n]}", kind).text)
        rest = code.op(f"udiv {kind} {rest}, {sizes[n]}", kind).text
    return [wide(str(rest)), *index[1:]]


class Elements:
    """The elements of a group: numbers `start` to `stop`, names or known, `most` of them at most.

    Of what is as long as an array each slot has `inner` numbers, of which those behind a group's last row are none.
    """

    def __init__(self, code: Code, sizes: Sequence[Size], rows: tuple[Index, Index] | None, most: Size) -> None:
        self.code, self.sizes, self.most = code, sizes, most
        self.low: Index = 0
        self.inner, self.high = 0, None
        if isinstance(most, Length):
            slots = sizes[0]
            self.inner = most.scale // slots.scale  # pyright: ignore[reportAttributeAccessIssue]
            self.start, self.stop = 0, code.sized(most)
            if rows is not None:
                self.low, self.high = (code.times(end, math.prod(sizes[2:])) for end in rows)
            return
        inner = math.prod(sizes[1:])
        low, high = rows if rows is not None else (0, sizes[0] if sizes else 1)
        self.start, self.stop = code.times(low, inner), code.times(high, inner)

    def turns(self, lanes: int) -> Index:
        """How often so many lanes at once take one each until none is left."""
        if not self.inner:
            return -(-self.most // lanes)
        return self.code.op(f"udiv i64 {self.code.add(self.stop, lanes - 1)}, {lanes}", "i64").text

    def at(self, number: Index) -> tuple[list[Index], Value | None]:
        """The index of a number, and whether there is such an element; None where there is one for each number."""
        code = self.code
        if not self.inner:
            return split_index(code, number, self.sizes), None
        slot, place = split_index(code, number, (self.sizes[0], self.inner))
        place = code.add(self.low, place)
        index = [slot, *split_index(code, place, self.sizes[1:])]
        return index, None if self.high is None else code.op(f"icmp slt i64 {place}, {self.high}", "i1")

    def each(self, lanes: int, body: Callable[[list[Index]], object]) -> None:
        """Runs the body at each element of this lane: its number among `lanes`, and every so many-th one after that."""
        code = self.code
        if not self.most:
            return

        def one(number: Index) -> None:
            index, there = self.at(number)
            with code.when(there) if there is not None else contextlib.nullcontext():
                body(index)

        if lanes == 1:
            with code.loop(self.start, self.stop) as loop:
                one(loop.index)
            return
        first = code.add(self.start, "%lane")
        if self.most <= lanes:  # one or none for each
            with code.when(code.op(f"icmp slt i64 {first}, {self.stop}", "i1")):
                one(first)
            return
        with code.loop(first, self.stop, lanes) as loop:
            one(loop.index)
