"""What is around a loop that asks to be compiled, and keeps it from that."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from tensorloop._common.scope import here
from tensorloop._common.user_line import user_place
from tensorloop._torch import transforms
from tensorloop._torch.tracing import blind_modes
from tensorloop.loop.compiled.refused import NATIVE, Refused
from tensorloop.loop.loop import Loop


def in_a_step() -> bool:
    """Whether the step of an eager loop with checkpoints runs here, or its replay."""
    return here.recorder is not None or here.nodes is not None


def nothing_to_do(loop: Loop) -> bool:
    """Whether there is no loop of its own to compile: it has no step, or is a part of a step that is looked at.

    What keeps a loop in a step of an eager one from being compiled was said as the step ran, and is not in its replay.
    """
    replayed = in_a_step() and transforms.graph_task() >= 0
    return loop.length == 0 or here.looks > 0 or replayed


def without_inference() -> AbstractContextManager[object]:
    """Under `torch.inference_mode` a compiled loop runs as under `torch.no_grad`, and gives ordinary tensors."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes


def check_inner(checkpoints: Any) -> None:
    """Refuses checkpoints of a loop in a step that is looked at: a graph of its operations would keep all of them."""
    if here.looks and checkpoints is not None:
        cure = "give checkpoints= to the outer loop alone: the inner one's operations are a part of its step"
        raise Refused("the body runs a loop with checkpoints", cure, user_place())


def check_whole(name: str) -> None:
    """Refuses a function of this library whose gradient is its own in a step that is looked at."""
    if here.looks:
        raise Refused(f"the body calls tl.{name}, whose gradient is its own", NATIVE, user_place())


def check_surroundings() -> None:
    """Refuses where transforms, modes or other loops have to see each operation."""
    if transforms.maybe_level() is not None:
        raise Refused(
            "a torch.func transform (grad, vmap, jvp ...) is around the loop",
            "torch.autograd.grad and a batch dim take a compiled one",
        )
    if transforms.forward_mode():
        raise Refused("forward-mode differentiation is on", "backward() takes a compiled loop")
    if modes := blind_modes():
        raise Refused(
            f"{modes[-1]} is around the loop, and would see no operation of a compiled one", "leave it before"
        )
    if in_a_step():
        raise Refused(
            "it runs in a step of an eager loop with checkpoints",
            "give compile=True to that one, or take its checkpoints away",
        )
