"""Which tensors that a step did not make carry a gradient of what it gave: a question to the step's graph alone.

The graph ends in leaves, or goes on beyond the step: nodes are numbered in the order in which a thread makes them, so
an edge to a node with a number from before the step leads out of it, to a tensor that a torch function of the step was
given. A number that is still to come is another thread's: that of a capture, or of what a thread of the body made, or
no tensor's at all, where a backward pass of the body ran on a device, in a thread of its own.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch import graph


class StepGraph(NamedTuple):
    """Holds what is known of a step besides its graph."""

    step: int
    arguments: Collection[int]  # ids of the leaves that the step was given
    numbers: range  # of the nodes that its thread made in it
    made: Collection[int]  # ids of what torch functions gave in it
    candidates: Collection[Tensor]  # what may be a capture: torch functions were given it, and none made it
    seen: Collection[Tensor]  # all that they were given or gave


def find_captures(outputs: Iterable[Tensor], of: StepGraph) -> list[Tensor]:
    """The captures that a step's outputs lead to, each once."""
    found: dict[int, Tensor] = {}
    sources = _Sources(of, found)

    def is_inside(edge: graph.Edge) -> bool:
        """Whether an edge stays in the step; the capture is taken where it does not."""
        below = edge[0]
        if (leaf := graph.leaf_of(below)) is not None:
            if id(leaf) not in of.arguments:
                found[id(leaf)] = leaf
            return False
        number = graph.number_of(below)
        if number in of.numbers:
            return True
        captured = sources.at(edge, number < of.numbers.start)
        if captured is None or (number >= of.numbers.stop and graph.leads_to(below, of.arguments)):
            return True
        found[id(captured)] = captured
        return False

    ends = []
    for out in outputs:
        if _is_capture(out, of):
            found[id(out)] = out
        elif out.grad_fn is not None:
            ends.append(out.grad_fn)
    for _ in graph.walk(ends, is_inside):
        pass
    return list(found.values())


def _is_capture(out: Tensor, of: StepGraph) -> bool:
    """Whether a step gave what it had not made, as it was."""
    if out.grad_fn is None:
        return id(out) not in of.arguments
    number = graph.number_of(out.grad_fn)
    elsewhere = number >= of.numbers.stop and id(out) not in of.made
    return number < of.numbers.start or (elsewhere and not graph.leads_to(out.grad_fn, of.arguments))


class _Sources:
    """The tensors behind edges to nodes that the step's thread did not make in it."""

    def __init__(self, of: StepGraph, found: dict[int, Tensor]) -> None:
        self.of, self.found = of, found
        self.by_edge: dict[bool, dict[graph.Edge, Tensor]] = {}

    def at(self, edge: graph.Edge, older: bool) -> Tensor | None:
        """The tensor that an edge belongs to; an older node's must be known."""
        if older not in self.by_edge:
            given = [*self.found.values(), *self.of.candidates, *(self.of.seen if older else ())]
            self.by_edge[older] = {(node, x.output_nr): x for x in given if (node := graph.node_of(x)) is not None}
        if older and edge not in self.by_edge[older]:
            raise Misuse(
                f"step {self.of.step} depends on the result of {edge[0].name()}, a tensor that no "
                f"torch function of the body was given; pass it in the carry, or use it in an operation; "
                f"if a gradient that the body takes goes through it, compute it in the body, or give no checkpoints"
            )
        return self.by_edge[older].get(edge)
