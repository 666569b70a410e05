"""Walks put into nests: the same as by looking at every unit for every walk, and no work that outgrows the body."""

import cProfile
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.emitter.ir.kernels import Gather, Kernel, Matmul, Point, Reduce, Walk
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup, group_walks
from tensorloop.loop.compiled.run.plan import plans

# -- the reference


def by_looking(kernels: Sequence[Kernel]) -> list[Unit]:
    """Each walk joins the first nest that fits, from the last unit back to the one that it needs."""
    units: list[Unit] = []
    for kernel in kernels:
        if not isinstance(kernel, Walk):
            units.append(kernel)
            continue
        home = None
        for unit in reversed(units):
            needs = meets(kernel, unit)
            if isinstance(unit, WalkGroup) and fits(kernel, unit):
                home = unit
            if needs:
                break
        if home is None:
            units.append(home := WalkGroup(kernel.space, []))
        home.walks.append(kernel)
        home.over = kernel.over if isinstance(kernel, Reduce) else home.over
    return units


def meets(kernel: Walk, unit: Unit) -> bool:
    """Whether a walk must come after a unit began."""
    written, read = ({a.buffer for a in arrays} for arrays in (unit.writes(), unit.reads()))
    return kernel.out.buffer in written | read or any(a.buffer in written for a in kernel.reads())


def fits(kernel: Walk, group: WalkGroup) -> bool:
    """Whether a walk may be in one nest with others."""
    reduces = [walk for walk in group.walks if isinstance(walk, Reduce)]
    if group.space != kernel.space or (isinstance(kernel, Reduce) and reduces and group.over != kernel.over):
        return False
    for array in kernel.reads():
        made = [walk for walk in group.walks if walk.out.buffer is array.buffer]
        gathered = isinstance(kernel, Gather) and array is kernel.source
        if made and (gathered or any(walk in reduces for walk in made) or [walk.out for walk in made] != [array]):
            return False
    if any(a.buffer is kernel.out.buffer for a in group.reads()):
        return False
    others = [walk for walk in group.walks if walk.out.buffer is kernel.out.buffer]
    piece = kernel.piece if isinstance(kernel, Point) else None
    return not others or (piece is not None and all(isinstance(w, Point) and w.piece is piece for w in others))


# -- random kernels


def contiguous(buffer: Region, shape: tuple[int, ...], offset: int = 0) -> Array:
    strides = tuple(torch.empty(shape, device="meta").stride())
    return Array(buffer, shape, strides, offset)


def drawn(seed: int, count: int) -> list[Kernel]:
    """Kernels over a few buffers, of two spaces."""
    rng = random.Random(seed)
    kernels: list[Kernel] = []
    buffers = [Region("scratch", i, 24, torch.float64) for i in range(rng.choice([4, 12, 40]))]
    shapes, pieces = [(4, 6), (6, 4), (4, 3)], [object(), object()]

    def some(shape: tuple[int, ...]) -> Array:
        return contiguous(rng.choice(buffers), shape, rng.choice([0, 0, 0, 3]))

    for _ in range(count):
        shape, kind = rng.choice(shapes), rng.random()
        if kind < 0.6:
            piece = rng.choice([None, None, *pieces])
            ins = tuple(some(shape) for _ in range(rng.choice([0, 1, 2])))
            kernels.append(Point("add", max, ins, some(shape), piece))
        elif kind < 0.8:
            over = rng.choice([(0,), (1,)])
            kernels.append(Reduce("sum", some(shape), over, some(shape)))
        elif kind < 0.9:
            kernels.append(Gather(some(shape), (some(shape),), (1,), (4,), some(shape)))
        else:
            kernels.append(Matmul(some((4, 6)), some((6, 4)), some((4, 3))))
    return kernels


@pytest.mark.parametrize("seed", range(200))
def test_nests_are_those_found_by_looking_at_each(seed: int) -> None:
    kernels = drawn(seed, 30)
    found, expected = group_walks(kernels), by_looking(kernels)

    def parts(units: Sequence[Unit]) -> list[object]:
        return [
            (unit.space, unit.over, list(map(id, unit.walks))) if isinstance(unit, WalkGroup) else id(unit)
            for unit in units
        ]

    assert parts(found) == parts(expected)


# -- visits


def chain(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Operations that are one nest."""

    def body(y: Tensor, x: Tensor) -> Tensor:
        for i in range(n // 2):
            y = torch.tanh(y) * x if i % 2 else y + x.sigmoid()
        return y

    return body


def mixed(n: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Reductions, products, parts and writes in place: many units."""

    def body(y: Tensor, x: Tensor) -> Tensor:
        for i in range(n // 10):
            y = torch.tanh(y - y.mean(1, keepdim=True)) @ x.t() @ x
            y = torch.cat([y[:, 4:] * x[:, :4], y[:, :4]], 1)
            y.mul_(0.5).add_(x.softmax(i % 2))
        return y

    return body


def visits(body: Callable[[Tensor, Tensor], Tensor]) -> Counter[str]:
    """How often each function of ours is called for a first call and its backward."""
    plans.clear()
    h, xs = torch.randn(3, 8, requires_grad=True), torch.randn(2, 3, 8)
    profile = cProfile.Profile()
    profile.enable()
    last, _ = tl.scan(lambda h, x: (body(h, x), None), h, xs, compile="strict")
    last.sum().backward()
    profile.disable()
    found = Counter[str]()
    for entry in profile.getstats():
        if not isinstance(entry.code, str) and "/tensorloop/" in entry.code.co_filename:
            found[f"{entry.code.co_filename}:{entry.code.co_qualname}"] += entry.callcount
    return found


@pytest.mark.parametrize("of", [chain, mixed])
def test_no_function_is_called_more_often_than_the_body_is_long(of: Callable[[int], Callable[..., Tensor]]) -> None:
    visits(of(10))
    few, more, many = (visits(of(n)) for n in (10, 100, 400))
    grown = {
        name: (few[name], more[name], many[name])
        for name in many
        if many[name] - more[name] > 1.3 * 300 / 90 * (more[name] - few[name]) + 300
    }
    assert not grown
    assert len(many) > 300


def test_a_function_that_outgrows_the_body_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorloop.compiler.emitter.write import units

    monkeypatch.setattr(units, "group_walks", by_looking)
    more, many = (visits(chain(n)) for n in (100, 200))
    name = next(name for name in many if name.endswith("_ToOut.writes"))
    assert many[name] > 3 * more[name]
