"""The order of packed documents: those that fill the rest of a block come behind those that leave it."""

import torch

from tensorloop._common.errors import WrongValue
from tensorloop.ordering.problem import Orders, Problem


def pack_documents(problem: Problem) -> Orders:
    """Best fit to the borders of blocks: the longest document on a border, then the longest that fits what is left.

    Where none fits, the one that touches the fewest more blocks, and of those the one that ends nearest to a border.
    """
    lens = problem.graph.lens
    if lens is None:
        raise WrongValue("this method orders documents, and the graph has none; make it by Graph.from_documents")
    starts = (lens.cumsum(0) - lens).tolist()
    sizes = lens.tolist()
    pieces = [torch.arange(starts[i], starts[i] + sizes[i], device="cpu") for i in best_fit(sizes, problem.size)]
    return (torch.cat(pieces).to(torch.int32) if pieces else torch.empty(0, dtype=torch.int32, device="cpu"),)


def best_fit(sizes: list[int], size: int) -> list[int]:
    """Numbers of the pieces in the order in which they are laid into blocks of `size`, as `pack_documents` says."""
    left = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    chosen: list[int] = []
    at = 0
    while left:
        room = -at % size
        document = left[0]
        if room:
            document = next((i for i in left if sizes[i] <= room), -1)
            if document < 0:
                document = min(left, key=lambda i: (_more_blocks(sizes[i], at % size, size), -(at + sizes[i]) % size))
        left.remove(document)
        chosen.append(document)
        at += sizes[document]
    return chosen


def _more_blocks(length: int, first: int, size: int) -> int:
    """How many blocks more a causal document meets that begins `first` tokens behind a border, than on one."""
    alone, here = -(-length // size), -(-(length + first) // size)
    return here * (here + 1) - alone * (alone + 1)
