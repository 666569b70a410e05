"""Operations that are not known here, taken apart by our own decompositions or torch's."""

from typing import Any

import torch
from torch import fx

from tensorloop.loop.compiled.emitter.lowering import Lowering
from tensorloop.loop.compiled.emitter.ordered import TABLE
from tensorloop.loop.compiled.recurrence import Unsupported


def expand(low: Lowering, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The node's decomposition, lowered in its place; Unsupported where torch has none, or one of random numbers."""
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported("not an operation of aten", node)
    if target not in decomposition_table.keys() | TABLE.keys() or torch.Tag.nondeterministic_seeded in target.tags:
        raise Unsupported("not known, and torch does not take it apart", node)
    arrays: list[Any] = []
    examples: list[Any] = []

    def collect(one: fx.Node) -> Any:
        arrays.append(low.values[one])
        fake = one.meta["val"]
        examples.append(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu"))
        return one

    fx.map_arg((node.args, node.kwargs), collect)

    def call(*tensors: Any) -> Any:
        left = iter(tensors)
        inner_args, inner_kwargs = fx.map_arg((node.args, node.kwargs), lambda one: next(left))
        return target(*inner_args, **inner_kwargs)

    decompositions = {target: TABLE.get(target) or decomposition_table[target]}
    traced = make_fx(torch.func.functionalize(call), decomposition_table=decompositions, tracing_mode="fake")(*examples)
    return _inline(low, traced, arrays, node)


def _inline(low: Lowering, module: fx.GraphModule, arrays: list[Any], node: fx.Node) -> Any:
    from tensorloop.loop.compiled.emitter.pointwise import HANDLERS

    nodes = list(module.graph.nodes)
    left = iter(arrays)
    for one in nodes:
        if one.op == "placeholder":
            low.values[one] = next(left)
        elif one.op == "get_attr":
            low.values[one] = low.constant(getattr(module, str(one.target)))
        elif one.target is node.target:
            raise Unsupported("not known here", node)
    low.run(nodes, HANDLERS, expand)
    return fx.map_arg(nodes[-1].args[0], lambda one: low.values[one])
