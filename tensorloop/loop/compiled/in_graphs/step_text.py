"""A step as text: what an operation in a graph carries, so that the graph runs in another process too.

It is JSON, and says which operations of torch a step does with which tensors. Whoever reads it can run nothing else.
"""

import dataclasses
import json
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.refused import Refused
from tensorloop.compiler.trace import Operation, Ref, Trace

MOST_CONSTANTS = 1024  # numbers in a tensor that the body makes
_NAMED = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_NAMESPACES = ("aten", "prims")


@dataclasses.dataclass(frozen=True)
class StepText:
    """The content of a step's text: the step, shapes and dtypes of its inputs, constants, and how the loop runs."""

    step: Trace
    inputs: list[tuple[list[int], torch.dtype]]  # of one step, but for the constants
    constants: list[Tensor]
    reverse: bool = False
    k: int | None = None


def to_text(content: StepText) -> str:
    """The text of a step; raises `Refused` where something of it has none."""
    if any(x.numel() > MOST_CONSTANTS for x in content.constants):
        raise Refused(f"the body makes a tensor of more than {MOST_CONSTANTS} numbers", "make it before the loop")
    s = content.step
    return json.dumps(
        {
            "operations": [
                [str(o.function), _put(o.args), _put(o.kwargs), _put(o.results), o.cut] for o in s.operations
            ],
            "step": [*map(list, (s.carry, s.sequences, s.invariants, s.next_carry, s.outs)), s.writes],
            "inputs": [[shape, _put(dtype)] for shape, dtype in content.inputs],
            "constants": [[_put(x.dtype), list(x.shape), _put(x.flatten().tolist())] for x in content.constants],
            "reverse": content.reverse,
            "k": content.k,
        }
    )


def from_text(text: str) -> StepText:
    """The step of a text."""
    content = json.loads(text)
    operations = [
        Operation(_operation(name), _get(args), _get(kwargs), _get(results), None, cut)
        for name, args, kwargs, results, cut in content["operations"]
    ]
    carry, sequences, invariants, next_carry, outs, writes = content["step"]
    step = Trace(operations, carry, sequences, invariants, next_carry, outs, None, writes)
    inputs = [(shape, _get(dtype)) for shape, dtype in content["inputs"]]
    constants = [torch.tensor(_get(x), dtype=_get(dtype)).reshape(shape) for dtype, shape, x in content["constants"]]
    return StepText(step, inputs, constants, content["reverse"], content["k"])


def _operation(name: str) -> Any:
    namespace, *rest = name.split(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"a step of a compiled loop does operations of {' and '.join(_NAMESPACES)}, not {name}")
    return reduce(getattr, rest, getattr(torch.ops, namespace))


def _put(x: Any) -> Any:
    """An argument as JSON has it: what it has not is a dict of one entry."""
    if isinstance(x, Ref):
        return {"tensor": x.number}
    if isinstance(x, (list, tuple)):
        return [_put(y) for y in x]
    if isinstance(x, dict):
        return {"dict": [[key, _put(y)] for key, y in x.items()]}
    if isinstance(x, complex):
        return {"complex": [x.real, x.imag]}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if (name := _NAMED.get(type(x))) is not None:
        return {name: str(x).removeprefix("torch.")}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise Refused(f"its step has an argument of type {type(x).__name__}", "set compile=False")


def _get(x: Any) -> Any:
    if isinstance(x, list):
        return [_get(y) for y in x]
    if not isinstance(x, dict):
        return x
    ((kind, value),) = x.items()
    if kind == "tensor":
        return Ref(value)
    if kind == "dict":
        return {key: _get(y) for key, y in value}
    if kind == "complex":
        return complex(*value)
    return torch.device(value) if kind == "device" else getattr(torch, value)
