"""The methods, each callable alone, and `best`, which takes the best of those that apply. Long by their docstrings."""

from collections.abc import Callable
from typing import Any

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, facts_of, named
from tensorloop.ordering import curves, documents, slab_search, swap_search, walks
from tensorloop.ordering.graph import Graph, as_graph, read_shape
from tensorloop.ordering.ordering import Ordering, use_permutation
from tensorloop.ordering.problem import Orders, Problem, read_problem
from tensorloop.ordering.report import bound_below

_SMALL = 1 << 16  # edges up to which everything is tried
_NEAR = 2  # times the lower bound: where the natural order leaves no more, what takes long is not tried
_FEW, _SHORT = 1 << 21, 100_000  # pairs of blocks up to which `best` tries so many swaps by itself
_EMBEDDED = 1 << 22  # edges up to which `best` looks at the spectrum although there are coordinates


@named("natural")
def natural(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Keeps positions in the order in which they come: what other orderings are compared with.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

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
    """Orders positions by a permutation of your own.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        permutation: (N,) integers, old positions in their new order; a pair (of queries, of keys) where these differ.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: numbers that are not those from 0 to N - 1, each once.

    Example:
        >>> graph = tl.ordering.Graph.from_edges(torch.tensor([0, 2]), torch.tensor([2, 0]), 4)
        >>> tl.ordering.given(graph, torch.tensor([0, 2, 1, 3]), block_size=2).blocks  # 0 and 2 side by side
        1
    """
    return use_permutation(read_problem(graph, None, block_size), permutation)


@named("sort_axis")
def sort_axis(graph: Any, *, coords: Any = None, block_size: int = 128) -> Ordering:
    """Sorts positions along the axis of the coordinates that leaves the fewest blocks.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: no coordinates, neither here nor in the graph.

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
    """Orders positions along Morton's curve (z-order) through their coordinates.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: no coordinates, neither here nor in the graph.

    Source: Morton 1966.

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
    """Orders positions along Hilbert's curve through their coordinates.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: no coordinates, neither here nor in the graph.

    Source: Hilbert 1891; Skilling 2004 for any number of axes.

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
    """Orders positions along Moore's curve, which is closed, through coordinates of two axes.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: no coordinates, or of another number of axes than two.

    Source: Moore 1900.

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
    """Groups the cells of a grid into boxes of one block each: the shape of box that leaves the fewest blocks.

    Args:
        graph: the mask: a `Graph` of `Graph.from_grid`.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: a graph that is no grid.

    Example:
        >>> image = tl.ordering.Graph.from_grid((16, 64), window=(3, 3))
        >>> tl.ordering.natural(image, block_size=64).blocks, tl.ordering.patches(image, block_size=64).blocks
        (48, 46)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, problem.best_of(_patches(problem)), "patches")


@named("slabs")
def slabs(graph: Any, *, coords: Any = None, block_size: int = 128, effort: float = slab_search.EFFORT) -> Ordering:
    """Cuts the points into slabs along one axis, and these into slabs along the next.

    It takes the counts of slabs that leave the fewest blocks.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds. None: those of the
            graph.
        block_size: int, default 128: positions in a block.
        effort: float, how many edges and coordinates may be read while counts are tried out.

    Returns:
        An `Ordering`.

    Raises:
        ValueError: no coordinates, neither here nor in the graph.

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
    """Orders positions breadth first from an end of the graph, reversed (reverse Cuthill-McKee); no coordinates needed.

    Some ends and some orders among nodes of equal degrees are tried, and components are packed into blocks.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Source: Cuthill & McKee 1969, George 1971.

    Example:
        >>> t = torch.arange(256.0)
        >>> points = tl.ordering.Graph.within(torch.stack([t * 0.618 % 1, t * 0.755 % 1], 1), radius=0.1)
        >>> tl.ordering.natural(points, block_size=32).blocks, tl.ordering.rcm(points, block_size=32).blocks
        (58, 22)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, problem.best_of(walks.breadth_first(problem)), "rcm")


@named("spectral")
def spectral(graph: Any, *, block_size: int = 128, effort: float = slab_search.EFFORT) -> Ordering:
    """Orders positions by eigenvectors of the graph's Laplacian; no coordinates needed.

    The eigenvectors serve as coordinates, which are cut into slabs or halved; or each half gets its own (spectral
    bisection). The result is what leaves the fewest blocks.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        block_size: int, default 128: positions in a block.
        effort: float, how many edges and coordinates may be read while counts are tried out.

    Returns:
        An `Ordering`.

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
    """Orders positions by halving the graph with METIS again and again, into whole blocks; needs the package pymetis.

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Raises:
        ImportError: pymetis is not installed.

    Source: Karypis & Kumar 1998.

    Example:
        >>> from importlib.util import find_spec
        >>> graph = tl.ordering.Graph.from_grid((16, 16), window=5)
        >>> blocks = tl.ordering.metis(graph, block_size=32).blocks if find_spec("pymetis") else None
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, walks.by_metis(problem), "metis")


@named("docs_pack")
def docs_pack(graph: Any, *, block_size: int = 128) -> Ordering:
    """Orders packed documents so that they fit the borders of blocks as well as possible.

    Args:
        graph: the mask: a `Graph` of `Graph.from_documents`.
        block_size: int, default 128: positions in a block.

    Returns:
        An `Ordering`.

    Example:
        >>> graph = tl.ordering.Graph.from_documents([20, 30, 44, 34])
        >>> tl.ordering.natural(graph, block_size=32).blocks, tl.ordering.docs_pack(graph, block_size=32).blocks
        (7, 6)
    """
    problem = read_problem(graph, None, block_size)
    return Ordering(problem, documents.pack_documents(problem), "docs_pack")


@named("improve")
def improve(ordering: Ordering, moves: int, *, seed: int = 0, progress: bool = False) -> Ordering:
    """Improves an ordering by swaps of two positions between blocks; never worse, and the same each time.

    Args:
        ordering: an `Ordering`.
        moves: int, at least 0: how many swaps are tried, about 2 million a second.
        seed: int, default 0, of the random swaps.
        progress: bool, default False: whether a bar is shown.

    Returns:
        An `Ordering`.

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
    moves = arguments.at_least(0, moves, "moves")
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
    "rcm": walks.breadth_first,
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
    moves: int | None = None,
    methods: tuple[str, ...] | list[str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Ordering:
    """Finds the best ordering for a mask, never worse than the order in which positions come.

        order = tl.ordering.best(graph)                                   # a Graph, or a sparse matrix
        order = tl.ordering.best(mask_mod=near, shape=4096, coords=xy)    # a mask_mod of flex_attention
        x = order.undo(layers(order.apply(x), order.block_mask()))

    Args:
        graph: the mask: a `Graph`, or a sparse matrix (N, M) of torch or scipy. Or give `mask_mod` and `shape`.
        coords: where positions are, (N, d), or a pair where queries and keys are of two kinds; makes it far better.
            None: those of the graph.
        mask_mod: the mask as `mask_mod(b, h, q, kv)`, as for flex_attention, in place of `graph`.
        shape: of `mask_mod`: N, or (N, M) where queries and keys differ; by default as many as `coords`.
        block_size: int, default 128: positions in a block.
        moves: int: swaps that a search tries afterwards, about 2 million a second; the result is the same each time.
            None: 100,000 where the graph is all that is known and its blocks are few, else 0.
        methods: names of those to try, such as ["hilbert", "rcm"]. None: all that apply and are quick; "metis" is tried
            only by name.
        seed: int, default 0, of the search.
        progress: bool, default False: whether the search shows a bar.

    Returns:
        An `Ordering`, whose `method` says which one it is.

    Cost: about a second; O(E) for each method.

    Raises:
        TypeError: what is no graph.
        ValueError: neither or both of `graph` and `mask_mod`, sizes that do not go together, NaN coordinates, a method
            that is not there.

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
    names = _applicable(problem) if methods is None else _read_methods(methods)
    # Walks through a graph decide by chance between nodes alike: a short search is worth more than any one of them.
    short = (
        methods is None
        and "spectral" in names
        and not problem.graph.coords
        and 2 * (problem.rows + problem.columns) ** 2 <= _FEW
    )
    moves = (_SHORT if short else 0) if moves is None else arguments.at_least(0, moves, "moves")
    name, orders = _choose(problem, names)
    found = swap_search.improve(problem, orders, moves, seed, progress) if moves else orders
    return Ordering(problem, found, name if found is orders else f"{name} + search")


def _choose(problem: Problem, names: list[str]) -> tuple[str, Orders]:
    """Returns the candidate of the fewest blocks, with its name; of equals the first: the natural order comes first."""
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
    if quick or not (graph.coords or graph.grid or graph.lens is not None):
        names += ["rcm"]
        if len(graph.indices) <= _SMALL or problem.count(problem.natural()) > _NEAR * bound_below(problem)[0]:
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
