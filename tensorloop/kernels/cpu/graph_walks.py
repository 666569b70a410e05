"""From node to neighbour through a graph, on the CPU: breadth first, components, groups, halves, sums over neighbours.

Graphs are square, as `graphs` has them; what a walk takes for undirected must be.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.graphs import EDGE
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array


def cuthill_mckee(indptr: Tensor, indices: Tensor, from_ends: bool = True, seed: int | None = None) -> Tensor:
    """(N,) int32: a symmetric graph's nodes, component by component, breadth first and reversed.

    Each component is begun at an end of it, or with `from_ends=False` at its node of the lowest degree, the component
    of the lowest first. Nodes of equal degrees go by their numbers, or with a seed at random.
    """
    order, n = torch.empty(len(indptr) - 1, dtype=torch.int32, device="cpu"), len(indptr) - 1
    keys = indptr.diff()
    if seed is not None:
        keys = keys * n + torch.randperm(n, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    roots = torch.arange(n, device="cpu") if from_ends else keys.argsort(stable=True)
    _cuthill_mckee(*map(array, (indptr, indices, keys, roots, order)), 8 if from_ends else 0)
    return order.flip(0)


def label_components(indptr: Tensor, indices: Tensor) -> tuple[Tensor, int]:
    """(N,) int64 and how many: the component of each node of a symmetric graph, numbered as they are met."""
    labels = torch.full((len(indptr) - 1,), -1, dtype=torch.int64, device="cpu")
    return labels, int(_label_components(array(indptr), array(indices), array(labels)))


def match_neighbours(indptr: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor, int]:
    """(N,) int64 and how many: nodes of a symmetric graph paired along heavy edges; each pair gets one number."""
    group = torch.full((len(indptr) - 1,), -1, dtype=torch.int64, device="cpu")
    return group, int(_match_neighbours(*map(array, (indptr, indices, weights, group))))


def take_nodes(indptr: Tensor, indices: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The part of a square graph between `nodes` (n,) int64, numbered as they stand there."""
    number = torch.full((len(indptr) - 1,), -1, dtype=torch.int32, device="cpu")
    number[nodes] = torch.arange(len(nodes), dtype=torch.int32, device="cpu")
    new = torch.zeros(len(nodes) + 1, dtype=torch.int64, device="cpu")
    room = torch.empty(int((indptr[nodes + 1] - indptr[nodes]).sum()), dtype=torch.int32, device="cpu")
    _take_nodes(*map(array, (indptr, indices, nodes, number, new, room)))
    return new, room[: int(new[-1])]


def balance(indptr: Tensor, indices: Tensor, side: Tensor, left: int) -> Tensor:
    """`side` (N,) int64 of 0 and 1 with exactly `left` zeros: nodes change over that cost the fewest cut edges."""
    side = side.clone()
    _balance(array(indptr), array(indices), array(side), left)
    return side


def sum_neighbours(indptr: Tensor, indices: Tensor, weights: Tensor, vectors: Tensor) -> Tensor:
    """(N, k) float64: the weighted sums over what each node sees of vectors (N, k)."""
    out = torch.empty(vectors.shape, dtype=torch.float64, device="cpu")
    args = tuple(map(array, (indptr, indices, weights, vectors, out)))
    share(_sum_neighbours, len(out), EDGE * len(indices), args)
    return out


def merge_nodes(
    indptr: Tensor, indices: Tensor, weights: Tensor, group: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The graph of `number` groups of nodes, (N,) int64 of a square graph: weights between groups are added up."""
    order = group.argsort(stable=True).to(torch.int32)
    new = torch.zeros(number + 1, dtype=torch.int64, device="cpu")
    columns, sums = torch.empty_like(indices), torch.empty_like(weights)
    _merge_nodes(*map(array, (indptr, indices, weights, group, order, new, columns, sums)))
    return new, columns[: int(new[-1])], sums[: int(new[-1])]


@compiled
def _walk(root: int, indptr: Any, indices: Any, order: Any, begin: int, mark: Any, stamp: int, keys: Any) -> Any:
    """Nodes reached from `root` into order[begin:], nearest first, of a parent the lowest key first.

    Gives where they end, and where the last layer begins.
    """
    order[begin] = root
    mark[root] = stamp
    head, end, layer, border = begin, begin + 1, begin, begin + 1
    while head < end:
        if head == border:
            layer, border = head, end
        u = order[head]
        head += 1
        first = end
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if mark[v] != stamp:
                mark[v] = stamp
                order[end] = v
                end += 1
        if end - first > 1:
            found = order[first:end].copy()
            order[first:end] = found[np.argsort(keys[found], kind="mergesort")]
    return end, layer


@compiled
def _cuthill_mckee(indptr: Any, indices: Any, keys: Any, roots: Any, order: Any, rounds: int) -> None:
    """Cuthill & McKee 1969, from an end by George & Liu 1979: the lowest degree of the last layer, repeatedly."""
    n = len(indptr) - 1
    done, mark = np.zeros(n, np.bool_), np.full(n, -1, np.int64)
    begin, stamp = 0, 0
    for first in roots:
        if done[first]:
            continue
        root, depth = first, -1
        for _ in range(rounds):
            end, layer = _walk(root, indptr, indices, order, begin, mark, stamp, keys)
            stamp += 1
            if layer - begin <= depth:
                break
            depth = layer - begin
            last = order[layer:end]
            root = last[np.argmin(keys[last])]
        end, _ = _walk(root, indptr, indices, order, begin, mark, stamp, keys)
        stamp += 1
        for a in range(begin, end):
            done[order[a]] = True
        begin = end


@compiled
def _label_components(indptr: Any, indices: Any, labels: Any) -> int:
    stack = np.empty(len(labels), np.int64)
    number = 0
    for root in range(len(labels)):
        if labels[root] >= 0:
            continue
        labels[root] = number
        stack[0] = root
        top = 1
        while top:
            top -= 1
            u = stack[top]
            for e in range(indptr[u], indptr[u + 1]):
                v = indices[e]
                if labels[v] < 0:
                    labels[v] = number
                    stack[top] = v
                    top += 1
        number += 1
    return number


@compiled
def _match_neighbours(indptr: Any, indices: Any, weights: Any, group: Any) -> int:
    number = 0
    for u in range(len(group)):
        if group[u] >= 0:
            continue
        best, mate = -1.0, -1
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if v != u and group[v] < 0 and weights[e] > best:
                best, mate = weights[e], v
        group[u] = number
        if mate >= 0:
            group[mate] = number
        number += 1
    return number


@compiled
def _take_nodes(indptr: Any, indices: Any, nodes: Any, number: Any, new: Any, room: Any) -> None:
    at = 0
    for i in range(len(nodes)):
        for e in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            if number[indices[e]] >= 0:
                room[at] = number[indices[e]]
                at += 1
        new[i + 1] = at


@compiled
def _balance(indptr: Any, indices: Any, side: Any, left: int) -> None:
    n = len(side)
    gain = np.zeros(n, np.int64)
    have = 0
    for u in range(n):
        have += 1 - side[u]
        for e in range(indptr[u], indptr[u + 1]):
            gain[u] += 1 if side[indices[e]] != side[u] else -1
    while have != left:
        source = 0 if have > left else 1
        best = -1
        for u in range(n):
            if side[u] == source and (best < 0 or gain[u] > gain[best]):
                best = u
        side[best] = 1 - source
        gain[best] = -gain[best]
        for e in range(indptr[best], indptr[best + 1]):
            v = indices[e]
            if v != best:
                gain[v] += -2 if side[v] == side[best] else 2
        have += 2 * source - 1


@compiled
def _sum_neighbours(start: int, stop: int, indptr: Any, indices: Any, weights: Any, vectors: Any, out: Any) -> None:
    for u in range(start, stop):
        for c in range(vectors.shape[1]):
            out[u, c] = 0
        for e in range(indptr[u], indptr[u + 1]):
            v, w = indices[e], weights[e]
            for c in range(vectors.shape[1]):
                out[u, c] += w * vectors[v, c]


@compiled
def _merge_nodes(
    indptr: Any, indices: Any, weights: Any, group: Any, order: Any, new: Any, columns: Any, sums: Any
) -> None:
    number = len(new) - 1
    place = np.full(number, -1, np.int64)
    at, a = 0, 0
    for g in range(number):
        begin = at
        while a < len(order) and group[order[a]] == g:
            u = order[a]
            a += 1
            for e in range(indptr[u], indptr[u + 1]):
                h = group[indices[e]]
                if place[h] < begin:
                    place[h] = at
                    columns[at] = h
                    sums[at] = 0
                    at += 1
                sums[place[h]] += weights[e]
        new[g + 1] = at
