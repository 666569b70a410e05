"""Splits a step into what runs once, what runs for all steps together, and what must run step by step.

Every node depends on nothing that moves, on sequences, or on the carry. In the loop stays only what the next carry
needs from the carry, with the views, pointwise operations and small products that feed it, or that go into sums over
steps: they cost less there than a pass over memory. The rest runs before the loop or after it, for all steps at once
(`all_steps`).
"""

import dataclasses
from collections.abc import Container, Iterable, Sequence

import torch
from torch import fx

from tensorloop.compiler.divide.sums import leaves, sums_in_loop
from tensorloop.compiler.edge_walks import depends_on, needed_for
from tensorloop.compiler.lengths import grows, meets_growing
from tensorloop.compiler.operations import (
    aten,
    bytes_of,
    is_constant,
    is_discontinuous,
    is_exact,
    is_opaque,
    is_pointwise,
    is_view,
    value_of,
    with_parts,
)
from tensorloop.compiler.place import Place
from tensorloop.compiler.step import Step

_FLOATS = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The loop of a step, and what the loop is given and gives, as nodes of the step's own graph.

    A carry whose state before each step is asked for is stored as the state after it: the same values, a step on.
    """

    step: Step
    loop: Step | None  # in a graph of its own; None where nothing is carried, and nothing as long as an array
    loop_invariants: list[fx.Node]
    loop_sequences: list[fx.Node]
    outs: list[fx.Node]
    sums: list[fx.Node]  # added up in the loop
    states: dict[int, fx.Node]  # place in the carry -> the out that is this carry one step later
    moving: set[fx.Node]  # other at each step
    inside: list[fx.Node]  # computed in the loop

    @property
    def after_loop(self) -> list[fx.Node]:
        """Returns the nodes that have a value for each step after the loop: outs, and states before the steps."""
        return [*self.outs, *(self.step.carry[i] for i in self.states)]


def divide(step: Step, hoisted: frozenset = frozenset(), barred: Container[fx.Node] = frozenset()) -> Partition:
    """Chooses what runs in the loop of a step. Operations in `hoisted` and nodes in `barred` are not pulled into it."""
    given = set(step.inputs)
    every = needed_for(step.outputs, given)
    order = [n for n in step.graph.nodes if n in every]
    arrays = [n for n in step.sequences if grows(n)]
    growing = {n for n in order if n not in given and meets_growing(n)}  # there is no such thing for all steps
    moving = depends_on((n for n in order if n not in given), [*step.sequences, *step.carry, *growing])
    # What the loop alone can tell: also what follows an array's length, and nothing else of the carry.
    carried = depends_on((n for n in order if n not in given), [*step.carry, *arrays, *growing])
    roots = [*step.next_carry, *([] if step.going is None else [step.going])]
    # What the next carry needs and the carry does not reach is left out here: it could be had for all steps at once.
    inner = (needed_for([*roots, *growing], given) & carried) | growing
    inner = (with_parts(inner) & every) - set(arrays)
    pulled = _Pulled(step, given, moving, hoisted, barred)
    for n in order:
        if n in inner and n not in given:
            for a in n.all_input_nodes:
                pulled.need(a, inner)
    for n in roots:
        if n not in inner:
            pulled.need(n, inner)
    sunk, outs, sums, states = _stored(order, step, given, moving, inner, carried, pulled)
    inside = [n for n in order if n not in given and (n in inner or n in sunk or n in pulled.inside)]
    loop = extract(step, pulled.invariants, pulled.sequences, inside, outs, sums) if step.carry or growing else None
    return Partition(step, loop, pulled.invariants, pulled.sequences, outs, sums, states, moving, inside)


def outside(found: Partition) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns the nodes that torch computes: (before the loop, after it)."""
    step = found.step
    given = {*step.invariants, *step.sequences}
    fed = {*found.loop_invariants, *found.loop_sequences}
    early = needed_for(fed, given) - given
    asked = [*step.outs, *(leaf for n in step.sums for leaf in leaves(n, found.moving, (), set(found.sums)))]
    there = {*given, *fed, *found.after_loop}
    return early, needed_for(asked, there) - there


def seen_by_discontinuous(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns inexact values that go into a discontinuous operation: they must be computed in one place only."""
    behind = needed_for(n for n in nodes if is_discontinuous(n))
    return {n for n in behind if n.op == "call_function" and not is_exact(n)}


class _Pulled:
    """Collects what a loop's nodes need and its carry does not reach: computed in the loop too, or given to it."""

    def __init__(
        self, step: Step, given: set[fx.Node], moving: set[fx.Node], hoisted: frozenset, barred: Container[fx.Node]
    ) -> None:
        self.step, self.given, self.moving, self.hoisted, self.barred = step, given, moving, hoisted, barred
        self.inside: set[fx.Node] = set()
        self.invariants: list[fx.Node] = []
        self.sequences: list[fx.Node] = []
        self._met: set[fx.Node] = set()

    def need(self, n: fx.Node, inner: set[fx.Node]) -> None:
        """Sees to a node that the loop uses."""
        left = [n]
        while left:
            n = left.pop()
            if n in self._met or n in inner or n in self.step.carry:
                continue
            self._met.add(n)
            if n not in self.given and self._cheap(n):
                self.inside.add(n)
                left += n.all_input_nodes
            elif n in self.moving:
                self.sequences.append(n)
            else:
                self.invariants.append(n)

    def _cheap(self, n: fx.Node) -> bool:
        if n.target in self.hoisted or n in self.barred:
            return False
        if is_constant(n) or is_view(n):
            return True
        cheap = is_pointwise(n) and not is_opaque(n)
        return n in self.moving and (cheap or is_small_product(n, self.moving, self.step.place))


def is_small_product(n: fx.Node, moving: set[fx.Node], place: Place) -> bool:
    """Whether a product is as fast in the loop as for all steps: its matrix stays in the cache from step to step."""
    if n.target is not aten.mm.default or meets_growing(n) or value_of(n).dtype not in _FLOATS:
        return False
    a, b = n.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    if b not in moving:
        return bytes_of(b) <= place.cached and value_of(a).shape[0] <= place.many_rows
    return a in moving and bytes_of(n) <= place.cached and place.few_rows <= value_of(a).shape[1] <= place.many_rows


def _stored(
    order: list[fx.Node],
    step: Step,
    given: set[fx.Node],
    moving: set[fx.Node],
    inner: set[fx.Node],
    carried: set[fx.Node],
    pulled: _Pulled,
) -> tuple[set[fx.Node], list[fx.Node], list[fx.Node], dict[int, fx.Node]]:
    """Returns (nodes behind the loop that move into it, its outs, what it adds up, states)."""
    outside = [n for n in order if n in carried and n not in inner and n not in given]
    ready = _ready(outside, step, inner, moving, carried, pulled.hoisted) if step.carry else set[fx.Node]()
    sums = sums_in_loop(step.sums, moving, inner & carried, ready) if step.carry else []
    # What is asked for moves into the loop with what leads to it: one value is stored, not those that it is made of.
    ends = [n for n in (*step.outs, *sums) if n in ready and not is_view(n)]
    sunk = needed_for(ends, [a for n in ready for a in n.all_input_nodes if a not in ready]) & ready
    for n in order:
        if n in sunk:
            for a in n.all_input_nodes:
                pulled.need(a, inner | sunk)
    asked = {*step.outs, *([] if step.going is None else [step.going])}
    summed = [leaf for n in step.sums for leaf in leaves(n, moving, (), set(sums))]
    # What is computed after the loop, from what the loop has: that is to be stored.
    late = needed_for([*asked, *summed], {*given, *inner, *sunk})
    users = [n for n in outside if n not in sunk and n in late]
    asks = [a for n in users for a in n.all_input_nodes] + [n for n in order if n in asked or n in summed]
    available = (inner & carried) | sunk | {n for n in step.carry if not grows(n)}
    outs: list[fx.Node] = []
    for n in dict.fromkeys(asks):
        if n in available:
            n = n if n in asked else _base(n, available)
            if n not in outs:
                outs.append(n)
    if step.going is not None and step.going not in outs:
        outs.append(step.going)  # which may depend on nothing that moves
    # A state before a step is the next carry of the step before: one memory serves both, but for the first state. A
    # next carry that is itself an input, or serves another carry already, has no such memory of its own.
    states: dict[int, fx.Node] = {}
    for i, (c, new) in enumerate(zip(step.carry, step.next_carry, strict=True)):
        if c in outs and new not in step.carry and new not in states.values():
            outs.remove(c)
            states[i] = new
            if new not in outs:
                outs.append(new)
    return sunk, outs, sums, states


def _ready(
    outside: list[fx.Node],
    step: Step,
    inner: set[fx.Node],
    moving: set[fx.Node],
    carried: set[fx.Node],
    hoisted: frozenset,
) -> set[fx.Node]:
    """Returns the nodes that the loop could compute at little cost from what it has."""
    found = set[fx.Node]()
    for n in outside:
        there = all(a in inner or a in found or a in step.carry for a in n.all_input_nodes if a in carried)
        cheap = (is_pointwise(n) and not is_opaque(n)) or is_view(n) or is_small_product(n, moving, step.place)
        if there and cheap and n.target not in hoisted:
            found.add(n)
    return found


def _base(n: fx.Node, available: set[fx.Node]) -> fx.Node:
    """Returns the tensor that a node is a view of all of, as far as the loop has it and can store it at each step."""
    while is_view(n):
        (before,) = n.all_input_nodes
        # A part of an array without features has as many numbers as the array: none.
        if before not in available or grows(before) or value_of(before).numel() != value_of(n).numel():
            break
        n = before
    return n


def extract(
    step: Step,
    invariants: Sequence[fx.Node],
    sequences: Sequence[fx.Node],
    inside: Sequence[fx.Node],
    outs: Sequence[fx.Node],
    sums: Sequence[fx.Node] = (),
) -> Step:
    """The loop of a step in a graph of its own: it is given these nodes and does those that are `inside`."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for kind, nodes in (("inv", invariants), ("seq", sequences), ("carry", step.carry)):
        for i, n in enumerate(nodes):
            new[n] = graph.placeholder(f"{kind}_{i}")
            new[n].meta = dict(n.meta)
    for n in inside:
        new[n] = graph.node_copy(n, lambda a: new[a])
        new[n].meta = dict(n.meta)
    loop = Step(
        graph,
        tuple(new[n] for n in invariants),
        tuple(new[n] for n in sequences),
        tuple(new[n] for n in step.carry),
        tuple(new[n] for n in step.next_carry),
        tuple(new[n] for n in outs),
        tuple(new[n] for n in sums),
        None if step.going is None else new[step.going],
        step.reverse,
        step.growth,
        place=step.place,
    )
    graph.output(loop.outputs)
    graph.lint()
    return loop
