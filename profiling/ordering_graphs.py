"""Orderings of masks of which nothing but the graph is known: ours beside SciPy's walk and spectral bisection.

    python profiling/ordering_graphs.py              # needs scipy and networkx
    python profiling/ordering_graphs.py --only torus

Each mask comes in the order in which it is made, and in random order. Counts are exact, so one run is enough. Spectral
bisection is written here with SciPy's eigenvectors: halves of whole blocks along the second one of the Laplacian, and
so on inside of them.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import tensorloop as tl

SIZES = 32, 128


def masks() -> dict[str, Callable[[int], Any]]:
    """What makes each mask, a sparse matrix of SciPy's, from a seed."""
    import networkx as nx

    def small_world(n: int, near: int, share: float) -> Callable[[int], Any]:
        return lambda seed: matrix(nx.watts_strogatz_graph(n, near, share, seed=seed))

    def components(count: int) -> Callable[[int], Any]:
        def make(seed: int) -> Any:
            draw = random.Random(seed)
            parts: list[Any] = [
                nx.path_graph(draw.randint(3, 60))
                if draw.random() < 0.5
                else nx.connected_watts_strogatz_graph(draw.randint(8, 60), 4, 0.1, seed=draw.randint(0, 9999))
                for _ in range(count)
            ]
            return matrix(nx.disjoint_union_all(parts))

        return make

    near = [[0.1 if i == j else 0.002 for j in range(12)] for i in range(12)]
    return {
        "small world 2000, 6, 0.05": small_world(2000, 6, 0.05),
        "small world 1500, 4, 0.1": small_world(1500, 4, 0.1),
        "small world 3000, 8, 0.01": small_world(3000, 8, 0.01),
        "120 components": components(120),
        "40 components": components(40),
        "scale-free": lambda seed: matrix(nx.barabasi_albert_graph(1500, 2, seed=seed)),
        "tree": lambda seed: matrix(nx.random_labeled_tree(2000, seed=seed)),
        "3-regular": lambda seed: matrix(nx.random_regular_graph(3, 1500, seed=seed)),
        "12 clusters": lambda seed: matrix(nx.stochastic_block_model([100] * 12, near, seed=seed)),
        "geometric": lambda seed: matrix(nx.random_geometric_graph(1500, 0.05, seed=seed)),
        "torus, every 2nd": lambda seed: torus(32, 48, 2),
        "torus, every 3rd": lambda seed: torus(36, 36, 3),
        "torus": lambda seed: torus(40, 40, 1),
        "hypercube": lambda seed: matrix(nx.hypercube_graph(11)),
        "grid": lambda seed: matrix(nx.grid_2d_graph(40, 50)),
        "ladder": lambda seed: matrix(nx.circular_ladder_graph(900)),
        "star": lambda seed: matrix(nx.star_graph(800)),
    }


def matrix(graph: Any) -> Any:
    import networkx as nx
    from scipy import sparse  # pyright: ignore[reportMissingImports]

    found = sparse.csr_matrix(nx.to_scipy_sparse_array(graph, format="csr"))
    return ones(found + sparse.eye(found.shape[0], format="csr"))


def torus(height: int, width: int, step: int) -> Any:
    """Each cell sees the nine around it, `step` apart."""
    from scipy import sparse  # pyright: ignore[reportMissingImports]

    cells = [(i, j) for i in range(height) for j in range(width)]
    pairs = [
        (i * width + j, (i + a * step) % height * width + (j + b * step) % width)
        for i, j in cells
        for a in (-1, 0, 1)
        for b in (-1, 0, 1)
    ]
    rows, columns = zip(*pairs, strict=True)
    return ones(sparse.csr_matrix(([1.0] * len(pairs), (rows, columns)), shape=(len(cells),) * 2))


def ones(found: Any) -> Any:
    found.data[:] = 1
    found.sort_indices()
    return found


def shuffled(mask: Any, seed: int) -> Any:
    import numpy as np

    order = np.random.default_rng(seed).permutation(mask.shape[0])
    return ones(mask[order][:, order].tocsr())


def blocks(mask: Any, order: Any, size: int) -> int:
    import numpy as np

    place, edges = np.empty(len(order), np.int64), mask.tocoo()
    place[order] = np.arange(len(order)) // size
    return len(np.unique(place[edges.row] * len(order) + place[edges.col]))


def bisection(mask: Any, nodes: Any, size: int) -> list[int]:
    import numpy as np
    from scipy.sparse import csgraph, linalg  # pyright: ignore[reportMissingImports]

    count = -(-len(nodes) // size)
    if count <= 1:
        return nodes.tolist()
    part = mask[nodes][:, nodes]
    number, labels = csgraph.connected_components(part)
    if number > 1:  # components go one after the other
        along = labels
    else:
        start = np.random.default_rng(0).random(len(nodes))
        laplacian = csgraph.laplacian(part).astype(float)
        values, vectors = linalg.eigsh(laplacian, k=2, sigma=-1e-3, v0=start)
        along = vectors[:, np.argsort(values)[1]]
    order = np.argsort(along, kind="stable")
    left = count // 2 * size
    return bisection(mask, nodes[order[:left]], size) + bisection(mask, nodes[order[left:]], size)


def compare(only: str, seeds: int) -> None:
    import numpy as np
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # pyright: ignore[reportMissingImports]

    print("| mask | order | block | natural | best | by | walk | bisection |\n| --- | --- |" + " ---: |" * 6)
    lost = total = 0
    for name, make in masks().items():
        if only not in name:
            continue
        for seed in range(seeds):
            made = make(seed)
            for how, mask in (("as made", made), ("random", shuffled(made, 5 + seed))):
                walk = reverse_cuthill_mckee(mask, symmetric_mode=True)
                for size in SIZES:
                    best = tl.ordering.best(mask, block_size=size)
                    halves = np.array(bisection(mask, np.arange(mask.shape[0]), size))
                    natural, *others = (blocks(mask, x, size) for x in (np.arange(mask.shape[0]), walk, halves))
                    worse = best.blocks > min(natural, *others)
                    lost, total = lost + worse, total + 1
                    mark = " (!)" * worse
                    first = f"| {name} | {how} | {size} | {natural} | {best.blocks}{mark} | {best.method} |"
                    print(first, " | ".join(map(str, others)), "|", flush=True)
    print(f"\n{lost} of {total} lost")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="part of a mask's name")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    compare(args.only, args.seeds)
