"""Bytes that a kernel moves between the device's memory and its lanes in a step."""

import math
from typing import NamedTuple

from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.ir.kernels import Gather, Matmul
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.lengths import has_length


class Traffic(NamedTuple):
    """Bytes read and written a step, by all groups, and bytes of matrices that each group reads once a launch.

    Each element counts once for each unit and group that touches it. What is as long as an array is left out.
    """

    read: int
    written: int
    once: int


def traffic(plan: KernelPlan) -> Traffic:
    """Counts what a plan moves."""
    read = sum(_bytes(plan, n, unit, one) for n, unit in enumerate(plan.units) for one in _read(unit))
    written = sum(_bytes(plan, n, unit, one) for n, unit in enumerate(plan.units) for one in {*unit.writes()})
    return Traffic(read, written, sum(plan.room(one.right.buffer) for one in plan.near.values()))


def _read(unit: Unit) -> set[Array]:
    # What a walk reads of an earlier one in its nest is in a register.
    own = {*unit.writes()} if isinstance(unit, WalkGroup) else set[Array]()
    return {*unit.reads()} - own


def _bytes(plan: KernelPlan, n: int, unit: Unit, one: Array) -> int:
    """Counts the bytes of an array that a unit touches; 0 where it is in registers or in fast memory."""
    kind, index = one.buffer.kind, one.buffer.index
    if kind in ("value", "near") or has_length((one.buffer.numel, one.shape)):
        return 0
    if kind == "carry":
        kind = plan.step.next[index].buffer.kind
    if (kind in ("next", "scratch") and plan.local) or (kind == "scratch" and one.buffer not in plan.stored):
        return 0
    sizes = [size for size, stride in zip(one.shape, one.strides, strict=True) if stride]
    if isinstance(unit, WalkGroup):  # what is chosen: an element for each index
        sizes = [*unit.space] if any(isinstance(w, Gather) and one is w.source for w in unit.walks) else sizes
    groups = 1 if plan.rows is not None and _has_rows(unit, plan.dims[n], one) else plan.groups
    if plan.dims[n] is None and kind == "sum":
        groups = 1  # one group adds what all have computed
    return math.prod(sizes) * one.dtype.itemsize * groups


def _has_rows(unit: Unit, dim: int | None, one: Array) -> bool:
    """Whether each group touches its own rows of an array alone."""
    if dim is None:
        return False
    if isinstance(unit, Matmul) and one is unit.b:
        last = len(one.shape) - 2
        return dim == last + 2 or (dim < last and one.strides[dim] != 0)
    if isinstance(unit, Matmul) and dim == len(unit.out.shape):
        return one is unit.a
    return dim < len(one.strides) and one.strides[dim] != 0
