"""Which keys each query sees, as rows of numbers: masks from matrices, edges, points, grids, documents, `mask_mod`s."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import saved
from tensorloop.kernels.cpu import graphs

_TILE = 1 << 22  # pairs that a mask_mod is asked about at a time
_MOST = 2**31 - 1  # positions are int32 in the tables of blocks


@saved()
@dataclass(frozen=True, eq=False)
class Graph:
    """Which keys each query sees, as a sparse matrix by rows; made by its class methods.

        graph = tl.ordering.Graph.within(points, radius=0.1)           # points that are near each other
        graph = tl.ordering.Graph.from_grid((64, 64), window=7)        # a window over an image
        graph = tl.ordering.Graph.from_mask_mod(mask_mod, 4096)        # a mask of flex_attention
        graph = tl.ordering.Graph.of(matrix)                           # a sparse matrix

    Attributes:
        indptr: (N + 1,) int64: query u sees the keys `indices[indptr[u] : indptr[u + 1]]`.
        indices: (E,) int32, the keys, ascending for each query.
        shape: (N, M), the numbers of queries and keys.
        coords: where positions are, one tensor (N, d) for both or one for each; () where unknown.
        grid: the sizes of a grid of which these are the cells; () for none.
        window: of a grid, how many cells each sees along each axis; () for none.
        lens: the lengths of the documents whose tokens these are; None for none.

    Cost: 4 bytes an edge and 8 a query.

    Example:
        >>> graph = tl.ordering.Graph.from_edges(torch.tensor([0, 0, 2]), torch.tensor([1, 0, 2]), 3)
        >>> graph.indptr, graph.indices
        (tensor([0, 2, 2, 3]), tensor([0, 1, 2], dtype=torch.int32))
    """

    indptr: Tensor
    indices: Tensor
    shape: tuple[int, int]
    coords: tuple[Tensor, ...] = ()
    grid: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    lens: Tensor | None = None

    @staticmethod
    def __restored__(
        indptr: Tensor, indices: Tensor, shape: Any, coords: Any, grid: Any, window: Any, lens: Any
    ) -> "Graph":
        made = _from_rows(_as_ints(indptr), _as_ints(indices), read_shape(shape, "shape"))
        made = made.at(coords) if coords else made
        if lens is not None and ((lens := _as_ints(lens)).lt(0).any() or lens.sum() != made.shape[0]):
            raise WrongValue(f"lens must sum to {made.shape[0]}, the number of positions")
        grid, window = (
            tuple(arguments.at_least(1, n, "a size of grid or window") for n in of) for of in (grid, window)
        )
        return replace(made, grid=grid, window=window, lens=lens)

    @staticmethod
    @named("Graph.of")
    def of(matrix: Any) -> "Graph":
        """Makes a graph of the non-zeros of a matrix.

        Args:
            matrix: (N, M), sparse of torch or scipy, or dense of torch; or a `Graph`. Entries that are stored count, of
                whatever value; dense ones count where they are not 0.

        Returns:
            A `Graph`; one that was given comes back as it is.

        Raises:
            TypeError: anything else.
            ValueError: a matrix that has no two dims.

        Example:
            >>> tl.ordering.Graph.of(torch.eye(3)).indices
            tensor([0, 1, 2], dtype=torch.int32)
        """
        return as_graph(matrix, "matrix")

    @staticmethod
    @named("Graph.from_edges")
    def from_edges(queries: Tensor, keys: Tensor, shape: int | tuple[int, int]) -> "Graph":
        """Makes a graph of pairs: query queries[i] sees key keys[i].

        Args:
            queries: (E,) integers, in any order; the same pair twice counts once.
            keys: (E,) integers.
            shape: the numbers of queries and keys, (N, M), or N for both.

        Returns:
            A `Graph`.

        Raises:
            IndexError: a number outside of `shape`.

        Example:
            >>> tl.ordering.Graph.from_edges(torch.tensor([0, 0]), torch.tensor([1, 0]), (2, 2)).indices
            tensor([0, 1], dtype=torch.int32)
        """
        n, m = read_shape(shape, "shape")
        ends = [arguments.index_tensor(x, torch.device("cpu"), w) for x, w in ((queries, "queries"), (keys, "keys"))]
        if ends[0].dim() != 1 or ends[0].shape != ends[1].shape:
            raise WrongValue(f"queries {tuple(ends[0].shape)} and keys {tuple(ends[1].shape)} must be (E,), both")
        arguments.in_range(ends[0], 0, n, "queries")
        arguments.in_range(ends[1], 0, m, "keys")
        indptr = torch.cat([ends[0].new_zeros(1), torch.bincount(ends[0], minlength=n).cumsum(0)])
        indices = ends[1][ends[0].argsort(stable=True)].to(torch.int32)
        return Graph(*graphs.sort_rows(indptr, indices), (n, m))

    @staticmethod
    @named("Graph.within")
    def within(
        coords: Tensor,
        *,
        radius: float | None = None,
        window: Sequence[float] | None = None,
        keys: Tensor | None = None,
    ) -> "Graph":
        """Makes a graph of points that see those near them; a point sees itself.

        Args:
            coords: (N, d) finite, the points.
            radius: float above 0: a point sees those at most so far away. Give this or `window`.
            window: d floats above 0: it sees those at most half of that away along each axis.
            keys: (M, d), other points that are seen; None: the points see each other.

        Returns:
            A `Graph` with these coordinates.

        Cost: time and bytes of the edges. Raises: ValueError (NaN or infinite coordinates, sizes that are not
        positive).

        Example:
            >>> tl.ordering.Graph.within(torch.tensor([[0.0], [1.0], [5.0]]), radius=2).indptr
            tensor([0, 2, 4, 5])
        """
        points = [read_points(coords, "coords")] + ([] if keys is None else [read_points(keys, "keys")])
        d = points[0].shape[1]
        if points[-1].shape[1] != d:
            raise WrongValue(f"coords have {d} axes, keys {points[-1].shape[1]}")
        if (radius is None) == (window is None):
            raise WrongValue("give a radius or a window, one of them")
        sizes = [radius] * d if window is None else [w / 2 for w in window]
        reach = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        if reach.shape != (d,) or not bool(((reach > 0) & reach.isfinite()).all()):
            raise WrongValue(f"the radius or window must be positive, one window for each of {d} axes; got {sizes}")
        shape = (len(points[0]), len(points[-1]))
        if not d or 0 in shape:
            every = torch.arange(shape[1], dtype=torch.int32, device="cpu").repeat(0 if d else shape[0])
            indptr = torch.arange(shape[0] + 1, device="cpu") * (0 if d else shape[1])
            return Graph(indptr, every, shape, tuple(points))
        found = graphs.find_within(points[0], points[-1], reach, window is None)
        return Graph(*found, shape, tuple(points))

    @staticmethod
    @named("Graph.from_grid")
    def from_grid(shape: Sequence[int], window: int | Sequence[int]) -> "Graph":
        """Makes a graph of an image, video or volume: each cell sees a window of cells around it.

        Cells are numbered as `x.flatten()` does. Near a border the window is moved inside, so each cell sees as many.

        Args:
            shape: the sizes of the grid, such as (height, width).
            window: int, odd: how many cells are seen along each axis; or one for each.

        Returns:
            A `Graph` with these cells as coordinates.

        Raises:
            ValueError: a window that is larger than the grid, or even.

        Source: Hassani et al. 2023 (neighborhood attention).

        Example:
            >>> tl.ordering.Graph.from_grid((4, 4), window=3).shape
            (16, 16)
        """
        sizes = tuple(arguments.as_int(s, f"shape[{i}]") for i, s in enumerate(shape))
        windows = (window,) * len(sizes) if isinstance(window, int) else tuple(window)
        if len(windows) != len(sizes) or not sizes or min(sizes) < 1:
            raise WrongValue(f"shape {sizes} and window {windows} need as many sizes, above 0")
        for axis, (side, width) in enumerate(zip(sizes, windows, strict=True)):
            if width % 2 == 0 or not 0 < width <= side:
                raise WrongValue(f"window[{axis}] must be odd, from 1 to {side}, got {width}")
        axes = [torch.arange(side, device="cpu") for side in sizes]
        cells = torch.cartesian_prod(*axes).reshape(-1, len(sizes))
        strides = torch.tensor(sizes, device="cpu").flip(0).cumprod(0).flip(0) // torch.tensor(sizes, device="cpu")
        starts = [(cells[:, i] - w // 2).clamp(0, sizes[i] - w) for i, w in enumerate(windows)]
        steps = torch.cartesian_prod(*[torch.arange(w, device="cpu") for w in windows]).reshape(-1, len(sizes))
        seen = (torch.stack(starts, 1) @ strides)[:, None] + (steps @ strides)[None]
        indptr = torch.arange(len(cells) + 1, device="cpu") * seen.shape[1]
        return Graph(
            indptr,
            seen.flatten().to(torch.int32),
            (len(cells), len(cells)),
            (cells.double(),),
            tuple(sizes),
            tuple(windows),
        )

    @staticmethod
    @named("Graph.from_documents")
    def from_documents(lens: Tensor | Sequence[int], *, causal: bool = True) -> "Graph":
        """Makes a graph of documents one after another: each token sees the tokens of its own document.

        Args:
            lens: ints, the number of tokens of each document.
            causal: bool, default True: whether a token sees no later one.

        Returns:
            A `Graph` of sum(lens) positions.

        Cost: bytes of the edges, which are the squares of `lens`.

        Example:
            >>> tl.ordering.Graph.from_documents([2, 1]).indices  # causal: 0 sees 0, 1 sees 0 and 1, 2 sees 2
            tensor([0, 0, 1, 2], dtype=torch.int32)
        """
        lens = arguments.index_tensor(lens, torch.device("cpu"), "lens")
        if lens.dim() != 1 or bool((lens < 0).any()):
            raise WrongValue("lens must be (documents,) of numbers of tokens, none negative")
        starts = (lens.cumsum(0) - lens).repeat_interleave(lens)
        tokens = torch.arange(len(starts), device="cpu")
        degrees = tokens - starts + 1 if causal else lens.repeat_interleave(lens)
        indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
        edges = torch.arange(int(indptr[-1]), device="cpu") - (indptr[:-1] - starts).repeat_interleave(degrees)
        return Graph(indptr, edges.to(torch.int32), (len(tokens), len(tokens)), lens=lens)

    @staticmethod
    @named("Graph.from_mask_mod")
    def from_mask_mod(mask_mod: Callable[..., Tensor], shape: int | tuple[int, int]) -> "Graph":
        """Makes a graph of what a `mask_mod` of FlexAttention allows in batch entry 0 and head 0.

        Args:
            mask_mod: `mask_mod(b, h, q, kv)` gives bools.
            shape: the numbers of queries and keys, (N, M), or N for both.

        Returns:
            A `Graph`.

        Cost: it is asked about all N M pairs, some million at a time; bytes of the edges.

        Example:
            >>> tl.ordering.Graph.from_mask_mod(lambda b, h, q, kv: (q - kv).abs() < 2, 3).indptr
            tensor([0, 2, 5, 7])
        """
        n, m = read_shape(shape, "shape")
        if not callable(mask_mod):
            raise WrongType(f"mask_mod must be a function of b, h, q and kv, got {arguments.describe(mask_mod)}")
        _check_takes_four(mask_mod)
        zero, keys = torch.tensor(0, device="cpu"), torch.arange(m, device="cpu")
        ask = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
        degrees, columns = [], []
        step = max(1, _TILE // max(m, 1))
        for start in range(0, n if m else 0, step):
            sees = ask(zero, zero, torch.arange(start, min(start + step, n), device="cpu"), keys)
            degrees.append(sees.sum(1))
            columns.append(sees.nonzero()[:, 1].to(torch.int32))
        counts = torch.cat(degrees) if degrees else torch.zeros(n, dtype=torch.int64, device="cpu")
        indices = torch.cat(columns) if columns else torch.empty(0, dtype=torch.int32, device="cpu")
        return Graph(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), indices, (n, m))

    @property
    def is_square(self) -> bool:
        """Whether queries and keys are the same positions: as many of them, not points of two kinds.

        Example:
            >>> tl.ordering.Graph.of(torch.ones(3, 4)).is_square
            False
        """
        return self.shape[0] == self.shape[1] and len(self.coords) < 2

    @cached_property
    def reverse(self) -> tuple[Tensor, Tensor]:
        """(indptr, indices) by key; where the graph is symmetric, its own two tensors."""
        found = graphs.turn_round(self.indptr, self.indices, self.shape[1])
        own = (self.indptr, self.indices)
        return own if self.is_square and all(map(torch.equal, found, own)) else found

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether of any two positions that see each other at all each sees the other."""
        return self.reverse[0] is self.indptr

    @cached_property
    def undirected(self) -> tuple[Tensor, Tensor]:
        """(indptr, indices) of all positions, each joined with what it sees and is seen by; keys behind queries."""
        if self.is_symmetric:
            return self.indptr, self.indices
        n, m = self.shape
        shift, total = (0, n) if self.is_square else (n, n + m)
        queries = torch.arange(n, device="cpu").repeat_interleave(self.indptr.diff())
        keys = self.indices.long() + shift
        both = Graph.from_edges(torch.cat([queries, keys]), torch.cat([keys, queries]), total)
        return both.indptr, both.indices

    def at(self, coords: Any) -> "Graph":
        """Gives the same graph with coordinates for its positions.

        Args:
            coords: (N, d), or a pair of one for queries and one for keys.

        Returns:
            A `Graph`.

        Example:
            >>> graph = tl.ordering.Graph.of(torch.eye(4)).at(torch.rand(4, 2))
            >>> tl.ordering.hilbert(graph, block_size=2).blocks
            2
        """
        pair = isinstance(coords, tuple | list)
        given = tuple(coords) if pair else (coords,)
        points = tuple(read_points(x, f"coords[{i}]" if pair else "coords") for i, x in enumerate(given))
        for x, n, of in zip(points, self.shape, ("queries", "keys"), strict=False):
            if len(x) != n:
                raise WrongValue(f"coords have {len(x)} rows for {n} {of}")
        if len(points) not in (1, 2) or (len(points) == 1 and self.shape[0] != self.shape[1]):
            raise WrongValue(f"{self.shape[0]} queries and {self.shape[1]} keys need two tensors of coords, (q, k)")
        return replace(self, coords=points, grid=(), window=())


def as_graph(matrix: Any, what: str) -> Graph:
    """A graph from what a user gives for one."""
    if isinstance(matrix, Graph):
        return matrix
    if isinstance(matrix, Tensor):
        return _from_tensor(matrix, what)
    if hasattr(matrix, "tocsr"):  # scipy's matrices and arrays
        rows = matrix.tocsr()
        if len(rows.shape) != 2:
            raise WrongValue(f"{what} must be (N, M), got {tuple(rows.shape)}")
        indptr, indices = (torch.as_tensor(x, device="cpu") for x in (rows.indptr, rows.indices))
        return _from_rows(indptr, indices, read_shape(tuple(rows.shape), what))
    got = arguments.describe(matrix)
    cure = "; wrap it with torch.as_tensor" if hasattr(matrix, "__array__") else ""
    cure = "; edges make one by Graph.from_edges" if isinstance(matrix, list | tuple) else cure
    raise WrongType(f"{what} must be a Graph, a sparse matrix of torch or scipy, or a tensor (N, M), got {got}{cure}")


def _check_takes_four(mask_mod: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(mask_mod)
    except (TypeError, ValueError):
        return  # nobody can tell
    try:
        signature.bind("b", "h", "q", "kv")
    except TypeError:
        raise WrongType(f"mask_mod is called as mask_mod(b, h, q, kv), but takes {signature}") from None


def _as_ints(x: Tensor) -> Tensor:
    return arguments.index_tensor(x.cpu(), torch.device("cpu")).view(-1)


def _from_tensor(matrix: Tensor, what: str) -> Graph:
    if matrix.dim() != 2:
        raise WrongValue(f"{what} must be (N, M), got {tuple(matrix.shape)}")
    if matrix.is_meta:
        raise WrongValue(f"{what} is on the meta device, which has no numbers; make it on another")
    matrix = matrix.detach().cpu()
    if matrix.layout is torch.sparse_csr:
        return _from_rows(matrix.crow_indices(), matrix.col_indices(), read_shape(tuple(matrix.shape), what))
    if matrix.layout is torch.strided:
        ends = matrix.nonzero().T
    else:
        ends = (matrix if matrix.layout is torch.sparse_coo else matrix.to_sparse_coo())._indices()
    return Graph.from_edges(ends[0], ends[1], read_shape(tuple(matrix.shape), what))


def _from_rows(indptr: Tensor, indices: Tensor, shape: tuple[int, int]) -> Graph:
    n, m = shape
    indptr = indptr.to(torch.int64)
    if len(indices):  # kernels follow them blindly
        arguments.in_range(torch.stack([indices.min(), indices.max()]), 0, m, "column numbers, least and largest,")
    if bool((indptr.diff() < 0).any()) or int(indptr[0]) or int(indptr[-1]) != len(indices) or len(indptr) != n + 1:
        raise WrongValue(f"the row pointers must be {n + 1} ascending numbers from 0 to {len(indices)}")
    return Graph(*graphs.sort_rows(indptr, indices.to(torch.int32)), shape)


def read_shape(shape: Any, what: str) -> tuple[int, int]:
    """(queries, keys), of which one number means both."""
    given = tuple(shape) if isinstance(shape, tuple | list) else (shape, shape)
    if len(given) != 2:
        raise WrongValue(f"{what} must be a number of positions, or (queries, keys), got {given}")
    n, m = (arguments.as_int(x, what) for x in given)
    if not (0 <= n <= _MOST and 0 <= m <= _MOST):
        raise WrongValue(f"{what} must be from 0 to {_MOST}, got {(n, m)}")
    return n, m


def read_points(coords: Any, what: str) -> Tensor:
    """(N, d) float64 on the CPU, finite."""
    if not isinstance(coords, Tensor):
        try:
            coords = torch.as_tensor(coords)
        except (TypeError, ValueError, RuntimeError):
            raise WrongType(f"{what} must be a tensor (N, d), got {arguments.describe(coords)}") from None
    arguments.dense_tensor(coords, what)
    if coords.dim() != 2 or coords.is_complex():
        raise WrongValue(f"{what} must be real numbers (N, d), got {arguments.describe(coords)}")
    points = coords.detach().to("cpu", torch.float64)
    bad = ~points.isfinite().all(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise WrongValue(f"{what}[{row}] is {points[row].tolist()}; give every point finite coordinates")
    return points
