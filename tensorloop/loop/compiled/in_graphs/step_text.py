"""A step as text: what an operation in a graph carries, so that the graph runs in another process too.

It is JSON, and says which operations of torch a step does with which tensors. Read, it runs nothing else.
"""

import dataclasses
import json
from collections.abc import Sequence
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
class Written:
    """A step, the (shape, dtype) of each input, tensors that the body makes itself, and how the loop runs."""

    step: Trace
    inputs: list[tuple[list[int], torch.dtype]]
    constants: list[Tensor]
    reverse: bool = False
    k: int | None = None

    def text(self) -> str:
        """As text."""
        s = self.step
        roles = s.carry, s.sequences, s.invariants, s.next_carry, s.outs
        return json.dumps(
            {
                "operations": [[str(o.function), _put(o.args), _put(o.kwargs), _put(o.results)] for o in s.operations],
                "step": [*map(list, roles), s.writes],
                "inputs": [[shape, _put(dtype)] for shape, dtype in self.inputs],
                "constants": [[_put(x.dtype), list(x.shape), _put(x.flatten().tolist())] for x in self.constants],
                "reverse": self.reverse,
                "k": self.k,
            }
        )


def written(step: Trace, inputs: Sequence[Tensor], constants: Sequence[Tensor]) -> Written:
    """A step with what belongs to it; `inputs` are those of one step, but for the constants."""
    if any(x.numel() > MOST_CONSTANTS for x in constants):
        raise Refused(f"the body makes a tensor of more than {MOST_CONSTANTS} numbers", "make it before the loop")
    return Written(step, [([*map(int, x.shape)], x.dtype) for x in inputs], list(constants))


def read(text: str) -> Written:
    """The step of a text."""
    found = json.loads(text)
    operations = [
        Operation(_operation(name), _get(args), _get(kwargs), _get(results), None)
        for name, args, kwargs, results in found["operations"]
    ]
    carry, xs, captures, next_carry, ys, writes = found["step"]
    step = Trace(operations, carry, xs, captures, next_carry, ys, None, writes)
    inputs = [(shape, _get(dtype)) for shape, dtype in found["inputs"]]
    constants = [torch.tensor(_get(x), dtype=_get(dtype)).reshape(shape) for dtype, shape, x in found["constants"]]
    return Written(step, inputs, constants, found["reverse"], found["k"])


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
