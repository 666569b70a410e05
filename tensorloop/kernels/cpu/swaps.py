"""A search over swaps of two nodes between blocks, on the CPU, so that fewer pairs of blocks meet.

What is minimised is not the number of blocks that meet but the sum of 1 - exp(-pairs / tau) over them, which says also
of a block with many pairs that it had better have fewer; tau falls from stage to stage, and with it the temperature of
the swaps that are taken although they cost (Kirkpatrick et al. 1983).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.threads import PIECE, share
from tensorloop.kernels.memory import array

# Of a search: first and last tau, in shares of the scale; and the heat of a stage when it begins and when it ends.
TAUS, HEATS = (4, 0.2), (0.01, 0.002)
_LEAST = 0.3  # tau of which a pair that meets once costs all but as much as any


class Swaps:
    """Chains of swaps, each with a partition of its own, which they change in place.

    `outs`, `ins`: (indptr, indices) of the graph and of its reverse; the same tensors where the graph is symmetric.
    `parts` (chains, N) int32: the block of each node. `kinds` (blocks,) int32: only blocks of a kind exchange nodes.
    """

    def __init__(
        self, outs: tuple[Tensor, Tensor], ins: tuple[Tensor, Tensor], parts: Tensor, kinds: Tensor, size: int
    ) -> None:
        self._graph = (*map(array, outs), *map(array, ins), outs[0] is ins[0], array(kinds), size)
        chains, blocks = len(parts), len(kinds)
        now = array(parts).copy()
        members, slots = np.full((chains, blocks, size), -1, np.int32), np.zeros(now.shape, np.int32)
        pairs = np.zeros((chains, blocks, blocks), np.int32)
        self._found = np.zeros((chains, 2), np.int64)  # blocks that meet: now, and at best
        self._best = now.copy()
        self._states = (now, self._best, slots, members, pairs, self._found)
        for chain in range(chains):
            _fill(self._graph, now[chain], slots[chain], members[chain], pairs[chain], self._found[chain])
        self.start = int(self._found[0, 0])  # of the first chain

    def run(self, moves: int, scale: float, done: float, seed: int) -> None:
        """Tries `moves` swaps in each chain, the same ones each time, as it does when `done` of the way is gone."""
        tau = max(scale * TAUS[0] * (TAUS[1] / TAUS[0]) ** done, _LEAST)
        cost = (1 - np.exp(-np.arange(math.ceil(16 * tau) + 2) / tau)).astype(np.float32)
        chains = len(self._found)
        args = (self._graph, self._states, moves, cost, np.array(HEATS), seed)
        share(_run, chains, chains * PIECE if moves > 1000 else 0, args)

    def best(self) -> tuple[Tensor, int]:
        """The partition (N,) that leaves the fewest blocks, of all chains, and how many."""
        chain = int(self._found[:, 1].argmin())
        return torch.from_numpy(self._best[chain].copy()), int(self._found[chain, 1])


@compiled
def _fill(graph: Any, part: Any, slot: Any, member: Any, pairs: Any, found: Any) -> None:
    indptr, indices, _, _, _, kinds, _ = graph
    filled = np.zeros(len(kinds), np.int64)
    for u in range(len(part)):
        p = part[u]
        slot[u] = filled[p]
        member[p, filled[p]] = u
        filled[p] += 1
        for e in range(indptr[u], indptr[u + 1]):
            pairs[p, part[indices[e]]] += 1
    for p in range(len(kinds)):
        for q in range(len(kinds)):
            found[0] += pairs[p, q] > 0
    found[1] = found[0]


@compiled
def _next(random: Any) -> Any:
    """xorshift64* (Marsaglia 2003, Vigna 2016): 64 bits."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return x * np.uint64(2685821657736338717)


@compiled
def _below(random: Any, n: int) -> Any:
    return np.int64(((_next(random) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@compiled
def _end(random: Any, indptr: Any, indices: Any, u: int) -> Any:
    """The other end of any edge of u; -1 where it has none."""
    degree = indptr[u + 1] - indptr[u]
    return np.int64(indices[indptr[u] + _below(random, degree)]) if degree else -1


@compiled
def _propose(random: Any, graph: Any, part: Any, member: Any) -> Any:
    """Two nodes of different blocks: u sees the block of v, and v, where that is found soon, the block of u."""
    indptr, indices, back, sources, _, kinds, size = graph
    u = _below(random, len(part))
    p = part[u]
    forth = _below(random, 2) == 0
    w = _end(random, indptr, indices, u) if forth else _end(random, back, sources, u)
    if w >= 0 and kinds[part[w]] != kinds[p]:  # queries and keys apart: another query that sees the same key
        w = _end(random, back, sources, w) if forth else _end(random, indptr, indices, w)
    if w < 0 or part[w] == p:
        return u, -1
    q = part[w]
    for _ in range(3):
        x = member[p, _below(random, size)]
        if x < 0:
            continue
        y = _end(random, indptr, indices, x) if forth else _end(random, back, sources, x)
        if y >= 0 and kinds[part[y]] != kinds[p]:
            y = _end(random, back, sources, y) if forth else _end(random, indptr, indices, y)
        if y >= 0 and part[y] == q:
            return u, y
    return u, np.int64(member[q, _below(random, size)])


@compiled
def _tally(graph: Any, part: Any, u: int, v: int, move: int, room: Any) -> Any:
    """Counts the edges of u and v to and from each block, in rows of `table`: those of the blocks listed in `seen`.

    Gives how many are listed, how many edges join u and v, and by how many edges to itself v has more than u.
    """
    indptr, indices, back, sources, symmetric, _, _ = graph
    table, marks, seen = room
    number, joined, own = 0, 0, 0
    for k in (part[u], part[v]):
        marks[k] = move
        table[k] = 0
        seen[number] = k
        number += 1
    for side in range(2):
        a, b = (u, v) if side == 0 else (v, u)
        for e in range(indptr[a], indptr[a + 1]):
            w = indices[e]
            if w == a:
                own += 2 * side - 1
                continue
            joined += w == b
            k = part[w]
            if marks[k] != move:
                marks[k] = move
                table[k] = 0
                seen[number] = k
                number += 1
            table[k, 2 * side] += 1
        if symmetric:
            continue
        for e in range(back[a], back[a + 1]):
            w = sources[e]
            if w == a:
                continue
            k = part[w]
            if marks[k] != move:
                marks[k] = move
                table[k] = 0
                seen[number] = k
                number += 1
            table[k, 2 * side + 1] += 1
    if symmetric:
        for i in range(number):
            table[seen[i], 1], table[seen[i], 3] = table[seen[i], 0], table[seen[i], 2]
    return number, joined, own


@compiled
def _corners(table: Any, p: int, q: int, joined: int, own: int) -> Any:
    """Returns what a swap of u in p and v in q adds to the pairs inside p, inside q, from p to q and from q to p."""
    pp = table[p, 2] + table[p, 3] - joined - table[p, 0] - table[p, 1] + own
    qq = table[q, 0] + table[q, 1] - joined - table[q, 2] - table[q, 3] - own
    pq = table[q, 2] + table[p, 1] + joined - table[q, 0] - table[p, 3]
    qp = table[p, 0] + table[q, 3] + joined - table[q, 1] - table[p, 2]
    return (p, p, pp), (q, q, qq), (p, q, pq), (q, p, qp)


@compiled
def _step(cost: Any, pairs: int, by: int) -> Any:
    far = len(cost) - 1
    return cost[min(pairs + by, far)] - cost[min(pairs, far)]


@compiled
def _weigh(pairs: Any, table: Any, seen: Any, number: int, corners: Any, cost: Any, symmetric: bool) -> Any:
    """Returns what a swap adds to the cost."""
    p, q = corners[2][0], corners[2][1]
    delta = np.float32(0)
    for i in range(2, number):
        k = seen[i]
        out = table[k, 2] - table[k, 0]
        if out:
            delta += _step(cost, pairs[p, k], out) + _step(cost, pairs[q, k], -out)
        into = table[k, 3] - table[k, 1]
        if into and not symmetric:
            delta += _step(cost, pairs[k, p], into) + _step(cost, pairs[k, q], -into)
    if symmetric:
        delta *= np.float32(2)
    for a, b, by in corners:
        delta += _step(cost, pairs[a, b], by)
    return delta


@compiled
def _move_pairs(pairs: Any, table: Any, seen: Any, number: int, corners: Any) -> int:
    """Brings `pairs` up to date; gives by how many more blocks meet."""
    p, q = corners[2][0], corners[2][1]
    more = 0
    for i in range(2, number):
        k = seen[i]
        for a, b, by in (
            (p, k, table[k, 2] - table[k, 0]),
            (q, k, table[k, 0] - table[k, 2]),
            (k, p, table[k, 3] - table[k, 1]),
            (k, q, table[k, 1] - table[k, 3]),
        ):
            old = pairs[a, b]
            pairs[a, b] = old + by
            more += int(old + by > 0) - int(old > 0)
    for a, b, by in corners:
        old = pairs[a, b]
        pairs[a, b] = old + by
        more += int(old + by > 0) - int(old > 0)
    return more


@compiled
def _run(start: int, stop: int, graph: Any, states: Any, moves: int, cost: Any, heats: Any, seed: int) -> None:
    blocks, random = len(graph[5]), np.empty(1, np.uint64)
    table, marks, seen = np.zeros((blocks, 4), np.int32), np.empty(blocks, np.int64), np.empty(blocks, np.int32)
    for chain in range(start, stop):
        part, best, slot = states[0][chain], states[1][chain], states[2][chain]
        member, pairs, found = states[3][chain], states[4][chain], states[5][chain]
        random[0] = np.uint64(seed * 1000003 + chain * 7919 + 88172645463325252)
        marks[:] = -1
        heat, cooling, look = heats[0], heats[1] / heats[0], max(1024, len(part) // 16)
        for move in range(moves):
            if move % look == 0:
                heat = heats[0] * cooling ** (move / moves)
                if found[0] < found[1]:
                    found[1] = found[0]
                    best[:] = part
            u, v = _propose(random, graph, part, member)
            if v < 0:
                continue
            p, q = part[u], part[v]
            number, joined, own = _tally(graph, part, u, v, move, (table, marks, seen))
            corners = _corners(table, p, q, joined, own)
            delta = _weigh(pairs, table, seen, number, corners, cost, graph[4])
            if delta > 0:
                chance = np.float64(_next(random) >> np.uint64(11)) / 9007199254740992.0
                if delta >= 30 * heat or chance >= math.exp(-delta / heat):
                    continue
            found[0] += _move_pairs(pairs, table, seen, number, corners)
            part[u], part[v] = q, p
            member[p, slot[u]], member[q, slot[v]] = v, u
            slot[u], slot[v] = slot[v], slot[u]
        if found[0] < found[1]:
            found[1] = found[0]
            best[:] = part
