"""Who touches what: every element that each thread reads or writes between two barriers, found one by one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from tensorloop.compiler.emitter.ir.kernels import CallOut, Gather, Matmul, Matrix, Scatter
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.function import LoopWriter
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.emitter.write.team import DimShare, Planner, Team
from tensorloop.compiler.step import Step
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.native_core import lowered

Walked = tuple[Array, Sequence[range], Sequence[tuple[int, int]], bool]  # ranges of its dims; (size, step) more; writes
Touched = tuple[dict[object, set[int]], dict[object, set[int]]]  # elements read and written, by whose memory it is


def assert_no_race(rec: Step, count: int) -> None:
    """No thread of `count` writes what another one reads or writes before they have met.

    Nor would it where every buffer had memory of its own, so that nobody waits for that.
    """
    made = LoopWriter(lowered(rec), host())
    assert made.team is not None
    _go(made, made.team, made.offsets, count)
    team = Planner(made.packed, made.stored, {}, host()).plan(made.step, made.units, [1] * len(made.units))
    assert team is not None
    assert team.barriers <= made.team.barriers or team.cuts != made.team.cuts
    _go(made, team, {}, count)


def _go(made: LoopWriter, team: Team, places: Mapping[Region, int], count: int) -> None:
    step = made.step
    threads: list[Touched] = [({}, {}) for _ in range(count)]
    if step.going is not None:  # after the barrier at the end of the step before
        for touched in threads:
            _note(places, touched, [(step.going, [range(n) for n in step.going.shape], (), False)])
    for n, unit in enumerate(made.units):
        if team.waits[n]:
            _check(threads)
        panels = made.packed.get(unit.b) if isinstance(unit, Matmul) else None
        packs = panels if panels is not None and panels.buffer.kind == "scratch" else None
        if packs is not None:
            _note(places, threads[0], [(packs.source, [range(n) for n in packs.source.shape], (), False)])
            _note(places, threads[0], [_all(packs.buffer, True)])
            if team.packing[n]:
                _check(threads)
        for number, touched in enumerate(threads):
            cut = team.cuts[n]
            if cut is None and number:
                continue
            _note(places, touched, _walked(unit, cut, number, count))
            if packs is not None:
                _note(places, touched, [_all(packs.buffer, False)])
    _check(threads)


def _all(buffer: Region, writes: bool) -> Walked:
    return Array(buffer, (buffer.numel,), (1,)), [range(buffer.numel)], (), writes


def _own(cut: DimShare, number: int, count: int) -> range:
    low, high = (min(cut.size, cut.parts * n // count * cut.grain) for n in (number, number + 1))
    return range(low, high)


def _walked(unit: Unit, cut: DimShare | None, number: int, count: int) -> Iterator[Walked]:
    """Every array of a unit, and how much of its dims a thread walks."""
    if isinstance(unit, Matrix | CallOut):  # one thread does it
        assert cut is None
        yield from ((array, [range(n) for n in array.shape], (), False) for array in unit.reads())
        yield from ((array, [range(n) for n in array.shape], (), True) for array in unit.writes())
        return
    space = unit.space if isinstance(unit, WalkGroup) else None
    if isinstance(unit, Matmul):
        space = unit.out.shape
    elif not isinstance(unit, WalkGroup):
        space = unit.index.shape if isinstance(unit, Scatter) else unit.array.shape
    assert space is not None
    own = [range(size) if cut is None or dim != cut.dim else _own(cut, number, count) for dim, size in enumerate(space)]
    if isinstance(unit, WalkGroup):
        for walk in unit.walks:
            for array in walk.reads():
                more = list[tuple[int, int]]()
                if isinstance(walk, Gather) and array is walk.source:
                    more += zip(walk.sizes, walk.steps, strict=True)
                yield array, own, more, False
            yield walk.out, own, (), True
    elif isinstance(unit, Matmul):
        *batch, m, n = own
        k = range(unit.a.shape[-1])
        yield unit.a, [*batch, m, k], (), False
        yield unit.b, [*batch, k, n], (), False
        for array, writes in ((unit.out, True), (unit.addend, False)):
            if array is not None:
                yield array, own, (), writes
    elif isinstance(unit, Scatter):
        anywhere = [range(unit.out.shape[dim]) if dim == unit.dim else one for dim, one in enumerate(own)]
        yield unit.index, own, (), False
        yield unit.source, own, (), False
        yield unit.out, anywhere, (), False
        yield unit.out, anywhere, (), True
    else:
        yield unit.array, own, (), False
        yield unit.out, own, (), True


def _note(places: Mapping[Region, int], touched: Touched, walked: Iterable[Walked]) -> None:
    for array, ranges, more, writes in walked:
        buffer = array.buffer
        if not buffer.written:
            continue
        elements = torch.tensor([array.offset])
        dims = [
            *((list(one), step) for one, step in zip(ranges, array.strides, strict=True)),
            *((list(range(size)), step) for size, step in more),
        ]
        for numbers, step in dims:
            elements = (elements[:, None] + torch.tensor(numbers, dtype=torch.int64) * step).flatten()
        if buffer in places:  # in bytes: buffers that live at other times share memory
            size = buffer.dtype.itemsize
            elements = (places[buffer] + elements[:, None] * size + torch.arange(size)).flatten()
        touched[writes].setdefault("scratch" if buffer in places else buffer, set()).update(elements.tolist())


def _check(threads: list[Touched]) -> None:
    """They meet: what was touched since is compared, and forgotten."""
    for a, (_, written) in enumerate(threads):
        for b, others in enumerate(threads):
            if a != b:
                for where, places in written.items():
                    for other in others:
                        assert places.isdisjoint(other.get(where, ())), (a, b, where)
    for touched in threads:
        for one in touched:
            one.clear()
