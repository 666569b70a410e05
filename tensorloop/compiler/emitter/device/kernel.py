"""The whole loop as one kernel's text: all steps by one launch, lanes of a group meeting where they must.

A group has its own rows of all that has rows; what has none it computes for itself, as each thread of the CPU does.
Scratch memory is the group's own, with room for its rows alone.
"""

import dataclasses
from collections.abc import Sequence

from tensorloop.compiler.emitter.device.devices import MOST_ARGUMENTS, Device
from tensorloop.compiler.emitter.device.kernel_body import KernelBody, Names
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.device.traffic import Traffic, traffic
from tensorloop.compiler.emitter.ir.code import Code
from tensorloop.compiler.emitter.ir.kernels import Check, Gather, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.function import operations_of
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.scratch import line
from tensorloop.compiler.lengths import Length, Size, actual
from tensorloop.compiler.step import Unsupported

SLOTS = 256  # that an array is taken to have where a step's operations are counted


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceText:
    """A kernel's module, and what a caller must know to launch it.

    The kernel `run` takes addresses, in this order: invariants in the layouts of the step, constants, dense copies of
    `packed`, sequences, carry, outs, sums, the last carry, and three words of status (steps done; whether an index was
    out of range; which matrix was singular, as `failures` has it), zero before; if anything is `growing`, of as many
    bytes as `grown` says; then the number of steps, an i64 of at least one, and the lengths of arrays before the first
    one; then, unless scratch is `local`, the address of `groups` times `scratch` bytes.

    Args:
        module: LLVM's text.
        lanes: of a group, which the launch must have.
        groups: as many, too.
        scratch: bytes a group needs beside its registers.
        local: whether these are shared memory, of a size that the launch says.
        rows: how many are shared out among groups; 0 for none.
        work: operations a step, roughly.
        barriers: how often lanes wait for each other in a step.
        apart: numbers of the sums of which each group has its own, one behind the other, zero before; the caller adds
            them up. None where there is one group.
        packed: matrices that stay the same, of which the caller hands over copies with neighbouring columns: parts of
            invariants and constants, as their buffers say.
        idle: what the first lane of a group does alone.
        checks_indices: whether a step may say that an index is out of range.
        asks: whether a loop may end before its last step.
        traffic: bytes that it moves.
        checks: of matrices that may be singular, by number.
        bounds: conditions on lengths of arrays, as those of `LoopText`.
        numbers: that of steps, and of lengths.
        growing: bytes of scratch that is as long as arrays, and how many of each there are: one of all groups where it
            has rows.
    """

    module: str
    lanes: int
    groups: int
    scratch: int
    local: bool
    rows: int
    work: int
    barriers: int
    apart: tuple[int, ...]
    packed: tuple[Array, ...]
    idle: tuple[str, ...]
    checks_indices: bool
    asks: bool
    traffic: Traffic
    checks: tuple[Check, ...] = ()
    bounds: tuple[Length, ...] = ()
    growing: tuple[tuple[int, Size], ...] = ()
    numbers: int = 1

    def grown(self, steps: int, lengths: Sequence[int], growth: Sequence[int]) -> int:
        """Returns the bytes of what is as long as arrays, where these are so long before the first of some steps."""
        longest = [n + max(0, more) * (steps - 1) for n, more in zip(lengths, growth, strict=True)]
        return sum(count * line(actual(size, longest)) for count, size in self.growing)


def device_text(step: LoweredStep, device: Device) -> DeviceText:
    """Returns a step's text for a device; raises `Unsupported` where it has none."""
    return write_text(KernelPlan(step, device))


def write_text(plan: KernelPlan) -> DeviceText:
    """Returns the text of what was planned."""
    step = plan.step
    for n, one in enumerate(plan.packed.values()):
        one.buffer.index = n
    code, names = Code(), Names(step, len(plan.packed), bool(plan.grown))
    if len(names.all) > MOST_ARGUMENTS:
        raise Unsupported(f"{len(names.all)} tensors, of which a kernel takes at most {MOST_ARGUMENTS}")
    groups = plan.groups
    plan.device.begin(code, plan.lanes, groups, plan.scratch, plan.local)
    KernelBody(plan, code, names).write()
    apart = tuple(n for n in range(len(step.sums)) if plan.is_apart(n))
    idle = [type(unit).__name__ for unit, share in zip(plan.units, plan.shares, strict=True) if share.by == "first"]
    return DeviceText(
        plan.device.module(code, names.all, names.numbers, plan.lanes, plan.local),
        plan.lanes,
        groups,
        plan.scratch,
        plan.local,
        0 if plan.rows is None else plan.rows.count,
        sum(operations_of(unit, SLOTS) for unit in plan.units) * (1 if plan.part is None else groups),
        plan.waits.a_step,
        apart,
        tuple(plan.packed),
        tuple(idle),
        any(map(_checks_indices, plan.units)),
        step.going is not None,
        traffic(plan),
        plan.checks,
        tuple(plan.bounds),
        tuple((1 if plan.has_rows(one) else groups, one.bytes) for one in plan.grown),
        len(names.numbers),
    )


def _checks_indices(unit: Unit) -> bool:
    return isinstance(unit, Scatter) or (
        isinstance(unit, WalkGroup) and any(isinstance(walk, Gather) for walk in unit.walks)
    )
