"""Operations that are not known here, taken apart by our own decompositions or torch's."""

from typing import Any

import torch
from torch import fx

from tensorloop._torch.tracing import traced, without_writes
from tensorloop.compiler.emitter.lower.lowering import Lowering
from tensorloop.compiler.emitter.lower.ordered import TABLE
from tensorloop.compiler.step import Unsupported


def expand(low: Lowering, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The node's decomposition, lowered in its place; Unsupported where torch has none, or one of random numbers."""
    from torch._decomp import decomposition_table

    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Unsupported("not an operation of aten", node)
    if target not in decomposition_table.keys() | TABLE.keys() or torch.Tag.nondeterministic_seeded in target.tags:
        raise Unsupported("not known, and torch does not take it apart", node)
    simpler = TABLE.get(target) or decomposition_table[target]
    arrays: list[Any] = []
    examples: list[Any] = []

    def collect(one: fx.Node) -> Any:
        arrays.append(low.values[one])
        fake = one.meta["val"]
        example = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
        memory: Any = example.untyped_storage()
        memory.fill_(0)  # it may be an index, which a decomposition follows
        examples.append(example)
        return one

    fx.map_arg((node.args, node.kwargs), collect)

    several: list[bool] = []  # whether the operation gives more than one tensor, and which of them

    def call(*tensors: Any) -> list[Any]:
        left = iter(tensors)
        inner_args, inner_kwargs = fx.map_arg((node.args, node.kwargs), lambda one: next(left))
        found = target(*inner_args, **inner_kwargs)
        if isinstance(found, torch.Tensor):
            return [found]
        several.extend(one is not None for one in found)
        return [one for one in found if one is not None]

    module = traced(without_writes(call), examples, {target: simpler})
    found = iter(_inline(low, module, arrays, node))
    return tuple(next(found) if there else None for there in several) if several else next(found)


def _inline(low: Lowering, module: fx.GraphModule, arrays: list[Any], node: fx.Node) -> list[Any]:
    from tensorloop.compiler.emitter.lower.pointwise import HANDLERS

    nodes = list(module.graph.nodes)
    left = iter(arrays)
    for one in nodes:
        if one.op == "placeholder":
            low.values[one] = next(left)
        elif one.target is node.target:
            raise Unsupported("not known here", node)
    low.run(nodes, HANDLERS, expand)
    return [low.values[one] for one in nodes[-1].args[0]]
