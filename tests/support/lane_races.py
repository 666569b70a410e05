"""What each lane of each group touches between two waits, element by element, and whether lanes of one group meet.

It goes by how lanes share units and by where buffers lie, and knows nothing of how waits were planned. Arrays have
`LENGTHS` slots before the first step.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.device.lanes import LaneShare, share_lanes, walking_order
from tensorloop.compiler.emitter.ir.kernels import Gather, Matmul, Reduce, Running, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.fuse import WalkGroup
from tensorloop.compiler.lengths import actual, grows

TURNS = 4
LENGTHS = (6, 7, 8)


class Access(NamedTuple):
    """Elements of an array that a lane reads or writes."""

    lane: int
    buffer: Region
    elements: list[int]
    writes: bool


def unneeded_waits(plan: KernelPlan) -> list[str]:
    """Waits of a kernel without which no two lanes meet; AssertionError where they meet although they wait."""
    before, *rest = plan.waits
    asking, leaving, starting = rest
    now = [
        [n + more * turn for n, more in zip(LENGTHS, plan.step.source.growth, strict=False)] for turn in range(TURNS)
    ]
    groups = [
        _Group(plan, k, [[list(_unit(plan, n, lengths, k)) for n in range(len(plan.units))] for lengths in now])
        for k in range(1 if plan.rows is None else plan.rows.groups)
    ]

    def meet(*waits: Any) -> bool:
        return any(_meet(group, *waits) for group in groups)

    assert not meet(before, *rest), "lanes meet"
    found = []
    for n, waits in enumerate(before):
        if waits and not meet([*before[:n], False, *before[n + 1 :]], *rest):
            found.append(f"before part {n}")
    if asking and not meet(before, False, leaving, starting):
        found.append("before it asks")
    if leaving and not meet(before, asking, False, starting):
        found.append("before the last carry")
    if starting and not meet(before, asking, leaving, False):
        found.append("before the first step")
    return found


class _Group(NamedTuple):
    """One of the groups, and what its lanes touch in each unit, turn by turn."""

    plan: KernelPlan
    number: int
    parts: Sequence[Sequence[list[Access]]]


def _meet(
    group: _Group,
    before: Sequence[bool],
    asking: bool,
    leaving: bool,
    starting: bool,
) -> bool:
    """Whether one lane writes what another one touches before they have waited."""
    plan, number, parts = group
    step, since = plan.step, _Since(plan, number)
    for n in plan.pairs:
        since.all(_copy(plan, number, step.carry[n], step.next[n].buffer, writes=True), -1)
    for one in plan.near.values():
        (point,) = one.load.walks
        share = share_lanes(one.load, one.row, plan.rows, plan.lanes)
        for lane, index in _elements(plan, share, (), number):
            since.all([Access(lane, one.right.buffer, _at(point.writes()[0], index), True)], -1)
    if starting:
        since.clear()
    for turn in range(TURNS):
        for part, waits in zip(parts[turn], before, strict=True):
            if waits:
                since.clear()
            since.all(part, turn)
        if step.going is not None:
            if asking:
                since.clear()
            box = _box(step.going, [range(size) for size in step.going.shape], ())
            since.all([Access(lane, step.going.buffer, box, False) for lane in range(plan.lanes)], turn)
    if leaving:
        since.clear()
    for array in step.carry:
        if array.buffer.kind != "array":
            since.all(_copy(plan, number, array, array.buffer, writes=False), TURNS)
    return since.met


class _Since:
    """Who has touched which element since the last wait."""

    def __init__(self, plan: KernelPlan, group: int) -> None:
        self.plan, self.group, self.met = plan, group, False
        self.readers: dict[object, set[int]] = {}
        self.plans: dict[object, int] = {}

    def clear(self) -> None:
        self.readers.clear()
        self.plans.clear()

    def all(self, accesses: Sequence[Access], turn: int) -> None:
        for lane, buffer, elements, writes in accesses:
            key = self._key(buffer, turn)
            if key is None:
                continue
            for element in self._bytes(buffer, elements):
                place = key, element
                self.met |= self.plans.get(place, lane) != lane
                if writes:
                    self.met |= bool(self.readers.get(place, {lane}) - {lane})
                    self.plans[place] = lane
                else:
                    self.readers.setdefault(place, set()).add(lane)

    def _bytes(self, buffer: Region, elements: list[int]) -> list[int]:
        if buffer not in self.plan.offsets:
            return elements
        at, size, rows = self.plan.offsets[buffer], buffer.dtype.itemsize, self.plan.rows
        if rows is not None and self.plan.has_rows(buffer):  # the group's first row lies first
            at -= self.group * rows.share * buffer.bytes // rows.count
        return [at + size * element + n for element in elements for n in range(size)]

    def _key(self, buffer: Region, turn: int) -> object:
        """Which memory it is at this step; None for what no step writes."""
        if buffer.kind == "carry":
            after = self.plan.step.next[buffer.index].buffer
            return (
                ("pair", buffer.index, (turn + 1) % 2) if after.kind == "next" else (after.kind, after.index, turn - 1)
            )
        if buffer.kind == "next":
            return "pair", buffer.index, turn % 2
        if buffer.kind in ("out", "sum"):
            return buffer.kind, buffer.index, turn if buffer.kind == "out" else 0
        if buffer.kind == "array" or buffer in self.plan.grown:
            return buffer
        return "scratch" if buffer in self.plan.offsets else None


def _copy(plan: KernelPlan, group: int, array: Array, buffer: Region, *, writes: bool) -> list[Access]:
    """A carry copied, by neighbours."""
    if not array.numel:
        return []
    if plan.part is not None:  # which lies as the group has it, in whatever order its dims are
        places = _box(array, [range(size) for size in array.shape], ())
        return [Access(n % plan.lanes, buffer, [place], writes) for n, place in enumerate(places)]
    low, high = _rows(plan, group) if plan.has_rows(array.buffer) else (0, 1)
    row = array.numel // plan.rows.count if plan.rows is not None and plan.has_rows(array.buffer) else array.numel
    return [Access(n % plan.lanes, buffer, [low * row + n], writes) for n in range((high - low) * row)]


def _rows(plan: KernelPlan, group: int) -> tuple[int, int]:
    """The rows of a group."""
    rows = plan.rows
    return (0, 1) if rows is None else (group * rows.share, min((group + 1) * rows.share, rows.count))


def _box(
    array: Array, ranges: Sequence[Sequence[int]], lengths: Sequence[int], more: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """The elements at these indices; `more` are further sizes and strides."""
    found = torch.tensor([actual(array.offset, lengths)])
    dims = [*((list(one), step) for one, step in zip(ranges, array.strides, strict=True))]
    dims += [(list(range(size)), step) for size, step in more]
    for numbers, step in dims:
        found = (found[:, None] + torch.tensor(numbers, dtype=torch.int64) * step).flatten()
    return found.tolist()


def _unit(plan: KernelPlan, n: int, lengths: Sequence[int], group: int) -> Iterator[Access]:
    """What each lane touches in a unit, where arrays are so long."""
    unit, share, dim = plan.units[n], plan.shares[n], plan.dims[n]
    if share.by == "first":
        for array in (*unit.reads(), *unit.writes()):
            whole = _box(array, [range(size) for size in actual(array.shape, lengths)], lengths)
            yield Access(0, array.buffer, whole, array in unit.writes())
        return
    for lane, index in _elements(plan, share, lengths, group):
        if isinstance(unit, WalkGroup):
            yield from _walk(plan, unit, share, lane, index, dim, lengths)
        elif isinstance(unit, Matmul):
            yield from _product(plan, group, unit, share, lane, index, dim)
        else:
            assert isinstance(unit, Scatter | Running)
            array = unit.index if isinstance(unit, Scatter) else unit.array
            line = {**index, unit.dim: range(array.shape[unit.dim])}
            for one in unit.reads():
                here = {**line, unit.dim: range(actual(one.shape[unit.dim], lengths))}
                yield Access(lane, one.buffer, _at(one, here, lengths), False)
            here = {**line, unit.dim: range(actual(unit.out.shape[unit.dim], lengths))}
            yield Access(lane, unit.out.buffer, _at(unit.out, here, lengths), True)


def _at(
    array: Array, index: dict[int, range], lengths: Sequence[int] = (), more: Sequence[tuple[int, int]] = ()
) -> list[int]:
    return _box(array, [index[d] for d in range(len(array.shape))], lengths, more)


def _elements(
    plan: KernelPlan, share: LaneShare, lengths: Sequence[int], group: int
) -> Iterator[tuple[int, dict[int, range]]]:
    """The first lane that has an element of a group, and the element."""
    sizes, first, n = list(actual(share.sizes, lengths)), 0, int(grows(share.sizes))
    if share.rows and plan.rows is not None:
        (low, high), each, known = _rows(plan, group), sizes[n], plan.rows.count
        first, sizes[n] = low * each // known, (high - low) * each // known
    for number in range(math.prod(sizes)):
        index, rest = {}, number
        for k, (d, size) in reversed([*enumerate(zip(share.order, sizes, strict=True))]):
            rest, place = divmod(rest, size)
            place += first if k == n else 0
            index[d] = range(place, place + 1)
        yield number % (plan.lanes // share.team) * share.team, index


def _walk(
    plan: KernelPlan,
    unit: WalkGroup,
    share: LaneShare,
    lane: int,
    index: dict[int, range],
    dim: int | None,
    lengths: Sequence[int],
) -> Iterator[Access]:
    space = actual(unit.space, lengths)
    reduced = [d for d in walking_order(unit, dim) if d in unit.over]
    for number in range(math.prod(space[d] for d in reduced)):
        here, rest = dict(index), number
        for d in reversed(reduced):
            rest, place = divmod(rest, space[d])
            here[d] = range(place, place + 1)
        for walk in unit.walks:
            for array in walk.reads():
                more = zip(actual(walk.sizes, lengths), walk.steps, strict=True) if _gathers(walk, array) else ()
                if array.buffer.kind != "scratch" or array.buffer in plan.stored:
                    yield Access(lane + number % share.team, array.buffer, _at(array, here, lengths, [*more]), False)
            if not isinstance(walk, Reduce) and (walk.out.buffer.kind != "scratch" or walk.out.buffer in plan.stored):
                yield Access(lane + number % share.team, walk.out.buffer, _at(walk.out, here, lengths), True)
    first = {d: index.get(d, range(1)) for d in range(len(unit.space))}
    for walk in unit.walks:
        if isinstance(walk, Reduce):
            yield Access(lane, walk.out.buffer, _at(walk.out, first, lengths), True)


def _gathers(walk: object, array: Array) -> TypeGuard[Gather]:
    return isinstance(walk, Gather) and array is walk.source


def _product(
    plan: KernelPlan, group: int, unit: Matmul, share: LaneShare, lane: int, index: dict[int, range], dim: int | None
) -> Iterator[Access]:
    m, n = len(unit.out.shape) - 2, len(unit.out.shape) - 1
    block = {**index, m: range(index[m].start * share.tall, index[m].stop * share.tall)}
    depth = range(unit.a.shape[-1])
    if dim == n + 1 and plan.rows is not None:
        depth = range(*_rows(plan, group))
    for k in range(share.team):  # which take turns along what is summed up
        part = range(depth.start + k, depth.stop, share.team)
        yield Access(lane + k, unit.a.buffer, _at(unit.a, {**block, n: part}), False)
        if unit.b not in plan.packed:
            yield Access(lane + k, unit.b.buffer, _at(unit.b, {**block, m: part}), False)
    if unit.addend is not None:
        yield Access(lane, unit.addend.buffer, _at(unit.addend, block), False)
    yield Access(lane, unit.out.buffer, _at(unit.out, block), True)
