"""Cuts a step into operations of torch's and pieces of small ones between them, each of which can be one kernel.

An operation that stays torch's, such as a product, is a level deeper than what goes into it. What is small and on one
level is a piece: nothing that leaves it comes back, or it would be a level deeper. What can be done late is done late,
so that little is left on the levels before.

What is rounded by us is always: a replay of a step is another program, and a comparison in it decides as it did before.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from tensorloop.compiler.divide.partition import extract
from tensorloop.compiler.emitter.ir.code import KINDS
from tensorloop.compiler.graph.core_operations import in_core_operations
from tensorloop.compiler.operations import is_constant, is_exact, is_part, is_view, shares_memory, traits, values_of
from tensorloop.compiler.step import Step

SMALL = ("view", "pointwise", "reduction", "movement", "constant")  # kinds of which pieces are made
LONGEST = 1024  # elements that one number is made of: a warp shares them at most, where torch has whole blocks
MOST = 128  # operations of a piece, which LLVM takes a second for; it takes minutes for a few times as many


class SmallPiece(NamedTuple):
    """Operations that become kernels: a step without a carry, and in the graph that it is of what it is given."""

    step: Step
    own: tuple[fx.Node, ...]  # its operations; the step has views and constants that they need, too
    given: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...]

    def pays(self, launches: int = 1) -> bool:
        """Whether kernels of so many launches take its place: if they are fewer than torch's, or round what it has."""
        return launches < sum(not shares_memory(n) for n in self.own) or not all(map(is_exact, self.own))


class Cut(NamedTuple):
    """A step's operations in an order in which each piece can run where its first operation stands."""

    order: Sequence[fx.Node]
    pieces: Sequence[SmallPiece]


def cut(step: Step) -> Cut:
    """Cuts a step without arrays."""
    nodes = [n for n in step.graph.nodes if n.op == "call_function"]
    small = _small(step, nodes)
    levels = _levels(nodes, small)
    by_level: dict[int, list[fx.Node]] = {}
    for n in nodes:
        if n in small and not is_free(n):
            by_level.setdefault(levels[n], []).append(n)
    parts = (own[n : n + MOST] for own in by_level.values() for n in range(0, len(own), MOST))
    found = [piece for part in parts if (piece := _piece(step, part)).pays()]
    inputs = [n for n in step.graph.nodes if n.op == "placeholder"]
    # On one level operations of torch's come first; what looks at a result stands behind it.
    late = {n for n in nodes if n in small and not is_free(n)}
    for n in nodes:
        if is_free(n) and any(a in late and levels[a] == levels[n] for a in n.all_input_nodes):
            late.add(n)
    return Cut([*inputs, *sorted(nodes, key=lambda n: (levels[n], n in late))], found)


def is_free(n: fx.Node) -> bool:
    """Whether a node launches nothing wherever it stands."""
    return is_view(n) or (is_constant(n) and traits(n).kind == "constant")


def _small(step: Step, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Returns the operations that a kernel can have, by what they are made of."""
    parts: dict[fx.Node, list[fx.Node]] = {}
    for part in in_core_operations(step).graph.nodes:
        if (whole := part.meta.get("part_of")) is not None and part.op == "call_function":
            parts.setdefault(whole, []).append(part)
    return {n for n in nodes if isinstance(n.meta.get("val"), Tensor) and all(map(_is_small, parts.get(n, [n])))}


def _is_small(n: fx.Node) -> bool:
    values = [x for a in (n, *n.all_input_nodes) for x in values_of(a)]
    if traits(n).kind not in SMALL or any(x.dtype not in KINDS for x in values):
        return False
    return traits(n).kind != "reduction" or values[1].numel() <= LONGEST * max(1, values[0].numel())


def _levels(nodes: Sequence[fx.Node], small: set[fx.Node]) -> Mapping[fx.Node, int]:
    """Returns the last level on which each can be, so that there are no more of them than there must be."""
    deep = {n: int(n not in small and not is_part(n)) for n in nodes}
    first: dict[fx.Node, int] = {}
    for n in nodes:
        first[n] = deep[n] + max((first.get(a, 0) for a in n.all_input_nodes), default=0)
    deepest, last = max(first.values(), default=0), dict[fx.Node, int]()
    for n in reversed(nodes):
        last[n] = min((last[u] - deep[u] for u in n.users if u in deep), default=deepest)
    _look_where_it_is(nodes, last)
    own = [n for n in nodes if n in small and not is_free(n)]
    held = Counter(last[n] for n in own)
    for n in own:  # what would be alone goes where others are, if it can be there already
        there = range(max((last.get(a, 0) for a in n.all_input_nodes), default=0), last[n])
        if held[last[n]] == 1 and (before := [level for level in there if held[level]]):
            last[n] = before[-1]
    _look_where_it_is(nodes, last)
    return last


def _look_where_it_is(nodes: Sequence[fx.Node], levels: dict[fx.Node, int]) -> None:
    """Puts a look at something, and a part of it, on the level of that."""
    for n in nodes:
        if is_free(n) or is_part(n):
            levels[n] = max((levels.get(a, 0) for a in n.all_input_nodes), default=0)


def _piece(step: Step, own: Sequence[fx.Node]) -> SmallPiece:
    """Returns operations of one level as a step."""
    members, free, given = set(own), set[fx.Node](), set[fx.Node]()
    left = [a for n in own for a in n.all_input_nodes]
    while left:
        a = left.pop()
        if is_free(a) and a not in free:
            free.add(a)
            left += a.all_input_nodes
        elif not is_free(a) and a not in members:
            given.add(a)
    inside = [n for n in step.graph.nodes if n in members or n in free]
    seen = seen_beyond(step, members)
    outs = tuple(n for n in own if n in seen)
    inputs = tuple(n for n in step.graph.nodes if n in given)
    bare = Step(step.graph, (), inputs, (), (), outs, place=step.place)
    return SmallPiece(extract(bare, (), inputs, inside, outs), tuple(own), inputs, outs)


def seen_beyond(step: Step, members: Container[fx.Node]) -> set[fx.Node]:
    """Returns what is seen of a step from outside of some operations, with all that it is a look at."""
    others = (n for n in step.graph.nodes if n.op == "call_function" and n not in members and not is_free(n))
    left, found = [*step.outputs, *(a for n in others for a in n.all_input_nodes)], set[fx.Node]()
    while left:
        found.add(n := left.pop())
        if is_free(n):
            left += n.all_input_nodes
    return found
