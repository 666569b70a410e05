"""Python floats that change between calls of what `torch.compile` compiled: dynamo hands them in as tensors.

In its graph `item()` makes a number of such a tensor again. Where that meets a larger tensor the two are the same: a
tensor without dims promotes as a number does, and is rounded alike. There the tensor is used, and nothing is read.
Torch 2.15 calls `item()` outside of the step, which is given the number: that is refused.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.refused import Refused

_ARITHMETIC = {operator.mul, operator.add, operator.sub, operator.truediv, torch.mul, torch.add, torch.sub, torch.div}
_ARITHMETIC |= {operator.lt, operator.le, operator.gt, operator.ge}
_CURE = "make it a tensor (torch.tensor(0.5), a buffer), or keep it as it is from call to call"


def use_as_tensors(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Puts the tensors of such floats in the place of the numbers; raises `Refused` where that is not the same."""
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, x in zip(places, inputs, strict=True):
        if isinstance(x, float | torch.SymFloat):
            into = _name(next(iter(node.users))) if node.users else "the loop"
            raise Refused(f"a Python float that changes between calls goes into {into}", _CURE)
    for node in module.graph.nodes:
        if node.op != "call_method" or node.target != "item" or node.args[0].op != "placeholder":
            continue
        for user in list(node.users):
            if not _as_well(user, node):
                raise Refused(f"a Python float that changes between calls goes into {_name(user)}", _CURE)
            user.replace_input_with(node, node.args[0])
        module.graph.erase_node(node)
    module.recompile()


def _as_well(user: fx.Node, number: fx.Node) -> bool:
    """Whether an operation gives the same with a tensor without dims in the place of this number."""
    others = [x.meta.get("example_value") for x in user.all_input_nodes if x is not number]
    return user.op == "call_function" and user.target in _ARITHMETIC and len(others) == 1 and _larger(others[0])


def _larger(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.dtype is torch.float64 or (x.dtype is torch.float32 and x.dim() > 0))


def _name(user: fx.Node) -> str:
    return "what the body returns" if user.op == "output" else f"{getattr(user.target, '__name__', user.target)}()"
