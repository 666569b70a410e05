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
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

from tensorloop.compiler.emitter.device.nearby import FIXED, with_arrays
from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point, Reduce, Running
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.lower.lowering import LoweredStep


class Mixed(Exception):
    """Raised where a kernel may read another part than the one that it writes."""


class Cut(NamedTuple):
    """A dim that groups share: its size, how much of it is a group's, the kernels' dims that walk it.

    steps: elements from one to the next in each buffer; 0 in one of which each group has, or reads, all.
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
    """A group's part of a step, and how the groups differ: what is theirs lies elsewhere in the caller's memory.

    The last of `cuts` is the one whose parts neighbouring groups have. `outside` is each carry in the caller's memory.
    """

    step: LoweredStep
    cuts: list[Cut]
    outside: list[Array]

    @property
    def groups(self) -> int:
        """Returns how many groups there are."""
        return math.prod(cut.groups for cut in self.cuts)

    def moves(self, kind: str, n: int) -> list[int]:
        """Returns how many bytes further what a group has of the caller's memory begins, for each cut."""
        own = self.outside[n].buffer if kind in ("first", "last") else None
        found = [
            next((x for x in cut.steps if (x is own if own else (x.kind, x.index) == (kind, n))), None)
            for cut in self.cuts
        ]
        return [
            0 if x is None else cut.steps[x] * cut.share * x.dtype.itemsize
            for x, cut in zip(found, self.cuts, strict=True)
        ]

    def runs(self, buffer: Region) -> tuple[int, int, int]:
        """Returns the runs of neighbours that a group reads of a buffer: how many, how many bytes apart and long.

        There are none where what it reads lies otherwise.
        """
        assert isinstance(buffer.numel, int)
        cuts = sorted((cut for cut in self.cuts if cut.steps.get(buffer)), key=lambda cut: cut.steps[buffer])
        steps, size = [cut.steps[buffer] for cut in cuts], buffer.dtype.itemsize
        if not cuts:
            return 1, 0, buffer.numel * size
        if steps[0] < 0 or steps[0] * math.prod(cut.size for cut in cuts) != buffer.numel:
            return 0, 0, 0
        return math.prod(cut.share for cut in cuts[1:]), sum(steps[1:]) * size, steps[0] * cuts[0].share * size


def spread(step: LoweredStep, most: int) -> Spread | None:
    """Returns a step of several heads shared out among as many groups as there may be; None where that is not known."""
    kernels = [one for one in step.kernels if isinstance(one, Matmul) and len(one.out.shape) > 2]
    carry = max((one for one in step.carry if one.shape), key=lambda one: one.numel, default=None)
    if most < 2 or not kernels or carry is None or step.source.growth or step.called:
        return None
    rows, rest = carry.shape[0], carry.shape[1:]
    batch = {size for one in kernels for size in one.out.shape[:-2]}
    batch |= {size // rows for size in batch if rows and size % rows == 0}
    found = [
        made
        for heads in sorted({*rest[:1], *batch})
        if heads > 1 and rest and rest[0] % heads == 0 and (made := _spread(step, [rows, heads], most)) is not None
    ]
    return max(found, key=lambda one: one.groups, default=None)


def _spread(step: LoweredStep, sizes: Sequence[int], most: int) -> Spread | None:
    kernels, cuts = list(step.kernels), list[Cut]()
    for n, size in enumerate(sizes):
        if size < 2:
            continue
        search = _Search(step, kernels, size, [_own_step(one, sizes[: n + 1]) for one in step.carry])
        try:
            dims = search.run()
        except Mixed:
            continue
        before = [cut.dims for cut in cuts]
        for at, split in search.splits:
            for old in before:
                old[at] = old[at] if (dim := old[at]) is None else _after_split(dim, split)[0]
        kernels = search.kernels
        if all(a is None or a != b for old in before for a, b in zip(old, dims, strict=True)):
            cuts.append(Cut(size, 1, dims, {buffer: n for buffer, n in search.known.items() if n}))
    if not cuts or not _nested(cuts):
        return None
    return _Part(step, _shared(kernels, cuts, most)).spread(kernels)


def _own_step(one: Array, sizes: Sequence[int]) -> int:
    """Elements of a carry from part to part, where its first dims are parts; 0 where it has none."""
    fits = len(one.shape) >= len(sizes) and one.numel and one.shape[0] == sizes[0]
    fits = fits and all(n % size == 0 for n, size in zip(one.shape, sizes, strict=False))
    return one.numel // math.prod(sizes) if fits else 0


def _after_split(dim: int, split: int) -> list[int]:
    """Returns what has become of a kernel's dim where one was split in two."""
    return [dim, dim + 1] if dim == split else [dim + (dim > split)]


def _nested(cuts: Sequence[Cut]) -> bool:
    """Whether, of two dims of parts in a buffer that is written, one lies within a part of the other."""
    shared = [buffer for buffer in cuts[0].steps if _written(buffer) and all(buffer in cut.steps for cut in cuts)]
    for buffer in shared:
        ways = sorted((cut.steps[buffer], cut.size) for cut in cuts)
        if any(large % (small * size) for (small, size), (large, _) in pairwise(ways)):
            return False
    return True


def _shared(kernels: Sequence[Kernel], cuts: Sequence[Cut], most: int) -> list[Cut]:
    """The cuts with as many groups as there may be; of ways that have as many, the one whose groups read least."""
    fixed = {x.buffer for one in kernels if isinstance(one, Matmul) for x in one.reads() if x.buffer.kind in FIXED}

    def better(shares: Sequence[int]) -> tuple[int, int]:
        made = [cut._replace(share=share) for cut, share in zip(cuts, shares, strict=True)]
        groups = math.prod(cut.groups for cut in made)
        read = sum(x.numel // math.prod(cut.groups for cut in made if cut.steps.get(x)) for x in fixed)
        return (groups if groups <= most else 0), -read

    shares = max(product(*([n for n in range(1, cut.size + 1) if cut.size % n == 0] for cut in cuts)), key=better)
    return [cut._replace(share=share) for cut, share in zip(cuts, shares, strict=True)]


def _written(buffer: Region) -> bool:
    return buffer.written or buffer.kind == "carry"


def _walked(kernel: Kernel) -> list[tuple[Array, tuple[int, ...]]]:
    """A kernel's arrays, each with the kernel's dims along which its own lie: a product has one more than each."""
    if not isinstance(kernel, Matmul):
        return [(one, tuple(range(len(one.shape)))) for one in (*kernel.reads(), *kernel.writes())]
    m = len(kernel.out.shape) - 2
    batch, others = range(m), [kernel.out] if kernel.addend is None else [kernel.out, kernel.addend]
    found = [(kernel.a, (*batch, m, m + 2)), (kernel.b, (*batch, m + 2, m + 1))]
    return [*found, *((one, (*batch, m, m + 1)) for one in others)]


def _along(array: Array, dims: tuple[int, ...], dim: int) -> int:
    return array.strides[dims.index(dim)] if dim in dims else 0


class _Search:
    """Looks for the parts of one size. `known`: elements from part to part in each buffer, 0 where all have all."""

    def __init__(self, step: LoweredStep, kernels: Sequence[Kernel], size: int, own: Sequence[int]) -> None:
        self.step, self.kernels, self.size = step, list(kernels), size
        self.known = {one.buffer: n for one, n in zip(step.carry, own, strict=True)}
        self.known |= {after.buffer: n for after, n in zip(step.next, own, strict=True)}
        self.splits: list[tuple[int, int]] = []  # a kernel's number, and which of its dims has become two

    def run(self) -> list[int | None]:
        """Returns the dim of each kernel that walks parts; raises `Mixed` where it is not known that they are apart."""
        count = -1
        while count < len(self.known):  # what is known of one kernel's arrays tells of the next one's, both ways
            count = len(self.known)
            for n in range(len(self.kernels)):
                self._split(n)
                self._guess(self.kernels[n])
        dims = [self._prove(kernel) for kernel in self.kernels]
        for carry, after in zip(self.step.carry, self.step.next, strict=True):
            if self.known[carry.buffer] != self.known[after.buffer]:
                raise Mixed
        if self.step.going is not None and self.known.get(self.step.going.buffer):
            raise Mixed  # all must agree on whether the loop ends
        return dims

    def _split(self, n: int) -> None:
        """Makes two dims of one that walks all elements of all parts."""
        kernel = self.kernels[n]
        fixed = _whole_dims(kernel)
        for array, dims in _walked(kernel):
            step = self.known.get(array.buffer, 0) if _written(array.buffer) else 0
            for d, size, stride in zip(dims, array.shape, array.strides, strict=True):
                inner, rest = divmod(size, self.size)
                ours = inner > 1 and not rest and step and inner * stride == step and d not in fixed
                if ours and (not isinstance(kernel, Matmul) or d < len(kernel.out.shape) - 2):
                    self.splits.append((n, d))
                    new, moved = partial(_in_two, dim=d, size=self.size), partial(_after_split, split=d)
                    self.kernels[n] = _of_dims(kernel, moved, new)
                    return

    def _guess(self, kernel: Kernel) -> None:
        """Notes how the parts lie in what a kernel touches beside what is known."""
        dims = self._dims(kernel)
        for array, own in _walked(kernel) if dims else ():
            step = _along(array, own, min(dims))
            if array.buffer.written and step > 0 and array.buffer.numel % (step * self.size) == 0:
                self.known.setdefault(array.buffer, step)

    def _own(self, kernel: Kernel) -> list[tuple[Array, tuple[int, ...]]]:
        return [pair for pair in _walked(kernel) if _written(pair[0].buffer) and self.known.get(pair[0].buffer)]

    def _dims(self, kernel: Kernel) -> set[int]:
        """The dims that walk parts in all arrays that are known to have them."""
        if not isinstance(kernel, Point | Gather | Reduce | Running | Matmul):
            return set()
        found = [set(self._aligned(kernel, *pair)) for pair in self._own(kernel)]
        return set[int].intersection(*found) - _whole_dims(kernel) if found else set()

    def _prove(self, kernel: Kernel) -> int | None:
        """Returns the dim at which a kernel is cut: its part i then touches part i alone of all that is written."""
        dim = None
        if self._own(kernel):
            dim = min(self._dims(kernel), default=None)
            if dim is None or not all(self.known.get(one.buffer) for one in kernel.writes()):
                raise Mixed
        if dim is None and any(one.buffer.kind == "sum" for one in kernel.writes()):
            raise Mixed  # each group would add all of it
        for array, dims in _walked(kernel):
            step, buffer = 0 if dim is None else _along(array, dims, dim), array.buffer
            if buffer.kind == "value":
                lies = buffer.value is not None  # else its elements are their places
            elif _written(buffer):
                lies = bool(self.known.get(buffer))
            else:
                lies = self.known.setdefault(buffer, step) == step
            if step and not lies:
                raise Mixed
        return dim

    def _aligned(self, kernel: Kernel, array: Array, dims: tuple[int, ...]) -> Iterator[int]:
        """Yields the dims along which this is the buffer's parts, each within itself."""
        step = self.known[array.buffer]
        period = step * self.size
        sizes = [*zip(array.shape, array.strides, strict=True)]
        if isinstance(kernel, Gather) and array is kernel.source:
            sizes += zip(kernel.sizes, kernel.steps, strict=True)
        if array.buffer.numel % period:
            return
        for d, here in zip(dims, sizes, strict=False):
            if here != (self.size, step):
                continue
            # Whole periods lead to the same part. All other dims together must stay within it.
            others = [(n - 1) * s for k, (n, s) in enumerate(sizes) if k != dims.index(d) and s % period]
            start = array.offset % period
            if start + sum(min(0, x) for x in others) >= 0 and start + sum(max(0, x) for x in others) < step:
                yield d


def _whole_dims(kernel: Kernel) -> set[int]:
    """The dims of a kernel along which it sums up or goes on: it is not cut there."""
    if isinstance(kernel, Matmul):
        return {len(kernel.out.shape)}
    return {*kernel.over} if isinstance(kernel, Reduce) else {kernel.dim} if isinstance(kernel, Running) else set()


def _of_dims(kernel: Kernel, moved: Callable[[int], Sequence[int]], new: Callable[[Array], Array]) -> Kernel:
    """A kernel on arrays of other dims; `moved` says which ones have come of one."""
    kernel = with_arrays(kernel, new)
    if isinstance(kernel, Reduce):
        return dataclasses.replace(kernel, over=tuple(d for one in kernel.over for d in moved(one)))
    return dataclasses.replace(kernel, dim=moved(kernel.dim)[0]) if isinstance(kernel, Running) else kernel


def _in_two(array: Array, dim: int, size: int) -> Array:
    inner, stride = array.shape[dim] // size, array.strides[dim]
    shape = (*array.shape[:dim], size, inner, *array.shape[dim + 1 :])
    return Array(array.buffer, shape, (*array.strides[:dim], stride * inner, *array.strides[dim:]), array.offset)


class _Part:
    """Makes a group's part of a step: kernels as long as its share, scratch memory as large."""

    def __init__(self, step: LoweredStep, cuts: list[Cut]) -> None:
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
        return sorted(found, reverse=True)

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
        cuts = {cut.dims[n]: cut.share for cut in self.cuts if cut.dims[n] is not None}
        if not cuts:
            return with_arrays(kernel, self._inside)
        if isinstance(kernel, Matmul):
            made = [
                self._cut(one, {dims.index(d): share for d, share in cuts.items() if d in dims})
                for one, dims in _walked(kernel)
            ]
            return Matmul(*made)
        if isinstance(kernel, Gather):
            steps = tuple(self._shrunk(kernel.source.buffer, step) for step in kernel.steps)
            kernel = dataclasses.replace(kernel, steps=steps)
        # No dim of a walk has one element: others would not be walked with it.
        kept = [d for d in range(len(kernel.out.shape)) if cuts.get(d) != 1]

        def new(one: Array) -> Array:
            one = self._cut(one, cuts)
            return Array(one.buffer, *(tuple(x[d] for d in kept) for x in (one.shape, one.strides)), one.offset)

        return _of_dims(kernel, lambda d: [kept.index(d)], new)

    def _cut(self, array: Array, cuts: Mapping[int, int]) -> Array:
        shape = tuple(cuts.get(d, size) for d, size in enumerate(array.shape))
        return self._inside(Array(array.buffer, shape, array.strides, array.offset))

    def _inside(self, array: Array) -> Array:
        """The array where the group has its own of the buffer: in scratch memory, and the two places of a carry."""
        buffer, ways = array.buffer, self._ways(array.buffer)
        if not ways or not self._moves(buffer):
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
