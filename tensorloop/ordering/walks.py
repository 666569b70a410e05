"""Orders from the graph alone: breadth first, by the eigenvectors of its Laplacian, by METIS."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.kernels.cpu import graph_walks
from tensorloop.ordering.documents import best_fit
from tensorloop.ordering.problem import Orders, Problem
from tensorloop.ordering.slab_search import EFFORT, search_slabs

_SMALL = 192  # nodes of the coarsest graph, whose eigenvectors are computed at once
_SEEDS = 4  # ways to break ties that are tried, as many as there is time for
_READ = 1 << 22  # edges: a graph of more is read once for each kind of walk, and is not halved again and again
_ROUNDS = 12  # averages over neighbours on each finer graph
_GUARDS = 2  # vectors beyond those that are wanted, which the wanted ones converge faster beside


def breadth_first(problem: Problem) -> list[Orders]:
    """Reverse Cuthill-McKee, on queries and keys together, from ends and from lowest degrees; components are packed.

    Which of the nodes of equal degrees comes first is worth a few per cent of the blocks: some ways are tried.
    """
    graph = problem.graph.undirected
    seeds = (None, *range(min(_SEEDS, _READ // max(len(graph[1]), 1))))
    orders = [graph_walks.cuthill_mckee(*graph, ends, seed) for seed in seeds for ends in (True, False)]
    labels, number = graph_walks.label_components(*graph)
    if number > 1:
        orders += [_pack_components(order, labels, problem.size) for order in orders]
    return [problem.split(order) for order in orders]


def _pack_components(order: Tensor, labels: Tensor, size: int) -> Tensor:
    """An order in which components are one behind the other, with components that fill blocks together as neighbours.

    None keeps its place for what it sees: between two components there are no edges.
    """
    lens = torch.bincount(labels[order.long()])
    chosen = torch.tensor(best_fit(lens.tolist(), size), device="cpu")
    rank = torch.empty_like(chosen)
    rank[chosen] = torch.arange(len(chosen), device="cpu")
    return order[rank[labels[order.long()]].argsort(stable=True)]


def by_spectrum(problem: Problem, effort: float = EFFORT) -> list[Orders]:
    """The smoothest functions on the graph as coordinates: two cut into slabs, three halved; or by halves alone."""
    pair = _points(problem)
    slabs = search_slabs(problem, tuple(x[:, :2] for x in pair), effort)
    return [slabs, tuple(_bisect(x, problem.size) for x in pair), *_by_halves(problem)]


def compact(problem: Problem) -> Orders:
    """Blocks as round as the graph has them, if not the fewest: where a search finds what slabs hide from it."""
    return tuple(_bisect(x, problem.size) for x in _points(problem))


def _points(problem: Problem) -> tuple[Tensor, ...]:
    """The coordinates of all positions, or of queries and of keys."""
    points, n = embed(problem.graph.undirected, 3), problem.graph.shape[0]
    return (points,) if problem.graph.is_square else (points[:n], points[n:])


def _by_halves(problem: Problem) -> list[Orders]:
    """Spectral bisection: each part is halved along the smoothest function on itself, into whole blocks.

    None where queries and keys are of two kinds, as a half of both is not one of either, and where the graph is large.
    """
    graph = problem.graph.undirected
    if not problem.graph.is_square or len(graph[1]) * problem.rows.bit_length() > 4 * _READ:
        return []

    def halve(part: tuple[Tensor, Tensor], left: int) -> Tensor:
        side = torch.ones(len(part[0]) - 1, dtype=torch.int64, device="cpu")
        side[embed(part, 1)[:, 0].argsort(stable=True)[:left]] = 0
        return side

    return [problem.split(_halve_again(problem, halve))]


def _halve_again(problem: Problem, halve: Callable[[tuple[Tensor, Tensor], int], Tensor]) -> Tensor:
    """(N,) int64: the graph in halves of whole blocks, and so on inside of them.

    `halve` gives the side of each node of a part, 0 for exactly as many as it is told and 1 for the others.
    """
    graph = problem.graph.undirected
    order = torch.empty(len(graph[0]) - 1, dtype=torch.int64, device="cpu")
    open_parts = [(torch.arange(len(order), device="cpu"), graph, 0)]
    while open_parts:
        nodes, part, at = open_parts.pop()
        blocks = -(-len(nodes) // problem.size)
        if blocks <= 1:
            order[at : at + len(nodes)] = nodes
            continue
        left = blocks // 2 * problem.size
        side = halve(part, left)
        for half, begin in ((1, at + left), (0, at)):
            chosen = (side == half).nonzero().flatten()
            open_parts.append((nodes[chosen], graph_walks.take_nodes(*part, chosen), begin))
    return order


def _bisect(points: Tensor, size: int) -> Tensor:
    """(N,) int32: halves of whole blocks along the widest axis, and so on inside of them."""
    done, open_parts = [], [torch.arange(len(points), device="cpu")]
    while open_parts:
        part = open_parts.pop()
        blocks = -(-len(part) // size)
        if blocks <= 1:
            done.append(part)
            continue
        inside = points[part]
        axis = int((inside.amax(0) - inside.amin(0)).argmax())
        part = part[inside[:, axis].argsort(stable=True)]
        open_parts += [part[blocks // 2 * size :], part[: blocks // 2 * size]]
    return torch.cat(done).to(torch.int32) if done else torch.empty(0, dtype=torch.int32, device="cpu")


def embed(graph: tuple[Tensor, Tensor], k: int) -> Tensor:
    """(N, k) float64: eigenvectors of the normalised Laplacian of a symmetric graph, scaled by commute times.

    Components lie beside each other along the first axis.
    """
    labels, number = graph_walks.label_components(*graph)
    points = torch.zeros(len(labels), k, dtype=torch.float64, device="cpu")
    order = labels.argsort(stable=True)
    at, begin = 0.0, 0
    for size in torch.bincount(labels, minlength=number).tolist():
        nodes = order[begin : begin + size]
        begin += size
        if size <= 2 * k + 2:
            points[nodes, 0] = at + torch.arange(size, dtype=torch.float64, device="cpu")
            at += size + 1
            continue
        part = graph if number == 1 else graph_walks.take_nodes(*graph, nodes)
        vectors = _smoothest(part, k)
        wide = vectors[:, 0].max() - vectors[:, 0].min()
        vectors = vectors / wide * size
        vectors[:, 0] += at - vectors[:, 0].min()
        points[nodes] = vectors
        at += 1.1 * size
    return points


class _Level(NamedTuple):
    """A weighted graph, and which node of the next coarser one each of its nodes is in."""

    indptr: Tensor
    indices: Tensor
    weights: Tensor
    group: Tensor

    @property
    def degrees(self) -> Tensor:
        return torch.segment_reduce(self.weights, "sum", offsets=self.indptr, initial=0)

    def average(self, vectors: Tensor) -> Tensor:
        return graph_walks.sum_neighbours(self.indptr, self.indices, self.weights, vectors) / self.degrees[:, None]

    def dense(self) -> Tensor:
        rows = torch.arange(len(self.group), device="cpu").repeat_interleave(self.indptr.diff())
        full = torch.zeros((len(self.group),) * 2, dtype=torch.float64, device="cpu")
        full[rows, self.indices.long()] = self.weights
        return full


def _coarsen(graph: tuple[Tensor, Tensor]) -> list[_Level]:
    """The graph and ever coarser ones, each of pairs of nodes matched along heavy edges."""
    weights, levels = torch.ones(len(graph[1]), dtype=torch.float64, device="cpu"), list[_Level]()
    while True:
        group, number = graph_walks.match_neighbours(*graph, weights)
        levels.append(_Level(*graph, weights, group))
        n = len(group)
        if n <= _SMALL or number > 0.9 * n:
            return levels
        indptr, indices, weights = graph_walks.merge_nodes(*graph, weights, group, number)
        graph = indptr, indices


def _smoothest(graph: tuple[Tensor, Tensor], k: int) -> Tensor:
    """(N, k) of a connected graph: coarsened by matching, solved there, averaged on the way back."""
    *levels, coarsest = _coarsen(graph)
    n = len(coarsest.group)
    count = min(k + _GUARDS, n - 1)
    if n <= 8 * _SMALL:
        root = coarsest.degrees.rsqrt()
        values, vectors = torch.linalg.eigh(coarsest.dense() * root[:, None] * root)
        values, vectors = values.flip(0)[1 : count + 1], vectors.flip(1)[:, 1 : count + 1] * root[:, None]
    else:  # a star, say: there is nothing to match
        generator = torch.Generator("cpu").manual_seed(0)
        vectors = torch.randn(n, count, dtype=torch.float64, generator=generator, device="cpu")
        values, vectors = _refine(coarsest, vectors, 8 * _ROUNDS)
    for level in reversed(levels):
        values, vectors = _refine(level, vectors[level.group], _ROUNDS)
    vectors = vectors / (1 - values).clamp(min=1e-12).sqrt()
    return torch.nn.functional.pad(vectors, (0, max(0, k - vectors.shape[1])))[:, :k]


def _refine(level: _Level, vectors: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Averages over neighbours, then the best combinations (Rayleigh & Ritz), without what is constant."""
    for _ in range(rounds):
        vectors = (vectors + level.average(vectors)) / 2
    degrees = level.degrees
    vectors = vectors - (degrees @ vectors) / degrees.sum()
    weighed = degrees[:, None] * vectors
    gram, form = vectors.T @ weighed, weighed.T @ level.average(vectors)
    scale, basis = torch.linalg.eigh(gram)
    basis = basis / scale.clamp(min=1e-30 + 1e-14 * float(scale[-1])).sqrt()
    values, turned = torch.linalg.eigh(basis.T @ form @ basis)
    return values.flip(0), (vectors @ basis @ turned).flip(1)


def by_metis(problem: Problem) -> Orders:
    """Halves by METIS, mended to whole blocks at each level, and so on inside of them.

    Source: Karypis & Kumar 1998; the package pymetis.
    """
    try:
        import pymetis  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("metis: this method needs pymetis: pip install pymetis") from error
    found = _halve_again(problem, lambda part, left: graph_walks.balance(*part, _halve(pymetis, part, left), left))
    return problem.split(found)


def _halve(pymetis: Any, graph: tuple[Tensor, Tensor], left: int) -> Tensor:
    n = len(graph[0]) - 1
    rows = torch.arange(n, device="cpu").repeat_interleave(graph[0].diff())
    proper = graph[1] != rows  # METIS wants no edge from a node to itself
    degrees = torch.bincount(rows[proper], minlength=n)
    if not int(degrees.sum()):
        return (torch.arange(n, device="cpu") >= left).long()
    starts = [0, *degrees.cumsum(0).tolist()]
    parts = pymetis.part_graph(
        2, xadj=starts, adjncy=graph[1][proper].tolist(), tpwgts=[left / n, 1 - left / n], recursive=True
    )
    return torch.as_tensor(parts[1], dtype=torch.int64, device="cpu")
