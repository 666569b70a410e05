"""Custom autograd Functions in a step: how a trace and its graph have them, and how they run.

A trace has what forward did as plain operations, and then what backward did, between marks: `BEGIN` gives forward's
results, `COMING` the gradient of one, `END` says which gradients backward gave. So what is done to a step's operations
(writes made new values, complex numbers made pairs) is done to those of the backward, too. Then `with_backwards` takes
them out, and makes each Function one node, a `UserFunction`, which runs as an autograd Function.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from tensorloop._torch import transforms
from tensorloop.compiler.edge_walks import needed_for
from tensorloop.compiler.lengths import Again
from tensorloop.compiler.place import put_on

_LIBRARY = torch.library.Library("tensorloop_step", "DEF")


def _mark(schema: str, function: Any) -> Any:
    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.tensorloop_step, name).default


# `function` is the number of the Function among those of the step.
BEGIN = _mark(
    "begin(Tensor[] values, Tensor[] inputs, int function, str name) -> Tensor[]",
    lambda values, inputs, function, name: [x.clone() for x in values],
)
COMING = _mark("coming(Tensor result, int function) -> Tensor", lambda result, function: torch.ones_like(result))
END = _mark(
    "end(Tensor[] inputs, Tensor[] comings, Tensor?[] found, int function, bool once, bool linear) -> Tensor",
    lambda inputs, comings, found, function, once, linear: inputs[0].new_zeros(()),
)
# A gradient that a user's backward gives: it is there if one of those that came is there, whatever is done with them.
FLOW = _mark("flow(Tensor gradient, Tensor[] comings) -> Tensor", lambda gradient, comings: gradient.clone())


def with_backwards(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with each Function as one node, which has its backward; it is changed in place."""
    for end in [n for n in module.graph.nodes if n.target is END]:
        _join(module.graph, end)
    return module


def _join(graph: fx.Graph, end: fx.Node) -> None:
    _, _, found, number, *kind = end.args
    nodes = list(graph.nodes)
    first = next(i for i, n in enumerate(nodes) if n.target is BEGIN and n.args[2] == number)
    begin, between = nodes[first], nodes[first + 1 : nodes.index(end)]
    results = [n for n in begin.users if n in between and n is not end]
    comings = [n for n in between if n.target is COMING and n.args[1] == number]
    given = [*comings, *results]
    grads: list[Any] = list(found)  # pyright: ignore[reportArgumentType]
    needed = needed_for([g for g in grads if g is not None], given)
    inner = [n for n in between if n in needed and n not in given]
    read = [a for n in inner for a in n.all_input_nodes] + [g for g in grads if g is not None]
    kept = list(dict.fromkeys(a for a in read if a not in inner and a not in given))
    backward = fx.Graph()
    new = {n: backward.placeholder(n.name) for n in (*given, *kept)}
    for n in inner:
        new[n] = backward.node_copy(n, new.__getitem__)
    backward.output([None if g is None else new[g] for g in grads])
    flowing = [_index(g.args[0]) for g in comings]
    function = UserFunction(begin.args[3], backward, flowing, [_index(n) for n in results], *kind)
    with graph.inserting_before(begin):
        node = graph.call_function(function, (begin.args[0], begin.args[1], kept))
    node.meta = begin.meta
    begin.replace_all_uses_with(node)
    for n in (end, *reversed(between), begin):
        if not n.users:
            graph.erase_node(n)


def _index(result: Any) -> int:
    """Returns the number of the result that this node is, or is a view of."""
    while result.target is not operator.getitem:
        result = result.args[0]
    return result.args[1]


class UserFunction:
    """A custom Function of a step: (what forward gave, its inputs, what its backward reads) -> its results.

    `flowing` are the results whose gradient its backward gets, `read` those that it reads. A backward that is not
    `linear` in these gradients gives something else if they come in two parts, or as zeros where there are none.
    """

    __name__ = "user_function"

    def __init__(self, name: Any, backward: fx.Graph, flowing: list[int], read: list[int], once: Any, linear: Any):
        self.name, self.flowing, self._read, self.linear = name, flowing, read, linear
        self._backward, self._once = backward, once

    def __call__(self, values: Sequence[Tensor], inputs: Sequence[Tensor], kept: Sequence[Tensor]) -> Any:
        """Runs it: as a node of autograd's graph where something requires a gradient."""
        node = _OnceDifferentiable if self._once else _Differentiable
        return node.apply(self, len(values), len(inputs), *values, *inputs, *kept)

    def put_on(self, device: torch.device) -> None:
        """Lets what its backward makes be on this device."""
        put_on(self._backward, device)

    def gradients(self, comings: Sequence[Tensor], results: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Any]:
        """Returns the gradients of the Function's inputs, given those of its results."""
        run = Again(fx.GraphModule(torch.nn.Module(), fx.Graph()), graph=self._backward)
        found = run.run(*comings, *(results[i] for i in self._read), *kept)
        plain = transforms.maybe_level() is None and not any(map(transforms.is_legacy_batched, comings))
        if torch.is_grad_enabled() or not plain:
            return list(found)
        return [None if g is None else FLOW(g, list(comings)) for g in found]  # for a graph that is being traced


class _Differentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(function: UserFunction, n: int, m: int, *tensors: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(x.detach() for x in tensors[:n])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function, ctx.n, ctx.m, *tensors = inputs
        ctx.save_for_backward(*tensors[ctx.n + ctx.m :], *output)
        ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if i not in ctx.function.flowing))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors, function = ctx.saved_tensors, ctx.function
        kept, results = tensors[: len(tensors) - ctx.n], tensors[len(tensors) - ctx.n :]
        found = function.gradients([grads[i] for i in function.flowing], results, kept)
        return None, None, None, *(None,) * ctx.n, *found, *(None for _ in kept)


class _OnceDifferentiable(_Differentiable):
    backward = staticmethod(once_differentiable(_Differentiable.backward))  # pyright: ignore[reportAssignmentType]
