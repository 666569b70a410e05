"""What an ordering saves, in numbers, and a lower bound that no ordering gets below."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.saved import saved
from tensorloop.kernels.cpu import graph_walks, graphs
from tensorloop.ordering.problem import Orders, Problem, find_blocks


@saved()
class MaskBlocks(NamedTuple):
    """The blocks of a mask in one order.

    Attributes:
        blocks: int, how many are not empty.
        full: int, in how many of them every pair is allowed.
        density: float, the share of all blocks that are not empty.
        filled: float, the share of the pairs in non-empty blocks that are allowed.
    """

    blocks: int
    full: int
    density: float
    filled: float


@saved()
class Report(NamedTuple):
    """The blocks of a mask before and after an ordering, and the fewest there could be; `str()` gives a text.

    Attributes:
        before: blocks in the order in which positions come: `blocks`, `full`, `density` and `filled`.
        after: blocks in the new order.
        bound: int, a number that no order comes below.
        bound_by: string, what the bound goes by.
        method: string, the name of the method.
        block_size: int, positions in a block.
        shape: (N, M), the numbers of queries and keys.
        tables: (rows, columns) of the blocks that are not empty, before and after.

    Example:
        >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
        >>> report = order.report()
        >>> report.bound <= report.after.blocks <= report.before.blocks
        True
    """

    before: MaskBlocks
    after: MaskBlocks
    bound: int
    bound_by: str
    method: str
    block_size: int
    shape: tuple[int, int]
    tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

    def __str__(self) -> str:
        n, m = self.shape
        lines = [f"{n} queries x {m} keys in blocks of {self.block_size}, ordered by {self.method}"]
        for name, x in (("before", self.before), ("after", self.after)):
            lines.append(
                f"{name:>6}: {x.blocks:>9,} blocks, {x.full:,} of them full; {x.density:.2%} of all blocks, "
                f"{x.filled:.1%} filled"
            )
        return "\n".join([*lines, f" bound: {self.bound:>9,} blocks at least ({self.bound_by})"])

    def picture(self, path: str | Path | None = None) -> Any:
        """Draws both block masks side by side; needs matplotlib.

        Args:
            path: where the picture is saved; None saves none.

        Returns:
            A figure of matplotlib.
        """
        from tensorloop.ordering.picture import draw  # matplotlib, where one draws

        return draw(self, path)


def make_report(problem: Problem, orders: Orders, method: str) -> Report:
    """Both orders counted; O(E)."""
    natural = problem.natural()
    before, table = count_all(problem, natural)
    after, new = count_all(problem, orders)
    bound, by = bound_below(problem)
    return Report(before, after, bound, by, method, problem.size, problem.graph.shape, (table, new))


def list_blocks(problem: Problem, orders: Orders) -> tuple[Tensor, Tensor, Tensor]:
    """offsets (rows + 1,), columns and numbers of pairs of the blocks that are not empty, row by row."""
    graph = problem.graph
    block_of = find_blocks(orders[-1], problem.size)
    return graphs.list_blocks(graph.indptr, graph.indices, orders[0], block_of, problem.columns, problem.size)


def areas_of(problem: Problem, rows: Tensor, columns: Tensor) -> Tensor:
    """Pairs that there are in each block; fewer at the ends."""
    n, m = problem.graph.shape
    return (n - rows * problem.size).clamp(max=problem.size) * (m - columns * problem.size).clamp(max=problem.size)


def count_all(problem: Problem, orders: Orders) -> tuple[MaskBlocks, tuple[Tensor, Tensor]]:
    """The numbers, and (rows, columns) of the blocks."""
    offsets, columns, pairs = list_blocks(problem, orders)
    rows = torch.arange(problem.rows, device="cpu").repeat_interleave(offsets.diff())
    areas = areas_of(problem, rows, columns.long())
    number, area = len(columns), int(areas.sum())
    density = number / max(problem.rows * problem.columns, 1)
    found = MaskBlocks(number, int((pairs == areas).sum()), density, int(pairs.sum()) / area if area else 0.0)
    return found, (rows, columns)


def bound_below(problem: Problem) -> tuple[int, str]:
    """The largest of some bounds that hold for every order, and what it goes by."""
    graph, size = problem.graph, problem.size
    bounds = {"pairs / area of a block": -(-len(graph.indices) // size**2)}
    for name, pointers in (("rows", graph.indptr), ("columns", graph.reverse[0])):
        # The widest row of each row of blocks needs that many; rows of like width together need the fewest.
        widest = pointers.diff().sort(descending=True).values[::size]
        bounds[f"widths of {name}"] = int((-(-widest // size)).sum())
    if graph.is_symmetric and problem.rows and graph_walks.label_components(graph.indptr, graph.indices)[1] == 1:
        # A tree of blocks, each edge both ways; and where all see themselves, the diagonal.
        queries = torch.arange(graph.shape[0], dtype=torch.int32, device="cpu").repeat_interleave(graph.indptr.diff())
        themselves = int((graph.indices == queries).sum()) == graph.shape[0]
        bounds["connected"] = 2 * (problem.rows - 1) + themselves * problem.rows
    if graph.grid:
        bounds["isoperimetric"] = problem.rows * _least_neighbourhood(graph.grid, graph.window, size)
    by = max(bounds, key=lambda name: bounds[name])
    return bounds[by], by


def _least_neighbourhood(grid: tuple[int, ...], window: tuple[int, ...], size: int) -> int:
    """Blocks that a block of `size` cells meets at least: those of a brick in a corner of the grid.

    Cells on one side of a brick alone are counted, as in a corner, and axes along which it reaches from border to
    border have none (Bollobas & Leader 1991, Brunn & Minkowski).
    """
    axes, reach = range(len(grid)), min(window) // 2
    volumes = []
    for number in range(len(grid)):
        for spanned in combinations(axes, number):
            full = math.prod(grid[i] for i in spanned)
            if full <= size:
                free = len(grid) - number
                volumes.append(full * ((size / full) ** (1 / free) + reach) ** free)
    return math.ceil(min(volumes) / size - 1e-9)
