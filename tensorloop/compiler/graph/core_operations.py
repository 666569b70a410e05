"""Takes the loop part of a step apart into core operations, when a target lowers it.

The decompositions are ours where there is one, else torch's. Only what runs in the loop is taken apart: for all steps
at once torch's own kernels are faster.
"""

import dataclasses
import operator
from collections.abc import Container
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop._torch.tracing import decompositions, traced, without_writes
from tensorloop.compiler.graph import orders, pooling_windows
from tensorloop.compiler.graph.decompositions import Table, after_autograd, before_autograd
from tensorloop.compiler.graph.simplify import Written, simplified
from tensorloop.compiler.lengths import meets_growing
from tensorloop.compiler.operations import is_core, values_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import Step


def in_core_operations(step: Step, whole: Container[fx.Node] = ()) -> Step:
    """The step with its operations taken apart as far as that goes: itself where there is nothing to take apart.

    Those in `whole` are not taken apart, and their copies say that they are `called`.
    """
    nodes = step.graph.nodes
    if not any(_may_be_apart(n) for n in nodes):
        return step
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    for n in nodes:
        if n.op != "output":
            new[n] = _put(graph, n, new, (), whole)
    names = ("invariants", "sequences", "carry", "next_carry", "outs", "sums")
    roles: Any = {name: tuple(new[n] for n in getattr(step, name)) for name in names}
    going = None if step.going is None else new[step.going]
    simpler = dataclasses.replace(step, graph=graph, going=going, **roles)
    graph.output(simpler.outputs)
    return simpler


def _may_be_apart(n: fx.Node) -> bool:
    """Whether a node is no core operation; of sizes that change from step to step there are no examples to trace."""
    target: Any = n.target
    return (
        n.op == "call_function"
        and not is_core(n)
        and isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not meets_growing(n)
        and not any(x.is_complex() for a in (n, *n.all_input_nodes) for x in values_of(a))
        and all(x.target is operator.getitem for x in n.users if not isinstance(n.meta["val"], Tensor))
    )


def _put(
    graph: fx.Graph, n: fx.Node, new: dict[fx.Node, Any], inside: tuple[Any, ...], whole: Container[fx.Node]
) -> Any:
    """A node in the new graph, or the nodes of its parts; `inside` are the operations that it is a part of."""
    if n.target is operator.getitem and isinstance(new[n.args[0]], tuple):  # pyright: ignore[reportArgumentType]
        return new[n.args[0]][n.args[1]]  # pyright: ignore[reportArgumentType]
    module = None if not _may_be_apart(n) or n.target in inside or n in whole else _apart(n)
    if module is None:
        copy = graph.node_copy(n, lambda a: new[a])
        copy.meta = {**n.meta, "called": n in whole}
        return copy
    given = iter(n.all_input_nodes)
    inner = dict[fx.Node, Any]()
    for one in module.nodes:
        one.meta["stack_trace"] = n.meta.get("stack_trace")
        one.meta["part_of"] = n.meta.get("part_of", n)
        if one.op == "placeholder":
            inner[one] = new[next(given)]
        elif one.op == "call_function":
            inner[one] = _put(graph, one, inner, (*inside, n.target), whole)
    outputs: Any = module.output_node().args[0]
    if isinstance(n.meta["val"], Tensor):
        return inner[outputs[0]]
    left = iter(outputs)
    return tuple(None if x is None else inner[next(left)] for x in n.meta["val"])


def _apart(n: fx.Node) -> fx.Graph | None:
    """Returns a node's operation as a graph of simpler ones; None where none is known."""
    target: Any = n.target
    table = _table()
    examples = [_example(a.meta["val"]) for a in n.all_input_nodes]

    def call(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(n.all_input_nodes, tensors, strict=True))
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: given[a])  # pyright: ignore
        found = target(*args, **kwargs)
        return [found] if isinstance(found, Tensor) else [x for x in found if x is not None]

    for simpler in (table.get(target), decompositions([target]).get(target)):
        if simpler is not None:
            try:
                found = simplified(traced(without_writes(call), examples, {**table, target: simpler}).graph)
            except Written:
                continue
            undone = [x for x in found.nodes if x.target is target and not is_core(x)]  # it gave NotImplemented
            if not undone:
                return found
    return None


@cache
def _table() -> Table:
    return {**before_autograd(), **after_autograd(), **orders.TABLE, **pooling_windows.TABLE}


def _example(value: Tensor) -> Tensor:
    """Zeros in memory as the value's: an example may be an index, which a decomposition follows."""
    example = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=HOST)
    memory: Any = example.untyped_storage()
    memory.fill_(0)
    return example
