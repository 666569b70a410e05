"""Heads that stay apart, as rows do: a group's own rows and heads are a step of their own, over less memory.

A product over heads gives each head from its own matrix, so a loop of rows and heads is as many loops as there are
pairs of both. Rows lie along one dim of a buffer and heads along another one, in whatever order: of each the index of
an element says to which it belongs, (element // step) % size. Each such dim is looked for by itself. Every kernel must
make part i of it from part i of all that a step writes; what no step writes may be read across.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise, product
from typing import NamedTuple

from tensorloop.compiler.emitter.device.nearby import FIXED, with_arrays
from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point, Reduce
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.row_shares import Mixed


class SharedDim(NamedTuple):
    """A dim that groups share: its size, how much of it is a group's, and the dim of each kernel that walks it.

    steps: elements from one to the next in each buffer; none of one of which each group has, or reads, all.
    """

    size: int
    share: int
    dims: list[int | None]
    steps: dict[Region, int]

    @property
    def groups(self) -> int:
        """Returns how many parts there are."""
        return self.size // self.share


class Spread(NamedTuple):
    """A group's part of a step, and how groups differ: in where their parts of the caller's memory begin.

    The parts of the last of `cuts` are those of groups in a row. `outside` is each carry in the caller's memory.
    """

    step: LoweredStep
    cuts: list[SharedDim]
    outside: list[Array]

    @property
    def groups(self) -> int:
        """Returns how many groups there are."""
        return math.prod(cut.groups for cut in self.cuts)

    def moves(self, kind: str, n: int) -> list[int]:
        """Returns how many bytes further the next group's part begins, for each cut."""
        role = "carry" if kind in ("first", "last") else kind, n
        regions = [{(x.kind, x.index): x for x in cut.steps if x.kind != "scratch"} for cut in self.cuts]
        found = [(cut, of.get(role)) for cut, of in zip(self.cuts, regions, strict=True)]
        return [0 if x is None else cut.steps[x] * cut.share * x.dtype.itemsize for cut, x in found]

    def runs(self, buffer: Region) -> tuple[int, int, int]:
        """Returns the runs of neighbours that a group reads of a buffer: how many, how many bytes apart and long.

        There are none where what it reads lies otherwise.
        """
        assert isinstance(buffer.bytes, int)
        found = sorted((cut.steps[buffer], cut.size, cut.share) for cut in self.cuts if buffer in cut.steps)
        if not found:
            return 1, 0, buffer.bytes
        (step, _, share), *outer = found
        dense = step * math.prod(size for _, size, _ in found) == buffer.numel
        apart = sum(step for step, _, _ in outer)
        count = math.prod(share for *_, share in outer) if dense else 0
        return count, apart * buffer.dtype.itemsize, step * share * buffer.dtype.itemsize


def spread(step: LoweredStep, most: int) -> Spread | None:
    """Returns a step of several heads shared out among as many groups as there may be; None where that is not known."""
    batch = {n for one in step.kernels if isinstance(one, Matmul) for n in one.out.shape[:-2]}
    carry = max((one for one in step.carry if len(one.shape) > 1), key=lambda one: one.numel, default=None)
    if most < 2 or not batch or carry is None or not carry.numel or step.source.growth or step.called:
        return None
    rows, rest = carry.shape[:2]
    # Heads are the second dim of the carry, or a part of it, or there is one batch of rows and heads in a product.
    sizes = sorted({rest, *batch, *(n // rows for n in batch)})
    tried = [_spread(step, (rows, heads), most) for heads in sizes if heads and rest % heads == 0]
    return max((one for one in tried if one is not None), key=lambda one: one.groups, default=None)


def _spread(step: LoweredStep, sizes: tuple[int, int], most: int) -> Spread | None:
    kernels, before = list(step.kernels), list[Kernel]()
    cuts = list[SharedDim]()
    while kernels != before:  # a dim that is split for heads moves those that rows were found along
        before = list(kernels)
        tried = [_Search(step, kernels, sizes[: n + 1]).run() for n in range(2)]
        cuts = [one for one in tried if one is not None]
    try:
        return _GroupPart(step, _shared(kernels, cuts, most)).spread(kernels) if cuts else None
    except Mixed:
        return None


def _shared(kernels: Sequence[Kernel], cuts: Sequence[SharedDim], most: int) -> list[SharedDim]:
    """The cuts with as many groups as there may be; of ways that have as many, the one whose groups read least."""
    fixed = {x.buffer for one in kernels if isinstance(one, Matmul) for x in one.reads() if x.buffer.kind in FIXED}
    ways = [
        [cut._replace(share=cut.size // n) for n in range(1, min(cut.size, most) + 1) if cut.size % n == 0]
        for cut in cuts
    ]

    def better(made: Sequence[SharedDim]) -> tuple[int, int]:
        groups = math.prod(cut.groups for cut in made)
        read = sum(x.numel // math.prod(cut.groups for cut in made if x in cut.steps) for x in fixed)
        return (groups if groups <= most else 0), -read

    return list(max(product(*ways), key=better))


def _written(buffer: Region) -> bool:
    return buffer.written or buffer.kind == "carry"


def _walked(kernel: Kernel) -> list[tuple[Array, tuple[int, ...]]]:
    """A kernel's arrays, each with the kernel's dims along which its own lie: a product has one more than each."""
    if not isinstance(kernel, Matmul):
        return [(one, tuple(range(len(one.shape)))) for one in (*kernel.reads(), *kernel.writes())]
    m = len(kernel.out.shape) - 2
    batch, outs = range(m), [kernel.out] if kernel.addend is None else [kernel.out, kernel.addend]
    found = [(kernel.a, (*batch, m, m + 2)), (kernel.b, (*batch, m + 2, m + 1))]
    return [*found, *((one, (*batch, m, m + 1)) for one in outs)]


class _Search:
    """Looks for parts of one size: the last of `sizes`, within parts of the sizes before it.

    `known`: elements from part to part in each buffer, 0 where each group has, or reads, all.
    """

    def __init__(self, step: LoweredStep, kernels: list[Kernel], sizes: Sequence[int]) -> None:
        self.step, self.kernels, self.size = step, kernels, sizes[-1]
        self.known = dict[Region, int]()
        for one, after in zip(step.carry, step.next, strict=True):
            fits = (
                len(one.shape) >= len(sizes) and one.shape[0] == sizes[0] and one.shape[len(sizes) - 1] % self.size == 0
            )
            self.known[one.buffer] = self.known[after.buffer] = one.numel // math.prod(sizes) if fits else 0

    def run(self) -> SharedDim | None:
        """Returns how parts lie; None where it is not known that they stay apart."""
        count = -1
        while self.size > 1 and count < len(self.known):  # a kernel's arrays tell of the next one's, both ways
            count = len(self.known)
            for n in range(len(self.kernels)):
                self._split(n)
                self._guess(self.kernels[n])
        try:
            dims = [self._prove(kernel) for kernel in self.kernels]
        except Mixed:
            return None
        pairs = zip(self.step.carry, self.step.next, strict=True)
        going = self.step.going  # all must agree on whether the loop ends
        same = all(self.known[one.buffer] == self.known[after.buffer] for one, after in pairs)
        if self.size < 2 or not same or (going is not None and self.known.get(going.buffer)):
            return None
        return SharedDim(self.size, self.size, dims, {buffer: n for buffer, n in self.known.items() if n})

    def _split(self, n: int) -> None:
        """Makes two dims of one that walks all elements of all parts."""
        kernel = self.kernels[n]
        last = len(kernel.writes()[0].shape) - 2 * isinstance(kernel, Matmul)
        for array, dims in _walked(kernel):
            step = self.known.get(array.buffer, 0) if _written(array.buffer) else 0
            for d, size, stride in zip(dims, array.shape, array.strides, strict=True):
                inner, rest = divmod(size, self.size)
                if step and inner > 1 and not rest and inner * stride == step and d < last:

                    def moved(one: int, d: int = d) -> list[int]:
                        return [d, d + 1] if one == d else [one + (one > d)]

                    self.kernels[n] = _of_dims(kernel, moved, lambda one, d=d: _in_two(one, d, self.size))
                    return

    def _guess(self, kernel: Kernel) -> None:
        """Notes how the parts lie in what a kernel touches beside what is known."""
        dim = min(self._dims(kernel), default=None)
        for array, dims in _walked(kernel):
            step = array.strides[dims.index(dim)] if dim in dims else 0
            if array.buffer.written and step > 0 and array.buffer.numel % (step * self.size) == 0:
                self.known.setdefault(array.buffer, step)

    def _own(self, kernel: Kernel) -> list[tuple[Array, tuple[int, ...]]]:
        return [pair for pair in _walked(kernel) if _written(pair[0].buffer) and self.known.get(pair[0].buffer)]

    def _dims(self, kernel: Kernel) -> set[int]:
        """The dims that walk parts in all arrays that are known to have them."""
        found = [set(self._aligned(kernel, *pair)) for pair in self._own(kernel)]
        if not found or not isinstance(kernel, Point | Gather | Reduce | Matmul):
            return set()
        summed = kernel.over if isinstance(kernel, Reduce) else [len(kernel.out.shape)]
        return set[int].intersection(*found) - {*summed}

    def _prove(self, kernel: Kernel) -> int | None:
        """Returns the dim at which a kernel is cut: its part i then touches part i alone of all that is written."""
        dim = min(self._dims(kernel), default=None)
        written = [self.known.get(one.buffer) for one in kernel.writes()]
        adds = any(one.buffer.kind == "sum" for one in kernel.writes())  # each group would add all of it
        if (self._own(kernel) and (dim is None or not all(written))) or (dim is None and adds):
            raise Mixed
        for array, dims in _walked(kernel):
            step, buffer = array.strides[dims.index(dim)] if dim in dims else 0, array.buffer
            if buffer.kind == "value":
                lies = not step or buffer.value is not None  # else its elements are their places
            elif _written(buffer):
                lies = not step or bool(self.known.get(buffer))
            else:  # all who read it begin at one place
                lies = self.known.setdefault(buffer, step) == step
            if not lies:
                raise Mixed
        return dim

    def _aligned(self, kernel: Kernel, array: Array, dims: tuple[int, ...]) -> Iterator[int]:
        """Yields the dims along which this is the buffer's parts, each within itself."""
        step, period = self.known[array.buffer], self.known[array.buffer] * self.size
        sizes = [*zip(array.shape, array.strides, strict=True)]
        if isinstance(kernel, Gather) and array is kernel.source:
            sizes += zip(kernel.sizes, kernel.steps, strict=True)
        for k, d in enumerate(dims if array.buffer.numel % period == 0 else ()):
            # Whole periods lead to the same part. All other dims together must stay within it.
            others = [(n - 1) * s for j, (n, s) in enumerate(sizes) if j != k and s % period]
            low, high = (array.offset % period + sum(f(0, x) for x in others) for f in (min, max))
            if sizes[k] == (self.size, step) and low >= 0 and high < step:
                yield d


def _of_dims(kernel: Kernel, moved: Callable[[int], Sequence[int]], new: Callable[[Array], Array]) -> Kernel:
    """A kernel on arrays of other dims; `moved` says which ones have come of one."""
    kernel = with_arrays(kernel, new)
    if not isinstance(kernel, Reduce):
        return kernel
    return dataclasses.replace(kernel, over=tuple(d for one in kernel.over for d in moved(one)))


def _in_two(array: Array, dim: int, size: int) -> Array:
    inner, stride = array.shape[dim] // size, array.strides[dim]
    shape = (*array.shape[:dim], size, inner, *array.shape[dim + 1 :])
    return Array(array.buffer, shape, (*array.strides[:dim], stride * inner, *array.strides[dim:]), array.offset)


class _GroupPart:
    """Makes a group's part of a step: kernels as long as its share, scratch memory as large."""

    def __init__(self, step: LoweredStep, cuts: list[SharedDim]) -> None:
        self.step, self.cuts = step, cuts
        self.regions: dict[Region, Region] = {}

    def spread(self, kernels: Sequence[Kernel]) -> Spread:
        """The part, and what lies outside of it."""
        made = copy(self.step)
        made.kernels = [self._kernel(n, kernel) for n, kernel in enumerate(kernels)]
        outside = [*map(self._in_parts, self.step.carry)]
        made.carry = [*map(self._inside, outside)]
        made.next = [*map(self._inside, map(self._in_parts, self.step.next))]
        return Spread(made, self.cuts, outside)

    def _ways(self, buffer: Region) -> list[tuple[int, int, int]]:
        """The steps, sizes and shares of a buffer's parts, the largest step first."""
        found = [(cut.steps[buffer], cut.size, cut.share) for cut in self.cuts if buffer in cut.steps]
        found.sort(reverse=True)
        if any(large % (small * size) for (large, *_), (small, size, _) in pairwise(found)):
            raise Mixed  # neither lies within a part of the other
        return found

    def _in_parts(self, array: Array) -> Array:
        """A dense array as a group has it, with a dim for each kind of parts."""
        shape, strides, rest = list[int](), list[int](), array.buffer.numel
        assert isinstance(rest, int)
        if not (ways := self._ways(array.buffer)):
            return array
        for step, size, share in ways:
            shape, strides, rest = [*shape, rest // (step * size), share], [*strides, step * size, step], step
        return Array(array.buffer, (*shape, rest), (*strides, 1)).squeeze()

    def _kernel(self, n: int, kernel: Kernel) -> Kernel:
        cuts = {dim: cut.share for cut in self.cuts if (dim := cut.dims[n]) is not None}
        if len(cuts) < sum(cut.dims[n] is not None for cut in self.cuts):
            raise Mixed  # one dim cannot walk both
        if not cuts:
            return kernel
        if isinstance(kernel, Matmul):
            own = (self._cut(x, {dims.index(d): cuts[d] for d in cuts if d in dims}) for x, dims in _walked(kernel))
            return dataclasses.replace(kernel, **dict(zip(("a", "b", "out", "addend"), own, strict=False)))
        if isinstance(kernel, Gather):
            steps = tuple(self._shrunk(kernel.source.buffer, step) for step in kernel.steps)
            kernel = dataclasses.replace(kernel, steps=steps)
        # No dim of a walk has one element: others would not be walked with it.
        kept = [d for d in range(len(kernel.writes()[0].shape)) if cuts.get(d) != 1]
        return _of_dims(kernel, lambda d: [kept.index(d)], lambda one: self._cut(one, cuts).squeeze())

    def _cut(self, array: Array, cuts: Mapping[int, int]) -> Array:
        shape = tuple(cuts.get(d, size) for d, size in enumerate(array.shape))
        return self._inside(Array(array.buffer, shape, array.strides, array.offset))

    def _inside(self, array: Array) -> Array:
        """The array where the group has its own of the buffer: in scratch memory, and the two places of a carry."""
        buffer = array.buffer
        if not self._moves(buffer) or not (ways := self._ways(buffer)):
            return array
        numel = buffer.numel // math.prod(size // share for _, size, share in ways)
        region = self.regions.setdefault(buffer, Region(buffer.kind, buffer.index, numel, buffer.dtype))
        strides = tuple(self._shrunk(buffer, step) for step in array.strides)
        return Array(region, array.shape, strides, self._shrunk(buffer, array.offset))

    def _moves(self, buffer: Region) -> bool:
        kind = self.step.next[buffer.index].buffer.kind if buffer.kind == "carry" else buffer.kind
        return kind in ("scratch", "next")

    def _shrunk(self, buffer: Region, way: int) -> int:
        """How far two elements of a group are apart in its own memory."""
        if not self._moves(buffer):
            return way
        far = abs(way)
        for step, size, share in self._ways(buffer):
            periods, rest = divmod(far, step * size)
            far = periods * step * share + rest
        return far if way >= 0 else -far
