"""A search over swaps of positions between blocks.

One half of the moves starts from an order that is good already, the other from one whose blocks are round: from slabs
a search does not find its way to what is better in three dimensions.
"""

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._common.progress import Progress
from tensorloop.kernels.cpu.swaps import Swaps
from tensorloop.ordering import walks
from tensorloop.ordering.problem import Orders, Problem, find_blocks

_CELLS = 1 << 27  # pairs of blocks that are counted, 4 bytes each
_STAGES = 10


def improve(problem: Problem, orders: Orders, moves: int, seed: int = 0, progress: bool = False) -> Orders:
    """The best order met in `moves` swaps that are tried, the same each time; `orders` itself where none is better."""
    graph, size = problem.graph, problem.size
    square = len(orders) == 1
    blocks = problem.rows if square else problem.rows + problem.columns
    if 2 * blocks**2 > _CELLS:
        raise WrongValue(
            f"a search counts the pairs between all {blocks} blocks, twice; that is more than {_CELLS} numbers. "
            "Take larger blocks, or moves=0"
        )
    if not len(graph.indices) or blocks < 2 or not moves:
        return orders
    parts = [_parts_of(problem, start) for start in (orders, walks.compact(problem))]
    outs, ins = (graph.indptr, graph.indices), graph.reverse
    kinds = torch.zeros(blocks, dtype=torch.int32, device="cpu")
    if not square:  # one graph of queries and keys behind them, which keep apart
        kinds[problem.rows :] = 1
        n, m = graph.shape
        outs = (torch.cat([outs[0], outs[0][-1:].expand(m)]), outs[1] + n)
        ins = (torch.cat([ins[0].new_zeros(n), ins[0]]), ins[1])
    swaps = Swaps(outs, ins, torch.stack(parts), kinds, size)
    start = swaps.start
    # Edges of a pair of blocks that meets: how many tell a pair that will stay from one that may go.
    scale = len(graph.indices) / max(start, 1) / 64
    each = max(1, moves // (2 * _STAGES))
    with Progress(progress, "search", moves) as bar:
        for stage in range(_STAGES):
            swaps.run(each, scale, stage / (_STAGES - 1), seed * _STAGES + stage)
            bar.update(2 * each)
    best, found = swaps.best()
    if found >= start:
        return orders
    return _orders_of(best, problem, square)


def _parts_of(problem: Problem, orders: Orders) -> Tensor:
    """The block of each position; keys of another kind stand behind the queries."""
    parts = [find_blocks(order, problem.size) for order in orders]
    return torch.cat([parts[0], *(problem.rows + part for part in parts[1:])])


def _orders_of(part: Tensor, problem: Problem, square: bool) -> Orders:
    order = part.argsort(stable=True)
    return (order.to(torch.int32),) if square else problem.split(order)
