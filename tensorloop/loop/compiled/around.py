"""What around a loop prevents or changes its compilation: checkpointed loops, looks of others, inference mode."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from tensorloop._common.scope import here
from tensorloop._common.user_line import user_place
from tensorloop._torch import transforms
from tensorloop._torch.tracing import blind_modes
from tensorloop.compiler.refused import NATIVE, Refused
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray


def in_a_step() -> bool:
    """Whether the step of an eager loop with checkpoints runs here, or its replay."""
    return here.recorder is not None or here.nodes is not None


def nothing_to_do(loop: Loop) -> bool:
    """Whether there is no loop of its own to compile: it has no step, or is a part of a step that is looked at.

    What keeps a loop in a step of an eager one from being compiled was said as the step ran, and is not in its replay.
    """
    return loop.length == 0 or here.looks > 0 or here.replays > 0 or here.shapes > 0


def without_inference() -> AbstractContextManager[object]:
    """Runs a block under `torch.no_grad` instead of `torch.inference_mode`, so that tensors are ordinary."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    return modes


def check_inner_loop(loop: Loop) -> None:
    """Refuses what an inner loop may not do in a step that is looked at: its operations are to be a part of that."""
    if not here.looks:
        return
    if loop.cond is not None or loop.until is not None:
        cure = "scan and fori_loop of a fixed length are a part of the step: choose by torch.where"
        raise Refused(f"the body runs {loop.title}, which ends by a condition", cure, user_place())
    if any(isinstance(x, TensorArray) for x in loop.init):
        raise Refused(f"the body runs {loop.title} with a TensorArray in its carry", "stack its ys", user_place())


def check_steps(name: str) -> None:
    """Refuses a loop of no steps with ys in a step that is looked at: their shapes are those of fake tensors."""
    if here.looks:
        raise Refused(f"the body runs {name} of no steps", "leave it out where there is nothing to do", user_place())


def check_inner(checkpoints: Any) -> None:
    """Refuses checkpoints of a loop in a step that is looked at: a graph of its operations would keep all of them."""
    if here.looks and checkpoints is not None:
        cure = "give checkpoints= to the outer loop alone: the inner one's operations are a part of its step"
        raise Refused("the body runs a loop with checkpoints", cure, user_place())


def check_whole(name: str) -> None:
    """Refuses a function of this library that is more than its operations in a step that is looked at."""
    if here.looks:
        raise Refused(f"the body calls tl.{name}, which is more than its operations", NATIVE, user_place())


def check_surroundings() -> None:
    """Refuses where transforms, modes or other loops have to see each operation."""
    if transforms.maybe_level() is not None:
        raise Refused(
            "a torch.func transform (grad, vmap, jvp ...) is around the loop",
            "torch.autograd.grad, torch.autograd.functional.jacobian and a batch dim take a compiled one",
        )
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise Refused("torch.jit.trace is on, which writes down operations", "trace the loop with compile=False")
    if transforms.forward_mode():
        raise Refused("forward-mode differentiation is on", "backward() takes a compiled loop")
    if modes := blind_modes():
        raise Refused(
            f"{modes[-1]} is around the loop, and would see no operation of a compiled one", "leave it before"
        )
    if in_a_step():
        raise Refused(
            "it runs in a step of tl.fixed_point, or of an eager loop with checkpoints",
            "give compile=True to that loop, or take its checkpoints away",
        )
