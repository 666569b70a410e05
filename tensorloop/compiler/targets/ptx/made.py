"""From a step to a loaded kernel: which steps are taken, and what a launch asks of a device, in counts."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from tensorloop.compiler.emitter.device.devices import Nvptx
from tensorloop.compiler.emitter.device.kernel import DeviceText, device_text
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import Core, Step, Unsupported
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.proved import Proved
from tensorloop.compiler.targets.ptx.assemble import arch_of, ptx_of
from tensorloop.compiler.targets.ptx.driver import CudaDevice, DeviceFacts, DriverError, LoadedKernel, device_of
from tensorloop.compiler.targets.ptx.kernel_core import PtxCore


class Limit(NamedTuple):
    """A count of a step's text, the most that is taken, and why more is not."""

    what: str
    of: Callable[[DeviceText], int]
    most: int
    why: str


# What goes to the rung below although there is text for it. By arithmetic, until a device's clock says otherwise:
# - a lane does one operation in about two cycles (each product loads an operand from shared memory), 256 lanes do 2**21
#   in 16,000 cycles, ten microseconds: as long as a graph takes for half a dozen launches of its own;
# - a multiprocessor reads some 64 bytes a cycle of what is not in its shared memory, 2**16 in 1,000 cycles: more, and
#   the whole device does it sooner, one launch for each operation or for a few of them;
# - the second cache of an A100 has 40 MB, and later devices have more: scratch of all groups stays in it.
LIMITS = (
    Limit(
        "operations a step of one group",
        lambda text: text.work // text.groups,
        2**21,
        "one multiprocessor does them, where a launch of its own for each operation has the whole device",
    ),
    Limit(
        "bytes that one group reads a step",
        lambda text: text.traffic.read // text.groups,
        2**16,
        "one multiprocessor reads them, where a launch of its own for each operation has the whole device",
    ),
    Limit(
        "bytes of scratch beyond shared memory",
        lambda text: 0 if text.local else text.groups * text.scratch,
        2**25,
        "all lanes would wait for the device's memory between two operations",
    ),
)
# Bytes a lane that the driver's compiler keeps in memory for want of registers: 16 numbers. ptxas of CUDA 13.0 kept at
# most 24 of a drawn step (sm_80; 16 on sm_90 and sm_100), 12 of steps in which rows meet, 4 of one cell and none of the
# cases of compiled loops, with at most 116 registers; `python -m tests.support.ptxas` prints the table.
MOST_SPILLED = 64
A100 = DeviceFacts((8, 0), 108, 1024, 163 * 1024)  # whose text is described where there is no device


def emit(step: Step, below: Core) -> Core:
    """Returns a step as one kernel that proves itself when it first runs; raises `Unsupported` where there is none."""
    device, kernels = device_of(step.place.device.index or 0), lowered(step)
    text = text_for(kernels, device.facts)
    core = PtxCore(kernels, text, lambda: _loaded(device, text), below)
    if not torch.cuda.is_current_stream_capturing():  # else it is loaded by the first call that may
        core.load()
    return Proved(core, below, EagerCore(step), step)


def describe(step: Step) -> list[str]:
    """Returns what a launch asks of the device, a line each, or why there is none; without a device, of an A100."""
    needs = "registers known on the device"
    try:
        try:
            device = device_of(step.place.device.index or 0)
        except Unsupported:
            text = text_for(lowered(step), A100)
        else:
            text = text_for(lowered(step), device.facts)
            found = _loaded(device, text).facts
            needs = f"{found.registers} registers and {found.local} bytes a lane"
    except Unsupported as lack:
        return [f"no kernel: {lack.reason}"]
    groups = f"{text.groups} groups of {text.lanes} lanes" if text.groups > 1 else f"one group of {text.lanes} lanes"
    waits = "1 barrier" if text.barriers == 1 else f"{text.barriers} barriers"
    where = "shared memory" if text.local else "the device's memory"
    read, written, once = text.traffic
    held = f", {once:,} of them matrices that are read once a launch" if once else ""
    lines = [
        f"one launch: {groups}, {waits} a step",
        f"{text.scratch:,} bytes of {where} a group{held}, {needs}",
        f"{read:,} bytes read and {written:,} written a step in the device's memory",
    ]
    return lines + ([f"one lane of a group alone: {', '.join(text.idle)}"] if text.idle else [])


def text_for(kernels: LoweredStep, facts: DeviceFacts) -> DeviceText:
    """Returns a step's text for a device; raises `Unsupported` where there is none, or one launch is not the way."""
    arch = arch_of(facts.capability)
    text = device_text(kernels, Nvptx(arch, groups=facts.multiprocessors, local=facts.shared))
    for limit in LIMITS:
        if (count := limit.of(text)) > limit.most:
            raise Unsupported(f"{count:,} {limit.what}, of at most {limit.most:,}: {limit.why}")
    return text


def _loaded(device: CudaDevice, text: DeviceText) -> LoadedKernel:
    """The kernel on its device; `Unsupported` where it needs too much there, or the driver fails."""
    try:
        kernel = LoadedKernel(device, ptx_of(text.module, arch_of(device.facts.capability)), "run")
        kernel.allow_shared(text.scratch if text.local else 0)
    except DriverError as error:
        raise Unsupported("; ".join([str(error), *getattr(error, "__notes__", ())])) from None
    if kernel.facts.threads < text.lanes:
        raise Unsupported(f"a group of {text.lanes} lanes, of which the device takes {kernel.facts.threads}")
    if kernel.facts.local > MOST_SPILLED:
        raise Unsupported(f"{kernel.facts.local} bytes a lane beside its registers, of at most {MOST_SPILLED}")
    return kernel
