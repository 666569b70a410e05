"""A step made runnable: what is computed before its loop for all steps, the loop's core, what is computed after it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._common.arguments import check_memory
from tensorloop._torch.memory import in_memory
from tensorloop.compiler.divide.all_steps import BatchedGraph
from tensorloop.compiler.divide.partition import Partition, divide, outside, seen_by_discontinuous
from tensorloop.compiler.divide.sums import Sums
from tensorloop.compiler.edge_walks import needed_for
from tensorloop.compiler.lengths import grows, growth_of
from tensorloop.compiler.operations import bytes_of, is_view, value_of
from tensorloop.compiler.place import Place
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Core, CoreCall, Step, StepFailed, Unsupported
from tensorloop.compiler.targets.choose import make_core
from tensorloop.compiler.verify import Promise, check_roles, check_values, promise

HELD = 3  # calls
Ask = Callable[[Sequence[Tensor]], bool]
Pool = dict["Program", tuple[int, list[Tensor]]]  # memory of outs, for so many steps


class Ran(NamedTuple):
    """The last carry, how many steps were done, outs of all of them, sums over them, and whether the loop goes on."""

    last: list[Tensor]
    done: int
    outs: list[Tensor]
    sums: list[Tensor]
    going: bool


class Program:
    """Runs a loop of one step: (steps, invariants, sequences, carry) -> `Ran`.

    `barred` nodes are kept out of the loop, as another program of the same step does: both then round alike.
    """

    def __init__(self, step: Step, barred: Iterable[fx.Node] = ()) -> None:
        if step.going is not None and not step.carry:
            raise Refused("a condition ends a loop that carries no tensor", "put what the condition sees in the carry")
        check_roles(step)
        self.step, self.barred = step, set(barred)
        self.order = list(step.graph.nodes)
        self.lacking: Unsupported | None = None  # why the loop is not native
        self._handed: list[fx.Node] = []  # what torch computes before the loop, and needs after it
        self.partition, self.core = self._compiled()
        s = self.partition
        if s.loop is not None:
            check_roles(s.loop, alone=True)
        given = [*step.invariants, *step.sequences]
        self._fed = [*s.loop_invariants, *s.loop_sequences, *self._handed]
        before = BatchedGraph(given, s.moving, reverse=step.reverse, device=step.place.device)
        before.compute(self.order, self._fed)
        self._before = before.finished(before.found[n] for n in self._fed)
        made = [n for n in self._fed if n not in given]
        nodes = [*given, *made, *s.after_loop]
        after = BatchedGraph(nodes, s.moving, reverse=step.reverse, device=step.place.device)
        sums = Sums(after, s.sums)
        summed = [leaf for n in step.sums for leaf in sums.leaves(n)]
        after.compute(self.order, [*step.outs, *summed])
        asked = needed_for(step.outputs, step.inputs)
        self._reads = [n in asked for n in step.invariants]
        self.needed = [n for n in self.order if n in asked]
        self.early = set(before.found)
        self._after = after.finished([*(after.whole(n) for n in step.outs), *(sums.of(n) for n in step.sums)])
        self._going = None if step.going is None else s.outs.index(step.going)
        # What is looked up here is not looked for at every call.
        self._places = [(self._fed.index(n), n in s.moving) for n in made]
        self._given = [nodes.index(n) for n in after.given]
        self._cut = [not grows(n) for n in step.sequences]
        self._grown = [grows(n) for n in s.loop_sequences]
        self._arrays = {i: more for i, n in enumerate(step.carry) if (more := growth_of(n, step.growth)) is not None}
        self._rooms = [_Room(self, n) for n in s.outs]
        self._states = [s.outs.index(n) for n in s.states.values()]
        self._sums = [(value_of(n).shape, value_of(n).dtype) for n in s.sums]
        self._held = 0  # calls whose values were held against what was promised
        device = step.place.device
        self._promised_before = [promise(n, device, each=n in s.moving) for n in self._fed]
        self._promised = [
            *(promise(n, device, each=True) for n in step.outs),
            *(promise(n, device, each=False) for n in step.sums),
        ]
        self.bytes_a_step = self._bytes_a_step([*made, *map(_held, summed)])
        self.bytes_of_sums = sum(map(bytes_of, s.sums))  # of the loop, before those of one tensor are put together

    def at(self, place: Place) -> "Program":
        """Returns the program of the same step at another place."""
        return Program(dataclasses.replace(self.step, place=place), self.barred)

    def _bytes_a_step(self, made: Sequence[fx.Node]) -> int:
        """Counts the bytes of each step that the loop is given, stores and gives, or that are added up after it."""
        given = {*self.step.sequences, *self.step.carry}  # states before the steps are those after them, a step on
        found = dict.fromkeys([*made, *self.partition.outs, *self.step.outs])
        return sum(bytes_of(n) for n in found if n in self.partition.moving and n not in given)

    def _compiled(self) -> tuple[Partition, Core | None]:
        """The partition whose loop a back end takes: what it lacks is kept out of the loop, as far as that goes.

        So is what torch does in the middle of a step, which costs less for all steps at once.
        So is what a comparison sees and torch computes too: rounded in two ways, a number is no equal of itself. What
        torch computes before the loop and needs after it is handed on for the same reason.
        """
        hoisted: set[Any] = set()
        seen = seen_by_discontinuous(self.order)
        while True:  # each turn bars nodes or hoists an operation, of which there are so many
            found = divide(self.step, frozenset(hoisted), self.barred)
            early, late = outside(found)
            twice = seen.intersection(found.inside) & (early | late)
            if twice:
                self.barred |= twice
                continue
            both = [n for n in self.order if n in seen and n in early and n in late]
            self._handed = [n for n in both if isinstance(n.meta["val"], Tensor)]  # of several together each by itself
            if found.loop is None:
                return found, None
            core, lacking = make_core(found.loop)
            lacks = [lacking.node] if lacking is not None and lacking.node is not None else core.called
            targets = dict.fromkeys(n.target for n in lacks if n.target not in hoisted)
            free = [target for target in targets if self._may_leave(found, target)]
            if not free:
                self.lacking = lacking
                return found, core
            hoisted.update(free)

    def _may_leave(self, found: Partition, target: Any) -> bool:
        """Whether a loop without this operation is a smaller one."""
        count = sum(n.target == target for n in found.inside)
        return count > 0 and sum(n.target == target for n in divide(self.step, frozenset({target})).inside) < count

    def __call__(
        self,
        steps: int,
        invariants: Sequence[Tensor],
        sequences: Sequence[Tensor],
        carry: Sequence[Tensor],
        lengths: Sequence[int] = (),
        ask: Ask | None = None,
        pool: Pool | None = None,
    ) -> Ran:
        """Runs the loop, so many steps at most: a condition may end it, and `ask`, which is asked after each step.

        Arrays of the carry are changed in place, and their memory has room for all steps; `lengths` are theirs before
        the first step, by symbol. With a `pool` the outs are there until the next call with it.
        """
        count = len(self.step.outs)
        if self.core is None:
            assert ask is None
            found = self._after(steps, *invariants, *sequences)
            self._hold(found, self._promised, steps)
            return Ran([], steps, list(found[:count]), list(found[count:]), True)
        try:
            fed = self._fed_with(steps, invariants, sequences)
        except StepFailed as failed:
            # What all steps were to have fails at a step that the loop may not come to: then nothing has failed.
            done, part = failed.done, slice(steps - failed.done, steps) if self.step.reverse else slice(failed.done)
            cut = [x[part] if cut else x for x, cut in zip(sequences, self._cut, strict=True)]
            if not done or (ran := self(done, invariants, cut, carry, lengths, ask, pool)).going:
                raise
            return ran
        self._hold(fed, self._promised_before, steps)
        sums = [torch.zeros(shape, dtype=dtype, device=self.step.place.device) for shape, dtype in self._sums]
        n, m = len(self.partition.loop_invariants), len(self.partition.loop_sequences)
        call = CoreCall(steps, fed[:n], fed[n : n + m], carry, (), sums, lengths)
        last, done, outs, going = self._loop(self.core, call, ask, pool)
        more = [fed[i] for i, _ in self._places]
        if done < steps:
            part = slice(steps - done, steps) if self.step.reverse else slice(done)
            sequences = [x[part] if cut else x for x, cut in zip(sequences, self._cut, strict=True)]
            more = [x[part] if moves else x for x, (_, moves) in zip(more, self._places, strict=True)]
        values = [*invariants, *sequences, *more, *outs]
        given = [values[i] for i in self._given]
        del fed, more, values, outs
        found = self._after(done, *given, *sums)
        self._hold(found, self._promised, done)
        self._held += 1
        return Ran(last, done, list(found[:count]), list(found[count:]), going)

    def check_inputs(self, invariants: Sequence[Tensor], sequences: Sequence[Tensor], carry: Sequence[Tensor]) -> None:
        """Raises where what it reads has lost its memory since the look at its loop."""
        read = (x for x, reads in zip(invariants, self._reads, strict=True) if reads)
        check_memory((*carry, *sequences, *read), "which the loop was given or closes over")

    def _fed_with(self, steps: int, invariants: Sequence[Tensor], sequences: Sequence[Tensor]) -> list[Tensor]:
        """Computes what the loop is given; raises `StepFailed` for the first step of which that fails."""
        try:
            return [x.contiguous() for x in in_memory(self._before(steps, *invariants, *sequences))]
        except StepFailed:
            raise
        except Exception:
            for done in range(steps):
                at = steps - 1 - done if self.step.reverse else done
                row = [x[at : at + 1] if cut else x for x, cut in zip(sequences, self._cut, strict=True)]
                try:
                    self._before(1, *invariants, *row)
                except Exception as error:
                    raise StepFailed(error, done) from None
            raise

    def _hold(self, values: Sequence[Tensor], promised: Sequence[Promise], steps: int) -> None:
        """Checks in the first calls what is computed for all steps at once: shapes and dtypes do not change later."""
        if self._held < HELD:
            check_values(values, promised, steps)

    def _loop(
        self, core: Core, call: CoreCall, ask: Ask | None, pool: Pool | None
    ) -> tuple[list[Tensor], int, list[Tensor], bool]:
        """Returns (the last carry, steps done, outs and states before the steps, whether the loop goes on)."""
        (steps, invariants, sequences, carry, _, sums, lengths), reverse = call, self.step.reverse
        memory = self._memory(steps, pool)
        for r, x in zip(self._rooms, memory, strict=True):
            r.begin(x, carry)
        state = list(carry)
        for i, more in self._arrays.items():
            x = carry[i]  # with the slots that lie behind it in its memory
            state[i] = x.as_strided((len(x) + max(more, 0) * steps, *x.shape[1:]), x.stride())
        outs = [r.after(x) for r, x in zip(self._rooms, memory, strict=True)]
        if ask is None:
            last, done = core(CoreCall(steps, invariants, sequences, state, outs, sums, lengths))
            going = done == steps and (self._going is None or bool(outs[self._going][0 if reverse else -1]))
        else:
            run, done, going, last = core.stepping(invariants), 0, True, state
            while going and done < steps:
                at = steps - 1 - done if reverse else done
                now = [n + more * done for n, more in zip(lengths, self.step.growth, strict=True)]
                rows = [x if whole else x[at : at + 1] for x, whole in zip(sequences, self._grown, strict=True)]
                try:
                    last, _ = run(CoreCall(1, invariants, rows, last, [x[at : at + 1] for x in outs], sums, now))
                except StepFailed as failed:
                    failed.done += done
                    raise
                done += 1
                going = ask(self._filled(last, carry, done))
        first = steps - done if reverse else 0
        found = [x[first : first + done] for x in outs] if done < steps else outs
        found += [self._rooms[i].before(memory[i], first, done) for i in self._states]
        return self._filled(last, carry, done), done, found, going

    def _filled(self, state: Sequence[Tensor], carry: Sequence[Tensor], done: int) -> list[Tensor]:
        """A carry after so many steps, its arrays as long as they are then."""
        found = list(state)
        for i, more in self._arrays.items():
            found[i] = state[i][: len(carry[i]) + more * done]
        return found

    def _memory(self, room: int, pool: Pool | None) -> list[Tensor]:
        """Returns memory for the outs of so many steps."""
        before, memory = (0, []) if pool is None else pool.get(self, (0, []))
        if before != room:
            memory = [r.made(room) for r in self._rooms]
            if pool is not None:
                pool[self] = room, memory
        return memory


def _held(n: fx.Node) -> fx.Node:
    """Returns the node whose memory a summed node takes: the one that it is a view of, unless that is smaller."""
    base = n
    while is_view(base):
        (base,) = base.all_input_nodes
    return n if bytes_of(n) > bytes_of(base) else base


class _Room:
    """The memory of one out: a row for each step and, where it is a carry too, one for the state before the first."""

    def __init__(self, program: Program, out: fx.Node) -> None:
        value = value_of(out)
        places = [i for i, n in program.partition.states.items() if n is out]
        self.place = places[0] if places else None  # in the carry
        self.reverse = program.step.reverse
        self.shift = int(self.place is not None and not self.reverse)
        self.shape, self.dtype, self.device = value.shape, value.dtype, program.step.place.device

    def made(self, room: int) -> Tensor:
        """Returns memory for so many steps."""
        return torch.empty((room + (self.place is not None), *self.shape), dtype=self.dtype, device=self.device)

    def begin(self, memory: Tensor, carry: Sequence[Tensor]) -> None:
        """Puts the state before the first step there."""
        if self.place is not None:
            memory[-1 if self.reverse else 0].copy_(carry[self.place])

    def after(self, memory: Tensor) -> Tensor:
        """Returns the part of memory that steps write to."""
        return memory if self.place is None else memory[self.shift : len(memory) - 1 + self.shift]

    def before(self, memory: Tensor, first: int, done: int) -> Tensor:
        """Returns the carry before each of the steps done."""
        shift = int(self.reverse)
        return memory[first + shift : first + done + shift]
