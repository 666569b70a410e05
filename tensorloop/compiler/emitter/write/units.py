"""What a step's text is made of: its kernels put together, and copies beside them."""

from collections.abc import Iterable, Sequence

from tensorloop.compiler.emitter.ir.kernels import Matmul, Point
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower import growing
from tensorloop.compiler.emitter.lower.lowering import LoweredStep, copied
from tensorloop.compiler.emitter.write.fuse import (
    Unit,
    WalkGroup,
    drop_unread,
    find_stored,
    group_walks,
    join_additions,
    split_by_readers,
)
from tensorloop.compiler.emitter.write.matmul import turn_product
from tensorloop.compiler.lengths import Length


def put_together(step: LoweredStep) -> tuple[list[Unit], set[Region]]:
    """Returns the units of a step, in their order, and the buffers that they keep in memory."""
    kept = {array.buffer for array in (*step.outs, *step.next, *step.sums)}
    kept |= {step.going.buffer} if step.going is not None else set()
    kernels = [growing.ordered(kernel) for kernel in drop_unread(step.kernels, kept)]
    kernels = [turn_product(kernel) if isinstance(kernel, Matmul) else kernel for kernel in kernels]
    units = group_walks(split_by_readers(join_additions(kernels, kept), kept))
    return units, find_stored(units, kept)


def find_grown(units: Sequence[Unit], stored: Iterable[Region]) -> list[Region]:
    """Returns the scratch that is as long as an array in the carry."""
    buffers = dict.fromkeys(array.buffer for unit in units for array in unit.writes())
    return [x for x in buffers if x.kind == "scratch" and x in stored and isinstance(x.numel, Length)]


def copying(array: Array, place: Array | None = None) -> WalkGroup:
    """A copy of an array as it lies into memory in which it lies like `place`, for others to say of what."""
    both = enumerate((array, array if place is None else place))
    a, b = (Array(Region("copy", n, x.buffer.numel, x.dtype), x.shape, x.strides, x.offset) for n, x in both)
    return WalkGroup(array.shape, [Point("copy", copied, (a,), b)])
