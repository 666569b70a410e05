"""Orders from coordinates alone: along an axis, by patches, along curves that fill space."""

import math
from itertools import permutations, product

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.ordering.problem import Orders, Problem

AXES = 3  # of more coordinates the three of widest range count
_BITS = 16  # cells of curves along an axis: 2 ** 16


def points_of(problem: Problem) -> tuple[Tensor, ...]:
    """The coordinates, of at most AXES axes, one tensor for all or one for queries and one for keys."""
    graph = problem.graph
    if not graph.coords:
        raise WrongValue("this method goes by coordinates, and the graph has none; give coords=")
    points = torch.cat(graph.coords)
    if points.shape[1] <= AXES or not len(points):
        return graph.coords
    widest = (points.amax(0) - points.amin(0)).argsort(descending=True, stable=True)[:AXES].sort().values
    return tuple(x[:, widest] for x in graph.coords)


def sort_by_axes(points: Tensor, axes: tuple[int, ...]) -> Tensor:
    """(N,) int32: by the first of the axes, equal ones by the second, and so on."""
    order = torch.arange(len(points), device="cpu")
    for axis in reversed(axes):
        order = order[points[order, axis].argsort(stable=True)]
    return order.to(torch.int32)


def along_axes(problem: Problem) -> list[Orders]:
    """One order for each axis."""
    points = points_of(problem)
    axes = range(points[0].shape[1])
    return [tuple(sort_by_axes(x, (a, *(b for b in axes if b != a))) for x in points) for a in axes]


def along_morton(problem: Problem) -> Orders:
    """Bits of the axes in turn (Morton 1966)."""
    return tuple(_interleave(x).argsort(stable=True).to(torch.int32) for x in _quantise(points_of(problem)))


def along_hilbert(problem: Problem) -> Orders:
    """Hilbert 1891, in any number of dimensions by Skilling 2004."""
    return tuple(_hilbert(x).argsort(stable=True).to(torch.int32) for x in _quantise(points_of(problem)))


def along_moore(problem: Problem) -> Orders:
    """Moore 1900: four of Hilbert's curves that close a circle, in two dimensions."""
    cells = _quantise(points_of(problem))
    if cells[0].shape[1] != 2:
        raise WrongValue(f"Moore's curve has two dimensions, coords have {cells[0].shape[1]}; take hilbert")
    return tuple(_moore(x).argsort(stable=True).to(torch.int32) for x in cells)


def by_patches(problem: Problem) -> list[Orders]:
    """Boxes of whole cells of a grid, one for each way to fill a block with whole cells."""
    graph = problem.graph
    if not graph.grid:
        raise WrongValue("patches are boxes of the cells of a grid; make the graph by Graph.from_grid")
    cells = graph.coords[0].long()
    found = []
    for patch in _boxes(graph.grid, problem.size):
        sides = torch.tensor(patch, device="cpu")
        keys = torch.cat([cells // sides, cells % sides], 1)
        radix = (keys.amax(0) + 1).flip(0).cumprod(0).flip(0)[1:]  # all keys as the digits of one number
        found.append(((keys[:, :-1] @ radix + keys[:, -1]).argsort().to(torch.int32),))
    return found


def _boxes(grid: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Sides of boxes of exactly `size` cells, the nearest to cubes first."""
    sides = [[s for s in range(1, min(side, size) + 1) if size % s == 0 or s == side] for side in grid]
    boxes = [box for box in product(*sides) if math.prod(box) == size]
    return sorted(boxes, key=lambda box: (max(box) / min(box), box))[:32]


def _quantise(points: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cells of one size for all axes, int64."""
    every = torch.cat(points)
    if not every.numel():
        return tuple(x.long() for x in points)
    low = every.amin(0)
    widest = (every.amax(0) - low).max().clamp(min=torch.finfo(torch.float64).tiny)
    bits = min(_BITS, 62 // every.shape[1])
    return tuple(((x - low) / widest * (2**bits - 1)).long() for x in points)


def _interleave(cells: Tensor) -> Tensor:
    d = cells.shape[1]
    code = cells.new_zeros(len(cells))
    for bit in range(min(_BITS, 62 // max(d, 1))):
        for axis in range(d):
            code |= ((cells[:, axis] >> bit) & 1) << (bit * d + d - 1 - axis)
    return code


def _hilbert(cells: Tensor, bits: int | None = None) -> Tensor:
    n, d = cells.shape
    if not d:
        return cells.new_zeros(n)
    bits = min(_BITS, 62 // d) if bits is None else bits
    x = list(cells.unbind(1))
    for bit in range(bits - 1, 0, -1):
        mask = (1 << bit) - 1
        for axis in range(d):
            high = (x[axis] >> bit) & 1 == 1
            swapped = (x[0] ^ x[axis]) & mask
            first = torch.where(high, x[0] ^ mask, x[0] ^ swapped)
            if axis:
                x[axis] = torch.where(high, x[axis], x[axis] ^ swapped)
            x[0] = first
    for axis in range(1, d):
        x[axis] = x[axis] ^ x[axis - 1]
    turned = torch.zeros_like(x[0])
    for bit in range(bits - 1, 0, -1):
        turned = torch.where((x[-1] >> bit) & 1 == 1, turned ^ ((1 << bit) - 1), turned)
    return _interleave(torch.stack([part ^ turned for part in x], 1))


def _moore(cells: Tensor) -> Tensor:
    """Quadrants left low, left high, right high, right low; in each Hilbert's curve, turned so that they join."""
    half = 1 << (_BITS - 1)
    x, y = cells.unbind(1)
    right, high = x >= half, y >= half
    within_x, within_y = x & (half - 1), y & (half - 1)
    last = half - 1
    # Hilbert's curve starts at (0, 0) and ends at (last, 0). Up on the left, (u, v) = (y, last - x): from the middle
    # below to the middle above; down on the right, (last - y, x).
    u = torch.where(right, last - within_y, within_y)
    v = torch.where(right, within_x, last - within_x)
    quadrant = torch.where(right, torch.where(high, 2, 3), torch.where(high, 1, 0))
    code = _hilbert(torch.stack([u, v], 1), _BITS - 1)
    return code + (quadrant << (2 * _BITS))


def every_turn(d: int) -> list[tuple[int, ...]]:
    """The orders in which d axes can be cut."""
    return list(permutations(range(d)))
