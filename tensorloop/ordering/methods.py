"""The methods, each callable alone, and `best`, which takes the best of those that apply."""

from collections.abc import Callable
from typing import Any

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, facts_of, named
from tensorloop.ordering import curves, documents, slab_search, swap_search, walks
from tensorloop.ordering.graph import Graph, as_graph, read_shape
from tensorloop.ordering.ordering import Ordering, use_permutation
from tensorloop.ordering.problem import Orders, Problem, read_problem
from tensorloop.ordering.report import bound_below

_NEAR = 2  # times the lower bound: where the natural order leaves no more, what takes long is not tried
_EMBEDDED = 1 << 22  # edges up to which `best` looks at the spectrum although there are coordinates


@named("natural")
def natural(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """The order in which positions come.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks  # of 64
        58
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, problem.natural(), "natural")


@named("given")
def given(graph: Any, permutation: Any, *, block_size: int = 128) -> Ordering:
    """A permutation (N,) of one's own, old positions in their new order; (of queries, of keys) where these differ.

    Example:
        >>> graph = tl.ordering.Graph.from_edges(torch.tensor([0, 2]), torch.tensor([2, 0]), 4)
        >>> tl.ordering.given(graph, torch.tensor([0, 2, 1, 3]), block_size=2).blocks  # 0 and 2 side by side
        1
    """
    return use_permutation(read_problem(graph, None, block_size), permutation)


@named("sort_axis")
def sort_axis(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Sorted along the axis that leaves the fewest blocks.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.sort_axis(points, block_size=32).blocks
        (58, 22)
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, problem.best_of(curves.along_axes(problem)), "sort_axis")


@named("morton")
def morton(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Along Morton's curve through the coordinates (Morton 1966).

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.morton(points, block_size=32).blocks
        (58, 38)
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, curves.along_morton(problem), "morton")


@named("hilbert")
def hilbert(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Along Hilbert's curve through the coordinates (Hilbert 1891, Skilling 2004).

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.hilbert(points, block_size=32).blocks
        (58, 34)
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, curves.along_hilbert(problem), "hilbert")


@named("moore")
def moore(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Along Moore's curve, which is closed, through coordinates of two axes (Moore 1900).

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.moore(points, block_size=32).blocks
        (58, 34)
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, curves.along_moore(problem), "moore")


@named("patches")
def patches(graph: Any, *, block_size: int = 128) -> Ordering:
    """Boxes of as many cells of a grid as a block has: the shape of box that leaves the fewest blocks.

    Example:
        >>> image = tl.ordering.Graph.from_grid((16, 64), window=(3, 3))
        >>> tl.ordering.natural(image, block_size=64).blocks, tl.ordering.patches(image, block_size=64).blocks
        (48, 46)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, problem.best_of(_patches(problem)), "patches")


@named("slabs")
def slabs(graph: Any, *, coords: Any = None, block_size: int = 128, effort: float = slab_search.EFFORT) -> Ordering:
    """Slabs along one axis, cut into slabs along the next: the counts of slabs that leave the fewest blocks.

    `effort`: edges and coordinates that may be read while counts are tried out.
    Source: Leutenegger, Lopez & Edgington 1997 (Sort-Tile-Recursive), cut at multiples of a block.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.slabs(points, block_size=32).blocks
        (58, 22)
    """
    problem = read_problem(graph, coords, block_size)
    return Ordering(problem, slab_search.search_slabs(problem, effort=effort), "slabs")


@named("rcm")
def rcm(graph: Any, *, block_size: int = 128) -> Ordering:
    """Breadth first from an end of the graph, reversed: Cuthill & McKee 1969, George 1971.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.rcm(points, block_size=32).blocks
        (58, 22)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, walks.breadth_first(problem), "rcm")


@named("spectral")
def spectral(graph: Any, *, block_size: int = 128, effort: float = slab_search.EFFORT) -> Ordering:
    """Eigenvectors of the graph's Laplacian as coordinates, cut into slabs or halved, whichever leaves fewer blocks.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.spectral(points, block_size=32).blocks
        (58, 22)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, problem.best_of(walks.by_spectrum(problem, effort)), "spectral")


@named("metis")
def metis(graph: Any, *, block_size: int = 128) -> Ordering:
    """Halved by METIS again and again, mended to whole blocks at each level; needs the package pymetis.

    Example:
        >>> from importlib.util import find_spec
        >>> graph = tl.ordering.Graph.from_grid((16, 16), window=5)
        >>> blocks = tl.ordering.metis(graph, block_size=32).blocks if find_spec("pymetis") else None
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, walks.by_metis(problem), "metis")


@named("docs_pack")
def docs_pack(graph: Any, *, block_size: int = 128) -> Ordering:
    """Packed documents, each put where it fits the borders of blocks best; for graphs of `Graph.from_documents`.

    Example:
        >>> graph = tl.ordering.Graph.from_documents([20, 30, 44, 34])
        >>> tl.ordering.natural(graph, block_size=32).blocks, tl.ordering.docs_pack(graph, block_size=32).blocks
        (7, 6)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, documents.pack_documents(problem), "docs_pack")


@named("improve")
def improve(ordering: Ordering, moves: int, *, seed: int = 0, progress: bool = False) -> Ordering:
    """An ordering after `moves` tried swaps of two positions between blocks; never worse, and the same each time.

    Cost: about as many lookups a move as a position has neighbours; 8 bytes for each pair of blocks, empty or not.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> start = tl.ordering.hilbert(points, block_size=32)
        >>> start.blocks, tl.ordering.improve(start, moves=20000).blocks
        (34, 22)
    """
    if not isinstance(ordering, Ordering):
        raise WrongType(f"ordering must be an Ordering, got {arguments.describe(ordering)}")
    moves = _read_moves(moves)
    found = swap_search.improve(ordering._problem, ordering._orders, moves, seed, progress)
    name = ordering.method if found is ordering._orders else f"{ordering.method} + search"
    return Ordering(ordering._problem, found, name)


METHODS: dict[str, Callable[[Problem], list[Orders]]] = {
    "docs_pack": lambda problem: [documents.pack_documents(problem)],
    "sort_axis": curves.along_axes,
    "morton": lambda problem: [curves.along_morton(problem)],
    "hilbert": lambda problem: [curves.along_hilbert(problem)],
    "moore": lambda problem: [curves.along_moore(problem)],
    "patches": lambda problem: _patches(problem),
    "slabs": lambda problem: [slab_search.search_slabs(problem)],
    "rcm": lambda problem: [walks.breadth_first(problem)],
    "spectral": lambda problem: walks.by_spectrum(problem, slab_search.EFFORT / (8 if problem.graph.coords else 1)),
    "metis": lambda problem: [walks.by_metis(problem)],
}


@named("best")
def best(
    graph: Any = None,
    *,
    coords: Any = None,
    mask_mod: Any = None,
    shape: int | tuple[int, int] | None = None,
    block_size: int = 128,
    moves: int = 0,
    methods: tuple[str, ...] | list[str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Ordering:
    """The best ordering found of a mask, never worse than the order in which positions come.

    `graph`: the mask, a `Graph` or a sparse matrix of torch or scipy (N, M). Or `mask_mod` with `shape`, N or (N, M).
    `coords`: where positions are, (N, d), or a pair where queries and keys are of two kinds; makes it far better.
    `moves`: swaps that a search tries afterwards, about 2 million a second; the result is the same each time.
    `methods`: names of those to try; by default all that apply and are quick. "metis" is tried only by name.
    Cost: about a second; O(E) for each method.
    Raises: TypeError and ValueError for what is no graph, sizes that do not go together, NaN coordinates.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.best(points, block_size=32).blocks
        (58, 22)
    """
    if (graph is None) == (mask_mod is None):
        hint = (
            "; coords alone do not say who sees whom: Graph.within(coords, radius=...) does"
            if coords is not None
            else ""
        )
        raise WrongValue(f"give a graph, or a mask_mod and its shape, one of them{hint}")
    if mask_mod is not None:
        if shape is None:
            if coords is None or isinstance(coords, tuple | list):
                raise WrongValue("mask_mod needs shape=, the number of positions, or (queries, keys)")
            shape = len(coords)
        graph = facts_of(Graph.from_mask_mod)(mask_mod, read_shape(shape, "shape"))
    problem = read_problem(as_graph(graph, "graph"), coords, block_size)
    moves = _read_moves(moves)
    name, orders = _choose(problem, _applicable(problem) if methods is None else _read_methods(methods))
    found = swap_search.improve(problem, orders, moves, seed, progress) if moves else orders
    return Ordering(problem, found, name if found is orders else f"{name} + search")


def _choose(problem: Problem, names: list[str]) -> tuple[str, Orders]:
    """Of equals the first; the natural order comes first."""
    candidates = [("natural", problem.natural())]
    candidates += [(name, orders) for name in names for orders in METHODS[name](problem)]
    if problem.every > 1:  # counted on a part of the rows: the best few are counted in whole
        counts = [problem.count(orders, problem.every) for _, orders in candidates]
        few = sorted(range(1, len(candidates)), key=counts.__getitem__)[:2]
        candidates = [candidates[i] for i in (0, *few)]
    return min(candidates, key=lambda x: problem.count(x[1]))


def _applicable(problem: Problem) -> list[str]:
    """The methods that go by what is known of the positions and are quick, the simplest first."""
    graph = problem.graph
    if not len(graph.indices) or max(problem.rows, problem.columns) < 2:
        return []
    names = ["docs_pack"] if graph.lens is not None else []
    quick = len(graph.indices) <= _EMBEDDED
    if graph.coords and graph.coords[0].shape[1]:
        d = min(graph.coords[0].shape[1], curves.AXES)
        names += ["sort_axis", "morton", "hilbert"][: 3 if quick else 0] + (["moore"] if d == 2 and quick else [])
        names += ["patches"] if graph.grid else []
        names += ["slabs"]
    if not graph.grid and graph.lens is None and (quick or not graph.coords):
        names += ["rcm"]
        if problem.count(problem.natural()) > _NEAR * bound_below(problem)[0]:
            names += ["spectral"]
    return names


def _patches(problem: Problem) -> list[Orders]:
    return curves.by_patches(problem)


def _read_methods(methods: Any) -> list[str]:
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods):
        raise WrongType(f"methods must be names, as ('slabs', 'rcm'), got {arguments.describe(methods)}")
    for name in methods:
        if name not in METHODS and name != "natural":
            raise WrongValue(f"there is no method {name!r}; there are {', '.join(METHODS)}")
    return [name for name in methods if name != "natural"]


def _read_moves(moves: Any) -> int:
    number = arguments.as_int(moves, "moves")
    if number < 0:
        raise WrongValue(f"moves must be at least 0, got {number}")
    return number
