"""A split step made runnable: the stage before the loop, the loop's core, the stage after it."""

import math
from collections.abc import Callable, Sequence
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

Ask = Callable[[Sequence[Tensor]], bool]
Pool = dict["Program", tuple[int, list[Tensor]]]  # memory of outs, for so many steps
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
        made = [n for n in self._fed if n not in given]
        nodes = [*given, *made, *s.after_loop]
        after = Stage(nodes, s.moving)
        sums = Sums(after, s.terms)
        after.compute(self.order, [*parts.wanted, *(leaf for n in parts.sums for leaf in sums.leaves(n))])
        asked = needed_for([*parts.next_carry, parts.going, *parts.wanted, *parts.sums], {*given, *parts.carry})
        self.needed = [n for n in self.order if n in asked]
        self.early = set(before.found)
        self._after = after.finished([*(after.whole(n) for n in parts.wanted), *(sums.of(n) for n in parts.sums)])
        self._going = None if parts.going is None else s.outs.index(parts.going)
        # What is looked up here is not looked for at every call.
        self._places = [(self._fed.index(n), n in s.moving) for n in made]
        self._given = [nodes.index(n) for n in after.given]
        self._cut = [not grows(n) for n in parts.sequences]
        self._grown = [grows(n) for n in s.loop_sequences]
        self._arrays = {i: more for i, n in enumerate(parts.carry) if (more := growth_of(n, parts.growth)) is not None}
        self._rooms = [_Room(self, n) for n in s.outs]
        self._states = [s.outs.index(n) for n in s.states.values()]
        self._terms = [(value_of(n).shape, value_of(n).dtype) for n in s.terms]
        self.bytes_a_step = self._bytes_a_step(made)

    @property
    def native(self) -> bool:
        """Whether the loop, where there is one, runs as one native function."""
        return self.lacking is None

    def _bytes_a_step(self, made: Sequence[fx.Node]) -> int:
        """What the loop is given, stores and gives of each step, beside the sequences that come from outside."""
        given = {*self.parts.sequences, *self.parts.carry}  # states before the steps are those after them, a step on
        found = dict.fromkeys([*made, *self.split.outs, *self.parts.wanted])
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
        ask: Ask | None = None,
        pool: Pool | None = None,
    ) -> tuple[list[Tensor], int, list[Tensor], list[Tensor]]:
        """Runs the loop; `steps` is None where only the condition knows: then there are `most` of them at most.

        `lengths` are those of arrays before the first step, by symbol. `ask` says after each step whether to go on.
        With a `pool` what is wanted is there until the next call with it.
        """
        wanted = len(self.parts.wanted)
        if self.core is None:
            assert steps is not None
            assert ask is None
            found = self._after(steps, *invariants, *sequences)
            return [], steps, list(found[:wanted]), list(found[wanted:])
        fed = [x.contiguous() for x in self._before(steps or 0, *invariants, *sequences)]
        totals = [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in self._terms]
        last, done, outs = self._loop(self.core, steps, most, fed, carry, totals, lengths, ask, pool)
        more = [fed[i] for i, _ in self._places]
        if steps is not None and done < steps:
            part = slice(steps - done, steps) if self.parts.reverse else slice(done)
            sequences = [x[part] if cut else x for x, cut in zip(sequences, self._cut, strict=True)]
            more = [x[part] if moves else x for x, (_, moves) in zip(more, self._places, strict=True)]
        values = [*invariants, *sequences, *more, *outs]
        given = [values[i] for i in self._given]
        del fed, more, values, outs
        found = self._after(done, *given, *totals)
        return last, done, list(found[:wanted]), list(found[wanted:])

    def _loop(
        self,
        core: Core,
        steps: int | None,
        most: int | None,
        fed: Sequence[Tensor],
        carry: Sequence[Tensor],
        totals: Sequence[Tensor],
        lengths: Sequence[int],
        ask: Ask | None,
        pool: Pool | None,
    ) -> tuple[list[Tensor], int, list[Tensor]]:
        """(the last carry, steps done, outs and states before the steps)."""
        n = len(self.split.loop_invariants)
        invariants, sequences = fed[:n], fed[n:]
        limit = steps if steps is not None else math.inf if most is None else most
        room = int(min(FIRST_ROOM, limit)) if steps is None else steps
        rooms, growth = self._rooms, self.parts.growth
        memory = self._memory(room, pool)
        for r, x in zip(rooms, memory, strict=True):
            r.begin(x, carry)
        last, done = list(carry), 0
        for i, more in self._arrays.items():
            last[i] = _with_room(last[i], len(last[i]), max(more, 0) * room)
        run, reverse = core if ask is None else core.stepping(invariants), self.parts.reverse
        while True:
            end = room if ask is None else done + 1
            part = slice(room - end, room - done) if reverse and ask is not None else slice(done, end)
            outs = [r.part(x, part.start, part.stop, room) for r, x in zip(rooms, memory, strict=True)]
            all_steps = ask is None and not done
            left = [x if whole or all_steps else x[part] for x, whole in zip(sequences, self._grown, strict=True)]
            now = [n + more * done for n, more in zip(lengths, growth, strict=True)]
            last, n = run(end - done, invariants, left, last, outs, totals, now)
            done += n
            if ask is not None:
                grown = {i: len(carry[i]) + more * done for i, more in self._arrays.items()}
                going = ask([x[: grown[i]] if i in grown else x for i, x in enumerate(last)])
            else:
                going = self._going is not None and done == room and bool(outs[self._going][-1])
            if not going or done >= limit:
                break
            if done < room:
                continue
            room = int(min(2 * room, limit))
            memory = [r.grown(x, room, done) for r, x in zip(rooms, memory, strict=True)]
            for i, more in self._arrays.items():
                last[i] = _with_room(last[i], len(carry[i]) + more * done, more * (room - done))
        first = (steps or room) - done if self.parts.reverse else 0
        for i, more in self._arrays.items():
            last[i] = last[i][: len(carry[i]) + more * done]
        found = [r.part(x, first, first + done, room) for r, x in zip(rooms, memory, strict=True)]
        return last, done, found + [rooms[i].before(memory[i], first, done) for i in self._states]

    def _memory(self, room: int, pool: Pool | None) -> list[Tensor]:
        """For the outs of so many steps."""
        before, memory = (0, []) if pool is None else pool.get(self, (0, []))
        if before != room:
            memory = [r.made(room) for r in self._rooms]
            if pool is not None:
                pool[self] = room, memory
        return memory


def _with_room(array: Tensor, filled: int, more: int) -> Tensor:
    """Memory of the loop's own for an array, with so many slots in it and room for more."""
    memory = torch.empty((filled + more, *array.shape[1:]), dtype=array.dtype, device="cpu")
    memory[:filled] = array[:filled].detach()
    return memory


class _Room:
    """The memory of one out: a row for each step and, where it is a carry too, one for the state before the first."""

    def __init__(self, program: Program, out: fx.Node) -> None:
        value = value_of(out)
        places = [i for i, n in program.split.states.items() if n is out]
        self.place = places[0] if places else None  # in the carry
        self.reverse = program.parts.reverse
        self.shift = int(self.place is not None and not self.reverse)
        self.shape, self.dtype = value.shape, value.dtype

    def made(self, room: int) -> Tensor:
        """For so many steps."""
        return torch.empty((room + (self.place is not None), *self.shape), dtype=self.dtype, device="cpu")

    def begin(self, memory: Tensor, carry: Sequence[Tensor]) -> None:
        """Puts the state before the first step there."""
        if self.place is not None:
            memory[-1 if self.reverse else 0].copy_(carry[self.place])

    def part(self, memory: Tensor, start: int, end: int, room: int) -> Tensor:
        """Where the steps from start to end of `room` go."""
        if self.place is None and start == 0 and end == room:
            return memory
        return memory[start + self.shift : end + self.shift]

    def grown(self, memory: Tensor, room: int, done: int) -> Tensor:
        """More room, with the steps done in it."""
        more = self.made(room)
        n = done + (self.place is not None)
        more[:n] = memory[:n]
        return more

    def before(self, memory: Tensor, first: int, done: int) -> Tensor:
        """The carry before each of the steps done."""
        shift = int(self.reverse)
        return memory[first + shift : first + done + shift]
