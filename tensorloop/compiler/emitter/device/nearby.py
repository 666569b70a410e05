"""What a group has in its fast memory from step to step, beside scratch: the carry, and matrices that stay the same."""

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, contiguous
from tensorloop.compiler.emitter.lower.lowering import LoweredStep, copied
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.lengths import Length

BANKS = 128  # bytes of shared memory that lanes read at once if each reads another bank of four
MORE = 16  # lines so far apart: eight of four numbers lie in banks of their own
FIXED = ("invariant", "constant")  # what no step writes


def outs_are_copies(step: LoweredStep) -> LoweredStep:
    """The step with places of their own for outs that it reads again: a carry, and what a product takes.

    An out lies in the device's memory, where whoever reads it would wait for it. Each part of it is copied as it is
    made, from a register, unless a product makes it.
    """
    held = Counter(after.buffer for after in step.next)
    moved = {
        after.buffer: Region("next", n, after.buffer.numel, after.dtype)
        for n, after in enumerate(step.next)
        if after.buffer.kind == "out" and held[after.buffer] == 1
    }
    for buffer in {one.buffer: None for kernel in step.kernels for one in kernel.reads()}:
        if buffer.kind == "out" and not held[buffer] and not isinstance(buffer.numel, Length):
            moved[buffer] = Region("scratch", 0, buffer.numel, buffer.dtype)
    if not moved:
        return step

    def new(one: Array) -> Array:
        return Array(moved.get(one.buffer, one.buffer), one.shape, one.strides, one.offset)

    made = copy.copy(step)
    made.kernels = []
    for kernel in step.kernels:
        made.kernels.append(with_arrays(kernel, new))
        for out in kernel.writes():
            if out.buffer in moved and out.numel:
                made.kernels.append(Point("copy", copied, (_each_once(new(out)),), _each_once(out)))
    made.next, made.going = [*map(new, step.next)], None if step.going is None else new(step.going)
    return made


def _each_once(one: Array) -> Array:
    """The array with an index for each element: a reduction writes one along a dim whose steps lead nowhere."""
    shape = tuple(size if stride else 1 for size, stride in zip(one.shape, one.strides, strict=True))
    return Array(one.buffer, shape, one.strides, one.offset).squeeze()


def with_arrays(kernel: Kernel, new: Callable[[Array], Array]) -> Kernel:
    """The kernel on other arrays."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if isinstance(value, Array):
            changed[field.name] = new(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Array):
            changed[field.name] = tuple(map(new, value))
    return dataclasses.replace(kernel, **changed)


class NearMatrix(NamedTuple):
    """A matrix in fast memory: as a unit reads it there, what copies it, and the dim of the copy that has rows."""

    right: Array
    load: WalkGroup
    row: int | None


def near_matrices(units: Sequence[Unit], dims: Sequence[int | None]) -> dict[Array, NearMatrix]:
    """Returns the operands of products and walks that each step reads and none writes, each with its copy.

    What is chosen by an index is not among them: of a table a step may need one row. `dims` are those of rows: of what
    has rows, a group has its own alone, if all units read it so.
    """
    rows: dict[Array, set[int | None]] = {}
    for unit, dim in zip(units, dims, strict=True):
        for one in _read_whole(unit):
            if one.buffer.kind in FIXED and one.numel > 1 and not isinstance(one.offset, Length):
                last = len(one.shape) - (2 if isinstance(unit, Matmul) else 0)
                own = dim is not None and dim < last and one.strides[dim] != 0
                rows.setdefault(one, set()).add(dim if own else None)
    right = {unit.b for unit in units if isinstance(unit, Matmul)}
    return {
        one: _near_matrix(one, found.pop() if len(found) == 1 else None, one in right) for one, found in rows.items()
    }


def _read_whole(unit: Unit) -> list[Array]:
    if isinstance(unit, Matmul):
        return [unit.b]
    walks = unit.walks if isinstance(unit, WalkGroup) else []
    return [one for walk in walks for one in (walk.indices if isinstance(walk, Gather) else walk.reads())]


def _near_matrix(array: Array, row: int | None, is_right: bool) -> NearMatrix:
    """A place for a matrix, rows outermost; of a dim along which all elements are the same it has one.

    A product's right operand has some bytes more in each line where lines would all begin in the same bank: lanes that
    share an element read several lines at once.
    """
    shape = tuple(1 if stride == 0 else size for size, stride in zip(array.shape, array.strides, strict=True))
    order = sorted(range(len(shape)), key=lambda d: (d != row, d))
    sizes = [shape[d] for d in order]
    if is_right and order[-1] == len(shape) - 1 and not sizes[-1] * array.dtype.itemsize % BANKS:
        sizes[-1] += MORE // array.dtype.itemsize
    region = Region("near", 0, math.prod(sizes), array.dtype)
    inner = contiguous(region, sizes).strides
    strides = tuple(inner[order.index(d)] if array.strides[d] else 0 for d in range(len(shape)))
    source = Array(array.buffer, shape, array.strides, array.offset).squeeze()
    load = Point("copy", copied, (source,), Array(region, shape, strides).squeeze())
    # The dims of one element before it are not in the copy.
    row = None if row is None else sum(size != 1 for size in shape[:row])
    return NearMatrix(Array(region, array.shape, strides), WalkGroup(load.space, [load]), row)


def reading_near(unit: Unit, near: Mapping[Array, NearMatrix]) -> Unit:
    """The unit where it reads these from fast memory."""

    def new(one: Array) -> Array:
        return near[one].right if one in near else one

    if isinstance(unit, Matmul):
        return dataclasses.replace(unit, b=new(unit.b))
    if not isinstance(unit, WalkGroup) or not any(one in near for one in _read_whole(unit)):
        return unit
    walks = [with_arrays(walk, new) for walk in unit.walks]
    for n, walk in enumerate(unit.walks):
        if isinstance(walk, Gather):  # its steps are those of where it lies now
            walks[n] = dataclasses.replace(walk, indices=tuple(map(new, walk.indices)))
    return dataclasses.replace(unit, walks=walks)
