"""Where a step runs: a device, and what is small there."""

import dataclasses

import torch

# Where Python runs. Steps are looked at and traced on tensors of the host, whatever device they run on later, and the
# device is named each time: a default device of the user's is none of the step's.
HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
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
