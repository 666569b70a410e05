"""A split step made runnable: the stage before the loop, the loop's core, the stage after it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.loop.compiled.batched import Stage
from tensorloop.loop.compiled.cores import made
from tensorloop.loop.compiled.lengths import grows, growth_of
from tensorloop.loop.compiled.operations import bytes_of, value_of
from tensorloop.loop.compiled.partition import Parts, Split, split
from tensorloop.loop.compiled.recurrence import Core, Unsupported
from tensorloop.loop.compiled.saving import needed_for
from tensorloop.loop.compiled.sums import Sums

FIRST_ROOM = 64  # steps, where nobody knows how many there will be


class Program:
    """(steps, invariants, sequences, carry) -> (the last carry, how many steps, wanted, sums), as `parts` says."""

    def __init__(self, graph: fx.Graph, parts: Parts) -> None:
        self.parts = parts
        self.order = list(graph.nodes)
        self.lacking: Unsupported | None = None  # why the loop is not native
        self.split, self.core = self._compiled(graph)
        s = self.split
        given = [*parts.invariants, *parts.sequences]
        self._fed = [*s.loop_invariants, *s.loop_sequences]
        before = Stage(given, s.moving)
        before.compute(self.order, self._fed)
        self._before = before.finished(before.found[n] for n in self._fed)
        self._made = [n for n in self._fed if n not in given]
        after = Stage([*given, *self._made, *s.after_loop], s.moving)
        sums = Sums(after)
        after.compute(self.order, [*parts.wanted, *(leaf for n in parts.sums for leaf in sums.leaves(n))])
        asked = needed_for([*parts.next_carry, parts.going, *parts.wanted, *parts.sums], {*given, *parts.carry})
        self.needed = [n for n in self.order if n in asked]
        self.early = set(before.found)
        self._after = after.finished([*(after.whole(n) for n in parts.wanted), *(sums.of(n) for n in parts.sums)])
        self._going = None if parts.going is None else s.outs.index(parts.going)

    @property
    def native(self) -> bool:
        """Whether the loop, where there is one, runs as one native function."""
        return self.lacking is None

    def bytes_a_step(self) -> int:
        """What the loop is given, stores and gives of each step, beside the sequences that come from outside."""
        given = {*self.parts.sequences, *self.parts.carry}  # states before the steps are those after them, a step on
        found = dict.fromkeys([*self._made, *self.split.outs, *self.parts.wanted])
        return sum(bytes_of(n) for n in found if n in self.split.moving and n not in given)

    def _compiled(self, graph: fx.Graph) -> tuple[Split, Core | None]:
        """The split whose loop a back end takes: what it lacks is kept out of the loop, as far as that goes."""
        hoisted: set[Any] = set()
        while True:
            found = split(graph, self.parts, frozenset(hoisted))
            if found.loop is None:
                return found, None
            core, lacking = made(found.loop)
            if lacking is None:
                return found, core
            target = None if lacking.node is None else lacking.node.target
            free = target is not None and target not in hoisted and self._may_leave(found, target)
            if not free:
                self.lacking = lacking
                return found, core
            hoisted.add(target)

    def _may_leave(self, found: Split, target: Any) -> bool:
        """Whether a loop without this operation is a smaller one."""
        with_it = [n for n in found.inside if n.target == target]
        again = split(with_it[0].graph, self.parts, frozenset({target})) if with_it else found
        return sum(n.target == target for n in again.inside) < len(with_it)

    def __call__(
        self,
        steps: int | None,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carry: Sequence[Tensor],
        most: int | None = None,
        lengths: Sequence[int] = (),
    ) -> tuple[list[Tensor], int, list[Tensor], list[Tensor]]:
        """Runs the loop; `steps` is None where only the condition knows: then there are `most` of them at most.

        `lengths` are those of arrays before the first step, by symbol.
        """
        if self.core is None:
            assert steps is not None
            found = self._after(steps, *invariants, *sequences)
            return [], steps, list(found[: len(self.parts.wanted)]), list(found[len(self.parts.wanted) :])
        s = self.split
        fed = [x.contiguous() for x in self._before(0 if steps is None else steps, *invariants, *sequences)]
        loop_invariants, loop_sequences = fed[: len(s.loop_invariants)], fed[len(s.loop_invariants) :]
        last, done, outs, states = self._loop(self.core, steps, most, loop_invariants, loop_sequences, carry, lengths)
        made = dict(zip(self._fed, fed, strict=True))
        more = [made[n] for n in self._made]
        if steps is not None and done < steps:
            part = slice(steps - done, steps) if self.parts.reverse else slice(done)
            sequences = [x if grows(n) else x[part] for n, x in zip(self.parts.sequences, sequences, strict=True)]
            moving = s.moving
            more = [x[part] if n in moving else x for n, x in zip(self._made, more, strict=True)]
        given = dict.fromkeys([*self.parts.invariants, *self.parts.sequences, *self._made, *s.after_loop])
        values = [*invariants, *sequences, *more, *outs, *states]
        nodes = [*self.parts.invariants, *self.parts.sequences, *self._made, *s.after_loop]
        for n, x in zip(nodes, values, strict=True):
            given[n] = x if given[n] is None else given[n]
        del fed, made, more, values, loop_invariants, loop_sequences, outs, states
        found = self._after(done, *given.values())
        return last, done, list(found[: len(self.parts.wanted)]), list(found[len(self.parts.wanted) :])

    def _loop(
        self,
        core: Core,
        steps: int | None,
        most: int | None,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carry: Sequence[Tensor],
        lengths: Sequence[int],
    ) -> tuple[list[Tensor], int, list[Tensor], list[Tensor]]:
        """(the last carry, steps done, outs, states before the steps)."""
        limit = math.inf if most is None else most
        room = int(min(FIRST_ROOM, limit)) if steps is None else steps
        buffers = [_Room(self, n, room, carry) for n in self.split.outs]
        last, done, growth = list(carry), 0, self.parts.growth
        arrays = {i: more for i, n in enumerate(self.parts.carry) if (more := growth_of(n, growth)) is not None}
        for i, more in arrays.items():
            last[i] = _with_room(last[i], len(last[i]), max(more, 0) * room)
        grown = [grows(n) for n in self.split.loop_sequences]
        while True:
            outs = [b.part(done, room) for b in buffers]
            left = [x if whole else x[done:] for x, whole in zip(sequences, grown, strict=True)]
            now = [n + more * done for n, more in zip(lengths, growth, strict=True)]
            last, n = core(room - done, invariants, left, last, outs, (), now)
            done += n
            ended = done < room or self._going is None or not bool(outs[self._going][-1])
            if steps is not None or ended or done >= limit:
                break
            room = int(min(2 * room, limit))
            for b in buffers:
                b.grow(room, done)
            for i, more in arrays.items():
                last[i] = _with_room(last[i], len(carry[i]) + more * done, more * (room - done))
        first = (steps or room) - done if self.parts.reverse else 0
        states = dict(zip(self.split.outs, buffers, strict=True))
        before = [states[n].before(first, done) for n in self.split.states.values()]
        for i, more in arrays.items():
            last[i] = last[i][: len(carry[i]) + more * done]
        return last, done, [b.after(first, done) for b in buffers], before


def _with_room(array: Tensor, filled: int, more: int) -> Tensor:
    """Memory of the loop's own for an array, with so many slots in it and room for more."""
    memory = torch.empty((filled + more, *array.shape[1:]), dtype=array.dtype, device="cpu")
    memory[:filled] = array[:filled].detach()
    return memory


class _Room:
    """The memory of one out: a row for each step and, where it is a carry too, one for the state before the first."""

    def __init__(self, program: Program, out: fx.Node, room: int, carry: Sequence[Tensor]) -> None:
        value = value_of(out)
        self.reverse = program.parts.reverse
        places = [i for i, n in program.split.states.items() if n is out]
        self.first = carry[places[0]] if places else None
        self.shape, self.dtype = value.shape, value.dtype
        self.memory = self._made(room)

    def _made(self, room: int) -> Tensor:
        memory = torch.empty((room + (self.first is not None), *self.shape), dtype=self.dtype, device="cpu")
        if self.first is not None:
            memory[-1 if self.reverse else 0].copy_(self.first)
        return memory

    def part(self, start: int, end: int) -> Tensor:
        """Where the steps from start to end go."""
        shift = self.first is not None and not self.reverse
        return self.memory[start + shift : end + shift]

    def grow(self, room: int, done: int) -> None:
        """More room, with the steps done in it."""
        old, self.memory = self.memory, self._made(room)
        n = done + (self.first is not None)
        self.memory[:n] = old[:n]

    def after(self, first: int, done: int) -> Tensor:
        """The values of the steps done."""
        return self.part(first, first + done)

    def before(self, first: int, done: int) -> Tensor:
        """The carry before each of the steps done."""
        shift = 1 if self.reverse else 0
        return self.memory[first + shift : first + done + shift]
