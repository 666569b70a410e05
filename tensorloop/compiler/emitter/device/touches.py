"""Which lane touches which element: of each buffer that a step writes, element by element.

Of all groups at once: what has rows lies row by row, and each group touches its own. What has none is each group's
whole, made by the same lanes in each; a unit of rows reads in it what belongs to the rows of its group.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.compiler.emitter.device.lanes import GroupRows, LaneShare, walking_order
from tensorloop.compiler.emitter.ir.kernels import Gather, Matmul, Matrix, Reduce, Running, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.lengths import Length, Size
from tensorloop.compiler.place import HOST

NOBODY, SEVERAL = -1, -2  # in place of a lane's number
MOST = 2**20  # elements that are looked at one by one; of larger ones any lane may touch any


class LaneTouch(NamedTuple):
    """Memory that a part of a step touches: the lane of each element of the buffer, None where it may be any of all."""

    buffer: Region
    writes: bool
    lanes: Tensor | None

    def meets(self, other: "LaneTouch") -> bool:
        """Whether a lane touches what another lane of `other` does, in the same memory."""
        return self.lanes is None or other.lanes is None or _differ(self.lanes, other.lanes)

    def overlaps(self, other: "LaneTouch", places: Mapping[Region, tuple[int, int]]) -> bool:
        """Whether two lanes touch one byte of two buffers, which may share memory if needed at different times."""
        if self.buffer not in places or other.buffer not in places:
            return False
        (low, end), (start, stop) = places[self.buffer], places[other.buffer]
        first, last = max(low, start), min(end, stop)
        if first >= last or self.lanes is None or other.lanes is None:
            return first < last
        here, there = (
            one.lanes.repeat_interleave(one.buffer.dtype.itemsize)[first - at : last - at]
            for one, at in ((self, low), (other, start))
            if one.lanes is not None
        )
        both = min(len(here), len(there))  # the rest of the last line is nobody's
        return _differ(here[:both], there[:both])


class SlotTouch(NamedTuple):
    """Memory as long as an array that a part of a step touches.

    lanes: of each element of a slot, whichever slot it is: SEVERAL where not each slot's is one lane's; None for any.
    walk: how its elements are numbered from `start` on, the same for two parts that give them to the same lanes; None
        where one may be several lanes'.
    start, low, end: where it begins, its first and its last place, as lengths are before the step.
    """

    buffer: Region
    writes: bool
    lanes: Tensor | None
    walk: object
    start: Size
    low: Size
    end: Size

    def meets(self, turn: int, other: "Touch", before: int, growth: Sequence[int]) -> bool:
        """Whether a lane touches what another lane of `other` does, which is done before, at an earlier turn or now."""
        if not isinstance(other, SlotTouch):
            return True
        if self.lanes is not None and other.lanes is not None and not _differ(self.lanes, other.lanes):
            return False

        def pace(place: Size) -> int:
            return place.scale * growth[place.symbol] if isinstance(place, Length) else 0

        def behind(low: Size, at: int, end: Size, then: int) -> int | None:
            """How far one place is behind another, if that does not depend on how long arrays are."""
            if isinstance(low, Length) and isinstance(end, Length) and low.symbol != end.symbol:
                return None
            gap = low + at * pace(low) - end - then * pace(end)
            return gap if isinstance(gap, int) else None

        if self.walk is not None and self.walk == other.walk and behind(self.start, turn, other.start, before) == 0:
            return False
        # Only a few turns are gone through. Two in a row stand for those that are further apart where what lies between
        # the two touches grows from turn to turn; else they are taken to meet.
        after = (behind(self.low, turn, other.end, before) or 0) > 0
        if after and (turn == before or pace(self.low) >= 0):
            return False
        early = (behind(other.low, before, self.end, turn) or 0) > 0
        return not (early and (turn == before or pace(self.end) <= 0))


Touch = LaneTouch | SlotTouch


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool(((a != NOBODY) & (b != NOBODY) & ((a != b) | (a == SEVERAL))).any())


class TouchedPart(NamedTuple):
    """Elements of an array, by indices of `space`; the lanes of each are from `low` to `high`."""

    array: Array
    space: tuple[int, ...]
    low: Tensor
    high: Tensor


@dataclasses.dataclass(frozen=True)
class LaneTouches:
    """Finds who touches what.

    Args:
        lanes: of a group.
        rows: how groups share rows; None where there is one group.
        stored: buffers that have memory; other scratch is in registers.
    """

    lanes: int
    rows: GroupRows | None
    stored: set[Region]

    def of(self, unit: Unit, dim: int | None, share: LaneShare) -> list[Touch]:
        """Returns the memory that a unit touches, whose rows are along `dim`."""
        written = {array.buffer for array in unit.writes()}
        found: list[Touch] = []
        for part in self._parts(unit, dim, share):
            buffer = part.array.buffer
            if self._is_shared(buffer):
                slots = isinstance(buffer.numel, Length)
                writes = buffer in written
                found.append(_slots(part, share, writes) if slots else LaneTouch(buffer, writes, _marked(part)))
        if isinstance(unit, Matrix) and unit.work is not None:
            assert isinstance(unit.work.numel, int)
            found.append(LaneTouch(unit.work, True, torch.zeros(unit.work.numel, dtype=torch.int64, device=HOST)))
        return found

    def copy(self, array: Array, share: LaneShare, *, writes: bool) -> LaneTouch:
        """A dense array copied element by element, as `share` has it."""
        space = tuple(map(_few, share.sizes))
        lanes = self._numbers(space, share)
        return LaneTouch(array.buffer, writes, _marked(TouchedPart(array, space, lanes, lanes)))

    def _is_shared(self, buffer: Region) -> bool:
        return buffer.kind in ("carry", "near") or (
            buffer.written and (buffer.kind != "scratch" or buffer in self.stored)
        )

    def _parts(self, unit: Unit, dim: int | None, share: LaneShare) -> Iterator[TouchedPart]:
        """Yields every array of a unit that lanes have memory of."""
        if share.by == "first":
            lane = torch.zeros((), dtype=torch.int64, device=HOST)
            every = (*unit.reads(), *unit.writes())
            yield from (TouchedPart(one, tuple(map(_few, one.shape)), lane, lane) for one in every)
        elif isinstance(unit, WalkGroup):
            yield from self._walk(unit, dim, share)
        elif isinstance(unit, Matmul):
            yield from self._product(unit, dim, share)
        else:
            assert isinstance(unit, Scatter | Running)
            shape = unit.index.shape if isinstance(unit, Scatter) else unit.array.shape
            line = self._space((*shape[: unit.dim], 1, *shape[unit.dim + 1 :]), share)
            lane = self._numbers(line, share)
            for one in {*unit.reads(), *unit.writes()}:
                along = _few(one.shape[unit.dim])
                yield TouchedPart(one, (*line[: unit.dim], along, *line[unit.dim + 1 :]), lane, lane)

    def _space(self, shape: Sequence[int], share: LaneShare) -> tuple[int, ...]:
        space = list(map(_few, shape))
        for d, size in zip(share.order, share.sizes, strict=True):
            space[d] = _few(size)
        return tuple(space)

    def _numbers(self, space: Sequence[int], share: LaneShare) -> Tensor:
        """The first lane of the team of each element: dims that are not in the order have one element."""
        sizes, n = list(map(_few, share.sizes)), int(bool(share.sizes) and isinstance(share.sizes[0], Length))
        if math.prod(sizes) > MOST:  # too many to look at: `_marked` does not
            return torch.zeros([1] * len(space), dtype=torch.int64, device=HOST)
        whole = sizes[n] if share.rows else 0
        if share.rows and self.rows is not None:
            sizes[n] = whole * self.rows.share // self.rows.count
        teams = self.lanes // share.team
        numbers = torch.arange(math.prod(sizes), device=HOST).reshape(sizes) % teams * share.team
        if share.rows:  # the next group's first row is the same lanes' again
            numbers = numbers.index_select(n, torch.arange(whole, device=HOST) % sizes[n])
        shape = [*numbers.shape, *[1] * (len(space) - len(share.order))]
        return numbers.reshape(shape).permute(_inverse(share.order, len(space)))

    def _walk(self, unit: WalkGroup, dim: int | None, share: LaneShare) -> Iterator[TouchedPart]:
        space = self._space(unit.space, share)
        leads = self._numbers(space, share)
        lane = leads
        if unit.over and share.team > 1 and math.prod(space) <= MOST:
            over = [d for d in walking_order(unit, dim) if d in unit.over]
            sizes = [space[d] for d in over]
            numbers = torch.arange(math.prod(sizes), device=HOST) % share.team
            lane = leads + numbers.reshape([*sizes, *[1] * (len(space) - len(over))]).permute(
                _inverse(over, len(space))
            )
        kept = tuple(1 if d in unit.over else size for d, size in enumerate(space))
        for walk in unit.walks:
            for array in walk.reads():
                if isinstance(walk, Gather) and array is walk.source:
                    more = lane.reshape([*lane.shape, *[1] * len(walk.sizes)])
                    shape = (*array.shape, *walk.sizes)
                    wide = Array(array.buffer, shape, (*array.strides, *walk.steps), array.offset)
                    yield TouchedPart(wide, (*space, *map(_few, walk.sizes)), more, more)
                else:
                    yield TouchedPart(array, space, lane, lane)
            if isinstance(walk, Reduce):
                yield TouchedPart(walk.out, kept, leads, leads)
            else:
                yield TouchedPart(walk.out, space, lane, lane)

    def _product(self, unit: Matmul, dim: int | None, share: LaneShare) -> Iterator[TouchedPart]:
        m = len(unit.out.shape) - 2
        blocks = self._space(tuple(n // share.tall if d == m else n for d, n in enumerate(unit.out.shape)), share)
        lane = self._numbers(blocks, share)
        if not math.prod(blocks):
            return
        depth, lane = unit.a.shape[-1], lane.expand(blocks)
        lane = lane.repeat_interleave(share.tall, m)
        space = (*blocks[:m], blocks[m] * share.tall, blocks[-1])
        last = lane + (share.team - 1)  # of its team
        yield TouchedPart(unit.a, (*space[:-1], depth), lane.amin(-1, keepdim=True), last.amax(-1, keepdim=True))
        if self._is_shared(unit.b.buffer):
            low, high = lane.amin(m, keepdim=True), last.amax(m, keepdim=True)
            yield TouchedPart(unit.b, (*space[:m], depth, space[-1]), low, high)
        for array in (unit.out, *(() if unit.addend is None else (unit.addend,))):
            yield TouchedPart(array, space, lane, lane)


def _inverse(order: Sequence[int], rank: int) -> list[int]:
    """Returns where each of `rank` dims lies if those of the order come first."""
    every = [*order, *(d for d in range(rank) if d not in order)]
    return [every.index(d) for d in range(rank)]


def _few(size: Size) -> int:
    """Returns a size, or that of two slots: lanes that differ in some slot differ in the second one."""
    return 2 * abs(size.scale) if isinstance(size, Length) else size


def _marked(part: TouchedPart) -> Tensor | None:
    """The lane of each element of the whole buffer; None where there are too many to look at, or it is not known."""
    array = part.array
    if isinstance(array.offset, Length) or max(math.prod(part.space), array.buffer.numel) > MOST:
        return None
    return _marks(part, _places(part, array.offset), array.buffer.numel)


def _places(part: TouchedPart, start: int) -> Tensor:
    places = torch.full((), start, dtype=torch.int64, device=HOST)
    for size, stride in zip(part.space, part.array.strides, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device=HOST) * stride
    return places


def _marks(part: TouchedPart, places: Tensor, count: int) -> Tensor:
    found = torch.full((count,), NOBODY, dtype=torch.int64, device=HOST)
    low, high = (lane.expand(part.space) for lane in (part.low, part.high))
    # One of those who touch an element is written down. Where another one did not find itself there, there are several.
    found[places] = low
    found[places[(found[places] != low) | (low != high)]] = SEVERAL
    return found


def _slots(part: TouchedPart, share: LaneShare, writes: bool) -> SlotTouch:
    """Returns the slots that a part touches of memory as long as an array."""
    array = part.array
    assert isinstance(array.buffer.numel, Length)
    slot, start = array.buffer.numel.scale, array.offset
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    low, end = start + sum(x for x in steps if x < 0), start + sum(x for x in steps if x > 0)
    whole = not isinstance(start, Length) or not start.scale % slot
    if not whole or max(math.prod(part.space), slot) > MOST:
        return SlotTouch(array.buffer, writes, None, None, start, low, end)
    places = _places(part, start % slot)
    lanes, walk = _marks(part, places % slot, slot), None
    first = int(places.min()) if places.numel() else 0
    apart = _marks(part, places - first, int(places.max()) - first + 1) if places.numel() else lanes
    if share.team == 1 and not (apart == SEVERAL).any() and len(array.shape) == len(part.space):
        order = [(array.shape[d], array.strides[d]) for d in share.order]
        rest = [(n, s) for d, (n, s) in enumerate(zip(array.shape, array.strides, strict=True)) if d not in share.order]
        walk = (*order, share.rows, share.tall, share.by, *sorted(map(str, rest)))
    return SlotTouch(array.buffer, writes, lanes, walk, start, low, end)
