"""Which target a step runs on."""

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets.listed import TARGETS
from tensorloop.compiler.targets.target import Target

DEVICES = tuple(dict.fromkeys(target.device for target in TARGETS if target.device))  # types of them
_BY_NAME = {target.name: target for target in TARGETS}


def find_place(devices: Iterable[torch.device]) -> Place:
    """Returns the place of tensors on these devices, the host where there are none; raises `Refused`."""
    first, *others = dict.fromkeys(devices) or (HOST,)
    if others:
        raise Refused(f"the tensors of the loop are on {first} and on {others[0]}", "move them to one device")
    for target in TARGETS:
        if target.device == first.type and (not target.variable or os.environ.get(target.variable) == "1"):
            return _place(target, first)
    kinds = " and ".join(DEVICES)
    raise Refused(f"loops on {kinds} are compiled, none on {first.type}", "compile=False says that this is meant")


def place_named(device: Any) -> Place:
    """Returns the place that a `device=` of the user's names, which need not be there; raises for one of no target."""
    if not isinstance(device, str | torch.device):
        raise WrongType(f"device must be a torch.device or its name, got {arguments.describe(device)}")
    try:
        named = torch.device(device)
        return find_place([named if named == HOST else torch.device(named.type, named.index or 0)])
    except RuntimeError as error:
        raise WrongValue(f"device: {str(error).splitlines()[0]}") from None
    except Refused as refusal:
        raise WrongValue(f"device: {refusal.reason}") from None


@functools.cache  # one object for each device
def _place(target: Target, device: torch.device) -> Place:
    return target.place(device)


def target_of(place: Place) -> Target:
    """Returns the target that makes the cores of a place."""
    return _BY_NAME[place.target]


def is_captured(place: Place) -> bool:
    """Whether a CUDA graph of the caller's is being captured: then nothing may wait for the device."""
    return place.device != HOST and torch.cuda.is_current_stream_capturing()


def left_to_loop(place: Place) -> bool:
    """Whether a loop whose core lacks something is left to the eager loop: on a device the eager core launches less."""
    return target_of(place).left_to_loop


def make_core(step: Step) -> tuple[Core, Unsupported | None]:
    """Returns a core, and why it is none of the place's own target."""
    return target_of(step.place).core_of(step)


def describe(step: Step) -> list[str]:
    """Returns what a step asks of its device, in counts, a line each, now and by the targets that nobody asked for."""
    own = target_of(step.place)
    lines = own.describe(step)
    for other in TARGETS:
        if other.variable and other.device == own.device and other is not own:
            lines += [f"with {other.variable}=1 instead:", *(f"  {line}" for line in other.describe(step))]
    return lines


def launched(step: Step) -> list[tuple[int, Sequence[fx.Node]]]:
    """Returns what a step launches on its device, in its loop: how often, and what is done there; [] on the host."""
    return target_of(step.place).launched(step)
