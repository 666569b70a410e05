"""What an ordering is looked for: a graph and a size of blocks, and how many blocks an order of it leaves."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop.kernels.cpu import graphs
from tensorloop.ordering.graph import Graph, as_graph

Orders = tuple[Tensor, ...]
"""Orders of positions, `order[new] = old`, int32: (of all,), or (of queries, of keys)."""
_SAMPLED = 1 << 19  # edges that are read of a candidate when many are compared


class Problem(NamedTuple):
    """A graph and a size of blocks."""

    graph: Graph
    size: int

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return -(-self.graph.shape[0] // self.size)

    @property
    def columns(self) -> int:
        """Blocks of keys."""
        return -(-self.graph.shape[1] // self.size)

    @property
    def every(self) -> int:
        """Returns n where candidates are compared by each n-th row of blocks alone."""
        return max(1, len(self.graph.indices) // _SAMPLED)

    def natural(self) -> Orders:
        """The order in which positions come."""
        sizes = self.graph.shape[:1] if self.graph.is_square else self.graph.shape
        return tuple(torch.arange(n, dtype=torch.int32, device="cpu") for n in sizes)

    def count(self, orders: Orders, every: int = 1) -> int:
        """Blocks that are not empty, of every `every`-th row of blocks alone."""
        graph = self.graph
        block_of = find_blocks(orders[-1], self.size)
        args = (graph.indptr, graph.indices, orders[0], block_of, self.columns, self.size, every)
        return int(graphs.count_blocks(*args).sum())

    def split(self, order: Tensor) -> Orders:
        """An order of all positions, keys behind queries, as one of queries and one of keys."""
        if self.graph.is_square:
            return (order.to(torch.int32),)
        n = self.graph.shape[0]
        return order[order < n].to(torch.int32), (order[order >= n] - n).to(torch.int32)

    def best_of(self, candidates: list[Orders]) -> Orders:
        """The one that leaves the fewest blocks, of equals the first."""
        return min(candidates, key=lambda orders: self.count(orders, self.every))


def find_blocks(order: Tensor, size: int) -> Tensor:
    """(N,) int32: the block that each position is in."""
    found = torch.empty(len(order), dtype=torch.int32, device="cpu")
    found[order.long()] = torch.arange(len(order), dtype=torch.int32, device="cpu") // size
    return found


def read_problem(graph: Any, coords: Any, block_size: Any) -> Problem:
    """From what a user gives."""
    size = arguments.at_least(1, block_size, "block_size")
    graph = as_graph(graph, "graph")
    return Problem(graph if coords is None else graph.at(coords), size)
