"""Where a step runs: a device, and what is small there."""

import dataclasses
from typing import Any

import torch
from torch import fx

# Where Python runs. Steps are looked at and traced on tensors of the host, whatever device they run on later, and the
# device is named each time: a default device of the user's is none of the step's. Where a graph names a device, that is
# the host, and what runs the graph elsewhere puts its own there (`put_on`).
HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True, eq=False)  # one for each device: keys of plans are compared at every call
class Place:
    """A device, the target that makes cores for it, and what work costs there: part of a step, and of its plan's key.

    Args:
        device: where the tensors of a loop are.
        target: the name of the target, as `targets` knows it.
        cached: bytes of a matrix that stays in fast memory from step to step.
        few_rows: sums over fewer rows than these are read as often as they are added to.
        many_rows: over more rows than these, torch's own product is faster than one in the loop.
        small_step: operations of a step that one thread looks at as fast as a team.
    """

    device: torch.device
    target: str
    cached: int
    few_rows: int
    many_rows: int
    small_step: int


def put_on(graph: fx.Graph, device: torch.device) -> None:
    """Lets the operations of a graph that make tensors make them on this device."""
    for n in graph.nodes:
        if n.op == "call_function" and names_device(n):
            n.kwargs = {**n.kwargs, "device": device}


def names_device(n: fx.Node) -> bool:
    """Whether an operation says, or has to say, on which device its result is."""
    if n.kwargs.get("device") is not None:
        return True
    arguments: Any = getattr(getattr(n.target, "_schema", None), "arguments", ())
    # What takes a tensor makes its result where that is; a number in its place is a tensor of one on the host, as good.
    given = any(isinstance(a.type, torch.TensorType) for a in arguments)
    return not given and any(a.name == "device" for a in arguments)


def generator_of(device: torch.device | None) -> torch.Generator:
    """Torch's own generator of a device, by default the host's."""
    if device is None or device == HOST:
        return torch.default_generator
    return torch.cuda.default_generators[device.index]
