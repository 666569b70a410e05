"""A piece of a step as kernels of the whole device, launched on torch's current stream; it proves itself first."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop._torch.cuda_numbers import exact_products
from tensorloop.compiler.emitter.device.devices import WholeNvptx
from tensorloop.compiler.emitter.device.piece import PieceText, piece_text
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.operations import value_of
from tensorloop.compiler.step import CoreCall, Step, Unsupported
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.proved import Oracle, unwritten
from tensorloop.compiler.targets.ptx import driver
from tensorloop.compiler.targets.ptx.assemble import arch_of, ptx_of
from tensorloop.compiler.targets.ptx.driver import DeviceFacts, DriverError, LoadedKernel, device_of
from tensorloop.compiler.targets.ptx.made import A100


class PieceFailed(Exception):
    """Kernels of a piece that give something else than torch's operations, or that do not run; says what."""


class PieceKernels:
    """Does what the operations of a piece do: a step without a carry, which is done once.

    Each call gives outs in new memory. The first one, which comes before anything is recorded, is held to the
    operations themselves.
    """

    def __init__(self, step: Step) -> None:
        self._device, self._oracle, self._shown = step.place.device, Oracle(EagerCore(step), step), False
        device, kernels = device_of(self._device.index or 0), lowered(step)
        self.text = piece_text(kernels, _nvptx(device.facts))
        self._constants = [x.to(self._device) for x in kernels.constants]
        self._given = [(tuple(value_of(n).shape), value_of(n).dtype) for n in step.sequences]
        self._outs = [(tuple(value_of(n).shape), value_of(n).dtype) for n in step.outs]
        arch = arch_of(device.facts.capability)
        try:
            self._loaded = [LoadedKernel(device, ptx_of(module, arch), "run") for module in self.text.modules]
        except DriverError as error:
            raise Unsupported("; ".join([str(error), *getattr(error, "__notes__", ())])) from None
        if (most := min(one.facts.threads for one in self._loaded)) < self.text.threads:
            raise Unsupported(f"a block of {self.text.threads} threads, of which the device takes {most}")

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Launches the kernels; raises `PieceFailed` where the first call shows that they are wrong."""
        given = tuple(x.resolve_neg().contiguous() for x in given)
        if (found := [(tuple(x.shape), x.dtype) for x in given]) != self._given:
            raise PieceFailed(f"are given {found} instead of {self._given}")
        outs = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._outs]
        if not self._shown:
            self._prove(given, outs)
            self._shown = True
        self._launch(given, outs)
        return outs

    def _launch(self, given: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        text = self.text
        # Torch gives memory that goes here out again, but for nothing that comes before these launches.
        scratch = torch.empty(text.scratch, dtype=torch.uint8, device=self._device)
        words = [x.data_ptr() for x in (*self._constants, *given, *outs, scratch)]
        try:
            for one in self._loaded:
                one.launch(driver.stream_of(self._device), text.blocks, text.threads, 0, words)
        except DriverError as error:
            raise PieceFailed(f"do not run: {error}") from None

    def _prove(self, given: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Raises where the kernels differ from the operations, both on these tensors."""
        call = CoreCall(1, [], [x[None] for x in given], [], [unwritten(x)[None] for x in outs], [])
        with exact_products():
            expected = self._oracle.expected(call)
            self._launch(given, [x[0] for x in call.outs])
            if fault := self._oracle.fault(call, self._oracle.gives(call, [], 1), expected):
                raise PieceFailed(fault)


def _nvptx(facts: DeviceFacts) -> WholeNvptx:
    return WholeNvptx(arch_of(facts.capability), groups=facts.multiprocessors)


def describe_piece(step: Step) -> PieceText:
    """Returns a piece's text; without a device, that of an A100."""
    try:
        facts = device_of(step.place.device.index or 0).facts
    except Unsupported:
        facts = A100
    return piece_text(lowered(step), _nvptx(facts))
