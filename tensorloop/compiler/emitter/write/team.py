"""Rows that meet, shared out all the same: each unit of a step is cut along a dim of its own.

Threads wait for each other before a unit that reads, or writes, what another one may have touched since they last met.
What cannot be cut is done by the first.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tensorloop.compiler.emitter.ir.kernels import CallOut, Gather, Matmul, Matrix, Scatter
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.matmul import Panels, lanes
from tensorloop.compiler.lengths import grows

ENOUGH = 16  # parts of a unit: a dim of more is no better for it
Piece = tuple[int, int, int]
FIRST: Piece = (0, 0, 0)  # what the first thread alone touches


class DimShare(NamedTuple):
    """A dim of a unit: thread n of N has size * n / N to size * (n + 1) / N of it, in whole grains."""

    dim: int
    size: int
    grain: int

    @property
    def parts(self) -> int:
        """Returns the most threads that the dim can be shared out among."""
        return -(-self.size // self.grain)


class Touch(NamedTuple):
    """A buffer touched: thread n its own piece of it; None where a thread may touch all of it."""

    buffer: Region
    piece: Piece | None
    writes: bool


@dataclasses.dataclass(frozen=True)
class Team:
    """How each unit is cut (None: the first thread does it), and before which of them threads wait."""

    cuts: list[DimShare | None]
    waits: list[bool]
    packing: list[bool]  # whether they wait between the packing of a product's panels and the product
    shared: int  # operations of a step that are shared out

    @property
    def barriers(self) -> int:
        """Returns how often threads wait in a step, the wait at its end included."""
        return sum(self.waits) + sum(self.packing) + 1


class Planner:
    """Goes through a step's units and remembers what was touched since the threads last met."""

    def __init__(
        self, packed: Mapping[Array, Panels], stored: set[Region], places: Mapping[Region, int], target: Machine
    ) -> None:
        self.packed, self.stored, self.places, self.target = packed, stored, places, target
        self.touched: list[Touch] = []

    def plan(self, step: LoweredStep, units: Sequence[Unit], work: Sequence[int]) -> Team | None:
        """Plans how threads share a step; None where it has arrays in the carry, or nothing that can be cut."""
        # What is as long as an array has another size at each step: shares, which are set once, would not fit it.
        if any(array.buffer.kind == "array" for array in step.carry) or any(_grows(unit) for unit in units):
            return None
        if step.going is not None:  # read after the end of the step before, by all
            self.touched.append(Touch(step.going.buffer, None, False))
        cuts, waits, packing = [], [], []
        for unit in units:
            cut = self._cut(unit)
            panels = _panels(unit, self.packed)
            accesses = list(self._accesses(unit, cut))
            # Panels are packed by the first thread alone, so there may be two waits: before it packs what others have
            # written, and before the others read the panels.
            first = list(_packing(panels)) if panels is not None else accesses
            waits.append(self._meet(first))
            packing.append(panels is not None and self._meet(accesses))
            cuts.append(cut)
        shared = sum(one for one, cut in zip(work, cuts, strict=True) if cut is not None)
        return Team(cuts, waits, packing, shared) if shared else None

    def _meet(self, accesses: Sequence[Touch]) -> bool:
        """Notes what is touched now; whether the threads must wait before."""
        waits = self._clashes(accesses) > 0
        # After a wait all that was done before is seen by all: only what is touched now can clash with what follows.
        # At the end of a step they wait too, so nothing is left over for the next one.
        self.touched = [*([] if waits else self.touched), *accesses]
        return waits

    def _clashes(self, accesses: Sequence[Touch]) -> int:
        return sum(self._clash(a, b) for a in accesses for b in self.touched)

    def _clash(self, a: Touch, b: Touch) -> bool:
        if not (a.writes or b.writes):
            return False
        if a.buffer is b.buffer:  # cut in the same way, each thread meets in it only what it did itself
            return a.piece is None or a.piece != b.piece
        # Scratch buffers that are not needed at one time share memory: writing one destroys the other, cut or not.
        if a.buffer not in self.places or b.buffer not in self.places:
            return False
        low, high = self.places[a.buffer], self.places[b.buffer]
        return low < high + b.buffer.bytes and high < low + a.buffer.bytes

    def _cut(self, unit: Unit) -> DimShare | None:
        """Chooses a dim of enough parts, or else of the most; among equals, the one that makes fewest threads wait."""
        found = [cut for cut in self._usable(unit) if cut.parts > 1]
        return min(
            found,
            # Waiting costs microseconds each time; more parts than threads gain nothing, so those count as equal.
            key=lambda cut: (-min(cut.parts, ENOUGH), self._clashes(list(self._accesses(unit, cut))), cut.dim),
            default=None,
        )

    def _usable(self, unit: Unit) -> Iterator[DimShare]:
        if isinstance(unit, Matrix | CallOut):  # there is one place to work in
            return
        for dim, size in enumerate(_space(unit)):
            if isinstance(unit, WalkGroup):
                if dim not in unit.over:  # parts of a sum would have to be added up in an order of their own
                    yield DimShare(dim, size, self._grain(unit, dim))
            elif not isinstance(unit, Matmul):
                if dim != unit.dim:  # along it each element needs the one before, or writes where an index says
                    yield DimShare(dim, size, 1)
            elif dim < len(unit.out.shape) - 1:
                yield DimShare(dim, size, 1)
            else:
                yield DimShare(dim, size, lanes(unit, self.target))

    def _grain(self, unit: WalkGroup, dim: int) -> int:
        """Returns the elements of a whole vector where elements are neighbours in memory, else 1."""
        near = any(array.strides[dim] == 1 for array in unit.writes())
        return self.target.lanes({unit.writes()[0].dtype}) if near else 1

    def _accesses(self, unit: Unit, cut: DimShare | None) -> Iterator[Touch]:
        written = set(unit.writes())
        for array in (*unit.reads(), *written):
            buffer = array.buffer
            # What no step writes cannot clash; scratch that is not stored is in registers.
            if buffer.written and (buffer.kind != "scratch" or buffer in self.stored):
                piece = FIRST if cut is None else _piece(unit, array, cut)
                yield Touch(buffer, piece, array in written)
        if isinstance(unit, Matrix) and unit.work is not None:
            yield Touch(unit.work, FIRST, True)
        panels = _panels(unit, self.packed)
        if panels is not None:
            yield Touch(panels.buffer, FIRST if cut is None else None, False)


def _packing(panels: Panels) -> Iterator[Touch]:
    yield Touch(panels.source.buffer, FIRST, False)
    yield Touch(panels.buffer, FIRST, True)


def _panels(unit: Unit, packed: Mapping[Array, Panels]) -> Panels | None:
    """The panels that a product packs at every step; None where it packs none."""
    found = packed.get(unit.b) if isinstance(unit, Matmul) else None
    return found if found is not None and found.buffer.kind == "scratch" else None


def _grows(unit: Unit) -> bool:
    return any(grows(array.shape) or grows((array.offset,)) for array in (*unit.reads(), *unit.writes()))


def _space(unit: Unit) -> tuple[int, ...]:
    """The sizes that a unit's loops walk."""
    assert not isinstance(unit, CallOut)
    if isinstance(unit, WalkGroup | Matrix):
        return unit.space
    if isinstance(unit, Matmul):
        return unit.out.shape
    return unit.index.shape if isinstance(unit, Scatter) else unit.array.shape


def _piece(unit: Unit, array: Array, cut: DimShare) -> Piece | None:
    """Returns how an array is cut among threads; None where a thread's part is not of its own elements alone."""
    dim, more = cut.dim, list[tuple[int, int]]()
    if isinstance(unit, Matmul):
        if array is unit.a and dim == len(unit.out.shape) - 1:  # every column needs all of a, every row all of b
            return None
        if array is unit.b and dim == len(unit.out.shape) - 2:
            return None
    if isinstance(unit, WalkGroup):
        for walk in unit.walks:
            if isinstance(walk, Gather) and array is walk.source:
                more += zip(walk.sizes, walk.steps, strict=True)
    if array.shape[dim] != cut.size:
        return None
    return _apart(array, dim, more, cut.grain)


def _apart(array: Array, dim: int, more: Sequence[tuple[int, int]], grain: int) -> Piece | None:
    """(stride, size, grain) where index i touches only elements e with e // stride % size == i, whatever the others.

    Those are the other dims, and `more`: sizes with their strides.
    """
    stride, size = array.strides[dim], array.shape[dim]
    # Element e belongs to index e // stride % size. Steps by whole turns do not change that; the others, the offset
    # included, must together stay below one stride, or they would reach into the next index's elements.
    turn = stride * size
    pairs = enumerate(zip(array.shape, array.strides, strict=True))
    others = [(n, step) for other, (n, step) in pairs if other != dim]
    near = [(n, step) for n, step in (*others, *more) if turn <= 0 or step % turn]
    reach = sum((n - 1) * step for n, step in near)
    if stride <= 0 or any(step < 0 for _, step in near) or array.offset % turn + reach >= stride:
        return None
    return stride, size, grain
