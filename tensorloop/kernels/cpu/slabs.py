"""Slabs that are cut into slabs, for many counts of slabs at once, on the CPU: which leave the fewest blocks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.graphs import EDGE
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array


def cut_slabs(orders: Tensor, slabs: Tensor, size: int) -> Tensor:
    """(N,) int32: nodes sorted into slabs along each axis in turn, from `orders` (d, N) int32 by axis.

    The first order is cut into slabs[0] slabs of whole blocks, each slab along the second into slabs[1], and so on;
    inside the last ones nodes follow the last order.
    """
    order = torch.empty(orders.shape[1], dtype=torch.int32, device="cpu")
    _cut_slabs(array(orders), array(slabs), size, array(order), np.empty(orders.shape[1], np.int32))
    return order


def try_slabs(
    indptr: Tensor, indices: Tensor, orders: tuple[Tensor, ...], slabs: Tensor, size: int, every: int = 1
) -> Tensor:
    """(candidates,) int64: blocks that are not empty, for each row of `slabs` (candidates, d - 1).

    `orders`: one (d, N) int32 for queries and keys alike, or one for each. Counts every `every`-th row of blocks alone.
    """
    found = torch.empty(len(slabs), dtype=torch.int64, device="cpu")
    graph = tuple(map(array, (indptr, indices, orders[0], orders[-1])))
    args = (graph, len(orders) == 1, array(slabs), size, every, array(found))
    each = EDGE * len(indices) // every + 8 * sum(x.numel() for x in orders)
    share(_try_slabs, len(slabs), len(slabs) * each, args)
    return found


@compiled
def _cut_slabs(orders: Any, slabs: Any, size: int, order: Any, group: Any) -> None:
    """`group` (N,) is room to work in."""
    d, n = orders.shape
    order[:] = orders[0]
    starts = np.array([0, n])
    for level in range(d - 1):
        cuts = np.empty(n // size + 2, np.int64)
        number = 0
        for g in range(len(starts) - 1):
            blocks = -(-(starts[g + 1] - starts[g]) // size)
            pieces = min(slabs[level], blocks)
            for i in range(pieces):
                cuts[number] = starts[g] + size * (blocks * i // pieces)
                number += 1
        cuts[number] = n
        starts = cuts[: number + 1]
        for g in range(number):
            for a in range(starts[g], starts[g + 1]):
                group[order[a]] = g
        place = starts.copy()
        for a in range(n):
            u = orders[level + 1, a]
            order[place[group[u]]] = u
            place[group[u]] += 1


@compiled
def _try_slabs(start: int, stop: int, graph: Any, square: bool, slabs: Any, size: int, every: int, found: Any) -> None:
    indptr, indices, of_q, of_k = graph
    n, m = of_q.shape[1], of_k.shape[1]
    blocks, rows = -(-m // size), -(-n // size)
    order, group = np.empty(n, np.int32), np.empty(max(n, m), np.int32)
    keys = order if square else np.empty(m, np.int32)
    block_of = np.empty(m, np.int32)
    seen = np.full(blocks, -1, np.int64)
    for c in range(start, stop):
        _cut_slabs(of_q, slabs[c], size, order, group)
        if not square:
            _cut_slabs(of_k, slabs[c], size, keys, group)
        for a in range(m):
            block_of[keys[a]] = a // size
        number = 0
        for r in range(0, rows, every):
            stamp = np.int64(c) * rows + r
            for a in range(r * size, min((r + 1) * size, n)):
                u = order[a]
                for e in range(indptr[u], indptr[u + 1]):
                    j = block_of[indices[e]]
                    if seen[j] != stamp:
                        seen[j] = stamp
                        number += 1
        found[c] = number
