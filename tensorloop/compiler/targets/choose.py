"""Which target a step runs on."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets.cpu.target import CpuTarget
from tensorloop.compiler.targets.eager import EagerTarget
from tensorloop.compiler.targets.graphs.target import GraphTarget
from tensorloop.compiler.targets.ptx.target import VARIABLE, PtxTarget, is_wanted
from tensorloop.compiler.targets.target import Target

EAGER: Target = EagerTarget()  # in the place of a target that lacks something
GRAPHS = GraphTarget()
TARGETS: dict[str, Target] = {"cpu": CpuTarget(), "cuda": GRAPHS}  # by the type of a device
PTX = PtxTarget(lambda step: _first_of((TARGETS["cuda"],), step)[0])  # in its place for who asks for it
_BY_NAME = {target.name: target for target in (EAGER, PTX, *TARGETS.values())}
AUTOCAST = tuple(TARGETS)  # types of devices whose autocast a loop may be under


def find_place(devices: Iterable[torch.device]) -> Place:
    """Returns the place of tensors on these devices, the host where there are none; raises `Refused`."""
    first, *others = dict.fromkeys(devices) or (HOST,)
    if others:
        raise Refused(f"the tensors of the loop are on {first} and on {others[0]}", "move them to one device")
    if first.type not in TARGETS:
        kinds = " and ".join(TARGETS)
        raise Refused(f"loops on {kinds} are compiled, none on {first.type}", "compile=False says that this is meant")
    return _place(first, first.type == "cuda" and is_wanted())


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


@functools.cache  # one object for each device: keys of plans are compared at every call
def _place(device: torch.device, kernels: bool) -> Place:
    return (PTX if kernels else TARGETS[device.type]).place(device)


def target_of(place: Place) -> Target:
    """Returns the target that makes the cores of a place."""
    return _BY_NAME[place.target]


def is_captured(place: Place) -> bool:
    """Whether a CUDA graph of the caller's is being captured: then nothing may wait for the device."""
    return place.device != HOST and torch.cuda.is_current_stream_capturing()


def left_to_loop(place: Place) -> bool:
    """Whether a loop whose core lacks something is left to the eager loop: on a device the eager core launches less."""
    return place.device == HOST


def make_core(step: Step) -> tuple[Core, Unsupported | None]:
    """Returns a core, and why it is of none of the place's own targets."""
    own = target_of(step.place)
    return _first_of((own, TARGETS["cuda"]) if own is PTX else (own,), step)


def describe(step: Step) -> list[str]:
    """Returns what a step asks of its device, in counts, a line each; none where the core says it all."""
    if step.place.device == HOST:
        return []
    kernel = PTX.describe(step)
    if step.place.target == PTX.name:
        return kernel
    return [*GRAPHS.describe(step), f"with {VARIABLE}=1 instead:", *(f"  {line}" for line in kernel)]


def _first_of(targets: Iterable[Target], step: Step) -> tuple[Core, Unsupported | None]:
    """The core of the first that makes one; else the eager one, and what the first of them lacks."""
    lacking: Unsupported | None = None
    for target in targets:
        try:
            return target.make_core(step), None
        except Unsupported as lack:
            lacking = lacking or Unsupported(lack.reason, lack.node)  # without frames, which hold the caller's tensors
        except Exception as error:  # a compiler that fails costs speed, no result
            lacking = lacking or Unsupported(f"the emitter failed, {type(error).__name__}: {error}")
    return EAGER.make_core(step), lacking
