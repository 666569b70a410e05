"""Device text run in this process: each lane is a coroutine, and between two waits lanes go on in any order asked for.

What a run shows is whether the text is right whatever lane is first. It does not show what a real device's compiler
makes of it, nor how fast that is.
"""

import ctypes
import dataclasses
import functools
import random
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.emitter.device.device_math import TWO_OVER_PI
from tensorloop.compiler.emitter.device.devices import Coroutines
from tensorloop.compiler.emitter.device.kernel import write_text
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.lengths import all_hold
from tensorloop.compiler.step import CoreCall, OutOfRange, Step
from tensorloop.compiler.targets.cpu import guard_text
from tensorloop.compiler.targets.cpu.host import host, llvm
from tensorloop.compiler.targets.given import NO_SLOT, OUT_OF_RANGE, NeededTensors, lay_out, matrix_failed

ORDERS = ("as is", "turned", "random")


class Lanes:
    """A module of `Coroutines`, compiled."""

    def __init__(
        self, module: str, lanes: int, arguments: int, numbers: int = 1, level: int = 1, guarded: bool = False
    ) -> None:
        binding, here = llvm(), host()
        self.lines: list[str] = []
        if guarded:  # what lies in the module itself is a region too, so it has a name outside
            self.lines = module.splitlines()
            module = guard_text.checked(module.replace("internal constant", "constant"), "nounwind")
        parsed = binding.parse_assembly(module)
        parsed.verify()
        machine = binding.Target.from_triple(here.triple).create_target_machine(
            cpu=here.cpu, features=here.features, opt=level, jit=True
        )
        options = binding.create_pipeline_tuning_options(speed_level=level)
        builder = binding.create_pass_builder(machine, options)
        builder.getModulePassManager().run(parsed, builder)
        _add_conversion(binding, here)
        self._engine = binding.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()
        at, place, word = self._engine.get_function_address, ctypes.c_void_p, ctypes.c_int64
        self._run = ctypes.CFUNCTYPE(place, *[place] * arguments, *[word] * numbers, place, word, word)(at("run"))
        self._resume, self._destroy = (ctypes.CFUNCTYPE(None, place)(at(name)) for name in ("resume", "destroy"))
        self._done = ctypes.CFUNCTYPE(word, place)(at("done"))
        if guarded:
            self._guard = ctypes.CFUNCTYPE(None, place)(at("guard"))
            table = self._engine.get_global_value_address("two_over_pi") if "@two_over_pi" in module else 0
            self._own = [(table, table + 8 * len(TWO_OVER_PI), 0)] if table else []
        self.lanes = lanes

    def guard(self, regions: Sequence[tuple[int, int, int]]) -> "array[int]":
        """Says which memory may be touched from here on: where it begins and ends, and whether it may be written."""
        rows = [*regions, *self._own]
        block = array("q", [0, 0, 0, 0, 0, len(rows), 0, *(word for row in rows for word in row)])
        self._guard(block.buffer_info()[0])
        return block

    def said(self, block: "array[int]") -> None:
        """Raises where a lane has been outside of all regions."""
        if block[0]:
            line = self.lines[block[3] - 1].strip()
            raise AssertionError(f"{block[0]} accesses out of bounds, the first of {block[2]} bytes by: {line}")

    def group(self, given: Sequence[int], scratch: int, group: int, turn: Callable[[], Any]) -> None:
        """Runs one group to its end; `turn` says in which order lanes go to their next wait."""
        handles = {lane: self._run(*given, scratch, lane, group) for lane in turn()}
        while not self._done(handles[0]):
            for lane in turn():
                assert not self._done(handles[lane]), "a lane has ended while others wait"
                self._resume(handles[lane])
        assert all(map(self._done, handles.values())), "lanes do not wait at the same places"
        for handle in handles.values():
            self._destroy(handle)


# From a double to half a float: a device has an instruction for it, and here LLVM calls a library that is not there.
# By way of memory, so that LLVM does not make one conversion of two again.
_CONVERSION = """
define half @__truncdfhf2(double %x) {
  %place = alloca float
  %single = fptrunc double %x to float
  store volatile float %single, ptr %place
  %again = load volatile float, ptr %place
  %found = fptrunc float %again to half
  ret half %found
}
"""


@functools.cache
def _add_conversion(binding: Any, here: Any) -> Any:
    machine = binding.Target.from_triple(here.triple).create_target_machine(
        cpu=here.cpu, features=here.features, jit=True
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(_CONVERSION), machine)
    engine.finalize_object()
    binding.add_symbol("__truncdfhf2", engine.get_function_address("__truncdfhf2"))
    return engine


@dataclasses.dataclass
class Order:
    """In which order lanes and groups go."""

    how: str = "as is"
    draw: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    def of(self, count: int) -> list[int]:
        """Numbers of so many."""
        numbers = list(range(count))
        if self.how == "random":
            self.draw.shuffle(numbers)
        return numbers[::-1] if self.how == "turned" else numbers


class LanesCore:
    """Runs a step as a device would; the order of lanes may be changed between calls."""

    way = "lanes, one after the other"
    called = ()

    def __init__(
        self,
        step: Step,
        lanes: int = 32,
        groups: int = 1,
        order: str = "as is",
        change: Callable[[KernelPlan], object] = lambda plan: None,
        local: int = 48 * 1024,
        seed: float = 0,
        guarded: bool = False,
    ) -> None:
        self.kernels = lowered(step)
        plan = KernelPlan(self.kernels, Coroutines(host(), lanes, groups, local))
        change(plan)
        self.text = write_text(plan)
        self.order = Order(order, random.Random(seed))
        roles = (
            *(self.kernels.invariants, self.kernels.sequences, self.kernels.carry),
            *(self.kernels.outs, self.kernels.sums),
        )
        self._needed = NeededTensors(step, roles, "cpu")
        count = sum(map(len, roles)) + len(self.kernels.constants) + len(self.text.packed) + len(step.carry) + 1
        count += bool(self.text.growing)
        self._loaded = Lanes(self.text.module, lanes, count, self.text.numbers, guarded=guarded)
        self._guarded = guarded
        self._alone = threading.Lock()  # the module has one list of what its lanes may touch

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        steps, invariants, sequences, carry, outs, sums, lengths = call = self._needed.as_numbers(call)
        text, step = self.text, self.kernels
        pairs = [*zip(step.carry, carry, strict=True)]
        last = [
            x if one.buffer.kind == "array" else torch.empty(one.shape, dtype=one.dtype, device="cpu")
            for one, x in pairs
        ]
        if steps <= 0:
            return [new if new is x else new.copy_(x.detach()) for new, x in zip(last, carry, strict=True)], 0
        if not self.fits(steps, lengths):
            raise IndexError(NO_SLOT)
        self._needed.check(call)
        laid = [lay_out(x.detach(), one.shape, one.strides) for x, one in zip(invariants, step.invariants, strict=True)]
        fixed = {"invariant": laid, "constant": step.constants}
        packed = [
            fixed[one.buffer.kind][one.buffer.index].as_strided(one.shape, one.strides, one.offset).contiguous()
            for one in text.packed
        ]
        totals = list(sums)
        for n in text.apart:
            totals[n] = torch.zeros((text.groups, *sums[n].shape), dtype=sums[n].dtype, device="cpu")
        status = torch.zeros(3, dtype=torch.int64, device="cpu")
        grown = torch.full((text.grown(steps, lengths, step.source.growth),), 0x7F, dtype=torch.uint8, device="cpu")
        parts = [
            *laid,
            *step.constants,
            *packed,
            *(x.detach().contiguous() for x in sequences),
            *(x.detach() if x is new else x.detach().contiguous() for x, new in zip(carry, last, strict=True)),
            *outs,
            *totals,
            *last,
            status,
            *([grown] if text.growing else []),
        ]
        # What nobody has written shows: it is no number, or a large one.
        scratch = torch.full((text.groups * text.scratch + 64,), 0x7F, dtype=torch.uint8, device="cpu")
        begin = scratch.data_ptr() + -scratch.data_ptr() % 64
        for group in self.order.of(text.groups):
            addresses = [x.data_ptr() for x in parts]
            place = begin + group * text.scratch
            with self._alone:
                block = self._loaded.guard(self._regions(parts, place)) if self._guarded else None
                self._loaded.group([*addresses, steps, *lengths], place, group, lambda: self.order.of(text.lanes))
                if block is not None:
                    self._loaded.said(block)
        if int(status[2]):
            raise matrix_failed(text.checks, int(status[2]))
        if int(status[1]):
            raise OutOfRange(OUT_OF_RANGE)
        for n in text.apart:
            sums[n].add_(totals[n].sum(0))
        return last, int(status[0])

    def _regions(self, parts: Sequence[Tensor], place: int) -> list[tuple[int, int, int]]:
        """A call's tensors, of which those behind the carry are written, and the group's scratch."""
        step, text = self.kernels, self.text
        read = len(step.invariants) + len(step.constants) + len(text.packed) + len(step.sequences) + len(step.carry)
        found = [(x.data_ptr(), x.data_ptr() + _span(x), int(n >= read)) for n, x in enumerate(parts)]
        return [(place, place + text.scratch, 1), *found]

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether so many steps stay in their memory, where arrays are this long before the first one."""
        growth = self.kernels.source.growth
        last = [n + more * (steps - 1) for n, more in zip(lengths, growth, strict=True)]
        return all_hold(self.text.bounds, (lengths, last))

    def stepping(self, invariants: Sequence[Tensor]) -> "LanesCore":
        """This core: nothing is prepared."""
        return self


def _span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not x.numel():
        return 0
    return x.itemsize * (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
