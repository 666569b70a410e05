"""The sum over all steps of a step's value, without the values: sums are pushed through linear operations.

A weight's gradient, the sum of products x[t]^T g[t], becomes one product over all steps and rows.
"""

from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.divide.all_steps import BatchedGraph
from tensorloop.compiler.divide.scatters import is_still, scatter_of
from tensorloop.compiler.lengths import meets_growing
from tensorloop.compiler.operations import aten, is_part, traits, value_of

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ADDED = (torch.float32, torch.float64)  # one after another; halves would lose too much


class Way(NamedTuple):
    """How the sum of a node over all steps is computed from other nodes.

    "linear": it is the node's operation on the sums of `nodes`. Of the others all steps' values are needed: "product",
    where both factors move, is one product over steps and rows; "scatter", where a node adds values to zeros in places,
    adds those of all steps; "kernel", the gradient of a convolution's kernel, takes steps as further rows of the batch.
    """

    how: Literal["linear", "product", "scatter", "kernel"]
    nodes: list[fx.Node]


def leaves(n: fx.Node, moving: set[fx.Node], given: Container[fx.Node], known: Container[fx.Node]) -> list[fx.Node]:
    """The nodes whose values at all steps the sum of a node needs; of `known` ones the sums are known."""
    if n in known:
        return []
    if n not in moving:
        return [n]  # times the number of steps
    way = _way(n, moving, given)
    if way is None:
        return [n]
    if way.how != "linear":
        return way.nodes
    return [leaf for a in way.nodes for leaf in leaves(a, moving, given, known)] + [
        a for a in n.all_input_nodes if a not in way.nodes and a not in moving
    ]


def sums_in_loop(
    nodes: Iterable[fx.Node], moving: set[fx.Node], inside: Container[fx.Node], ready: Container[fx.Node]
) -> list[fx.Node]:
    """Returns the nodes that a loop adds up for the sums of these: the parts of them that it computes `inside`.

    What is `ready` could be, too; where it is a linear function of such nodes, those are added up instead.
    """
    found: list[fx.Node] = []
    left = list(nodes)
    while left:
        n = left.pop()
        way = _way(n, moving, ()) if n in moving else None
        linear = way.nodes if way is not None and way.how == "linear" else None
        there = n in inside and n.target is not aten.expand.default
        there = there or (n in ready and not (linear is not None and all(a in inside or a in ready for a in linear)))
        if there and value_of(n).dtype in _ADDED:
            found.append(n)
        else:
            left += linear or []
    return list(dict.fromkeys(found))


class Sums:
    """Sums over all steps, as further nodes of a graph for all steps. Those `known` come from the loop, as inputs."""

    def __init__(self, batched: BatchedGraph, known: Sequence[fx.Node] = ()) -> None:
        self.batched = batched
        self.found: dict[fx.Node, fx.Node] = {n: batched.graph.placeholder(f"sum_{i}") for i, n in enumerate(known)}

    def leaves(self, n: fx.Node) -> list[fx.Node]:
        """The nodes whose values at all steps the sum of a node needs."""
        return leaves(n, self.batched.moving, self.batched.given, self.found)

    def of(self, n: fx.Node) -> fx.Node:
        """The sum of a node over all steps. Its leaves are in the graph."""
        if n not in self.found:
            self.found[n] = self._made(n)
        return self.found[n]

    def _made(self, n: fx.Node) -> fx.Node:
        s = self.batched
        args: Any
        if n not in s.moving:
            return s.call(_times, s.found[n], s.steps)
        way = _way(n, s.moving, s.given)
        if way is None:
            return s.call(_over_steps, s.found[n])
        if way.how == "product":
            a, b = (s.found[a] for a in way.nodes)
            return s.call(_products if n.target is aten.mm.default else _batches_of_products, a, b)
        if way.how == "scatter":
            scatter = scatter_of(n)
            assert scatter is not None
            args = fx.map_arg(n.args, lambda a: s.whole(a) if a in way.nodes else list(value_of(a).shape))
            return s.call(scatter.together, *args, **n.kwargs)
        if way.how == "kernel":
            grad, x, weight = way.nodes
            options = _node(n.args[0]).args[3:]
            return s.call(_of_kernel, s.whole(grad), s.whole(x), s.found[weight], options)
        if n.target in (aten.add.Tensor, aten.sub.Tensor):
            args = fx.map_arg(n.args, self.of)
        else:
            args = fx.map_arg(n.args, lambda a: self.of(a) if a in way.nodes else s.found[a])
        if n.target is aten.view.default:
            return s.call(torch.reshape, *args)
        return s.call(n.target, *args, **n.kwargs)  # pyright: ignore[reportArgumentType]


def _way(n: fx.Node, moving: set[fx.Node], given: Container[fx.Node]) -> Way | None:
    """The way to the sum of a node; None where its values at all steps are added up as they are."""
    if n.op != "call_function" or n in given or value_of(n).dtype not in _FLOATS or meets_growing(n):
        return None
    if is_part(n):
        return Way("kernel", [_node(a) for a in _node(n.args[0]).args[:3]]) if _is_kernels(n, moving) else None
    args = [a for a in n.args if isinstance(a, fx.Node)]
    inner = [a for a in args if a in moving]
    if (scatter := scatter_of(n)) is not None:
        still = scatter.values in moving and is_still(scatter, moving)
        return Way("linear", [scatter.values]) if still else Way("scatter", [scatter.values, *scatter.places])
    if n.target is not aten._to_copy.default and any(value_of(a).dtype is not value_of(n).dtype for a in inner):
        return None
    if n.target in (aten.mm.default, aten.bmm.default) and len(inner) == 2:
        return Way("product", args)
    return Way("linear", inner) if _is_linear(n, args, inner) else None


def _is_linear(n: fx.Node, args: list[fx.Node], inner: list[fx.Node]) -> bool:
    """Whether a node is a linear function of those of its arguments that move."""
    if n.target is aten._to_copy.default:  # of a sum that is rounded once
        return value_of(inner[0]).dtype in _FLOATS
    if n.target is aten.constant_pad_nd.default and any(n.args[2:]):  # a frame of ones is one of as many as steps
        return False
    linear = traits(n).linear
    if linear == "each":
        return len(inner) == 1
    return inner == args[:1] if linear == "first" else linear == "together" and len(args) == 2


def _is_kernels(n: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether a node is the gradient of a convolution's kernel, which is the same at each step."""
    source = _node(n.args[0])
    if source.target is not aten.convolution_backward.default or n.args[1] != 1:
        return False
    return _node(source.args[2]) not in moving


def _of_kernel(grad: Tensor, x: Tensor, weight: Tensor, options: Any) -> Tensor:
    """A kernel's gradient over all steps: they are further rows of the batch."""
    return aten.convolution_backward.default(grad.flatten(0, 1), x.flatten(0, 1), weight, *options)[1]


def _node(x: Any) -> fx.Node:
    assert isinstance(x, fx.Node)
    return x


def _times(x: Tensor, steps: int) -> Tensor:
    return x * steps


def _over_steps(x: Tensor) -> Tensor:
    return x.sum(0)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a[t] @ b[t], as one product: (M, T K) by (T K, N)."""
    return a.transpose(1, 2).flatten(0, 1).t() @ b.flatten(0, 1)


def _batches_of_products(a: Tensor, b: Tensor) -> Tensor:
    """The sum of bmm(a[t], b[t]), as one bmm."""
    steps, batch, m, k = a.shape
    left = a.permute(1, 2, 0, 3).reshape(batch, m, steps * k)
    return torch.bmm(left, b.transpose(0, 1).reshape(batch, steps * k, b.shape[3]))
