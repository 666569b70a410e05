"""Kernels on the pretended device: what is launched runs here, as lanes that take turns, and counts as one launch.

A pretended driver is given PTX, which no processor here runs. So each step's text is made twice, for the GPU and for
lanes as coroutines of this machine, and a launch of the one runs the other.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tensorloop.compiler.emitter.device.devices import Coroutines, Nvptx, WholeNvptx
from tensorloop.compiler.emitter.device.kernel import DeviceText, device_text
from tensorloop.compiler.emitter.device.piece import PieceText, piece_text
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.ptx import assemble, driver, made, piece_kernels
from tensorloop.loop.compiled.run.plan import plans
from tests.device import pretended, recording
from tests.support.lanes import Lanes, Order
from tests.support.pretended_driver import Launch


class Twin(NamedTuple):
    """A kernel's text as lanes, and what a launch of the kernel has to be."""

    own: DeviceText
    lanes: DeviceText


class PieceTwin(NamedTuple):
    """One kernel of a piece as lanes: its module, how many there are, bytes of scratch memory with theirs."""

    own: PieceText
    module: str
    lanes: int
    scratch: int


class PretendedKernels:
    """The driver, the twins of what it was given, and the order in which lanes go."""

    def __init__(self) -> None:
        self.library = pretended.DRIVER
        self.library.run = self.run
        self.order = Order()
        self.twins: dict[str, Twin | PieceTwin] = {}  # by the module's text
        self.modules: dict[bytes, str] = {}  # by PTX
        self.loaded: dict[str, Lanes] = {}

    def text(self, step: LoweredStep, device: Nvptx) -> DeviceText:
        own = device_text(step, device)
        here = Coroutines(host(), own.lanes, device.groups, device.local)
        self.twins[own.module] = Twin(own, device_text(step, here))
        return own

    def piece(self, step: LoweredStep, device: WholeNvptx) -> PieceText:
        own = piece_text(step, device)
        lanes = own.blocks * own.threads
        here = piece_text(step, Coroutines(host(), lanes, local=0))
        for module, twin in zip(own.modules, here.modules, strict=True):
            self.twins[module] = PieceTwin(own, twin, lanes, own.scratch + 8 * lanes)
        return own

    def ptx(self, module: str, arch: str) -> bytes:
        # Modules that do the same may have the same PTX, and scratch memory of other sizes.
        found = assemble.ptx_of(module, arch) + f"// {len(self.modules)}\n".encode()
        self.modules[found] = module
        return found

    def run(self, launch: Launch) -> None:
        """Runs a launch, which a recorder around it writes down."""
        with recording.launched(launch.stream, launch.words, lambda: self.done(launch)):
            self.done(launch)

    def done(self, launch: Launch) -> None:
        module = self.modules[launch.ptx]
        twin = self.twins[module]
        with recording.watches[0].one_launch("kernel"):
            if isinstance(twin, PieceTwin):
                self.run_piece(twin, launch)
            else:
                self.run_loop(twin, module, launch)

    def run_piece(self, twin: PieceTwin, launch: Launch) -> None:
        """All threads are lanes of one group. Scratch memory is the launch's own, with theirs behind it."""
        assert (launch.groups, launch.lanes, launch.shared) == (twin.own.blocks, twin.own.threads, 0)
        *given, place = launch.words
        if twin.module not in self.loaded:
            self.loaded[twin.module] = Lanes(twin.module, twin.lanes, len(given), 0)
        scratch = torch.empty(twin.scratch + 64, dtype=torch.uint8, device="cpu")
        begin = scratch.data_ptr() + -scratch.data_ptr() % 64
        ctypes.memmove(begin, place, twin.own.scratch)
        self.loaded[twin.module].group(given, begin, 0, lambda: self.order.of(twin.lanes))
        ctypes.memmove(place, begin, twin.own.scratch)

    def run_loop(self, twin: Twin, module: str, launch: Launch) -> None:
        own, lanes = twin
        assert (launch.groups, launch.lanes) == (own.groups, own.lanes)
        assert launch.shared == (own.scratch if own.local else 0)
        given = launch.words if own.local else launch.words[:-1]  # without where scratch lies
        if module not in self.loaded:
            numbers = own.numbers
            self.loaded[module] = Lanes(lanes.module, lanes.lanes, len(given) - numbers, numbers)
        scratch = torch.full((lanes.scratch + 64,), 0x7F, dtype=torch.uint8, device="cpu")
        begin = scratch.data_ptr() + -scratch.data_ptr() % 64
        for group in self.order.of(lanes.groups):
            self.loaded[module].group(given, begin, group, lambda: self.order.of(lanes.lanes))


_started: list[PretendedKernels] = []


@contextlib.contextmanager
def fresh() -> Iterator["PretendedKernels"]:
    """No plan is there yet, nothing is left of faults or orders afterwards."""
    found = start()
    plans.clear()
    yield found
    found.library.fails.clear()
    found.order.how = "as is"
    plans.clear()


def start() -> PretendedKernels:
    """Gives the library the pretended driver, until this process ends; loops ask for it by `TENSORLOOP_PTX=1`."""
    if not _started:
        _started.append(PretendedKernels())
        kernels = _started[0]
        driver.stream_of = lambda device: torch.cuda.current_stream(device).stream_id
        made.device_text, made.ptx_of = kernels.text, kernels.ptx
        piece_kernels.piece_text, piece_kernels.ptx_of = kernels.piece, kernels.ptx
    return _started[0]
