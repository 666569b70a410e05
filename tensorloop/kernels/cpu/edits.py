"""Edit distances on the CPU: one pair of rows after the other, in memory of the shorter row; threads share the pairs.

What the arguments are is said in `kernels/eager/edits.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.offsets import bounds_of, longest_of
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.eager.edits import DELETION, INSERTION, MATCH, SUBSTITUTION
from tensorloop.kernels.memory import array

# What a cell of a pair's table costs, as bytes that are read and written in the same time (`threads.share`).
BIT_COST, CELL_COST, PATH_COST = 8, 50, 100


def edit_distance(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> Tensor:
    """(R,) int64: the fewest edits."""
    rows = _rows(a, a_offsets, b, b_offsets, "edit_distance")
    out = a_offsets.new_empty(len(a_offsets) - 1)
    _over_pairs(_count, BIT_COST, rows, array(out))
    return out


def edit_cost(
    a: Tensor,
    a_offsets: Tensor,
    b: Tensor,
    b_offsets: Tensor,
    insertion: float,
    deletion: float,
    substitution: float | Tensor,
) -> Tensor:
    """(R,) float64: the least cost of edits. Tokens must be rows of the table, where there is one."""
    rows = _rows(a, a_offsets, b, b_offsets, "edit_cost")
    out = a.new_empty(len(a_offsets) - 1, dtype=torch.float64)
    _over_pairs(_weigh, CELL_COST, rows, insertion, deletion, _substitutions(substitution), array(out))
    return out


def edit_paths(
    a: Tensor,
    a_offsets: Tensor,
    b: Tensor,
    b_offsets: Tensor,
    insertion: float,
    deletion: float,
    substitution: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """(N, 3), (R,) int64: (what, place in the row of a, place in that of b) by pair, in order; how many a pair.

    Which of several paths: `kernels/eager/edits.py`. Each pair takes a byte a cell of its table for as long as it runs.
    """
    rows = _rows(a, a_offsets, b, b_offsets, "edit_paths")
    each, count = rows[-1], len(a_offsets) - 1
    longest = a_offsets.diff() + b_offsets.diff()[torch.arange(count, device=a.device) // each]
    stops = longest.cumsum(0)
    steps = a.new_full((int(longest.sum()), 3), -1)
    _over_pairs(_trace, PATH_COST, rows, insertion, deletion, _substitutions(substitution), array(stops), array(steps))
    kept = steps[:, 0] >= 0
    ends = torch.cat([stops.new_zeros(1), kept.cumsum(0)])  # steps kept before each place
    return steps[kept], ends[stops] - ends[stops - longest]


def _rows(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor, name: str) -> tuple[Any, ...]:
    """(a, its bounds, b, its bounds, rows of a that each of b serves), checked: what a kernel follows blindly."""
    a_bounds, b_bounds = bounds_of(a_offsets, len(a), name, len(a)), bounds_of(b_offsets, len(b), name, len(b))
    rows, others = len(a_bounds) - 1, len(b_bounds) - 1
    if rows % others if others else rows:
        raise ValueError(f"{name}: {rows} rows of a cannot be shared among {others} rows of b")
    return (*(array(a), a_bounds, array(b), b_bounds), rows // others if rows else 1)


def _substitutions(substitution: float | Tensor) -> tuple[float, Any]:
    """The number for tokens that differ, and the table; it is empty where the number holds."""
    if isinstance(substitution, Tensor):
        return 0.0, array(substitution.double())
    return float(substitution), np.empty((0, 0))


def _over_pairs(kernel: Callable[..., Any], cost: int, rows: tuple[Any, ...], *args: Any) -> None:
    _, a_bounds, _, b_bounds, each = rows
    share(kernel, len(a_bounds) - 1, cost * _cells(a_bounds, b_bounds, each), (rows, *args))


@compiled
def _cells(a_bounds: Any, b_bounds: Any, each: int) -> int:
    total = 0
    for r in range(len(a_bounds) - 1):
        s = r // each
        total += (a_bounds[r + 1] - a_bounds[r] + 1) * (b_bounds[s + 1] - b_bounds[s] + 1)
    return total


@compiled
def _count(begin: int, end: int, rows: Any, out: Any) -> None:
    """Myers 1999, by words of 64 as Hyyro 2003: a column of the table is the bits of its steps up and down.

    Which tokens of a word equal one of the other row is found by comparing them, 64 at a time, which compiles to vector
    instructions: tokens are any int64, and a table of their bits would cost more to make than it saves.
    """
    a, a_bounds, b, b_bounds, each = rows
    longest = min(longest_of(begin, end, a_bounds, 1), longest_of(begin, end, b_bounds, each))
    ups, downs = np.empty(longest // 64 + 1, np.uint64), np.empty(longest // 64 + 1, np.uint64)
    one = np.uint64(1)
    for r in range(begin, end):
        down_side = a[a_bounds[r] : a_bounds[r + 1]]
        across = b[b_bounds[r // each] : b_bounds[r // each + 1]]
        if len(down_side) > len(across):
            down_side, across = across, down_side
        size = len(down_side)
        words = (size + 63) // 64
        ups[:words] = ~np.uint64(0)
        downs[:words] = 0
        distance = len(across) if size == 0 else size
        for t in range(len(across) if size else 0):
            # Whether the last row of the words so far grew or shrank from the column before; the top row always grows.
            grew, shrank = one, np.uint64(0)
            for k in range(words):
                count = min(64, size - k * 64)
                equal = np.uint64(0)
                for j in range(count):
                    equal |= np.uint64(down_side[k * 64 + j] == across[t]) << np.uint64(j)
                up, down = ups[k], downs[k]
                vertical = equal | down
                equal |= shrank
                horizontal = (((equal & up) + up) ^ up) | equal
                grows = down | ~(horizontal | up)
                shrinks = up & horizontal
                last = np.uint64(count - 1)
                grows_next, shrinks_next = (grows >> last) & one, (shrinks >> last) & one
                grows = (grows << one) | grew
                shrinks = (shrinks << one) | shrank
                ups[k] = shrinks | ~(vertical | grows)
                downs[k] = grows & vertical
                grew, shrank = grows_next, shrinks_next
            distance += np.int64(grew) - np.int64(shrank)
        out[r] = distance


@compiled
def _weigh(begin: int, end: int, rows: Any, insertion: float, deletion: float, substitutions: Any, out: Any) -> None:
    """Wagner & Fischer 1974, with one row of the table, along the shorter row of tokens."""
    (a, a_bounds, b, b_bounds, each), (substitution, table) = rows, substitutions
    size = len(table)
    flat = table.ravel()
    row = np.empty(min(longest_of(begin, end, a_bounds, 1), longest_of(begin, end, b_bounds, each)) + 1)
    for r in range(begin, end):
        outer, inner = a[a_bounds[r] : a_bounds[r + 1]], b[b_bounds[r // each] : b_bounds[r // each + 1]]
        down, along, step_down, step_along = insertion, deletion, size, 1
        if len(inner) > len(outer):
            outer, inner = inner, outer
            down, along, step_down, step_along = deletion, insertion, 1, size
        row[0] = 0
        for j in range(len(inner)):
            row[j + 1] = row[j] + along
        for x in outer:
            diagonal = row[0]
            row[0] += down
            for j in range(len(inner)):
                if size:
                    over = diagonal + flat[x * step_down + inner[j] * step_along]
                else:
                    over = diagonal + (0.0 if x == inner[j] else substitution)
                diagonal = row[j + 1]
                row[j + 1] = min(over, min(diagonal + down, row[j] + along))
        out[r] = row[len(inner)]


@compiled
def _trace(
    begin: int, end: int, rows: Any, insertion: float, deletion: float, substitutions: Any, stops: Any, steps: Any
) -> None:
    """The steps of pair r end before steps[stops[r]]; there is room for all its tokens, and -1 where none is."""
    (a, a_bounds, b, b_bounds, each), (substitution, table) = rows, substitutions
    size = len(table)
    for r in range(begin, end):
        xs, ys = a[a_bounds[r] : a_bounds[r + 1]], b[b_bounds[r // each] : b_bounds[r // each + 1]]
        taken = np.empty((len(xs) + 1, len(ys) + 1), np.uint8)
        row = np.empty(len(ys) + 1)
        row[0] = 0
        for j in range(len(ys)):
            row[j + 1] = row[j] + deletion
            taken[0, j + 1] = DELETION
        for i in range(len(xs)):
            diagonal = row[0]
            row[0] += insertion
            taken[i + 1, 0] = INSERTION
            for j in range(len(ys)):
                same = xs[i] == ys[j]
                over = diagonal + (table[xs[i], ys[j]] if size else 0.0 if same else substitution)
                diagonal = row[j + 1]
                only_a, only_b = diagonal + insertion, row[j] + deletion
                row[j + 1] = min(over, min(only_a, only_b))
                if row[j + 1] == over:
                    taken[i + 1, j + 1] = MATCH if same else SUBSTITUTION
                else:
                    taken[i + 1, j + 1] = INSERTION if row[j + 1] == only_a else DELETION
        n, i, j = stops[r], len(xs), len(ys)
        while i > 0 or j > 0:
            n -= 1
            what = taken[i, j]
            steps[n, 0] = what
            if what != DELETION:
                i -= 1
                steps[n, 1] = i
            if what != INSERTION:
                j -= 1
                steps[n, 2] = j
