"""Which target a step runs on."""

import functools
from collections.abc import Iterable

import torch

from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets.cpu.target import CpuTarget
from tensorloop.compiler.targets.eager import EagerTarget
from tensorloop.compiler.targets.graphs.target import GraphTarget
from tensorloop.compiler.targets.target import Target

EAGER: Target = EagerTarget()  # in the place of a target that lacks something
TARGETS: dict[str, Target] = {"cpu": CpuTarget(), "cuda": GraphTarget()}  # by the type of a device
_BY_NAME = {target.name: target for target in (EAGER, *TARGETS.values())}
AUTOCAST = tuple(TARGETS)  # types of devices whose autocast a loop may be under


def find_place(devices: Iterable[torch.device]) -> Place:
    """Returns the place of tensors on these devices, the host where there are none; raises `Refused`."""
    first, *others = dict.fromkeys(devices) or (HOST,)
    if others:
        raise Refused(f"the tensors of the loop are on {first} and on {others[0]}", "move them to one device")
    if first.type not in TARGETS:
        kinds = " and ".join(TARGETS)
        raise Refused(f"loops on {kinds} are compiled, none on {first.type}", "compile=False says that this is meant")
    return _place(first)


@functools.cache  # one object for each device: keys of plans are compared at every call
def _place(device: torch.device) -> Place:
    return TARGETS[device.type].place(device)


def target_of(place: Place) -> Target:
    """Returns the target that makes the cores of a place."""
    return _BY_NAME[place.target]


def make_core(step: Step) -> tuple[Core, Unsupported | None]:
    """Returns a core, and why it is not one of the place's own target."""
    try:
        return target_of(step.place).make_core(step), None
    except Unsupported as lack:
        return EAGER.make_core(step), lack
    except Exception as error:  # a compiler that fails costs speed, no result
        return EAGER.make_core(step), Unsupported(f"the emitter failed, {type(error).__name__}: {error}")
