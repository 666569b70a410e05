"""Linear recurrences on the CPU, float32 and float64: one pass through memory, a block of columns at a time.

With `starts`, bools that broadcast to b, there is no `init`: h is b alone where they are true, and what stands before
is not looked at.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, summing
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array

BLOCK = 256  # columns of a task; their h is 2 KiB
FEW = 1 << 10  # numbers of a step with one matrix in common, above which torch's products are faster


def linear_recurrence(
    a: Tensor, b: Tensor, init: Tensor | None, dim: int, reverse: bool, starts: Tensor | None = None
) -> Tensor:
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
    flat = [array(x).reshape(-1) for x in (a, b, _begin(b, init, dim), out, _bools(starts, b))]
    tasks = sizes[0] * q * -(-r // BLOCK)
    share(_run, tasks, 3 * b.numel() * b.element_size(), (*flat, sizes, strides, reverse))
    return out


def _begin(b: Tensor, init: Tensor | None, dim: int) -> Tensor:
    """h before the first step; where that is a start, it is not looked at."""
    return torch.zeros_like(b.narrow(dim, 0, 1)) if init is None else init.expand_as(b.narrow(dim, 0, 1))


def _bools(starts: Tensor | None, b: Tensor) -> Tensor:
    """`starts` for each number of b, or nothing."""
    return b.new_empty(0, dtype=torch.bool) if starts is None else starts.expand_as(b)


@compiled
def _run(
    begin: int, end: int, a: Any, b: Any, init: Any, out: Any, starts: Any, sizes: Any, strides: Any, reverse: bool
) -> None:
    _, T, Q, R = sizes
    by_row, by_step, by_group, each = strides
    blocks = (R + BLOCK - 1) // BLOCK
    h = np.empty(BLOCK, b.dtype)
    for task in range(begin, end):
        group, low = task // blocks, task % blocks * BLOCK
        p, q = group // Q, group % Q
        if R == 1:  # time is the last dim: without slices, which cost more than their one number
            last = init[group]
            for step in range(T):
                t = T - 1 - step if reverse else step
                at = (p * T + t) * Q + q
                of = p * by_row + t * by_step + q * by_group
                last = b[at] if starts.size and starts[at] else a[of] * last + b[at]
                out[at] = last
            continue
        size = min(BLOCK, R - low)
        h[:size] = init[group * R + low : group * R + low + size]
        for step in range(T):
            t = T - 1 - step if reverse else step
            at = ((p * T + t) * Q + q) * R + low
            new, to = b[at : at + size], out[at : at + size]
            of = p * by_row + t * by_step + q * by_group
            if starts.size:
                begins = starts[at : at + size]
                for d in range(size):
                    h[d] = new[d] if begins[d] else a[of + (low + d) * each] * h[d] + new[d]
            elif each:
                factor = a[of + low : of + low + size]
                for d in range(size):
                    h[d] = factor[d] * h[d] + new[d]
            else:
                for d in range(size):
                    h[d] = a[of] * h[d] + new[d]
            to[:] = h[:size]


def matrix_recurrence(
    a: Tensor, b: Tensor, init: Tensor | None, dim: int, reverse: bool, starts: Tensor | None = None
) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t] for vectors along the last dim of b, and matrices a that broadcast to (*b.shape, F).

    Along the last dims in which a is 1, R vectors have a matrix in common: h is (P, T, Q, R, F), a ends before R.
    """
    size, outer, inner = b.shape[-1], b.shape[:dim], b.shape[dim + 1 : -1]
    same = len(inner)
    while same and a.shape[dim + same] == 1:
        same -= 1
    # Where a is 1 in some dims alone, before `dim` or behind, it is repeated there.
    before, behind = a.shape[:dim], a.shape[dim + 1 : dim + 1 + same]
    before = outer if math.prod(before) > 1 else before
    behind = inner[:same] if same else behind
    a = a.reshape(*a.shape[: dim + 1 + same], size, size).expand(*before, a.shape[dim], *behind, size, size)
    sizes = math.prod(outer), b.shape[dim], math.prod(behind), math.prod(inner[same:]), size
    many, rows = math.prod(before), sizes[2]
    if sizes[3] * size > FEW:
        return _by_products(a.reshape(many, -1, rows, size, size), b, init, starts, dim, reverse, sizes)
    strides = rows * a.shape[dim] if many > 1 else 0, rows if a.shape[dim] > 1 else 0, int(rows > 1)
    out = b.new_empty(b.shape)
    flat = [array(x).reshape(-1) for x in (a, b, _begin(b, init, dim), out)]
    bools = array(b.new_empty(0, dtype=torch.bool) if starts is None else starts.expand(*b.shape[:-1], 1)).reshape(-1)
    vectors = b[..., 0].numel() // max(b.shape[dim], 1) if size else 0
    cost = (2 * b.numel() + a.numel()) * b.element_size() + b.numel() * size
    share(_run_matrices, vectors, cost, (*flat, bools, sizes, strides, reverse))
    return out


@summing
def _run_matrices(
    begin: int, end: int, a: Any, b: Any, init: Any, out: Any, starts: Any, sizes: Any, strides: Any, reverse: bool
) -> None:
    _, T, Q, R, F = sizes
    by_row, by_step, by_group = strides
    for step in range(T):
        t = T - 1 - step if reverse else step
        back = (-1 if reverse else 1) * Q * R * F
        for vector in range(begin, end):
            p, q = vector // (Q * R), vector // R % Q
            number = vector + (p * (T - 1) + t) * Q * R
            at = number * F
            if starts.size and starts[number]:
                out[at : at + F] = b[at : at + F]
                continue
            old = out[at - back : at - back + F] if step else init[vector * F : vector * F + F]
            of = (p * by_row + t * by_step + q * by_group) * F * F
            for i in range(F):
                row = a[of + i * F : of + i * F + F]
                total = b[at + i]
                for j in range(F):
                    total += row[j] * old[j]
                out[at + i] = total


def _by_products(
    a: Tensor, b: Tensor, init: Tensor | None, starts: Tensor | None, dim: int, reverse: bool, sizes: Any
) -> Tensor:
    """Runs a recurrence with matrices a step at a time, by torch's products; a is (P or 1, T or 1, Q, F, F)."""
    P, T, Q, R, F = sizes

    def steps_first(x: Tensor) -> Tensor:
        return x.reshape(P, -1, Q, R, x.shape[-1]).transpose(0, 1).reshape(-1, P * Q, R, x.shape[-1])

    a = a.expand(P, *a.shape[1:]).transpose(0, 1).reshape(-1, P * Q, F, F).mT
    xs, h = steps_first(b), steps_first(_begin(b, init, dim))[0]
    begins = None if starts is None else steps_first(starts.expand(*b.shape[:-1], 1))
    out = torch.empty_like(xs)
    for t in reversed(range(T)) if reverse else range(T):
        torch.baddbmm(xs[t], h, a[t if len(a) > 1 else 0], out=out[t])
        h = out[t]
        if begins is not None:
            torch.where(begins[t], xs[t], h, out=h)
    return out.view(T, P, Q, R, F).transpose(0, 1).reshape(b.shape)
