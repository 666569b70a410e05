"""No address without a proved bound: every place that a step reads or writes lies in its tensor.

A kernel walks a box of places, so the first and the last one of each array bound all of them. Where these are numbers
they are looked at now. Where they follow the length of an array in the carry they become conditions on that length
(`Length`s, none below zero): a core holds them against the lengths of its first and of its last step before it runs,
and as both a length and a condition change by the same number at each step, what holds at both ends holds in between.
Indices from tensors are compared in the code (`Memory.chosen`, `write_scatter`); here they may be any that pass.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from tensorloop.compiler.emitter.ir.kernels import CallOut, Gather, Kernel, Matmul, Matrix, Reduce, Running, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.lengths import Length, Size, of_slice
from tensorloop.compiler.step import Unsupported

# The largest and smallest of no elements are errors in torch; machine code would give what it began with.
_OF_SOME = ("amax", "amin", "argmax", "argmin")


def find_bounds(units: Sequence[Unit], nodes: Iterable[fx.Node], growth: Sequence[int]) -> list[Length]:
    """The conditions under which a step stays in its memory; Unsupported where it does not under any.

    `nodes` are the step's. An array has room for what the step appends, and that is not there to be read before.
    """
    found: dict[Length, None] = {}
    kernels = (kernel for unit in units for kernel in (unit.walks if isinstance(unit, WalkGroup) else (unit,)))
    numbers = itertools.chain.from_iterable(_conditions(kernel, growth) for kernel in kernels)
    slices = itertools.chain.from_iterable(of_slice(n) for n in nodes) if growth else ()
    for number in itertools.chain(numbers, slices):
        if isinstance(number, Length):
            found[number] = None
        elif number < 0:
            raise Unsupported("an address outside of its tensor")
    return list(found)


def check_rows(units: Sequence[Unit], dims: Mapping[int, int | None], count: int) -> None:
    """Raises Unsupported where threads would share out other rows than a unit walks."""
    for n, unit in enumerate(units):
        dim = dims[n]
        if dim is None:
            continue
        if isinstance(unit, Matmul):
            space = (*unit.out.shape, unit.a.shape[-1])
        else:
            space = unit.space if isinstance(unit, WalkGroup) else _boxes(unit)[0].shape
        if space[dim] != count:
            raise Unsupported(f"{space[dim]} rows of a unit, shared out as {count}")


def _conditions(kernel: Kernel, growth: Sequence[int]) -> Iterator[Size]:
    """Yields numbers that must not be below zero if a kernel is to stay in its memory."""
    for array in _boxes(kernel):
        yield from _of_box(array, growth)
    if isinstance(kernel, Gather):
        yield from (size - 1 for size in kernel.sizes)  # what is out of range reads the first
        reach = sum((size - 1) * step for size, step in zip(kernel.sizes, kernel.steps, strict=True) if step > 0)
        back = sum((size - 1) * step for size, step in zip(kernel.sizes, kernel.steps, strict=True) if step < 0)
        low, high = _ends(_walked(kernel.source, kernel.space))
        yield low + back
        yield _room(kernel.source, growth) - 1 - high - reach
    if isinstance(kernel, Reduce) and kernel.how in _OF_SOME:
        yield from (kernel.array.shape[dim] - 1 for dim in kernel.over)


def _boxes(kernel: Kernel) -> list[Array]:
    """Returns the arrays of a kernel, each with the shape that is walked."""
    if isinstance(kernel, Matmul):
        (*batch, m, n), k = kernel.out.shape, kernel.a.shape[-1]
        walked = [(kernel.a, (*batch, m, k)), (kernel.b, (*batch, k, n)), (kernel.out, (*batch, m, n))]
        walked += [] if kernel.addend is None else [(kernel.addend, (*batch, m, n))]
        return [_walked(array, shape) for array, shape in walked]
    if isinstance(kernel, Matrix):
        return [*kernel.ins, *kernel.outs]
    if isinstance(kernel, Scatter):
        shape = list(kernel.index.shape)
        at = [*shape[: kernel.dim], kernel.out.shape[kernel.dim], *shape[kernel.dim + 1 :]]
        return [kernel.index, _walked(kernel.source, shape), _walked(kernel.out, at)]
    if isinstance(kernel, CallOut):
        return [*kernel.reads(), *kernel.writes()]
    if isinstance(kernel, Gather):
        return [_walked(array, kernel.space) for array in (*kernel.indices, kernel.out)]
    space = kernel.array.shape if isinstance(kernel, Running) else kernel.space
    return [_walked(array, space) for array in (*kernel.reads(), *kernel.writes())]


def _walked(array: Array, shape: Sequence[int]) -> Array:
    """The places of an array that a walk over a shape meets."""
    if len(array.strides) != len(shape):
        raise Unsupported(f"a walk of {len(shape)} dims over an array of {len(array.strides)}")
    return Array(array.buffer, tuple(shape), array.strides, array.offset)


def _of_box(array: Array, growth: Sequence[int]) -> Iterator[Size]:
    """Yields numbers that are not below zero if an array's sizes are sizes and its two ends are in memory."""
    if array.buffer.kind == "value":
        return
    yield from (size for size in array.shape if isinstance(size, Length))
    if 0 in array.shape:  # nothing is walked
        return
    low, high = _ends(array)
    yield low
    yield _room(array, growth) - 1 - high


def _ends(array: Array) -> tuple[Size, Size]:
    """Returns the first and the last place of an array, in elements."""
    # Each dim moves the place by itself, so the extremes are reached by all dims at their own first or last index.
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return array.offset + sum(x for x in steps if x < 0), array.offset + sum(x for x in steps if x > 0)


def _room(array: Array, growth: Sequence[int]) -> Size:
    """Returns the elements of a buffer; arrays of the carry have room for what a step appends."""
    buffer = array.buffer
    if buffer.kind != "array":
        return buffer.numel
    assert isinstance(buffer.numel, Length)
    # The caller gives memory for all steps' slots; backward, arrays get shorter, and there is room for what they were.
    return buffer.numel + max(growth[buffer.numel.symbol], 0) * buffer.numel.scale
