"""A loop as one launch: what its kernel is given, and what of it is read back."""

import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from tensorloop.compiler.emitter.device.kernel import DeviceText
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.lengths import all_hold
from tensorloop.compiler.step import Core, CoreCall, OutOfRange
from tensorloop.compiler.targets.given import NO_SLOT, OUT_OF_RANGE, NeededTensors, as_numbers, lay_out, matrix_failed
from tensorloop.compiler.targets.proved import Trial
from tensorloop.compiler.targets.ptx import driver
from tensorloop.compiler.targets.ptx.driver import DriverError, LoadedKernel

CHECKED = 3  # calls of a core whose tensors are looked at
STATUS = 3  # words: steps done, whether an index was wrong, which matrix was singular


class PtxCore:
    """Runs all steps of a call in one launch on torch's current stream, and waits only where a step can end or fail.

    `load` gives the kernel. `below` is the core that runs instead where the device has no room for a launch; and while
    a user's graph is recorded, what is not loaded yet or what the host has to read.
    """

    called: Sequence[fx.Node] = ()
    trials = Trial(4, 4), Trial(1, 3)  # one code for all steps, which has carries elsewhere at each of the first three

    def __init__(self, step: LoweredStep, text: DeviceText, load: Callable[[], LoadedKernel], below: Core) -> None:
        self.text, self._load, self._below = text, load, below
        self._device, self._growth = step.source.place.device, step.source.growth
        self._layouts = [(one.shape, one.strides) for one in step.invariants]
        self._constants = [x.to(self._device) for x in step.constants]
        self._carry = [(one.shape, one.dtype, one.buffer.kind == "array") for one in step.carry]
        roles = step.invariants, step.sequences, step.carry, step.outs, step.sums
        self._needed = NeededTensors(step.source, roles, self._device.type)
        self._reads = text.asks or text.checks_indices or bool(text.checks)
        self._checked = 0
        self._kernel: LoadedKernel | None = None
        self._instead: Core | None = None
        self._lock = threading.Lock()
        self.way = f"one launch, {text.groups} x {text.lanes} lanes"

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs at most so many steps: (the last carry, how many were done)."""
        return self._run(call, None)

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns a core for many calls of few steps, from one thread: invariants are laid out and packed once."""
        if self._instead is not None:
            return self._instead.stepping(invariants)
        fixed = self._fixed([as_numbers(x) for x in invariants])
        return lambda call: self._run(call, fixed)

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether each address of so many steps is in its tensor, where arrays are this long before the first one."""
        last = [n + more * (steps - 1) for n, more in zip(lengths, self._growth, strict=True)]
        return all_hold(self.text.bounds, (lengths, last))

    def load(self) -> LoadedKernel:
        """Loads the kernel unless it is; raises `Unsupported` or `DriverError` where that fails."""
        with self._lock:
            self._kernel = self._kernel or self._load()
            return self._kernel

    def _run(self, call: CoreCall, fixed: list[Tensor] | None) -> tuple[list[Tensor], int]:
        if call.steps <= 0:
            return [new if new is old else new.copy_(old.detach()) for new, old in self._new(call.carry)], 0
        if self._instead is not None:
            return self._instead(call)
        recorded = torch.cuda.is_current_stream_capturing()
        if recorded and (self._kernel is None or self._reads):
            return self._below(call)
        try:
            return self._launched(self.load(), call, fixed, recorded)
        except DriverError as error:
            if not error.not_run:
                raise
            core = self._instead = self._below
            warnings.warn(f"a compiled loop goes on another way ({core.way}): {error}", RuntimeWarning, stacklevel=2)
        return core(call)

    def _launched(
        self, kernel: LoadedKernel, call: CoreCall, fixed: list[Tensor] | None, recorded: bool
    ) -> tuple[list[Tensor], int]:
        kernel.recorded |= recorded
        call, text = self._needed.as_numbers(call), self.text
        self._check(call)
        steps, invariants, sequences, carry, outs, sums, lengths = call
        last = [new for new, _ in self._new(carry)]
        totals = list(sums)
        for n in text.apart:
            totals[n] = torch.zeros((text.groups, *sums[n].shape), dtype=sums[n].dtype, device=self._device)
        # Zeros are a launch: only what is read has to say that nothing has happened.
        status = (torch.zeros if self._reads else torch.empty)(STATUS, dtype=torch.int64, device=self._device)
        fixed = self._fixed(invariants) if fixed is None else fixed
        # Memory that goes when this returns is given out again by torch, but not before what is launched here is over.
        scratch = [] if text.local else [self._bytes(text.groups * text.scratch)]
        grown = [self._bytes(text.grown(steps, lengths, self._growth))] if text.growing else []
        given = [*fixed, *sequences, *carry, *outs, *totals, *last, status, *grown]
        words = [*(x.data_ptr() for x in given), steps, *lengths, *(x.data_ptr() for x in scratch)]
        shared = text.scratch if text.local else 0
        kernel.launch(driver.stream_of(self._device), text.groups, text.lanes, shared, words)
        for n in text.apart:
            sums[n].add_(totals[n].sum(0))
        done, wrong, failed = status.tolist() if self._reads else (steps, 0, 0)
        if failed:
            raise matrix_failed(text.checks, failed)
        if wrong:
            raise OutOfRange(OUT_OF_RANGE)
        return last, done

    def _new(self, carry: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Where the last carry goes, beside the first: arrays stay where they are."""
        pairs = zip(carry, self._carry, strict=True)
        return [
            (x if stays else torch.empty(shape, dtype=kind, device=self._device), x)
            for x, (shape, kind, stays) in pairs
        ]

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _fixed(self, invariants: Sequence[Tensor]) -> list[Tensor]:
        """Returns the kernel's first arguments: invariants in their layouts, constants, and what is packed of them."""
        given = [lay_out(one, *layout) for one, layout in zip(invariants, self._layouts, strict=True)]
        of = {"invariant": given, "constant": self._constants}
        packed = [
            of[one.buffer.kind][one.buffer.index].as_strided(one.shape, one.strides, one.offset).contiguous()
            for one in self.text.packed
        ]
        return [*given, *self._constants, *packed]

    def _check(self, call: CoreCall) -> None:
        """Raises before the launch where the kernel would leave a tensor that it was given."""
        if self.text.bounds and not self.fits(call.steps, call.lengths):
            raise IndexError(NO_SLOT)
        if self._checked < CHECKED:
            self._checked += 1
            self._needed.check(call)
