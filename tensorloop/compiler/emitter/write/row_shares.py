"""Whether the rows of dim 0 stay apart: every kernel then makes row i from row i, and threads share them out.

What is only read may be read across rows. It is enough to look at addresses, whatever the operation.
"""

from collections.abc import Mapping, Sequence

from tensorloop.compiler.emitter.ir.kernels import CallOut, Gather, Matmul, Matrix, Running, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.matmul import Panels
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.step import Unsupported


class Mixed(Exception):
    """Raised where a kernel reads another row than the one that it writes."""


class RowShare:
    """The dim of rows in every unit; None where each thread computes the same for itself.

    The dim behind a product's own is the one that it sums over: what it is added to is `apart`, each thread's own.
    """

    def __init__(
        self, count: int, dims: dict[int, int | None], buffers: dict[Region, bool], apart: set[Region]
    ) -> None:
        self.count, self.dims, self.buffers, self.apart = count, dims, buffers, apart


def share_rows(step: LoweredStep, units: Sequence[Unit], packed: Mapping[Array, Panels]) -> RowShare | None:
    """Returns how rows are told apart; None where they meet."""
    sizes = [(array.numel, array.shape[0]) for array in step.carry if array.shape and array.buffer.kind != "array"]
    count = max(sizes, default=(0, 0))[1]
    arrays = [array for array in step.carry if array.buffer.kind == "array"]
    if count < 2 or any(len(array.shape) < 2 or array.shape[1] != count for array in arrays):
        return None  # an array of no rows would be written to by every thread
    try:
        known = {array.buffer: bool(array.shape) and array.shape[0] == count for array in step.carry}
        known |= {array.buffer: True for array in arrays}
        return _RowSearch(step, units, packed, count, known).run()
    except Mixed:
        return None


def do_rows_meet(step: LoweredStep, units: Sequence[Unit], count: int, own: Sequence[Array]) -> bool:
    """Whether rows meet, where `own` of what is read, and the carry, have rows of their own."""
    if any(isinstance(unit, CallOut) for unit in units):
        raise Unsupported("torch's operations do not say which rows they read")
    known = {array.buffer: bool(array.shape) for array in step.carry} | {array.buffer: True for array in own}
    try:
        found = _RowSearch(step, units, {}, count, known, parts=True).run()
    except Mixed:
        return True
    return not all(found.buffers.get(array.buffer, False) for array in step.outs)


class _RowSearch:
    def __init__(
        self,
        step: LoweredStep,
        units: Sequence[Unit],
        packed: Mapping[Array, Panels],
        count: int,
        known: dict[Region, bool],
        *,
        parts: bool = False,
    ) -> None:
        self.step, self.units, self.packed, self.count, self.known = step, units, packed, count, known
        self.parts = parts  # whether a dim may walk rows in parts, as where heads of attention lie in the batch
        self.apart: set[Region] = set()

    def run(self) -> RowShare:
        dims = {n: self._unit(unit) for n, unit in enumerate(self.units)}
        for carry, after in zip(self.step.carry, self.step.next, strict=True):
            # Who has a row now must have it at the next step, and what all have must not be made from one's rows.
            if self.known.get(after.buffer, False) != self.known[carry.buffer]:
                raise Mixed
        going = self.step.going
        if going is not None and self.known.get(going.buffer, False):  # all must agree on whether the loop ends
            raise Mixed
        return RowShare(self.count, dims, self.known, self.apart)

    def _unit(self, unit: Unit) -> int | None:
        if isinstance(unit, Matmul) and self._sums_rows(unit):
            self.apart.add(unit.out.buffer)
            return len(unit.out.shape)
        dims = None
        for array in unit.reads():
            if self.known.get(array.buffer, False) and array.buffer.kind != "sum":
                here = set(self._aligned(array))
                dims = here if dims is None else dims & here
        fresh = dims is None
        # One dim must be that of rows in everything that the unit touches and that has rows: the loop is cut there.
        for array in unit.writes():
            here = set(self._aligned(array))
            dims = here if dims is None else dims & here
        dims = {d for d in dims or () if self._usable(unit, d)}
        if not dims:
            if not fresh:
                raise Mixed
            return self._mark(unit, None)
        return self._mark(unit, min(dims))

    def _sums_rows(self, unit: Matmul) -> bool:
        """Whether a product sums over rows and is added to sums, so that each thread can add up those of its rows."""
        added = unit.out.buffer.kind == "sum" and unit.addend is not None and unit.addend.buffer is unit.out.buffer
        if not added or unit.b in self.packed:
            return False
        return len(unit.a.shape) - 1 in self._aligned(unit.a) and len(unit.b.shape) - 2 in self._aligned(unit.b)

    def _mark(self, unit: Unit, dim: int | None) -> int | None:
        for array in unit.writes():
            if self.known.setdefault(array.buffer, dim is not None) != (dim is not None):
                raise Mixed
        return dim

    def _usable(self, unit: Unit, dim: int) -> bool:
        """Whether the unit's loops can be cut at this dim."""
        if isinstance(unit, WalkGroup):
            gathers = [walk for walk in unit.walks if isinstance(walk, Gather)]
            return dim not in unit.over and all(self._inside(walk) for walk in gathers)
        if isinstance(unit, Scatter):  # an index may have fewer rows than what it writes to
            return dim != unit.dim and not unit.index.shape[dim] % self.count and unit.index.shape[dim] > 0
        if isinstance(unit, Running):
            return dim != unit.dim
        if isinstance(unit, Matrix):
            return dim < unit.batch
        if not isinstance(unit, Matmul) or dim == len(unit.out.shape) - 1:
            return False
        if self.known.get(unit.b.buffer, False):
            return dim < len(unit.out.shape) - 2 and unit.b not in self.packed
        return True

    def _inside(self, walk: Gather) -> bool:
        """Whether what is gathered from a row lies in that row."""
        if not self.known.get(walk.source.buffer, False):
            return True
        reach = sum((size - 1) * abs(step) for size, step in zip(walk.sizes, walk.steps, strict=True))
        return bool(list(self._aligned(walk.source, reach)))

    def _aligned(self, array: Array, more: int = 0) -> list[int]:
        """The dims along which this is the buffer's rows, each within itself.

        What is as long as an array of the carry has its slots outermost, and rows in each of them.
        """
        numel = array.buffer.numel
        slot = numel.scale if isinstance(numel, Length) else numel
        stride, rest = divmod(slot, self.count)
        if rest or not stride:
            return []
        if isinstance(numel, Length):
            array = _within_slot(array, slot)
        found = []
        for dim, (size, step) in enumerate(zip(array.shape, array.strides, strict=True)):
            cut = self.parts and not isinstance(size, Length) and not size % self.count
            parts = size // self.count if cut else 1
            if size == parts * self.count and parts * step == stride:
                # The buffer is `count` rows of `stride` elements. Walking this dim goes from row to row; all other dims
                # together must stay within one: from the row's first element, at no less than 0, to below its end.
                others = [
                    (n - 1) * s for d, (n, s) in enumerate(zip(array.shape, array.strides, strict=True)) if d != dim
                ]
                others.append((parts - 1) * step)
                low = array.offset + sum(min(0, one) for one in others)
                high = array.offset + more + sum(max(0, one) for one in others)
                if low >= 0 and high < stride:
                    found.append(dim)
        return found


def _within_slot(array: Array, slot: int) -> Array:
    """An array without its way from slot to slot."""
    strides = tuple(0 if step and not step % slot else step for step in array.strides)
    return Array(array.buffer, array.shape, strides, array.offset % slot)
