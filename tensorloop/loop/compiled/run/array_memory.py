"""Where the TensorArrays of a loop's carry lie while its steps run in parts, forward and again.

Each array is one piece of memory, as long as it is at the end; its versions are the first slots of that. What a replay
appends is there already, and stays bit for bit: the caller has it. An array whose slots are overwritten is the loop's
alone, with a log of what they held before, by which an earlier version comes back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._common.errors import Misuse
from tensorloop.compiler.lengths import WRITES, Length, Size, grows, shape_of, versions
from tensorloop.compiler.operations import aten, bytes_of, value_of
from tensorloop.compiler.step import Step
from tensorloop.loop.compiled.run.plan import Plan, Write


class Log(NamedTuple):
    """The values that slots of one array had before some steps wrote to them: a row for each write, earliest first."""

    place: int  # of the array, in the carry
    start: int
    stop: int
    slots: Tensor
    old: Tensor


def logged(step: Step) -> list[Write]:
    """The writes of a step to slots that there are, earliest first. What they find there becomes part of the graph."""
    found = list[Write]()
    for i, (array, last) in enumerate(zip(step.carry, step.next_carry, strict=True)):
        if not grows(array):
            continue
        for n in reversed(versions(array, last)):
            if n.target not in WRITES:
                continue
            before: Any = n.args[0]
            slot: Any
            with step.graph.inserting_before(n):
                if n.target is aten.index_put.default:
                    (slot,) = n.args[1]  # pyright: ignore[reportGeneralTypeIssues]
                    old = step.graph.call_function(aten.index.Tensor, (before, [slot]))
                else:
                    slot = n.args[3]
                    old = step.graph.call_function(aten.select.int, (before, 0, slot))
            old.meta["val"] = value_of(before).select(0, 0)
            found.append(Write(i, before, slot, old))
    return found


class ArrayMemory:
    """The arrays of one run of a plan; `starts` are their lengths before the first step, by symbol."""

    def __init__(self, plan: Plan, starts: Sequence[int]) -> None:
        self.plan, self.starts = plan, starts
        self.symbols = {i: _symbol(n) for n, i in plan.arrays.items()}
        self.appended = sorted({*plan.versions.values()})
        self.overwritten = [i for i in self.symbols if i not in self.appended]
        self.own: dict[int, Tensor] = {}  # by place, with the room behind the array
        self.log: list[Log] = []
        self.at = 0  # the step before which they are

    def length(self, place: int, step: int) -> int:
        """Returns the length of an array before a step."""
        symbol = self.symbols[place]
        return self.starts[symbol] + self.plan.step.growth[symbol] * step

    def make_room(self, state: list[Tensor], steps: int) -> None:
        """Puts the arrays of a carry into memory of the loop's own, with room for so many steps more."""
        for i in self.symbols:
            filled, needed = self.length(i, self.at), self.length(i, self.at + steps)
            memory = self.own.get(i)
            if memory is None or len(memory) < needed:
                room = needed if memory is None else max(needed, 2 * len(memory))
                memory = state[i].new_empty((room, *state[i].shape[1:]))
                memory[:filled] = state[i].detach()
                self.own[i] = memory
            state[i] = memory[:filled]

    @contextmanager
    def unchanged(self, start: int, stop: int) -> Iterator[None]:
        """Leaves what these steps have appended as it is, while they run again."""
        # By `data`, which counts its changes for itself: for the caller's views of the array there is none.
        there = [self.own[i].data[self.length(i, start) : self.length(i, stop)] for i in self.appended]
        kept = [x.clone() for x in there]
        try:
            yield
        finally:
            for x, old in zip(there, kept, strict=True):
                x.copy_(old)

    def note(self, found: Mapping[fx.Node, Tensor], start: int, stop: int) -> None:
        """Keeps what slots held before these steps wrote to them."""
        if self.overwritten and self.plan.step.reverse:
            found = {n: x.flip(0) for n, x in found.items()}
        for i in self.overwritten:
            writes = [w for w in self.plan.writes if w.place == i]
            slots = torch.stack([self._slots(w, found, start, stop) for w in writes], 1).flatten()
            old = found[writes[0].old]
            if len(writes) > 1:
                old = torch.stack([found[w.old] for w in writes], 1).flatten(0, 1)
            self.log.append(Log(i, start, stop, slots, old))

    def _slots(self, write: Write, found: Mapping[fx.Node, Tensor], start: int, stop: int) -> Tensor:
        """The slots that some steps wrote to."""
        if isinstance(write.slot, fx.Node):
            slots = found[write.slot].flatten()
            return torch.where(slots < 0, slots + self._at_steps(shape_of(write.before)[0], start, stop), slots)
        return self._at_steps(write.slot, start, stop)

    def _at_steps(self, number: Size, start: int, stop: int) -> Tensor:
        """A number that may follow the length of an array, at each of some steps."""
        device = self.plan.step.place.device
        if not isinstance(number, Length):
            return torch.full((stop - start,), number, device=device)
        first, more = self.starts[number.symbol], self.plan.step.growth[number.symbol]
        return (first + more * torch.arange(start, stop, device=device)) * number.scale + number.shift

    def seek(self, step: int) -> None:
        """Takes back what this step and those after it overwrote."""
        if step > self.at and self.overwritten:
            raise Misuse("a schedule went forward to a snapshot without the steps before it")
        for log in reversed(self.log):
            first, last = max(step, log.start), min(self.at, log.stop)
            if first < last:
                each = len(log.slots) // (log.stop - log.start)
                part = slice((first - log.start) * each, (last - log.start) * each)
                _put_back(self.own[log.place], log.slots[part], log.old[part])
        self.at = step

    def before(self, step: int) -> dict[int, Tensor]:
        """The arrays before a step, by place, to be sought when it runs."""
        return {i: memory[: self.length(i, step)] for i, memory in self.own.items()}

    def result(self, state: Sequence[Tensor]) -> list[Tensor]:
        """Returns the last carry for the caller: no replay will change it."""
        return [x.clone() if i in self.overwritten else x for i, x in enumerate(state)]

    def let_go(self) -> None:
        """Holds nothing any more; an array that is only appended to is where the caller has it."""
        self.own, self.log, self.at = {}, [], 0


def bytes_a_step(plan: Plan) -> int:
    """Returns how many bytes a step appends to the arrays of a carry."""
    found = 0
    for n in plan.arrays:
        more, slot = plan.step.growth[_symbol(n)], value_of(n)
        found += more * bytes_of(n) // max(len(slot), 1)
    return found


def bytes_beside(plan: Plan, starts: Sequence[int], steps: int) -> int:
    """Bytes that arrays take after so many steps, beside them and their gradients.

    Two copies, for memory that grows and for what steps make of all slots, and what slots held that were overwritten.
    """
    found = 0
    for n, i in plan.arrays.items():
        slot = bytes_of(n) // max(len(value_of(n)), 1)
        found += 2 * (starts[_symbol(n)] + plan.step.growth[_symbol(n)] * steps) * slot
        found += steps * sum(w.place == i for w in plan.writes) * slot
    return found


def _symbol(array: fx.Node) -> int:
    size = shape_of(array)[0]
    assert isinstance(size, Length)
    return size.symbol


def _put_back(memory: Tensor, slots: Tensor, old: Tensor) -> None:
    """Gives slots the values that they had before the first of some writes."""
    order = torch.argsort(slots, stable=True)
    slots = slots[order]
    first = torch.cat([slots.new_ones(min(len(slots), 1), dtype=torch.bool), slots[1:] != slots[:-1]])
    memory.index_copy_(0, slots[first], old[order[first]])
