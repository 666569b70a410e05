"""What is made of a step once and used for every loop whose step is the same: its programs, forward and backward.

The number of steps is no part of it. A plan holds no tensor of the caller's; plans are kept, the least used ones let go
first.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from tensorloop._common.faces import collector_at_rest
from tensorloop._common.user_line import UserLine
from tensorloop.compiler.custom_functions import UserFunction, with_backwards
from tensorloop.compiler.divide.saving import kept
from tensorloop.compiler.edge_walks import depends_on, needed_for
from tensorloop.compiler.graph import complex_pairs
from tensorloop.compiler.graph.backward_step import Missing, backward_step, zeros_in
from tensorloop.compiler.graph.capture import StepWithGradients, functional, with_gradients
from tensorloop.compiler.lengths import Size, grows, versions
from tensorloop.compiler.operations import aten, bytes_of, is_opaque, with_parts
from tensorloop.compiler.place import HOST, Place, put_on
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.trace import Trace
from tensorloop.compiler.verify import verify
from tensorloop.loop.compiled.pays import Clock
from tensorloop.loop.compiled.run.program import Program

MOST_PLANS = 128
NONE = Missing()
MOST_LENGTHS = 64  # of loops, for which a plan remembers which gradients there are


class Reached(NamedTuple):
    """The inputs of a step that get a gradient, by place; of its carry, those that get `none`."""

    none: frozenset[int]
    sequences: frozenset[int]
    invariants: frozenset[int]


class Write(NamedTuple):
    """A write of a step to a slot that there is: of which array, by its place in the carry, what it was before, ..."""

    place: int
    before: fx.Node
    slot: fx.Node | Size
    old: fx.Node  # what the slot held


class Plan:
    """The programs of one step, which is given as the trace of it, with `examples` on the host."""

    def __init__(
        self,
        trace: Trace,
        examples: Sequence[Tensor],
        wants: Sequence[bool],
        *,
        grad: bool,
        reverse: bool,
        place: Place,
        growth: Sequence[int] = (),
    ) -> None:
        found = complex_pairs.to_pairs(trace, functional(trace, examples), examples, wants)
        self.of_pairs = found[0] is not trace  # of real numbers, in the place of complex ones
        self.trace, module, examples, wants = found
        self.module = with_backwards(module)  # the step as one calls it: where the loop is, once all is traced
        functions = [n.target for n in self.module.graph.nodes if isinstance(n.target, UserFunction)]
        self.linear = all(x.linear for x in functions)  # whether each backward is, in the gradients that come
        self.gradients = self._with_gradients(*found, grad=grad, place=place, reverse=reverse, growth=growth)
        self.step = step = self.gradients.step
        verify(step, examples)
        if place.device != HOST:
            put_on(self.module.graph, place.device)
            for x in functions:
                x.put_on(place.device)
        self.wants = tuple(wants)  # of each input, whether it has a gradient
        self.flowing_carry = sorted(self.gradients.next_carry_grads)  # leaves of the carry that have a gradient
        self.flowing_outs = sorted(self.gradients.out_grads)  # outs that have one
        self.arrays = {n: i for i, n in enumerate(step.carry) if grows(n)}
        self.versions = self._versions()
        self.grad = bool(self.gradients.found.nodes)
        self.saved: list[fx.Node] = self._saved() if self.grad else []
        new = [n for n in self.saved if n not in step.sequences and n not in step.outs and n not in self.versions]
        self._check_arrays(new)
        self.whole = [grows(n) for n in self.saved]  # arrays, which have all steps' slots
        self.forward = Program(dataclasses.replace(step, outs=tuple(dict.fromkeys([*step.outs, *new]))))
        self._places = {n: i for i, n in enumerate(self.forward.step.outs)}
        self._replays: dict[str, Program] = {}
        self._backward: dict[Missing, Program] = {}
        self._reached: dict[Missing, Reached] = {}
        self._reached_in: dict[tuple[Missing, int], Reached] = {}
        self._lock = threading.Lock()
        self.apart: dict[Any, Any] = {}  # what `rows_apart` knows of the step
        self.clock = Clock(getattr(self.forward.core, "work", 0), place)
        self.writes: list[Write] = []  # where checkpoints want to take them back
        self.answers: Sequence[bool] = ()  # bools that the body was told: it is the plan of steps with these
        self.asked: tuple[str, UserLine | None] = "", None  # the call and line that asked for the first of them
        # places of xs and of draws whose slices of the next step are sequences, too
        self.ahead: Sequence[int] = ()
        self.drawn: dict[int, Any] = {}  # graphs that draw its random numbers, by stream
        self.longest = 0  # of the stretches of steps that it has run
        self.restless = ""  # why loops that begin with it run no more in stretches

    def _with_gradients(
        self, trace: Trace, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool], **options: Any
    ) -> StepWithGradients:
        return with_gradients(trace, module, examples, wants, **options)

    @property
    def lacking(self) -> Unsupported | None:
        """Returns what keeps the loop forward from being native; None where nothing does."""
        return self.forward.lacking

    @property
    def light(self) -> Program:
        """The program forward that keeps nothing for a backward: it gives outs, and what slots held before writes."""
        log = (n for w in self.writes for n in (w.slot, w.old) if isinstance(n, fx.Node))
        return self._replay("light", [*self.step.outs, *log], self.step.going)

    @property
    def bare(self) -> Program:
        """The program forward that returns only the final carry: it asks no condition, the steps are an argument."""
        return self._replay("bare", [], None)

    @property
    def again(self) -> Program:
        """The program forward for steps that are known to be done: it asks no condition."""
        return self.forward if self.step.going is None else self._replay("again", [*self._places], None)

    def _replay(self, name: str, outs: Sequence[fx.Node], going: fx.Node | None) -> Program:
        with self._lock:
            if name not in self._replays:
                step = dataclasses.replace(self.step, outs=tuple(dict.fromkeys(outs)), going=going)
                self._replays[name] = Program(step, self.forward.barred)
                self.clock.made += 1
            return self._replays[name]

    def keeps_last(self, n: int) -> bool:
        """Whether a backward keeps the last n of the sequences, before those that are a step ahead, as they are."""
        end = len(self.step.sequences) - len(self.ahead)
        return all(x in self.saved for x in self.step.sequences[end - n : end])

    def outs_of(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The step's outs among what the program forward gave."""
        return [given[self._places[n]] for n in self.step.outs]

    def light_of(self, given: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        """Returns the results of the light program by node."""
        return dict(zip(self.light.step.outs, given, strict=True))

    def saved_of(
        self, outs: Sequence[Tensor], sequences: Sequence[Tensor], last: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Picks what the backward keeps from outs, sequences and the last carry, whose arrays have all slots."""
        given = dict(zip(self.step.sequences, sequences, strict=True))
        given |= {n: last[i] for n, i in self.versions.items()} if last else {}
        return [given[n] if n in given else outs[self._places[n]] for n in self.saved]

    def _check_arrays(self, new: Sequence[fx.Node]) -> None:
        """Refuses a step whose backward needs an array as it was before slots of it were overwritten."""
        needed = needed_for(self.gradients.found.nodes, self.saved) if self.grad else set[fx.Node]()
        if any(grows(n) for n in new) or any(n in needed and n not in self.versions for n in self.arrays):
            raise Refused(
                "its backward needs slots of an array in the carry that are overwritten",
                "read a slot before it is overwritten into the carry, or append",
            )
        if any(grows(n) for n in self.step.outs):
            raise Refused("a y has another size at each step", "return a slice of one size")

    def _versions(self) -> dict[fx.Node, int]:
        """Returns all versions of arrays that are only appended to, each with the array's place in the carry."""
        found = dict[fx.Node, int]()
        for array, i in self.arrays.items():
            those = versions(array, self.step.next_carry[i])
            if all(n is array or n.target is aten.cat.default for n in those):
                found |= dict.fromkeys(those, i)
        return found

    def backward(self, missing: Missing = NONE) -> Program:
        """The program backward where these gradients are missing; `reached` says what it gives."""
        with self._lock:
            if (found := self._backward.get(missing)) is None:
                with collector_at_rest():
                    found = self._backward[missing] = Program(backward_step(self.gradients, self.saved, missing))
                self.clock.made += 1
            return found

    def reached(self, missing: Missing) -> Reached:
        """Returns which inputs of one step get a gradient where these of its outputs have none."""
        if (found := self._reached.get(missing)) is None:
            zero = zeros_in(self.gradients, missing)
            carry, *there = (frozenset(k for k, g in by.items() if g not in zero) for by in self.gradients.found)
            found = self._reached[missing] = Reached(frozenset(self.flowing_carry) - carry, *there)
        return found

    def reached_in(self, missing: Missing, steps: int) -> Reached:
        """Returns which inputs get a gradient from so many steps; `missing.carry` is missing at the last one alone."""
        if (found := self._reached_in.get((missing, steps))) is None:
            if len(self._reached_in) >= MOST_LENGTHS:
                self._reached_in.clear()
            found = self._reached_in[missing, steps] = self._step_by_step(missing, steps)
        return found

    def _step_by_step(self, missing: Missing, steps: int) -> Reached:
        sequences, invariants, met = frozenset[int](), frozenset[int](), list[frozenset[int]]()
        carry = missing.carry
        while len(met) < steps and carry not in met:
            met.append(carry)
            carry, more, held = self.reached(Missing(missing.outs, carry))
            sequences, invariants = sequences | more, invariants | held
        if len(met) < steps:  # from here on it goes round
            turn = met[met.index(carry) :]
            carry = turn[(steps - len(met)) % len(turn)]
        return Reached(carry, sequences, invariants)

    def differentiable(self, steps: int) -> frozenset[int]:
        """Outputs of a loop, its carry and then outs, that require a gradient after so many steps."""
        return self.gradients.flow.after(steps)

    def _saved(self) -> list[fx.Node]:
        s, t = self.step, self.gradients
        order = list(s.graph.nodes)
        linear = depends_on(order, [*t.next_carry_grads.values(), *t.out_grads.values()])
        moving = depends_on((n for n in order if n not in linear), [*s.carry, *s.sequences]) - linear
        needed = needed_for(t.found.nodes) & linear
        # A gradient is linear in those that come: of the rest of the graph it uses what its linear part is given.
        uses = [a for n in needed for a in n.all_input_nodes if a not in linear]
        uses += [g for g in t.found.nodes if g in moving]
        forward = with_parts(needed_for([*s.next_carry, *s.outs]))
        # Of an operation that nobody knows, the gradient may jump too: that of a table read between its places does.
        opaque = [n for n in needed_for([*needed, *uses]) if is_opaque(n)]
        late = [n for n in opaque if n not in linear and n not in forward]  # backward alone: there it may fail
        alike = {a for n in opaque if n in needed or n in late for a in n.all_input_nodes}
        price = dict.fromkeys(s.sequences, 1) | dict.fromkeys(s.outs, 2) | dict.fromkeys(self.versions, 1)
        pairs = [(c, new) for c, new in zip(s.carry, s.next_carry, strict=True) if new not in s.carry and not grows(c)]
        price |= {c: 3 for c, new in pairs if new in s.outs}
        first = set(kept(order, moving, forward, uses, price, alike, late))
        # States before the steps and after them are one memory: who keeps the ones has the others.
        price |= {n: 3 for pair in pairs for n in pair if first & {*pair}}
        return kept(order, moving, forward, uses, price, alike, late)

    def kept_of_a_step(self) -> list[fx.Node]:
        """Returns what a backward keeps of each step, beside sequences and outs, which are there anyway."""
        s = self.step
        states = {c for c, new in zip(s.carry, s.next_carry, strict=True) if new in s.outs or new in self.saved}
        there = {*s.sequences, *s.outs, *self.versions, *states}
        return [n for n in self.saved if n not in there]

    def bytes_a_step(self) -> int:
        """Returns the bytes of that."""
        return sum(map(bytes_of, self.kept_of_a_step()))

    @property
    def work(self) -> int:
        """Operations of a step, roughly, backward too; 0 where nobody counts them."""
        programs = [self.forward, *([self.backward()] if self.grad else [])]
        return sum(getattr(program.core, "work", 0) for program in programs)

    def bytes_of_carry(self) -> int:
        """Returns the bytes that one kept carry takes."""
        return sum(bytes_of(n) for n in self.step.carry if not grows(n))

    def bytes_beyond(self) -> int:
        """Estimates what blocks take beside their steps' bytes: gradients before they are added up, and temporaries."""
        graphs = [self.step.graph, *([self.backward().step.graph] if self.grad else [])]
        made = [n for graph in graphs for n in graph.nodes if n.op == "call_function" and not grows(n)]
        largest = max(map(bytes_of, made), default=0)
        sums = 0
        if self.grad:
            sums = sum(bytes_of(self.step.invariants[k]) for k in self.reached(NONE).invariants)
            sums += self.backward().bytes_of_sums  # of a tensor that a step uses often the loop adds up as many
        return 2 * self.bytes_of_carry() + sums + 2 * largest

    def bytes_reversed(self) -> int:
        """Estimates the bytes of a step while it is run again and reversed: most of what is kept has a gradient."""
        kept = self.again.bytes_a_step
        return kept + max(kept, self.backward().bytes_a_step if self.grad else 0) + self.bytes_of_carry()


class Plans:
    """Plans by key, and those whose making failed by their reason; the ones used last are kept."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.RLock()
        self.made = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan of a key, made where there is none."""
        if (found := self.find(key)) is not None:
            return found
        with self._making, collector_at_rest():  # torch traces one graph at a time
            if (found := self.find(key)) is not None:
                return found
            found = make()
        with self._lock:
            self.made += 1
            self._plans[key] = found
            while len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return found

    def find(self, key: Hashable) -> Any:
        """The plan of a key, None where there is none."""
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
            return found

    def clear(self) -> None:
        """Lets all plans go."""
        with self._lock:
            self._plans.clear()


plans = Plans()
