"""Reductions over the segments of packed rows on the CPU, float32 and float64.

A task is a segment and a block of columns: few long segments are shared among threads too, and what is summed up stays
in the first cache. Sums run in float64, a few rows at a time, in the order of the rows: the same bits whatever the
number of threads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, inlined
from tensorloop.kernels.cpu.exponential import exp
from tensorloop.kernels.cpu.offsets import bounds_of
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import arrays

BLOCK = 256  # columns of a task; its sums are 2 KiB
FEW = 4  # rows


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); 0 for an empty segment."""
    return _reduce(_sum, 1, values, offsets, "segment_sum")


def segment_max(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the maximum and where it is first; `fill` and -1 for an empty segment."""
    return _extreme(_max, values, offsets, fill, "segment_max")


def segment_min(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the minimum and where it is first; `fill` and -1 for an empty segment."""
    return _extreme(_min, values, offsets, fill, "segment_min")


def segment_logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); -inf for an empty segment."""
    return _reduce(_logsumexp, 2, values, offsets, "segment_logsumexp")


def segment_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F), each segment and column adding up to 1; NaN where torch's softmax has NaN."""
    return _map(_softmax, 3, (values,), offsets, "segment_softmax")


def segment_softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (N, F) -> (N, F): the gradient of what y is the softmax of, y * (dy - sum(y * dy))."""
    return _map(_softmax_grad, 3, (y, dy), offsets, "segment_softmax_grad")


def segment_logsumexp_grad(values: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad * exp(values - out), 0 in segments that are -inf throughout."""
    return _map(_logsumexp_grad, 2, (values,), offsets, "segment_logsumexp_grad", (out, grad))


def segment_extreme_grad(values: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad in equal shares to the entries that equal `best`, 0 in the others."""
    return _map(_extreme_grad, 2, (values,), offsets, "segment_extreme_grad", (best, grad))


def segment_cumsum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F): sums from the start of the segment. Nothing of one segment reaches another, NaN included."""
    return _map(_cumsum, 2, (values,), offsets, "segment_cumsum")


def _reduce(kernel: Callable[..., Any], passes: int, values: Tensor, offsets: Tensor, name: str) -> Tensor:
    """A row for each segment."""
    bounds = bounds_of(offsets, len(values), name)
    out = values.new_empty(len(bounds) - 1, values.shape[1])
    _over_segments(kernel, bounds, passes, values, out)
    return out


def _map(
    kernel: Callable[..., Any], passes: int, given: Sequence[Tensor], offsets: Tensor, name: str, reduced: Any = ()
) -> Tensor:
    """A row for each of the first that is given; `reduced` have one for each segment."""
    out = given[0].new_empty(given[0].shape)
    bounds = bounds_of(offsets, len(out), name)
    wanted = len(bounds) - 1, out.shape[1]
    if any(x.shape != wanted for x in reduced):
        got = " and ".join(str(x.shape) for x in reduced)
        raise ValueError(f"{name}: expected a row for each segment, {wanted}, got {got}")
    _over_segments(kernel, bounds, passes, *given, *reduced, out)
    return out


def _extreme(
    kernel: Callable[..., Any], values: Tensor, offsets: Tensor, fill: float, name: str
) -> tuple[Tensor, Tensor]:
    bounds = bounds_of(offsets, len(values), name)
    out = values.new_full((len(bounds) - 1, values.shape[1]), fill)
    where = offsets.new_full(out.shape, -1)
    _over_segments(kernel, bounds, 1, values, out, where)
    return out, where


def _over_segments(
    kernel: Callable[..., Any], bounds: np.ndarray, passes: int, values: Tensor, *others: Tensor
) -> None:
    """Runs a kernel over all (segment, block of columns); `passes`: how often it goes through the values."""
    tasks = (len(bounds) - 1) * -(-values.shape[1] // BLOCK)
    laid = arrays((values, *others))  # what is written is contiguous already
    share(kernel, tasks, passes * values.numel() * values.element_size(), (bounds, *laid))


@inlined
def _task(task: Any, bounds: Any, features: Any) -> Any:
    """(segment, its first row, one past its last, first column, columns)"""
    blocks = (features + BLOCK - 1) // BLOCK
    b, low = task // blocks, task % blocks * BLOCK
    return b, bounds[b], bounds[b + 1], low, min(BLOCK, features - low)


@compiled
def _sum(begin: int, end: int, bounds: Any, values: Any, out: Any) -> None:
    total = np.empty(BLOCK, np.float64)
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        total[:size] = 0
        n = first
        while n + FEW <= last:  # a few rows at once: in float64 only their sum
            r0, r1 = values[n, low : low + size], values[n + 1, low : low + size]
            r2, r3 = values[n + 2, low : low + size], values[n + 3, low : low + size]
            for d in range(size):
                total[d] += (r0[d] + r1[d]) + (r2[d] + r3[d])
            n += FEW
        while n < last:
            row = values[n, low : low + size]
            for d in range(size):
                total[d] += row[d]
            n += 1
        for d in range(size):
            out[b, low + d] = total[d]


@compiled
def _max(begin: int, end: int, bounds: Any, values: Any, out: Any, where: Any) -> None:
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        best, place = out[b, low : low + size], where[b, low : low + size]
        for n in range(first, last):
            row = values[n, low : low + size]
            for d in range(size):
                # A NaN is greater than all numbers, and the first one stays.
                better = (n == first) | (row[d] > best[d]) | ((row[d] != row[d]) & (best[d] == best[d]))
                best[d] = row[d] if better else best[d]
                place[d] = n if better else place[d]


@compiled
def _min(begin: int, end: int, bounds: Any, values: Any, out: Any, where: Any) -> None:
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        best, place = out[b, low : low + size], where[b, low : low + size]
        for n in range(first, last):
            row = values[n, low : low + size]
            for d in range(size):
                better = (n == first) | (row[d] < best[d]) | ((row[d] != row[d]) & (best[d] == best[d]))
                best[d] = row[d] if better else best[d]
                place[d] = n if better else place[d]


@inlined
def _top(values: Any, first: Any, last: Any, low: Any, size: Any, top: Any) -> None:
    """The maximum of each column, -inf without rows, NaN where there is one."""
    top[:size] = -np.inf
    for n in range(first, last):
        row = values[n, low : low + size]
        for d in range(size):
            x = row[d]
            top[d] = x if (x > top[d]) | (x != x) else top[d]


@compiled
def _logsumexp(begin: int, end: int, bounds: Any, values: Any, out: Any) -> None:
    top, part, total = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        _top(values, first, last, low, size, top)
        total[:size] = 0
        for n in range(first, last, FEW):
            part[:size] = 0
            for i in range(n, min(n + FEW, last)):
                row = values[i, low : low + size]
                for d in range(size):
                    part[d] += exp(row[d] - top[d])
            for d in range(size):
                total[d] += part[d]
        for d in range(size):  # where the maximum is infinite, so is the result; inf - inf above was NaN
            out[b, low + d] = top[d] if np.isinf(top[d]) else np.log(total[d]) + top[d]


@compiled
def _softmax(begin: int, end: int, bounds: Any, values: Any, out: Any) -> None:
    top, total = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float64)
    scale = np.empty(BLOCK, np.float32)
    for task in range(begin, end):
        _, first, last, low, size = _task(task, bounds, values.shape[1])
        _top(values, first, last, low, size, top)
        total[:size] = 0
        for n in range(first, last):
            row, to = values[n, low : low + size], out[n, low : low + size]
            for d in range(size):
                to[d] = exp(row[d] - top[d])
            for d in range(size):
                total[d] += to[d]
        for d in range(size):
            scale[d] = 1 / total[d]
        for n in range(first, last):
            to = out[n, low : low + size]
            for d in range(size):
                to[d] *= scale[d]


@compiled
def _softmax_grad(begin: int, end: int, bounds: Any, y: Any, dy: Any, out: Any) -> None:
    total, mean = np.empty(BLOCK, np.float64), np.empty(BLOCK, y.dtype)
    for task in range(begin, end):
        _, first, last, low, size = _task(task, bounds, y.shape[1])
        total[:size] = 0
        for n in range(first, last):
            a, da = y[n, low : low + size], dy[n, low : low + size]
            for d in range(size):
                total[d] += a[d] * da[d]
        for d in range(size):
            mean[d] = total[d]
        for n in range(first, last):
            a, da, to = y[n, low : low + size], dy[n, low : low + size], out[n, low : low + size]
            for d in range(size):
                to[d] = a[d] * (da[d] - mean[d])


@compiled
def _cumsum(begin: int, end: int, bounds: Any, values: Any, out: Any) -> None:
    total = np.empty(BLOCK, np.float64)
    for task in range(begin, end):
        _, first, last, low, size = _task(task, bounds, values.shape[1])
        total[:size] = 0
        for n in range(first, last):
            row, to = values[n, low : low + size], out[n, low : low + size]
            for d in range(size):
                total[d] += row[d]
                to[d] = total[d]


@compiled
def _logsumexp_grad(begin: int, end: int, bounds: Any, values: Any, top: Any, grad: Any, out: Any) -> None:
    base = np.empty(BLOCK, np.float32)
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        for d in range(size):
            base[d] = np.float32(0) if top[b, low + d] == -np.inf else top[b, low + d]
        scale = grad[b, low : low + size]
        for n in range(first, last):
            row, to = values[n, low : low + size], out[n, low : low + size]
            for d in range(size):
                to[d] = exp(row[d] - base[d]) * scale[d]


@compiled
def _extreme_grad(begin: int, end: int, bounds: Any, values: Any, best: Any, grad: Any, out: Any) -> None:
    equal, share = np.empty(BLOCK, np.int64), np.empty(BLOCK, values.dtype)
    for task in range(begin, end):
        b, first, last, low, size = _task(task, bounds, values.shape[1])
        top = best[b, low : low + size]
        equal[:size] = 0
        for n in range(first, last):
            row = values[n, low : low + size]
            for d in range(size):
                equal[d] += row[d] == top[d]
        for d in range(size):
            share[d] = grad[b, low + d] / max(equal[d], 1)
        for n in range(first, last):
            row, to = values[n, low : low + size], out[n, low : low + size]
            for d in range(size):
                to[d] = share[d] if row[d] == top[d] else 0
