"""Graphs as rows of sorted neighbours (CSR), on the CPU: made from points, turned, and the blocks an order leaves.

`indptr` (N+1,) int64 and `indices` (E,) int32 say which keys each query sees; `order` (N,) int32 is a permutation, of
which every `size` entries are a block; `block_of` (M,) int32 says in which block a key is. Kernels follow all of them
blindly: who calls has checked them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array

EDGE = 16  # bytes that an edge counts for when work is shared: one of its own, and one line looked up elsewhere


def count_blocks(
    indptr: Tensor, indices: Tensor, order: Tensor, block_of: Tensor, blocks: int, size: int, every: int = 1
) -> Tensor:
    """(ceil(rows of blocks / every),) int64: how many of the `blocks` blocks of keys each row of blocks meets."""
    rows = -(-len(order) // size)
    found = torch.zeros(-(-rows // every), dtype=torch.int64, device="cpu")
    args = (tuple(map(array, (indptr, indices, order, block_of))), blocks, size, every, array(found))
    share(_count_blocks, len(found), EDGE * len(indices) // every, args)
    return found


def list_blocks(
    indptr: Tensor, indices: Tensor, order: Tensor, block_of: Tensor, blocks: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (rows + 1,), then for each row of blocks those it meets, ascending, and the number of pairs in each."""
    found = count_blocks(indptr, indices, order, block_of, blocks, size)
    offsets = torch.cat([found.new_zeros(1), found.cumsum(0)])
    columns = torch.empty(int(offsets[-1]), dtype=torch.int32, device="cpu")
    counts = torch.empty(int(offsets[-1]), dtype=torch.int64, device="cpu")
    given, listed = (tuple(map(array, x)) for x in ((indptr, indices, order, block_of), (offsets, columns, counts)))
    share(_list_blocks, len(found), EDGE * len(indices), (given, blocks, size, listed))
    return offsets, columns, counts


def find_within(x: Tensor, y: Tensor, reach: Tensor, euclidean: bool) -> tuple[Tensor, Tensor]:
    """(indptr, indices): for each point x (N, d) the points y (M, d) within `reach` (d,), which is above 0.

    Within an ellipsoid of these radii where `euclidean`, else within a box of these halves; ends are inside. Points are
    sorted into cells as wide as the reach, so that only the cells around one are looked at.
    """
    low = torch.minimum(x.amin(0), y.amin(0))
    cells = ((torch.maximum(x.amax(0), y.amax(0)) - low) / reach).floor() + 1
    most = max(len(y), 1) ** (1 / x.shape[1]) + 1  # as many cells as points, so that empty space costs nothing
    wide = reach * (cells / most).clamp(min=1).ceil()
    # One layer of empty cells around, so that the cells beside one are always there.
    sides = (((torch.maximum(x.amax(0), y.amax(0)) - low) / wide).floor() + 3).to(torch.int64)
    strides = torch.cat([sides.flip(0).cumprod(0).flip(0)[1:], sides.new_ones(1)])
    of_x, of_y = (((((p - low) / wide).floor() + 1).to(torch.int64)) @ strides for p in (x, y))
    number = int(sides.prod())
    inside = torch.argsort(of_y, stable=True)
    starts = torch.searchsorted(of_y[inside], torch.arange(number + 1, device="cpu"))
    steps = torch.cartesian_prod(*([torch.tensor([-1, 0, 1], device="cpu")] * x.shape[1])).reshape(-1, x.shape[1])
    around = steps @ strides
    counts = torch.zeros(len(x), dtype=torch.int64, device="cpu")
    turn = torch.argsort(of_x, stable=True)  # queries of a cell after each other: their neighbours are in the cache
    scaled, shifted = (x / reach).double(), (y[inside] / reach).double()
    given = (tuple(map(array, (scaled, shifted, inside, starts, of_x, turn, around))), euclidean)
    work = EDGE * len(x) * max(1, len(y) // max(number, 1)) * len(around)
    nothing = torch.empty(0, dtype=torch.int32, device="cpu")
    share(_find_within, len(x), work, (*given, tuple(map(array, (counts, counts, nothing))), False))
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device="cpu")
    share(_find_within, len(x), work, (*given, tuple(map(array, (counts, indptr, indices))), True))
    return indptr, indices


def sort_rows(indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts the indices of each row, and drops repetitions."""
    indices, kept = indices.clone(), torch.zeros(len(indptr) - 1, dtype=torch.int64, device="cpu")
    share(_sort_rows, len(kept), 8 * EDGE * len(indices), (array(indptr), array(indices), array(kept)))
    new = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
    if int(new[-1]) == len(indices):
        return indptr, indices
    short = torch.empty(int(new[-1]), dtype=torch.int32, device="cpu")
    _close_gaps(array(indptr), array(indices), array(new), array(short))
    return new, short


def turn_round(indptr: Tensor, indices: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """(indptr, indices) of the keys: which queries see each of them, ascending."""
    new = torch.zeros(keys + 1, dtype=torch.int64, device="cpu")
    back = torch.empty_like(indices)
    _turn_round(array(indptr), array(indices), array(new), array(back))
    return new, back


def renumber(indptr: Tensor, indices: Tensor, order: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The graph in a new order: row i is that of order[i], and key v is place[v], ascending in each row."""
    degrees = indptr.diff()[order.long()]
    new = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    found = torch.empty_like(indices)
    args = tuple(map(array, (indptr, indices, order, place, new, found)))
    share(_renumber, len(order), 8 * EDGE * len(indices), args)
    return new, found


def mark_pairs(indptr: Tensor, indices: Tensor, queries: Tensor, keys: Tensor, number: int) -> Tensor:
    """(G, L, S) bool: whether query (G, L) sees key (G, S) of the same group; -1 among the keys is none.

    `number`: of keys in the graph. Of a key that stands twice in a group one place alone is marked.
    """
    out = torch.zeros(*queries.shape, keys.shape[1], dtype=torch.bool, device="cpu")
    args = (*map(array, (indptr, indices, queries, keys)), number, array(out))
    share(_mark_pairs, len(queries), EDGE * out.numel() // 8, args)
    return out


@compiled
def _count_blocks(start: int, stop: int, graph: Any, blocks: int, size: int, every: int, found: Any) -> None:
    indptr, indices, order, block_of = graph
    seen = np.full(blocks, -1, np.int32)
    for r in range(start, stop):
        number = 0
        for a in range(r * every * size, min((r * every + 1) * size, len(order))):
            u = order[a]
            for e in range(indptr[u], indptr[u + 1]):
                j = block_of[indices[e]]
                if seen[j] != r:
                    seen[j] = r
                    number += 1
        found[r] = number


@compiled
def _list_blocks(start: int, stop: int, graph: Any, blocks: int, size: int, listed: Any) -> None:
    (indptr, indices, order, block_of), (offsets, columns, counts) = graph, listed
    pairs = np.zeros(blocks, np.int64)
    for r in range(start, stop):
        at = offsets[r]
        for a in range(r * size, min((r + 1) * size, len(order))):
            u = order[a]
            for e in range(indptr[u], indptr[u + 1]):
                j = block_of[indices[e]]
                if pairs[j] == 0:
                    columns[at] = j
                    at += 1
                pairs[j] += 1
        columns[offsets[r] : at] = np.sort(columns[offsets[r] : at])
        for k in range(offsets[r], at):
            counts[k] = pairs[columns[k]]
            pairs[columns[k]] = 0


@compiled
def _find_within(start: int, stop: int, points: Any, euclidean: bool, found: Any, fill: bool) -> None:
    """First how many, then which; points are in units of the reach."""
    (x, y, inside, starts, cell, turn, around), (counts, indptr, indices) = points, found
    d = x.shape[1]
    for r in range(start, stop):
        u = turn[r]
        number = 0
        for s in around:
            for p in range(starts[cell[u] + s], starts[cell[u] + s + 1]):
                far = 0.0
                for c in range(d):
                    step = abs(x[u, c] - y[p, c])
                    far = far + step * step if euclidean else max(far, step)
                if far <= 1.0:
                    if fill:
                        indices[indptr[u] + number] = inside[p]
                    number += 1
        if fill:
            indices[indptr[u] : indptr[u] + number] = np.sort(indices[indptr[u] : indptr[u] + number])
        else:
            counts[u] = number


@compiled
def _sort_rows(start: int, stop: int, indptr: Any, indices: Any, kept: Any) -> None:
    for u in range(start, stop):
        row = np.sort(indices[indptr[u] : indptr[u + 1]])
        number = 0
        for k in range(len(row)):
            if k == 0 or row[k] != row[k - 1]:
                indices[indptr[u] + number] = row[k]
                number += 1
        kept[u] = number


@compiled
def _close_gaps(indptr: Any, indices: Any, new: Any, short: Any) -> None:
    for u in range(len(indptr) - 1):
        for k in range(new[u + 1] - new[u]):
            short[new[u] + k] = indices[indptr[u] + k]


@compiled
def _turn_round(indptr: Any, indices: Any, new: Any, back: Any) -> None:
    for e in range(len(indices)):
        new[indices[e] + 1] += 1
    for v in range(len(new) - 1):
        new[v + 1] += new[v]
    place = new.copy()
    for u in range(len(indptr) - 1):
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            back[place[v]] = u
            place[v] += 1


@compiled
def _renumber(start: int, stop: int, indptr: Any, indices: Any, order: Any, place: Any, new: Any, found: Any) -> None:
    for i in range(start, stop):
        row = place[indices[indptr[order[i]] : indptr[order[i] + 1]]]
        found[new[i] : new[i + 1]] = np.sort(row)


@compiled
def _mark_pairs(
    start: int, stop: int, indptr: Any, indices: Any, queries: Any, keys: Any, number: int, out: Any
) -> None:
    place = np.full(number, -1, np.int64)
    for g in range(start, stop):
        for s in range(keys.shape[1]):
            if keys[g, s] >= 0:
                place[keys[g, s]] = s
        for i in range(queries.shape[1]):
            u = queries[g, i]
            for e in range(indptr[u], indptr[u + 1]):
                s = place[indices[e]]
                if s >= 0:
                    out[g, i, s] = True
        for s in range(keys.shape[1]):
            if keys[g, s] >= 0:
                place[keys[g, s]] = -1
