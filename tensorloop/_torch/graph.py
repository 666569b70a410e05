"""Autograd's graph: its nodes from outputs towards leaves, in which order they were made, and what they keep.

Each thread numbers the nodes that it makes, in order. Private names of torch, tried with 2.11 to 2.15:
`torch.autograd._get_sequence_nr`, `Node._sequence_nr`, `Node._saved_*`, `BackwardCFunction._forward_cls`,
`torch._C._autograd._top_saved_tensors_default_hooks`.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tensorloop._torch import transforms

Node = Any
# To a node, and which of its results.
Edge = tuple[Node, int]
# What stands for a tensor in a graph: the edge to what made it, a leaf itself. An id may be that of another one later.
End = Edge | weakref.ref[Tensor]

# What a node hands its gradients to, an edge for each of its inputs; (None, 0) where one needs none.
edges_of: Callable[[Node], Sequence[Edge]] = attrgetter("next_functions")
# The number of the node that this thread makes next.
next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]


def number_of(node: Node) -> int:
    """When a node was made, among those of its thread."""
    return node._sequence_nr()


def node_of(x: Tensor) -> Node:
    """Returns the node of the graph that made x; None where there is none."""
    try:
        return x.grad_fn
    except RuntimeError:  # a view made without grad of what was changed in place, as a custom function may
        return None


def function_of(node: Node) -> type | None:
    """Returns the class whose backward a node runs; None of one that is torch's own."""
    return type(node)._forward_cls if isinstance(node, torch.autograd.function.BackwardCFunction) else None  # pyright: ignore[reportAttributeAccessIssue]


def leaf_of(node: Node) -> Tensor | None:
    """The leaf at which a graph ends in this node. A user's node may have an attribute of that name, too."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def end_of(x: Tensor | GradientEdge) -> End:
    """Identifies a tensor in its graph: by its node and its place there, or by a weak reference to a leaf."""
    node, place = (node_of(x), x.output_nr) if isinstance(x, Tensor) else x[:2]
    leaf: Any = x if node is None else leaf_of(node)
    return (node, place) if leaf is None else weakref.ref(leaf)


def ends_of(x: Any) -> list[End]:
    """The ends of one tensor or of several, as functions of autograd take them."""
    return [*map(end_of, [x] if isinstance(x, (Tensor, GradientEdge)) else x or ())]


def is_from(end: End, first: int, made: Collection[int] = ()) -> bool:
    """Whether what made a tensor is this node of the thread, or a later one; or it is a leaf with one of these ids."""
    return number_of(end[0]) >= first if isinstance(end, tuple) else id(end()) in made


def reached(*ends: End) -> set[End]:
    """All tensors that these depend on, themselves among them."""
    found, stack = set[End](), [*ends]
    while stack:
        if (end := stack.pop()) not in found:
            found.add(end)
            for edge in edges_of(end[0]) if isinstance(end, tuple) else ():
                if edge[0] is not None:
                    stack.append(edge if (leaf := leaf_of(edge[0])) is None else weakref.ref(leaf))
    return found


def walk(starts: Iterable[Node], follows: Callable[[Edge], bool] | None = None) -> Iterator[Node]:
    """The nodes of a graph from `starts` on, each once; with `follows`, only those that such an edge leads to."""
    visited: set[Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        yield node
        for edge in edges_of(node):
            below = edge[0]
            if below is not None and below not in visited and (follows is None or follows(edge)):
                stack.append(below)


def leads_to(start: Node, leaves: Collection[int], nodes: Collection[Node] = ()) -> bool:
    """Whether the graph below a node has one of these leaves, by id, or nodes."""
    return any(node is not start and (node in nodes or id(leaf_of(node)) in leaves) for node in walk([start]))


def saving_is_hooked() -> bool:
    """Whether hooks are told of what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore[reportAttributeAccessIssue]


def residual_bytes(outputs: Sequence[Tensor], captured: Iterable[Tensor], beside: Iterable[Tensor]) -> int:
    """Bytes that the graph of a step keeps for its backward, each storage once, without what the body closes over.

    `beside`: what is held with the graph, and counted, too.
    """
    captured = [*captured]
    saved = [x for node in step_nodes(outputs, captured) for x in _saved(node)]
    return transforms.bytes_of([*saved, *beside], captured)


def read_later(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Lists what the backward of a step will read: what its graph keeps, but not the statistics of a training norm.

    Such a node keeps those for its backward in evaluation alone.
    """
    for node in step_nodes(outputs, ()):
        if not getattr(node, "_saved_training", False):
            yield from _saved(node)


def step_nodes(outputs: Sequence[Tensor], captured: Iterable[Tensor]) -> Iterator[Node]:
    """The nodes of a step's graph: none of what made the tensors that its body closes over."""
    ends = {node_of(x) for x in captured}
    starts = [x.grad_fn for x in outputs if x.grad_fn is not None and x.grad_fn not in ends]
    return walk(starts, lambda edge: edge[0] not in ends and leaf_of(edge[0]) is None)


def _saved(node: Node) -> list[Tensor]:
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    values += list(getattr(node, "saved_tensors", ()))
    flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [x for x in flat if isinstance(x, Tensor)]
