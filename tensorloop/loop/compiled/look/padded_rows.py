"""Scans over packed xs in stretches, each with a batch of one size: rows that have ended stay in it, masked.

A row that has ended is given its last entry and its last real input again, so that what is computed there is as finite
as its own steps were; its carry stays what it was, and its outputs are left out. So a step does the same at each t.
Where that is much work for nothing, a stretch ends, and the next one has half as many rows. Rows without any entry take
no part.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tensorloop.loop.loop import Loop, State
from tensorloop.loop.packed_scan import PackedOutputs, PackedSlices
from tensorloop.loop.slices import Slices
from tensorloop.loop.stopped_rows import select
from tensorloop.packed.rows import segments
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import replace

L = TypeVar("L", bound=Loop)
WORTH_A_CUT = 100_000_000, 2**23  # operations or bytes to be spared by a further stretch, which takes time too


class Entries(Slices):
    """The entries of a stretch: a leaf of xs is (T, rows, *F) or None.

    `active` (T, rows) says which of them are real; None where all of the scan's are.
    """

    def __init__(self, packed: PackedSlices, leaves: Sequence[Tensor | None], active: Tensor, *, masked: bool) -> None:
        self.packed, self.active = packed, active if masked else None
        self.length, self.rows = active.shape
        self.tree, self.tensors, self.dim, self.reverse = packed.tree, [(x, 0) for x in leaves], 0, False
        self.ranges = {}

    def outputs(self) -> PackedOutputs:
        """Returns the collector of a stretch's ys, which are those of all its rows."""
        return _PaddedOutputs(self.packed, self.rows)

    def of_rows(self, ids: Tensor) -> "Entries":
        """The entries of some rows."""
        leaves = [None if x is None else x.index_select(1, ids) for x, _ in self.tensors]
        assert self.active is not None
        return Entries(self.packed, leaves, self.active.index_select(1, ids), masked=True)


class _PaddedOutputs(PackedOutputs):
    def __init__(self, packed: PackedSlices, rows: int) -> None:
        super().__init__(packed)
        self.rows = rows

    def rows_at(self, step: int) -> int:
        return self.rows


class PaddedLoop(Loop):
    """A stretch as a loop. `lasts` are the last real inputs of the leaves of the carry."""

    entries: Entries
    lasts: State


def of_rows(loop: Loop, ids: Tensor) -> Loop:
    """A loop of some of the rows, to be looked at."""
    if not isinstance(loop, PaddedLoop):
        return _with_init(loop, copy.copy(loop), select(loop.init, ids), ids)
    return _stretch(loop, loop.entries.of_rows(ids), select(loop.init, ids), select(loop.lasts, ids), ids)


def _stretch(loop: Loop, entries: Entries, init: State, lasts: State, ids: Tensor | None) -> PaddedLoop:
    """A loop over these entries; `ids` are those among its rows, None for all."""
    copied = PaddedLoop.__new__(PaddedLoop)
    vars(copied).update(vars(loop))
    copied.entries = copied.slices = entries
    copied.lasts, copied.length, copied.outputs = lasts, entries.length, entries.outputs()
    return _with_init(loop, copied, init, ids)


def _with_init(loop: Loop, copied: L, init: State, ids: Tensor | None) -> L:
    """Puts `init` and the context of these rows into a copy of a loop."""
    copied.init, copied.carry = init, copy.copy(loop.carry)
    copied.carry.expect(init)
    if ids is not None:
        copied.context = copy.copy(loop.context)
        copied.context.leaves = select(loop.context.leaves, ids)
        copied.context.arguments = copied.context.arguments_of(copied.context.leaves)
    return copied


class Stretch(NamedTuple):
    """Steps from `start` to `stop`, of the rows `ids`, which are on the host."""

    start: int
    stop: int
    ids: Tensor


class PaddedScan:
    """A scan over packed xs, stretch by stretch."""

    def __init__(self, loop: Loop, packed: PackedSlices) -> None:
        self.loop, self.packed, self.counts = loop, packed, packed.counts
        self.lens, self.device = packed.ragged._host_lens, packed.ragged.device  # places are found on the host
        self.stretches = [Stretch(0, len(self.counts), self.lens.nonzero().squeeze(1))]
        self.masked = self.counts[-1] < self.counts[0]
        self.outputs = _PaddedOutputs(packed, self.counts[0])
        self.state: State = list(loop.init)  # of all rows
        self._ys: list[Sequence[Tensor]] = []

    def first(self) -> tuple[PaddedLoop, None]:
        """Returns the first stretch, of which only the first step is there, to be looked at."""
        rows = self.counts[0]
        leaves = [None if x is None else x[:rows].unsqueeze(0) for x, _ in self.packed.tensors]
        active = torch.ones(1, rows, dtype=torch.bool, device=self.device)
        entries = Entries(self.packed, leaves, active, masked=self.masked)
        ids = None if rows == len(self.lens) else self._there(self.stretches[0].ids)
        init = self.loop.init if ids is None else select(self.loop.init, ids)
        self._first = self._watched(_stretch(self.loop, entries, init, init, ids))
        return self._first, None

    def cut(self, work: int, kept: int) -> None:
        """Decides on the stretches, for so many operations and bytes kept a step of all rows; lays out the entries."""
        (start, end, ids), self.stretches = self.stretches[0], []
        for t, n in enumerate(self.counts):
            half = -(-len(ids) // 2)
            spared = (len(ids) - half) * (end - t) / self.counts[0]  # steps of all rows
            if n <= half < len(ids) and (work * spared >= WORTH_A_CUT[0] or kept * spared >= WORTH_A_CUT[1]):
                self.stretches.append(Stretch(start, t, ids))
                start, ids = t, self.lens.topk(half).indices.sort().values
        self.stretches.append(Stretch(start, end, ids))
        steps = torch.arange(end, device=self.lens.device).unsqueeze(1)
        active = [steps[s.start : s.stop] < self.lens[s.ids] for s in self.stretches]
        tensors = [x for x, _ in self.packed.tensors]
        if self.masked:
            places = torch.cat([x.flatten() for x in active]).nonzero().squeeze(1)
            self._places = self._there(places)  # of entries, in time order
            earlier = (steps < self.lens).cumsum(1)  # at each step, of the rows up to each those that run
            index = self._there(torch.cat([self._index(s, steps, earlier) for s in self.stretches]))
            tensors = [None if x is None else segments.repeat(x, index, self._places) for x in tensors]
        sizes = [x.numel() for x in active]
        columns = [None if x is None else x.split(sizes) for x in tensors]
        self._entries = []
        for k, mask in enumerate(active):
            leaves = [None if x is None else x[k].unflatten(0, mask.shape) for x in columns]
            self._entries.append(Entries(self.packed, leaves, self._there(mask), masked=self.masked))

    def _there(self, x: Tensor) -> Tensor:
        """A tensor of the host where the entries are: nobody waits for it to come."""
        return x.to(self.device, non_blocking=True)

    def _index(self, s: Stretch, steps: Tensor, earlier: Tensor) -> Tensor:
        """(T * rows,): where in time order the entry is that a row gets, its last one where it has no more."""
        t = torch.minimum(steps[s.start : s.stop], self.lens[s.ids] - 1)
        return (torch.tensor(self.packed.starts, device=self.lens.device)[t] + earlier[t, s.ids] - 1).flatten()

    def begin(self) -> PaddedLoop:
        """The first stretch, as it was cut."""
        first = self._first
        return self._watched(_stretch(first, self._entries[0], first.init, first.lasts, None))

    def _watched(self, loop: PaddedLoop) -> PaddedLoop:
        """A stretch whose ys are checked against those of all others."""
        loop.outputs, self.outputs.rows = self.outputs, loop.entries.rows
        return loop

    def take(self, k: int, carry: State, lasts: State, ys: Sequence[Tensor]) -> PaddedLoop | None:
        """Takes what stretch k gave: of its rows the carry, their last inputs, and ys (T, rows, *F). Gives the next."""
        ids = self.stretches[k].ids
        all_rows = len(ids) == len(self.lens)
        self.state = carry if all_rows else _put(self.state, self._there(ids), carry, len(self.lens))
        self._ys.append([y.flatten(0, 1) for y in ys])
        if k + 1 == len(self.stretches):
            return None
        left = self.stretches[k + 1].ids
        places, left = self._there(torch.searchsorted(ids, left)), self._there(left)
        init, lasts = (
            [segments.collect(x, places) if _has_rows(x) else x for x in leaves] for leaves in (carry, lasts)
        )
        return self._watched(_stretch(self.loop, self._entries[k + 1], init, lasts, left))

    def ys(self) -> list[Tensor]:
        """ys in time order, of the rows that ran."""
        ys = [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*self._ys, strict=True)]
        return [segments.collect(y, self._places) for y in ys] if self.masked else ys


class SomeRows:
    """A loop whose condition lets some rows begin: the others leave the batch before its first step."""

    def __init__(self, loop: Loop, begin: Tensor) -> None:
        self.loop, self.ids, self.size = loop, begin.nonzero().squeeze(1), len(begin)

    def first(self) -> tuple[Loop, Tensor]:
        """Returns the loop of those rows that begin, and a mask of them: all true."""
        return of_rows(self.loop, self.ids), torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)

    def after(self, state: State, steps: Tensor) -> tuple[State, Tensor]:
        """Returns (the carry of all rows, their steps)."""
        return _put(self.loop.init, self.ids, state, self.size), steps.new_zeros(self.size).index_copy(
            0, self.ids, steps
        )


def whole_of(loop: Loop, begin: Tensor | None) -> PaddedScan | SomeRows | None:
    """The loop as what has rows that take no part in its first step; `begin` says which do. None where all do."""
    if isinstance(loop.slices, PackedSlices):
        return PaddedScan(loop, loop.slices)
    if not loop.compact or begin is None or not begin.dim() or bool(begin.all()):
        return None
    return SomeRows(loop, begin)


def _put(whole: State, ids: Tensor, state: State, rows: int) -> State:
    """The leaves of all rows, with these in some."""
    return [
        _put_slots(x, ids, y, rows) if isinstance(y, TensorArray) else x.index_copy(0, ids, y) if _has_rows(y) else y
        for x, y in zip(whole, state, strict=True)
    ]


def _put_slots(whole: TensorArray, ids: Tensor, some: TensorArray, rows: int) -> TensorArray:
    """An array of `rows` rows: those of `ids` as in `some`, the others as they were and 0 in new slots."""
    values = some.stack()
    old = values.new_zeros(len(values), rows, *values.shape[2:])
    if len(whole):
        old = torch.cat([whole.stack(), old[len(whole) :]])
    return replace(some, old.index_copy(1, ids, values))


def _has_rows(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
