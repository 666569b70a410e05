"""Kernels put together: what nobody reads is dropped, additions join products, walks over one space share one nest."""

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
    made: list[Kernel] = []
    for kernel in kernels:
        found = _addition(kernel, products) if isinstance(kernel, Point) and kernel.name == "add" else None
        if found is None or found[0].addend is not None or found[0] not in made:
            made.append(kernel)
            continue
        product, other = found
        if readers[product.out.buffer] != 1 or product.out.buffer in kept:
            made.append(kernel)
            continue
        made.remove(product)
        (out,), shape = kernel.writes(), product.out.shape
        joined = Matmul(product.a, product.b, _unsqueezed(out, shape), _unsqueezed(other, shape))
        products[out.buffer] = joined
        made.append(joined)
    return made


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
    """Each walk joins the last nest that it can be moved to, before which lies nothing that it needs."""
    units: list[Unit] = []
    for kernel in kernels:
        if not isinstance(kernel, Walk):
            units.append(kernel)
            continue
        home = None
        for unit in reversed(units):
            joins, needs = _meeting(kernel, unit)
            if joins:
                home = unit
            if needs:
                break
        # Moved up to `home` it passes units that give it nothing and take nothing from it: `needs` ends the search.
        if isinstance(home, WalkGroup):
            home.walks.append(kernel)
            if isinstance(kernel, Reduce):
                home.over = kernel.over
        else:
            units.append(WalkGroup(kernel.space, [kernel], kernel.over if isinstance(kernel, Reduce) else ()))
    return units


def _meeting(kernel: Walk, unit: Unit) -> tuple[bool, bool]:
    """(whether it may join, whether it must come after the unit began)."""
    needs, aligned = False, True
    written = {array.buffer: [] for array in unit.writes()}
    for array in unit.writes():
        written[array.buffer].append(array)
    reduced = (
        {walk.out.buffer for walk in unit.walks if isinstance(walk, Reduce)} if isinstance(unit, WalkGroup) else set()
    )
    for array in kernel.reads():
        if array.buffer in written:
            needs = True
            gathered = isinstance(kernel, Gather) and array is kernel.source
            aligned = aligned and not gathered and array.buffer not in reduced and written[array.buffer] == [array]
    out = kernel.out
    if out.buffer in written:
        needs = True
        aligned = aligned and isinstance(unit, WalkGroup) and isinstance(kernel, Point) and _one_piece(kernel, unit)
    if any(array.buffer is out.buffer for array in unit.reads()):
        needs, aligned = True, False
    if not isinstance(unit, WalkGroup) or unit.space != kernel.space:
        return False, needs
    if isinstance(kernel, Reduce) and any(isinstance(walk, Reduce) for walk in unit.walks) and unit.over != kernel.over:
        return False, needs
    return aligned, needs


def _one_piece(kernel: Point, group: WalkGroup) -> bool:
    """Whether all that write the kernel's buffer here are pieces of one thing with it."""
    others = [walk for walk in group.walks if walk.out.buffer is kernel.out.buffer]
    return kernel.piece is not None and all(isinstance(w, Point) and w.piece is kernel.piece for w in others)


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
