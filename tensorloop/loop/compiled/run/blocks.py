"""Checkpoints of a compiled loop: a few carries are kept, and the programs run again over blocks of steps.

A block is to the schedule what a step is to that of an eager loop. What a backward keeps is there for one block at a
time: a block is as long as the carries that are kept leave it room, and small loops a little more.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.errors import Misuse, named
from tensorloop.compiler.operations import value_of
from tensorloop.loop.checkpoint.in_order import reversal
from tensorloop.loop.checkpoint.options import Checkpoints, WhatFits, bytes_on, check_least
from tensorloop.loop.checkpoint.snapshots import Place, Places, Stored
from tensorloop.loop.compiled.run.array_memory import ArrayMemory, bytes_a_step, bytes_beside
from tensorloop.loop.compiled.run.gradient_sums import GradientSums, room_for
from tensorloop.loop.compiled.run.looped import RunAtOnce
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.program import Program, Ran
from tensorloop.schedule import Schedule, spans

MOST_STEPS = 128  # in a block: more would run no faster
FREE_BYTES = 2**20  # what a block may take, however few carries are kept
AT_A_TIME = 16  # carries in one piece of memory
LARGE = 2**17  # bytes, of which malloc gives each piece back to the system as soon as it is free
AT_ONCE = 1024  # steps that run at once where nothing is kept of them, at most


@dataclasses.dataclass(frozen=True)
class BlocksOfSteps:
    """How a loop is cut into blocks of `size` steps, and where the carries before them are kept."""

    schedule: Schedule
    size: int
    offload: Any = None
    free: int = FREE_BYTES  # what may be taken for the steps at hand


def blocks_of(
    plan: Plan,
    checkpoints: Checkpoints | Schedule,
    known: bool,
    steps: int | None = None,
    lengths: Sequence[int] = (),
) -> BlocksOfSteps:
    """The blocks of a loop of so many steps, which is a bound where they are not `known`; `lengths` are its arrays'."""
    carry, step = max(plan.bytes_of_carry(), 1), max(plan.bytes_reversed() + bytes_a_step(plan), 1)
    own = checkpoints if isinstance(checkpoints, Schedule) else None
    if isinstance(checkpoints, Schedule):
        offload, k, budget = None, checkpoints.k, None
    else:
        offload, k, budget = checkpoints.offload, checkpoints.k, bytes_on(plan.step.place.device, checkpoints)
    if budget is not None:
        beyond = plan.bytes_beyond() + bytes_beside(plan, lengths, steps or 0)
        budget = check_least(budget, step, beyond, carry, isinstance(checkpoints, WhatFits))
    steps = steps if known else None
    if isinstance(own, schedule.Budgeted):  # made for other steps than those of a program
        own, budget = None, own.budget
    in_memory = own.memory if isinstance(own, schedule.Hierarchy) else k
    size = _size_beside((in_memory or 1) * carry, step) if budget is None else _size_within(budget, carry, step, steps)
    if isinstance(own, schedule.Blocks):
        own, size = own.of, own.steps
    elif isinstance(checkpoints, Checkpoints):
        size = checkpoints.residuals or size
    free = FREE_BYTES
    if budget is not None:
        blocks = None if steps is None else -(-steps // size)
        k, free = _most_carries(budget - size * step, carry, blocks), min(size * step, FREE_BYTES)
    return BlocksOfSteps(own or schedule.of(k or 1, 0 if known else None), size, offload, free)


def _size_beside(carries: int, step: int) -> int:
    """The steps of a block for which there is as much memory as for carries, and a little more."""
    return max(1, min(MOST_STEPS, max(carries, FREE_BYTES) // step))


@functools.lru_cache(maxsize=1024)
def _size_within(budget: int, carry: int, step: int, steps: int | None) -> int:
    """The steps of a block: those for which the fewest steps run again, and of these in the fewest blocks.

    What fits into some bytes fits into more, so these never cost more. One half is for a block where nobody knows how
    many there are.
    """
    if steps is None:
        return max(1, min(MOST_STEPS, budget // 2 // step))

    def cost(size: int) -> tuple[float, int]:
        blocks = max(-(-steps // size), 1)
        k = _most_carries(budget - size * step, carry, blocks)
        return spans.cost(blocks + 1, k) / blocks, blocks  # of each step; the last block is advanced over, too

    return min(range(1, max(min(MOST_STEPS, budget // step), 1) + 1), key=cost)


def _most_carries(room: int, carry: int, blocks: int | None) -> int:
    """How many carries to keep in so many bytes, of a loop of so many blocks: memory for many comes in pieces."""
    k = max(room // carry, 1)
    k = k if blocks is None else min(k, max(blocks, 1))
    pieces = -(-k // AT_A_TIME) * AT_A_TIME
    return k if k <= AT_A_TIME or pieces * carry <= room else k - k % AT_A_TIME


@dataclasses.dataclass
class RunInBlocks(RunAtOnce):
    """A loop that runs by a plan in blocks. It ends after `most` steps, if not before."""

    blocks: BlocksOfSteps = dataclasses.field(kw_only=True)
    name: str = dataclasses.field(kw_only=True)
    most: int | None = None

    def __post_init__(self) -> None:
        plan, blocks, draws = self.plan, self.blocks, self.draws
        self.known = plan.step.going is None and self.ask is None
        self.arrays = ArrayMemory(plan, self.lengths)
        self.schedule, self.size = blocks.schedule, blocks.size
        few = min(AT_ONCE, blocks.free // max(plan.light.bytes_a_step + bytes_a_step(plan), 1))
        few = 0 if draws is not None else few
        self.stride = max(1, few // self.size) * self.size  # steps that run at once where nothing is kept of them
        self.places = Places(blocks.offload)
        self.shelf = Shelf(min(self.schedule.k or AT_A_TIME, AT_A_TIME))
        self.shelved = blocks.offload is None and 0 < plan.bytes_of_carry() < LARGE
        self.carries: dict[int, Stored | None] = {}  # before which block; of the first one there is init
        self.lock = threading.Lock()  # one backward at a time

    def _count(self, steps: int) -> int:
        return -(-steps // self.size)

    def _part(self, start: int, stop: int, steps: int | None) -> slice:
        """The indices of these steps among so many; a reversed loop begins at the end."""
        if not self.plan.step.reverse:
            return slice(start, stop)
        assert steps is not None
        return slice(steps - stop, steps - start)

    def _run(
        self, program: Program, start: int, stop: int, tensors: Sequence[Tensor], state: list[Tensor], **options: Any
    ) -> Ran:
        """Runs a program for these steps."""
        invariants, rows = self.split(tensors)[2], self._rows(start, stop, tensors)
        program.check_inputs(invariants, rows, state)
        self.arrays.seek(start)
        with self.after(start):
            found = program(stop - start, invariants, rows, state, self._lengths(start), **options)
        self.arrays.at = start + found.done
        return found

    def _rows(self, start: int, stop: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sequences of these steps; those that are drawn are drawn now."""
        _, sequences, _ = self.split(tensors)
        part = self._part(start, stop, self.steps)
        given = [x[part] for x in sequences[: len(sequences) - self.drawn]]
        return given if self.draws is None else [*given, *self.draws.between(start, stop, self.size)]

    def whole(self, sequences: list[Tensor]) -> list[Tensor]:
        """Returns all sequences, of all steps: those that are drawn, drawn again."""
        if self.draws is None:
            return sequences
        return [*sequences[: len(sequences) - self.drawn], *self.draws.between(0, self.done, self.size)]

    # -- forward

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Runs all blocks and keeps the carries that the schedule wants."""
        state, limit = self.split(tensors)[0], self._limit()
        if self.known:
            self.arrays.make_room(state, int(limit))
        outs = _OutsOfBlocks(self)
        for action in self.schedule.sweep(self._count(int(limit)) if self.known else None):
            if isinstance(action, schedule.Advance):
                state, going = self._advance(min(action.stop * self.size, limit), tensors, state, outs)
                if not going or self.done >= limit:
                    break
            else:
                self._keep(action, state)
        else:
            raise Misuse(f"the schedule's sweep ended at step {self.done}, where the loop goes on")
        return self.arrays.result(state), outs.whole(), [state[i] for i in self.arrays.appended]

    def _limit(self) -> float:
        """The most steps that there can be."""
        bounds = [n for n in (self.steps, self.most) if n is not None]
        return min(bounds, default=math.inf)

    def _advance(
        self, stop: float, tensors: Sequence[Tensor], state: list[Tensor], outs: "_OutsOfBlocks"
    ) -> tuple[list[Tensor], bool]:
        """Runs blocks and returns (the carry after the steps before `stop`, or fewer, whether the loop goes on)."""
        going = True
        while going and self.done < stop:
            start = self.done
            end = int(min(start + self.stride, stop))
            self.arrays.make_room(state, end - start)
            state, done, given, _, going = self._run(self.plan.light, start, end, tensors, state, ask=self.ask)
            self.done += done
            found = self.plan.light_of(given)
            self.arrays.note(found, start, self.done)
            outs.add([found[n] for n in self.plan.step.outs], start, self.done)
        return state, going

    def _keep(self, action: schedule.Action, state: list[Tensor]) -> None:
        """Carries out what the schedule wants with the carry before a block."""
        if isinstance(action, schedule.Snapshot):
            self.carries[action.step] = self._stored(state, action.place) if action.step else None
        elif isinstance(action, schedule.Drop) and (stored := self.carries.pop(action.step)) is not None:
            stored.drop()
            if self.shelved and not stored.moved:
                self.shelf.take_back(stored.values)

    def _stored(self, state: list[Tensor], place: Place) -> Stored:
        state = [x for i, x in enumerate(state) if i not in self.arrays.symbols]  # arrays are versions of one memory
        shelved = self.shelved and place is None
        return self.places.store(self.shelf.copied(state) if shelved else state, place)

    # -- backward

    def reverse(self, total: GradientSums, tensors: list[Tensor], saved: list[Tensor]) -> GradientSums:
        """Takes gradients through all steps, block by block from the last one."""
        with self.lock:
            try:
                total.room = max(self.size * self.plan.bytes_reversed(), self.blocks.free)
                self.arrays.own |= dict(zip(self.arrays.appended, saved, strict=True))
                named(self.name)(self._reverse_blocks)(total, tensors)
            finally:
                for step in list(self.carries):
                    self._keep(schedule.Drop(step), [])
                self.shelf = Shelf(self.shelf.slots)
                self.arrays.let_go()
        return total

    def _reverse_blocks(self, total: GradientSums, tensors: list[Tensor]) -> None:
        count = self._count(self.done)
        if not self.carries:
            self._keep_again(tensors, count)
        state: list[Tensor] = []
        for action in reversal(self.schedule, count, [*self.carries]):
            if isinstance(action, schedule.Restore):
                state = self._restored(action.step, tensors)
            elif isinstance(action, schedule.Advance):
                state = self._again(action.start, action.stop, tensors, state)
            elif isinstance(action, schedule.Backward):
                self._reverse(action.step, tensors, state, total)
                state = []
            else:
                self._keep(action, state)

    def _keep_again(self, tensors: list[Tensor], count: int) -> None:
        """Takes the carries of the sweep anew: an earlier backward has used them up."""
        state = self.split(tensors)[0]
        self.arrays.make_room(state, self.done)
        for action in self.schedule.sweep(count if self.known else None):
            if isinstance(action, schedule.Advance):
                state = self._again(action.start, min(action.stop, count), tensors, state, anew=True)
                if action.stop >= count:
                    break
            else:
                self._keep(action, state)

    def _restored(self, block: int, tensors: list[Tensor]) -> list[Tensor]:
        stored, arrays = self.carries.get(block), self.arrays.before(block * self.size)
        if stored is None:
            return [arrays.get(i, x) for i, x in enumerate(self.split(tensors)[0])]
        kept = iter(stored.read())
        return [arrays[i] if i in arrays else next(kept) for i in range(len(self.plan.step.carry))]

    def _again(
        self, first: int, last: int, tensors: list[Tensor], state: list[Tensor], *, anew: bool = False
    ) -> list[Tensor]:
        """The carry after some blocks, run for it alone; and `anew` what they overwrite, where that was let go."""
        stop, light = min(last * self.size, self.done), anew and self.arrays.overwritten
        for start in range(first * self.size, stop, self.stride):
            end = min(start + self.stride, stop)
            with self.arrays.unchanged(start, end):
                found = self._run(self.plan.light if light else self.plan.bare, start, end, tensors, state)
            state = found.last
            if light:
                self.arrays.note(self.plan.light_of(found.outs), start, end)
        return state

    def _reverse(self, i: int, tensors: list[Tensor], state: list[Tensor], total: GradientSums) -> None:
        """Runs block i with what a backward keeps, and then that."""
        start, stop = i * self.size, min((i + 1) * self.size, self.done)
        rows = self._rows(start, stop, tensors)
        with self.arrays.unchanged(start, stop):
            last, _, outs, _, _ = self._run(self.plan.again, start, stop, tensors, state, pool=total.pool)
        saved = self.plan.saved_of(outs, rows, last)
        del outs, rows, last
        total.reverse(self._part(start, stop, self.done), self.split(tensors)[2], saved, self._lengths(stop - 1))


class Shelf:
    """Memory for carries, for some in one piece: made and let go singly, they leave holes that nothing else fits."""

    def __init__(self, slots: int) -> None:
        self.slots = slots  # in one piece
        self._free: list[list[Tensor]] = []

    def copied(self, state: list[Tensor]) -> list[Tensor]:
        """Copies these values into memory of the shelf."""
        if not self._free:
            rooms = [torch.empty((self.slots, *x.shape), dtype=x.dtype, device=x.device).unbind() for x in state]
            self._free = [list(slot) for slot in zip(*rooms, strict=True)]
        slot = self._free.pop()
        for room, x in zip(slot, state, strict=True):
            room.copy_(x)
        return slot

    def take_back(self, values: list[Tensor]) -> None:
        """Takes back memory that it gave. Who still reads it is done before another carry is kept."""
        self._free.append(values)


class _OutsOfBlocks:
    """The outs of a loop that runs in blocks: in one memory where the number of steps is known."""

    def __init__(self, run: RunInBlocks) -> None:
        self.run = run
        self.values = [value_of(n) for n in run.plan.step.outs]
        self.parts: list[list[Tensor]] = [[] for _ in self.values]
        self.made: list[Tensor] = []
        if run.known:
            device = run.plan.step.place.device
            self.made = [room_for(run.steps or 0, x, device) for x in self.values]

    def add(self, outs: list[Tensor], start: int, stop: int) -> None:
        """Takes the outs of some steps."""
        for y, x in zip(self.made, outs, strict=False):
            y[self.run._part(start, stop, self.run.steps)] = x
        if not self.made:
            for parts, x in zip(self.parts, outs, strict=True):
                parts.append(x)

    def whole(self) -> list[Tensor]:
        """The outs of all steps."""
        if self.run.known:
            return self.made
        step = -1 if self.run.plan.step.reverse else 1
        return [torch.cat(parts[::step]) for parts in self.parts]
