"""Kernels put together: what nobody reads is dropped, additions join products, walks over one space share one nest."""

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from tensorloop.compiler.emitter.ir.kernels import (
    CallOut,
    Gather,
    Kernel,
    Matmul,
    Matrix,
    Point,
    Reduce,
    Running,
    Scatter,
    Walk,
)
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.lengths import grows


@dataclasses.dataclass(eq=False)
class WalkGroup:
    """Walks in one nest of loops over `space`; the dims in `over` are reduced by those that reduce."""

    space: tuple[int, ...]
    walks: list[Walk]
    over: tuple[int, ...] = ()

    def reads(self) -> list[Array]:
        """The arrays that its members read."""
        return [array for walk in self.walks for array in walk.reads()]

    def writes(self) -> list[Array]:
        """The arrays that its members write."""
        return [array for walk in self.walks for array in walk.writes()]


Unit = WalkGroup | Matmul | Scatter | Running | CallOut | Matrix


def drop_unread(kernels: Sequence[Kernel], kept: Iterable[Region]) -> list[Kernel]:
    """The kernels whose results leave the step's scratch memory, or go into ones whose results do."""
    wanted, found = set(kept), []
    for kernel in reversed(kernels):
        checks = isinstance(kernel, Matrix) and kernel.check is not None
        if checks or any(a.buffer.kind != "scratch" or a.buffer in wanted for a in kernel.writes()):
            wanted.update(array.buffer for array in kernel.reads())
            found.append(kernel)
    return found[::-1]


def join_additions(kernels: Sequence[Kernel], kept: Iterable[Region]) -> list[Kernel]:
    """a @ b + c where nobody else sees a @ b: the accumulators begin with c."""
    kernels, kept = list(kernels), set(kept)
    readers = Counter(array.buffer for kernel in kernels for array in kernel.reads())
    products = {kernel.out.buffer: kernel for kernel in kernels if isinstance(kernel, Matmul)}
    made: dict[int, Kernel] = {}  # by id
    for kernel in kernels:
        found = _addition(kernel, products) if isinstance(kernel, Point) and kernel.name == "add" else None
        if found is None or found[0].addend is not None or id(found[0]) not in made:
            made[id(kernel)] = kernel
            continue
        product, other = found
        if readers[product.out.buffer] != 1 or product.out.buffer in kept:
            made[id(kernel)] = kernel
            continue
        del made[id(product)]
        (out,), shape = kernel.writes(), product.out.shape
        joined = Matmul(product.a, product.b, _unsqueezed(out, shape), _unsqueezed(other, shape))
        products[out.buffer] = joined
        made[id(joined)] = joined
    return list(made.values())


def _addition(kernel: Point, products: dict[Region, Matmul]) -> tuple[Matmul, Array] | None:
    for n, one in enumerate(kernel.ins):
        product, other = products.get(one.buffer), kernel.ins[1 - n]
        if product is None or other.buffer is one.buffer or kernel.out.dtype != product.out.dtype:
            continue
        if other.dtype == product.out.dtype and one == product.out.squeeze() and one.buffer.kind == "scratch":
            return product, other
    return None


def _unsqueezed(array: Array, shape: Sequence[int]) -> Array:
    """The dims of one element again."""
    strides = iter(array.strides)
    return Array(array.buffer, tuple(shape), tuple(0 if size == 1 else next(strides) for size in shape), array.offset)


def group_walks(kernels: Sequence[Kernel]) -> list[Unit]:
    """Each walk joins the first nest that it can be moved to: behind the last unit that gives it or takes something."""
    units: list[Unit] = []
    touched: list[_Touched] = []  # of each unit
    last_write, last_touch = dict[Region, int](), dict[Region, int]()  # the last unit that writes, or touches, a buffer
    nests: dict[tuple[int, ...], list[int]] = {}  # the groups of each space
    for kernel in kernels:
        at = len(units)
        if isinstance(kernel, Walk):
            needed = [
                *(last_write.get(array.buffer, -1) for array in kernel.reads()),
                last_touch.get(kernel.out.buffer, -1),
            ]
            at = _home(kernel, units, touched, nests.get(kernel.space, ()), max(needed))
        if at == len(units):
            if isinstance(kernel, Walk):
                units.append(WalkGroup(kernel.space, []))
                nests.setdefault(kernel.space, []).append(at)
            else:
                units.append(kernel)
            touched.append(_Touched())
        unit = units[at]
        if isinstance(unit, WalkGroup) and isinstance(kernel, Walk):
            unit.walks.append(kernel)
            unit.over = kernel.over if isinstance(kernel, Reduce) else unit.over
        touched[at].add(kernel)
        for array in kernel.writes():
            last_write[array.buffer] = max(at, last_write.get(array.buffer, 0))
        for array in (*kernel.reads(), *kernel.writes()):
            last_touch[array.buffer] = max(at, last_touch.get(array.buffer, 0))
    return units


class _Touched:
    """Buffers that a unit writes, by which pieces of a concatenation (None for no piece), reads, and reduces to."""

    def __init__(self) -> None:
        self.written: dict[Region, list[Array]] = {}
        self.pieces: dict[Region, set[object]] = {}
        self.read, self.reduced = set[Region](), set[Region]()

    def add(self, kernel: Kernel) -> None:
        for array in kernel.writes():
            self.written.setdefault(array.buffer, []).append(array)
            self.pieces.setdefault(array.buffer, set()).add(kernel.piece if isinstance(kernel, Point) else None)
        self.read.update(array.buffer for array in kernel.reads())
        if isinstance(kernel, Reduce):
            self.reduced.add(kernel.out.buffer)


def _home(kernel: Walk, units: Sequence[Unit], touched: Sequence[_Touched], nests: Sequence[int], needed: int) -> int:
    """The unit that a walk joins: the one that it needs, or the first of its space behind that; else a new one."""
    for k in range(bisect.bisect_left(nests, needed), len(nests)):
        at, unit = nests[k], units[nests[k]]
        assert isinstance(unit, WalkGroup)
        other = isinstance(kernel, Reduce) and touched[at].reduced and unit.over != kernel.over
        if not other and (at > needed or _is_aligned(kernel, touched[at])):
            return at
    return len(units)


def _is_aligned(kernel: Walk, touched: _Touched) -> bool:
    """Whether a walk takes from a nest of its space only what the same turn of it made, and gives it nothing."""
    for array in kernel.reads():
        if array.buffer in touched.written:
            gathered = isinstance(kernel, Gather) and array is kernel.source
            if gathered or array.buffer in touched.reduced or touched.written[array.buffer] != [array]:
                return False
    out = kernel.out.buffer
    if out in touched.read:
        return False
    if out not in touched.written:  # else all that write it are pieces of one thing
        return True
    return isinstance(kernel, Point) and kernel.piece is not None and touched.pieces[out] == {kernel.piece}


def find_stored(units: Sequence[Unit], kept: Iterable[Region]) -> set[Region]:
    """Buffers that must lie in memory: read by another unit, or seen from outside."""
    found = set(kept)
    for unit in units:
        own = {array.buffer for array in unit.writes()} if isinstance(unit, WalkGroup) else set()
        for array in unit.reads():
            if array.buffer not in own:
                found.add(array.buffer)
    partial = Counter(array.buffer for unit in units for array in unit.writes())
    # Pieces written by several kernels are read as a whole, which no register holds.
    found.update(buffer for buffer, writers in partial.items() if writers > 1)
    found.update(a.buffer for unit in units if not isinstance(unit, WalkGroup) for a in unit.writes())
    found.update(
        a.buffer
        for unit in units
        if isinstance(unit, WalkGroup)
        for w in unit.walks
        if isinstance(w, Reduce)
        for a in w.writes()
    )
    found.update(array.buffer for unit in units for array in unit.writes() if array.buffer.kind != "scratch")
    return found


def split_by_readers(kernels: Sequence[Kernel], kept: Iterable[Region]) -> list[Kernel]:
    """A kernel that is only read in slices is made slice by slice, so that each joins its readers' nest."""
    kernels, kept = list(kernels), set(kept)
    readers: dict[Region, list[Array]] = {}
    writers = Counter(array.buffer for kernel in kernels for array in kernel.writes())
    for kernel in kernels:
        for array in kernel.reads():
            readers.setdefault(array.buffer, []).append(array)
    walked = {a for kernel in kernels if isinstance(kernel, Point | Reduce) for a in kernel.reads()}
    made: list[Kernel] = []
    for kernel in reversed(kernels):
        slices = None
        if isinstance(kernel, Point) and not grows(kernel.out.shape):
            buffer = kernel.out.buffer
            views = list(dict.fromkeys(readers.get(buffer, [])))
            usable = buffer.kind == "scratch" and buffer not in kept and writers[buffer] == 1
            if usable and len(views) > 1 and all(view in walked for view in views):
                slices = _slices(kernel, views)
        if slices is None:
            made.append(kernel)
        else:
            assert isinstance(kernel, Point)
            piece = object()
            for one in slices:
                one.piece = piece
                for array in one.ins:
                    readers.setdefault(array.buffer, []).append(array)
                    walked.add(array)
                made.append(one)
            writers[kernel.out.buffer] += len(slices) - 1
    return made[::-1]


def _slices(kernel: Point, views: Sequence[Array]) -> list[Point] | None:
    """The kernel over each of the views alone, where they are boxes along one dim that do not meet."""
    out = kernel.out
    cuts, found = [], []
    for view in views:
        dims = [n for n in range(len(out.shape)) if n >= len(view.shape) or view.shape[n] != out.shape[n]]
        if len(view.shape) != len(out.shape) or view.strides != out.strides or len(dims) != 1:
            return None
        dim = dims[0]
        start = (view.offset - out.offset) // out.strides[dim]
        if view.offset - out.offset != start * out.strides[dim] or not 0 <= start <= out.shape[dim] - view.shape[dim]:
            return None
        cuts.append((dim, start, start + view.shape[dim]))
        ins = tuple(Array(a.buffer, view.shape, a.strides, a.offset + start * a.strides[dim]) for a in kernel.ins)
        found.append(Point(kernel.name, kernel.function, ins, view))
    cuts.sort()
    apart = all(a[0] == b[0] and a[2] <= b[1] for a, b in itertools.pairwise(cuts))
    return found if apart else None
