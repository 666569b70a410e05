"""Slabs cut into slabs, each of whole blocks: Sort-Tile-Recursive packing, with searched counts of slabs.

Only the sets of positions in blocks matter to the number of blocks that meet, not their order. So slabs are cut at
multiples of the block, and the counts of slabs along each axis are tried out on the graph itself: sort once along every
axis, and a candidate costs O(d N) to cut and O(E) to count.

Source: Leutenegger, Lopez & Edgington 1997.
"""

import math
from itertools import product

import torch
from torch import Tensor

from tensorloop.kernels.cpu.slabs import cut_slabs, try_slabs
from tensorloop.ordering.curves import every_turn, points_of, sort_by_axes
from tensorloop.ordering.problem import Orders, Problem

EFFORT = 3e8  # edges and coordinates read in all candidates of a search
_KEPT = 6  # candidates beside which others are tried, and that are counted more closely at the end
_STEPS = (-3, -2, -1, 1, 2, 3)


def search_slabs(problem: Problem, points: tuple[Tensor, ...] | None = None, effort: float = EFFORT) -> Orders:
    """The best counts of slabs that were found; the same ones each time."""
    points = points_of(problem) if points is None else points
    d = points[0].shape[1]
    if not d or not problem.rows or not problem.columns:
        return problem.natural()
    turns = {turn: _sort_cyclic(points, turn) for turn in every_turn(d)}
    each = len(problem.graph.indices) / problem.every + 8 * d * sum(map(len, points))
    budget = max(16, int(effort / max(each, 1)))
    tried: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {turn: {} for turn in turns}
    fresh = {turn: _spread(problem, d, budget // (2 * len(turns))) for turn in turns}
    ranked: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    while any(fresh.values()) and budget > 0:
        for turn, counts in fresh.items():
            counts = counts[: max(budget, 1 - bool(ranked))]
            budget -= len(counts)
            tried[turn] |= zip(counts, _try(problem, turns[turn], counts), strict=True)
        ranked = sorted((blocks, turn, count) for turn, found in tried.items() for count, blocks in found.items())
        fresh = {turn: [] for turn in turns}
        for _, turn, count in ranked[:_KEPT]:
            fresh[turn] += [c for c in _beside(count, problem) if c not in tried[turn] and c not in fresh[turn]]
    few = [_cut(turns[turn], count, problem.size) for _, turn, count in ranked[: _KEPT if problem.every > 1 else 1]]
    return min(few, key=lambda orders: problem.count(orders, max(1, problem.every // 8)))


def _cut(orders: tuple[Tensor, ...], count: tuple[int, ...], size: int) -> Orders:
    slabs = torch.tensor(count, dtype=torch.int64, device="cpu")
    return tuple(cut_slabs(x, slabs, size) for x in orders)


def _sort_cyclic(points: tuple[Tensor, ...], turn: tuple[int, ...]) -> tuple[Tensor, ...]:
    """(d, N) int32 for each tensor: sorted along each axis of the turn, equal ones by those that follow."""
    d = len(turn)
    starts = [turn[i:] + turn[:i] for i in range(d)]
    return tuple(torch.stack([sort_by_axes(x, axes) for axes in starts]) for x in points)


def _try(problem: Problem, orders: tuple[Tensor, ...], counts: list[tuple[int, ...]]) -> list[int]:
    if not counts:
        return []
    graph, d = problem.graph, orders[0].shape[0]
    slabs = torch.tensor(counts, dtype=torch.int64, device="cpu").reshape(len(counts), d - 1)
    return try_slabs(graph.indptr, graph.indices, orders, slabs, problem.size, problem.every).tolist()


def _spread(problem: Problem, d: int, most: int) -> list[tuple[int, ...]]:
    """Counts of slabs from 1 to the number of blocks, closer where they are few, at most about `most`."""
    blocks, ratio = max(problem.rows, problem.columns), 1.0
    while True:
        sizes = [1]
        while sizes[-1] < blocks:
            sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * ratio)), blocks))
        if len(sizes) ** (d - 1) <= 2 * max(most, 8) or ratio > 8:
            return [c for c in product(sizes, repeat=d - 1) if math.prod(c) <= blocks]
        ratio *= 1.05


def _beside(count: tuple[int, ...], problem: Problem) -> list[tuple[int, ...]]:
    most = max(problem.rows, problem.columns)
    return [
        (*count[:i], count[i] + step, *count[i + 1 :])
        for i in range(len(count))
        for step in _STEPS
        if 1 <= count[i] + step <= most
    ]
