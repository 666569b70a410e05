"""Edit distances: a warp for a pair of rows, one diagonal of its table after the other."""

from typing import Any

from torch import Tensor

from tensorloop_cuda.launch import WARP, Shape, block_shape, launch
from tensorloop_cuda.memory import INT, address, bounds_of, lay_out, load, store
from tensorloop_cuda.target import cuda


def edit_distance(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> Tensor:
    """(R,) int64: the fewest edits between row r of a (N,) and row r // (R / S) of b (M,), both int64.

    Three diagonals of each pair's table are kept, in 24 bytes a token of a and pair.
    """
    a, a_offsets, b, b_offsets = map(lay_out, (a, a_offsets, b, b_offsets))
    n, m, rows, others = len(a), len(b), len(a_offsets) - 1, len(b_offsets) - 1
    if rows % others if others else rows:
        raise ValueError(f"edit_distance: {rows} rows of a cannot be shared among {others} rows of b")
    out, diagonals = a_offsets.new_empty(rows), a_offsets.new_empty(3 * (n + rows))
    if rows:
        places = address(a), address(a_offsets), address(b), address(b_offsets), address(diagonals), address(out)
        shape = Shape(block_shape(WARP).across, 1)
        launch(_edits, a_offsets, rows, shape, *places, n, m, rows, rows // others, INT)
    return out


@cuda.jit(cache=True)
def _edits(
    a: Any,
    a_offsets: Any,
    b: Any,
    b_offsets: Any,
    diagonals: Any,
    out: Any,
    n: Any,
    m: Any,
    rows: Any,
    each: Any,
    like: Any,
) -> None:
    """Entry i of diagonal d is D[i, d - i], what the first i tokens of a cost against the first d - i of b."""
    for r in range(cuda.blockIdx.x, rows, cuda.gridDim.x):
        first, last = bounds_of(a_offsets, r, n)
        start, stop = bounds_of(b_offsets, r // each, m)
        wide, high = max(last - first, 0), max(stop - start, 0)
        # Within 3 * (n + rows) numbers whatever the offsets are, as first + wide <= n, and apart where they rise.
        base = 3 * (first + r)
        for d in range(wide + high + 1):
            here = base + d % 3 * (wide + 1)
            one_before = base + (d + 2) % 3 * (wide + 1)
            two_before = base + (d + 1) % 3 * (wide + 1)
            for i in range(max(d - high, 0) + cuda.threadIdx.x, min(d, wide) + 1, cuda.blockDim.x):
                cost = d  # where one of the two has no token yet
                if 0 < i < d:
                    over = load(diagonals, two_before + i - 1, like)
                    if load(a, first + i - 1, like) != load(b, start + d - i - 1, like):
                        over += 1
                    beside = min(load(diagonals, one_before + i - 1, like), load(diagonals, one_before + i, like))
                    cost = min(over, beside + 1)
                store(diagonals, here + i, cost, like)
            cuda.syncthreads()  # the next diagonal reads this one, and overwrites the one that this one read
        if cuda.threadIdx.x == 0:
            store(out, r, load(diagonals, base + (wide + high) % 3 * (wide + 1) + wide, like), like)
