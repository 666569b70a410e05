"""Splits a step into what runs once, what runs for all steps together, and what must run step by step.

Every node depends on nothing that moves, on sequences, or on the carry. In the loop stays only what the next carry
needs from the carry, with the views, pointwise operations and small products that feed it, or that go into sums over
steps: they cost less there than a pass over memory. The rest runs before the loop or after it, for all steps at once
(`batched`).
"""

import dataclasses
from collections.abc import Container, Iterable, Sequence

import torch
from torch import fx

from tensorloop.compiler.divide.sums import leaves, terms
from tensorloop.compiler.lengths import grows, meets_growing, shape_of
from tensorloop.compiler.operations import (
    aten,
    bytes_of,
    is_constant,
    is_discontinuous,
    is_exact,
    is_pointwise,
    is_view,
    value_of,
    with_parts,
)
from tensorloop.compiler.step import Recurrence
from tensorloop.compiler.walks import depends_on, needed_for

_FLOATS = (torch.float32, torch.float64)
SMALL = 2**16  # bytes of a matrix that stays in the cache from step to step
FEW, MANY = 4, 64  # rows: sums over fewer are read as often as they are added to; with more, torch's threads pay


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What a step is given, and what is asked of it, as nodes of one graph.

    `next_carry` goes by `carry`; None stands for zeros. `wanted` are asked for at each step, `sums` over all steps.
    """

    invariants: Sequence[fx.Node]
    sequences: Sequence[fx.Node]
    carry: Sequence[fx.Node]
    next_carry: Sequence[fx.Node | None]
    wanted: Sequence[fx.Node]
    sums: Sequence[fx.Node] = ()
    going: fx.Node | None = None
    reverse: bool = False
    growth: Sequence[int] = ()  # what a step adds to the lengths of arrays, by symbol


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The loop, and what it is given and gives, as nodes of the whole graph.

    A carry whose state before each step is asked for is stored as the state after it: the same values, a step on.
    """

    parts: Parts
    loop: Recurrence | None
    loop_invariants: list[fx.Node]
    loop_sequences: list[fx.Node]
    outs: list[fx.Node]
    terms: list[fx.Node]  # added up in the loop
    states: dict[int, fx.Node]  # place in the carry -> the out that is this carry one step later
    moving: set[fx.Node]  # other at each step
    inside: list[fx.Node]  # of the whole graph, computed in the loop

    @property
    def after_loop(self) -> list[fx.Node]:
        """What there is at each step when the loop is over: outs, and states before the steps."""
        return [*self.outs, *(self.parts.carry[i] for i in self.states)]


def split(
    graph: fx.Graph, parts: Parts, hoisted: frozenset = frozenset(), barred: Container[fx.Node] = frozenset()
) -> Split:
    """The loop of a step. Operations in `hoisted`, and nodes that are `barred`, are not pulled into it."""
    order = list(graph.nodes)
    given = {*parts.invariants, *parts.sequences, *parts.carry}
    roots = [*parts.next_carry, parts.going]
    every = needed_for([*roots, *parts.wanted, *parts.sums], given)
    order = [n for n in order if n in every]
    moving = depends_on((n for n in order if n not in given), [*parts.sequences, *parts.carry])
    arrays = [n for n in parts.sequences if grows(n)]
    carried = depends_on((n for n in order if n not in given), [*parts.carry, *arrays])
    growing = {n for n in order if n not in given and meets_growing(n)}  # there is no such thing for all steps
    inner = (needed_for([*roots, *growing], given) & carried) | growing
    inner = (with_parts(inner) & every) - set(arrays)
    pulled = _Pulled(parts, given, moving, hoisted, barred)
    for n in order:
        if n in inner and n not in given:
            for a in n.all_input_nodes:
                pulled.need(a, inner)
    for n in roots:
        if n is not None and n not in inner:
            pulled.need(n, inner)
    sunk, outs, added, states = _stored(order, parts, given, moving, inner, carried, pulled)
    inside = [n for n in order if n not in given and (n in inner or n in sunk or n in pulled.inside)]
    loop = recurrence(parts, pulled.invariants, pulled.sequences, inside, outs, added) if parts.carry else None
    return Split(parts, loop, pulled.invariants, pulled.sequences, outs, added, states, moving, inside)


def outside(found: Split) -> tuple[set[fx.Node], set[fx.Node]]:
    """What torch computes (before the loop, after it)."""
    parts, added = found.parts, set(found.terms)
    given = {*parts.invariants, *parts.sequences}
    fed = {*found.loop_invariants, *found.loop_sequences}
    early = needed_for(fed, given) - given
    asked = [*parts.wanted, *(leaf for n in parts.sums for leaf in leaves(n, found.moving, (), added))]
    there = {*given, *fed, *found.after_loop}
    return early, needed_for(asked, there) - there


def seen_by_discontinuous(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What is rounded, each time perhaps otherwise, and goes into a comparison or the like, forward or backward."""
    behind = needed_for(n for n in nodes if is_discontinuous(n))
    return {n for n in behind if n.op == "call_function" and not is_exact(n)}


class _Pulled:
    """What the nodes of a loop need that does not depend on its carry: computed there too, or given to it."""

    def __init__(
        self, parts: Parts, given: set[fx.Node], moving: set[fx.Node], hoisted: frozenset, barred: Container[fx.Node]
    ) -> None:
        self.parts, self.given, self.moving, self.hoisted, self.barred = parts, given, moving, hoisted, barred
        self.inside: set[fx.Node] = set()
        self.invariants: list[fx.Node] = []
        self.sequences: list[fx.Node] = []
        self._met: set[fx.Node] = set()

    def need(self, n: fx.Node, inner: set[fx.Node]) -> None:
        """Sees to a node that the loop uses."""
        left = [n]
        while left:
            n = left.pop()
            if n in self._met or n in inner or n in self.parts.carry:
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
        return n in self.moving and (is_pointwise(n) or is_small_product(n, self.moving))


def is_small_product(n: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether a product is as fast in the loop as for all steps: its matrix stays in the cache from step to step."""
    if n.target is not aten.mm.default or meets_growing(n) or value_of(n).dtype not in _FLOATS:
        return False
    a, b = n.args
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    if b not in moving:
        return bytes_of(b) <= SMALL and value_of(a).shape[0] <= MANY
    return a in moving and bytes_of(n) <= SMALL and FEW <= value_of(a).shape[1] <= MANY


def _stored(
    order: list[fx.Node],
    parts: Parts,
    given: set[fx.Node],
    moving: set[fx.Node],
    inner: set[fx.Node],
    carried: set[fx.Node],
    pulled: _Pulled,
) -> tuple[set[fx.Node], list[fx.Node], list[fx.Node], dict[int, fx.Node]]:
    """(nodes behind the loop that move into it, its outs, what it adds up, states)."""
    outside = [n for n in order if n in carried and n not in inner and n not in given]
    ready = _ready(outside, parts, inner, moving, carried, pulled.hoisted) if parts.carry else set[fx.Node]()
    added = terms(parts.sums, moving, inner & carried, ready) if parts.carry else []
    ends = [n for n in (*parts.wanted, *added) if n in ready and not is_view(n)]
    sunk = needed_for(ends, [a for n in ready for a in n.all_input_nodes if a not in ready]) & ready
    for n in order:
        if n in sunk:
            for a in n.all_input_nodes:
                pulled.need(a, inner | sunk)
    asked = {*parts.wanted, *([] if parts.going is None else [parts.going])}
    summed = [leaf for n in parts.sums for leaf in leaves(n, moving, (), set(added))]
    late = needed_for([*asked, *summed], {*given, *inner, *sunk})
    users = [n for n in outside if n not in sunk and n in late]
    asks = [a for n in users for a in n.all_input_nodes] + [n for n in order if n in asked or n in summed]
    available = (inner & carried) | sunk | {n for n in parts.carry if not grows(n)}
    outs: list[fx.Node] = []
    for n in dict.fromkeys(asks):
        if n in available:
            n = n if n in asked else _base(n, available)
            if n not in outs:
                outs.append(n)
    if parts.going is not None and parts.going not in outs:
        outs.append(parts.going)  # which may depend on nothing that moves
    states: dict[int, fx.Node] = {}
    for i, (c, new) in enumerate(zip(parts.carry, parts.next_carry, strict=True)):
        if c in outs and new is not None and new not in parts.carry and new not in states.values():
            outs.remove(c)
            states[i] = new
            if new not in outs:
                outs.append(new)
    return sunk, outs, added, states


def _ready(
    outside: list[fx.Node],
    parts: Parts,
    inner: set[fx.Node],
    moving: set[fx.Node],
    carried: set[fx.Node],
    hoisted: frozenset,
) -> set[fx.Node]:
    """What could be computed in the loop at little cost from what is there."""
    found = set[fx.Node]()
    for n in outside:
        there = all(a in inner or a in found or a in parts.carry for a in n.all_input_nodes if a in carried)
        cheap = is_pointwise(n) or is_view(n) or is_small_product(n, moving)
        if there and cheap and n.target not in hoisted:
            found.add(n)
    return found


def _base(n: fx.Node, available: set[fx.Node]) -> fx.Node:
    """What a node is a view of all of, as far as the loop has that."""
    while is_view(n):
        (before,) = n.all_input_nodes
        if before not in available or value_of(before).numel() != value_of(n).numel():
            break
        n = before
    return n


def recurrence(
    parts: Parts,
    invariants: Sequence[fx.Node],
    sequences: Sequence[fx.Node],
    inside: Sequence[fx.Node],
    outs: Sequence[fx.Node],
    added: Sequence[fx.Node] = (),
) -> Recurrence:
    """The loop as a graph of its own: it is given these nodes and does those that are `inside`."""
    graph, found = fx.Graph(), dict[fx.Node, fx.Node]()
    for kind, nodes in (("inv", invariants), ("seq", sequences), ("carry", parts.carry)):
        for i, n in enumerate(nodes):
            found[n] = graph.placeholder(f"{kind}_{i}")
            found[n].meta = dict(n.meta)
    for n in inside:
        found[n] = graph.node_copy(n, lambda a: found[a])
        found[n].meta = dict(n.meta)
    following: list[fx.Node] = []
    for c, new in zip(parts.carry, parts.next_carry, strict=True):
        if new is None:
            value = value_of(c)
            options = {"dtype": value.dtype, "device": torch.device("cpu")}
            zeros = graph.call_function(aten.full.default, (list(shape_of(c)), 0), options)
            zeros.meta = dict(c.meta)
            following.append(zeros)
        else:
            following.append(found[new])
    given = [[found[n] for n in nodes] for nodes in (invariants, sequences, parts.carry, outs, added)]
    going = None if parts.going is None else found[parts.going]
    graph.output((*following, *given[3], *given[4], *([] if going is None else [going])))
    graph.lint()
    growth = tuple(parts.growth)
    of_all, of_steps, carry, stored, sums = (tuple(nodes) for nodes in given)
    return Recurrence(graph, of_all, of_steps, carry, tuple(following), stored, sums, parts.reverse, going, growth)
