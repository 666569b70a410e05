"""Linear recurrences on the CPU, float32 and float64: one pass through memory, a block of columns at a time."""

import math
from typing import Any

import numpy as np
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array

BLOCK = 256  # columns of a task; their h is 2 KiB


def linear_recurrence(a: Tensor, b: Tensor, init: Tensor, dim: int, reverse: bool) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t] along `dim`, from `init` of length 1 there; `a` may have length 1 in any dim."""
    out = b.new_empty(b.shape)
    outer, inner = b.shape[:dim], b.shape[dim + 1 :]
    # A factor that is the same along the last dims is read once for all of these: h is (P, T, Q, R), a ends before R.
    same = len(inner)
    while same and a.shape[dim + same] == 1:
        same -= 1
    if math.prod(inner[same:]) == 1:
        same = len(inner)
    few = math.prod(a.shape[:dim]) == 1
    shape = (*(a.shape[:dim] if few else outer), a.shape[dim], *inner[:same])
    a = a.reshape(*a.shape[: dim + 1 + same]).expand(shape)
    q, r = (1, math.prod(inner)) if same in (0, len(inner)) else (math.prod(inner[:same]), math.prod(inner[same:]))
    sizes = math.prod(outer), b.shape[dim], q, r
    each = int(same == len(inner))  # whether each column has a factor of its own
    row = math.prod(inner[:same])
    steps = 0 if a.shape[dim] == 1 else row
    strides = 0 if few else a.shape[dim] * row, steps, 0 if q == 1 else 1, each
    init = init.expand(*outer, 1, *inner)
    flat = [array(x).reshape(-1) for x in (a, b, init, out)]
    tasks = sizes[0] * q * -(-r // BLOCK)
    share(_run, tasks, 3 * b.numel() * b.element_size(), (*flat, sizes, strides, reverse))
    return out


@compiled
def _run(begin: int, end: int, a: Any, b: Any, init: Any, out: Any, sizes: Any, strides: Any, reverse: bool) -> None:
    _, T, Q, R = sizes
    by_row, by_step, by_group, each = strides
    blocks = (R + BLOCK - 1) // BLOCK
    h = np.empty(BLOCK, b.dtype)
    for task in range(begin, end):
        group, low = task // blocks, task % blocks * BLOCK
        p, q = group // Q, group % Q
        size = min(BLOCK, R - low)
        h[:size] = init[group * R + low : group * R + low + size]
        for step in range(T):
            t = T - 1 - step if reverse else step
            at = ((p * T + t) * Q + q) * R + low
            new, to = b[at : at + size], out[at : at + size]
            of = p * by_row + t * by_step + q * by_group
            if each:
                factor = a[of + low : of + low + size]
                for d in range(size):
                    h[d] = factor[d] * h[d] + new[d]
            else:
                for d in range(size):
                    h[d] = a[of] * h[d] + new[d]
            to[:] = h[:size]
