"""What is made of a step once and used for every loop whose step is the same: its programs, forward and backward.

The number of steps is no part of it. A plan holds no tensor of the caller's; plans are kept, the least used ones let go
first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from tensorloop.compiler.divide.partition import Parts
from tensorloop.compiler.divide.saving import kept
from tensorloop.compiler.graph import complex_pairs
from tensorloop.compiler.graph.capture import Traced, functional, with_gradients
from tensorloop.compiler.graph.simplify import without_grads, zeros_in
from tensorloop.compiler.lengths import Size, grows, versions
from tensorloop.compiler.operations import aten, bytes_of, value_of, with_parts
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.trace import Step
from tensorloop.compiler.verify import check_graph
from tensorloop.compiler.walks import depends_on, needed_for
from tensorloop.loop.compiled.pays import Clock
from tensorloop.loop.compiled.run.program import Program

MOST_PLANS = 128
MOST_LENGTHS = 64  # of loops, for which a plan remembers which gradients there are


class Missing(NamedTuple):
    """Outputs of a step that have no gradient: no zeros, for zero times infinity is none. By place.

    `carry` of the next carry: after the last step what the caller makes no use of, before it what a step does not use.
    """

    ys: frozenset[int] = frozenset()
    carry: frozenset[int] = frozenset()


class Reached(NamedTuple):
    """Which inputs of a step get a gradient, by place; of its carry, those that get `none`."""

    none: frozenset[int]
    xs: frozenset[int]
    captures: frozenset[int]


class Reversed(NamedTuple):
    """A program backward, and of which xs and captures it gives the gradients, in order."""

    program: Program
    xs: list[int]
    captures: list[int]


class Write(NamedTuple):
    """A write of a step to a slot that there is: of which array, by its place in the carry, what it was before, ..."""

    place: int
    before: fx.Node
    slot: fx.Node | Size
    old: fx.Node  # what the slot held


class Plan:
    """The programs of one step."""

    def __init__(
        self,
        step: Step,
        examples: Sequence[Tensor],
        wants: Sequence[bool],
        *,
        grad: bool,
        reverse: bool,
        growth: Sequence[int] = (),
    ) -> None:
        step, self.module, examples, wants = complex_pairs.apart(step, functional(step, examples), examples, wants)
        self.step, self.reverse, self.growth = step, reverse, tuple(growth)
        self.traced = t = self._trace(step, examples, wants, grad)
        check_graph(t.graph, examples, len(self.growth))
        self.wants = tuple(wants)
        self.flowing_carry = sorted(t.carry_grads)  # the leaves of the carry that carry a gradient
        self.flowing_ys = sorted(t.y_grads)  # the ys that carry one
        self.arrays = {n: i for i, n in enumerate(t.carry) if grows(n)}
        self.versions = self._versions()
        self.grad = bool(t.found["carry"] or t.found["xs"] or t.found["captures"])
        self.saved: list[fx.Node] = self._saved() if self.grad else []
        new = [n for n in self.saved if n not in t.xs and n not in t.ys and n not in self.versions]
        self._check_arrays(new)
        self.whole = [grows(n) for n in self.saved]  # arrays, which have all steps' slots
        wanted = list(dict.fromkeys([*t.ys, *new]))
        parts = Parts(t.captures, t.xs, t.carry, t.next_carry, wanted, (), t.answer, reverse, self.growth)
        self.forward = Program(t.graph, parts)
        self._places = {n: i for i, n in enumerate(wanted)}
        self._replays: dict[str, Program] = {}
        self._backward: dict[Missing, Reversed] = {}
        self._reached: dict[Missing, Reached] = {}
        self._reached_in: dict[tuple[Missing, int], Reached] = {}
        self._lock = threading.Lock()
        self.apart: dict[Any, Any] = {}  # what `rows_apart` knows of the step
        self.clock = Clock(getattr(self.forward.core, "work", 0))
        self.writes: list[Write] = []  # where checkpoints want to take them back

    def _trace(self, step: Step, examples: Sequence[Tensor], wants: Sequence[bool], grad: bool) -> Traced:
        return with_gradients(step, self.module, examples, wants, grad)

    @property
    def lacking(self) -> Unsupported | None:
        """What the loop forward lacks to be native."""
        return self.forward.lacking

    @property
    def light(self) -> Program:
        """The program forward that keeps nothing for a backward: it gives ys, and what slots held before writes."""
        log = (n for w in self.writes for n in (w.slot, w.old) if isinstance(n, fx.Node))
        return self._replay("light", [*self.traced.ys, *log], self.traced.answer)

    @property
    def bare(self) -> Program:
        """That gives the last carry alone, after as many steps as it is told."""
        return self._replay("bare", [], None)

    @property
    def again(self) -> Program:
        """The program forward for steps that are known to be done: it asks no condition."""
        return self.forward if self.traced.answer is None else self._replay("again", [*self._places], None)

    def _replay(self, name: str, wanted: Sequence[fx.Node], answer: fx.Node | None) -> Program:
        t = self.traced
        with self._lock:
            if name not in self._replays:
                asked, grow = list(dict.fromkeys(wanted)), self.growth
                parts = Parts(t.captures, t.xs, t.carry, t.next_carry, asked, (), answer, self.reverse, grow)
                self._replays[name] = Program(t.graph, parts, self.forward.barred)
            return self._replays[name]

    def keeps_last(self, n: int) -> bool:
        """Whether a backward keeps the last n of xs, as they are."""
        return all(x in self.saved for x in self.traced.xs[len(self.traced.xs) - n :])

    def ys_of(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """The ys among what the program forward gave."""
        return [wanted[self._places[n]] for n in self.traced.ys]

    def light_of(self, wanted: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        """What the light program gave, by node."""
        return dict(zip(self.light.parts.wanted, wanted, strict=True))

    def saved_of(self, wanted: Sequence[Tensor], xs: Sequence[Tensor], last: Sequence[Tensor] = ()) -> list[Tensor]:
        """What the backward keeps, of that, of xs and of the last carry: arrays, which have all slots there."""
        given = dict(zip(self.traced.xs, xs, strict=True))
        given |= {n: last[i] for n, i in self.versions.items()} if last else {}
        return [given[n] if n in given else wanted[self._places[n]] for n in self.saved]

    def _check_arrays(self, new: Sequence[fx.Node]) -> None:
        """Refuses a step whose backward needs an array as it was before slots of it were overwritten."""
        t = self.traced
        found = [g for grads in t.found.values() for g in grads.values()] if self.grad else []
        needed = needed_for(found, self.saved)
        if any(grows(n) for n in new) or any(n in needed and n not in self.versions for n in self.arrays):
            raise Refused(
                "its backward needs slots of an array in the carry that are overwritten",
                "read a slot before it is overwritten into the carry, or append",
            )
        if any(grows(n) for n in t.ys):
            raise Refused("a y has another size at each step", "return a slice of one size")

    def _versions(self) -> dict[fx.Node, int]:
        """What an array is in a step, where its slots are never overwritten, and its place in the carry."""
        t, found = self.traced, dict[fx.Node, int]()
        for array, i in self.arrays.items():
            those = versions(array, t.next_carry[i])
            if all(n is array or n.target is aten.cat.default for n in those):
                found |= dict.fromkeys(those, i)
        return found

    def backward(self, missing: frozenset[int]) -> Program:
        """The program backward where these ys got no gradient."""
        return self.reversed(Missing(missing)).program

    def reversed(self, missing: Missing) -> Reversed:
        """The program backward where these gradients are missing, and what it gives."""
        with self._lock:
            if (found := self._backward.get(missing)) is None:
                t, saved = without_grads(self.traced, self.saved, *missing)
                places = [sorted(t.found[name]) for name in ("xs", "captures")]
                found = self._backward[missing] = Reversed(self._made_backward(t, saved), *places)
            return found

    def reached(self, missing: Missing) -> Reached:
        """What gets a gradient from one step where these are missing."""
        if (found := self._reached.get(missing)) is None:
            t = self.traced
            zero = zeros_in(t, {*(t.y_grads[k] for k in missing.ys), *(t.carry_grads[i] for i in missing.carry)})
            there = {name: frozenset(k for k, g in grads.items() if g not in zero) for name, grads in t.found.items()}
            none = frozenset(self.flowing_carry) - there["carry"]
            found = self._reached[missing] = Reached(none, there["xs"], there["captures"])
        return found

    def reached_in(self, missing: Missing, steps: int) -> Reached:
        """What gets a gradient from so many steps, the last of which has none for these; ys have theirs at each."""
        if (found := self._reached_in.get((missing, steps))) is None:
            if len(self._reached_in) >= MOST_LENGTHS:
                self._reached_in.clear()
            found = self._reached_in[missing, steps] = self._step_by_step(missing, steps)
        return found

    def _step_by_step(self, missing: Missing, steps: int) -> Reached:
        xs, captures, met = frozenset[int](), frozenset[int](), list[frozenset[int]]()
        carry = missing.carry
        while len(met) < steps and carry not in met:
            met.append(carry)
            carry, more, held = self.reached(Missing(missing.ys, carry))
            xs, captures = xs | more, captures | held
        if len(met) < steps:  # from here on it goes round
            turn = met[met.index(carry) :]
            carry = turn[(steps - len(met)) % len(turn)]
        return Reached(carry, xs, captures)

    def differentiable(self, steps: int) -> frozenset[int]:
        """Outputs of a loop, its carry and then ys, that require a gradient after so many steps."""
        return self.traced.flow.after(steps)

    def _made_backward(self, t: Traced, saved: list[fx.Node]) -> Program:
        flowing = sorted(t.carry_grads)
        parts = Parts(
            t.captures,
            [*saved, *(t.y_grads[k] for k in sorted(t.y_grads))],
            [t.carry_grads[i] for i in flowing],
            [t.found["carry"].get(i) for i in flowing],
            [t.found["xs"][k] for k in sorted(t.found["xs"])],
            [t.found["captures"][k] for k in sorted(t.found["captures"])],
            reverse=not self.reverse,
            growth=[-more for more in self.growth],
        )
        return Program(t.graph, parts)

    def _saved(self) -> list[fx.Node]:
        t = self.traced
        order = list(t.graph.nodes)
        linear = depends_on(order, [*t.carry_grads.values(), *t.y_grads.values()])
        moving = depends_on((n for n in order if n not in linear), [*t.carry, *t.xs]) - linear
        found = [g for grads in t.found.values() for g in grads.values()]
        needed = needed_for(found) & linear
        uses = [a for n in needed for a in n.all_input_nodes if a not in linear] + [g for g in found if g in moving]
        forward = with_parts(needed_for([*t.next_carry, *t.ys]))
        price = dict.fromkeys(t.xs, 1) | dict.fromkeys(t.ys, 2) | dict.fromkeys(self.versions, 1)
        pairs = [(c, new) for c, new in zip(t.carry, t.next_carry, strict=True) if new not in t.carry and not grows(c)]
        price |= {c: 3 for c, new in pairs if new in t.ys}
        first = set(kept(order, moving, forward, uses, price))
        # States before the steps and after them are one memory: who keeps the ones has the others.
        price |= {n: 3 for pair in pairs for n in pair if first & {*pair}}
        return kept(order, moving, forward, uses, price)

    def bytes_a_step(self) -> int:
        """What a backward keeps of each step, beside xs and ys, which are there anyway."""
        t = self.traced
        states = {c for c, new in zip(t.carry, t.next_carry, strict=True) if new in t.ys or new in self.saved}
        there = {*t.xs, *t.ys, *self.versions, *states}
        new = [n for n in self.saved if n not in there]
        return sum(value_of(n).numel() * value_of(n).element_size() for n in new)

    @property
    def work(self) -> int:
        """Operations of a step, roughly, backward too; 0 where nobody counts them."""
        programs = [self.forward, *([self.backward(frozenset())] if self.grad else [])]
        return sum(getattr(program.core, "work", 0) for program in programs)

    def bytes_of_carry(self) -> int:
        """What one kept carry takes."""
        return sum(bytes_of(n) for n in self.traced.carry if not grows(n))

    def bytes_reversed(self) -> int:
        """What a step takes, about, while it is run again and reversed: there are gradients of most of what is kept."""
        return 2 * self.again.bytes_a_step


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
        with self._making:  # torch traces one graph at a time
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
        """The same, None where there is none."""
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
