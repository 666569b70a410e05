"""Reductions over segments of packed rows, forward and backward.

A block has one segment and a strip of columns: its threads side by side along a row, `down` rows at a time, and what
each has found meets in shared memory in a fixed order. There are no atomics, so results repeat to the bit. Sums are
taken in float64.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop_cuda.launch import THREADS, block_shape, launch
from tensorloop_cuda.memory import address, bounds_of, cast, lay_out, load, store
from tensorloop_cuda.target import cuda

LIKE = {torch.float32: np.float32(0), torch.float64: np.float64(0)}
_WIDE = np.float64(0)
_INDEX = np.int64(0)
_NONE = -1


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); 0 for an empty segment."""
    values, offsets = lay_out(values), lay_out(offsets)
    out = values.new_empty(len(offsets) - 1, values.shape[1])
    _per_segment(_sum, values, offsets, address(values), address(out))
    return out


def segment_max(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the maximum and where it is first; `fill` and -1 for an empty segment."""
    return _extremes(values, offsets, fill, 1)


def segment_min(values: Tensor, offsets: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(N, F) -> (B, F), (B, F) int64: the minimum and where it is first; `fill` and -1 for an empty segment."""
    return _extremes(values, offsets, fill, -1)


def segment_logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (B, F); -inf for an empty segment."""
    values, offsets = lay_out(values), lay_out(offsets)
    out = values.new_empty(len(offsets) - 1, values.shape[1])
    _per_segment(_logsumexp, values, offsets, address(values), address(out))
    return out


def segment_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F), each segment and column adding up to 1; NaN where torch's softmax has NaN."""
    values, offsets = lay_out(values), lay_out(offsets)
    out = torch.empty_like(values)
    _per_segment(_softmax, values, offsets, address(values), address(out))
    return out


def segment_softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (N, F) -> (N, F): the gradient of what y is the softmax of, y * (dy - sum(y * dy))."""
    y, dy, offsets = lay_out(y), lay_out(dy), lay_out(offsets)
    out = torch.empty_like(y)
    _per_segment(_softmax_grad, y, offsets, address(y), address(dy), address(out))
    return out


def segment_logsumexp_grad(values: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad * exp(values - out), 0 in segments that are -inf throughout."""
    return _spread_grad(_logsumexp_grad, values, out, grad, offsets)


def segment_extreme_grad(values: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """(N, F), (B, F), (B, F) -> (N, F): grad in equal shares to the entries that equal `best`, 0 in the others."""
    return _spread_grad(_extreme_grad, values, best, grad, offsets)


def segment_cumsum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, F) -> (N, F): sums from the start of the segment. Nothing of one segment reaches another, NaN included."""
    values, offsets = lay_out(values), lay_out(offsets)
    out = torch.empty_like(values)
    _per_segment(_cumsum, values, offsets, address(values), address(out))
    return out


def _spread_grad(kernel: Any, values: Tensor, reduced: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    values, reduced, grad, offsets = lay_out(values), lay_out(reduced), lay_out(grad), lay_out(offsets)
    out = torch.empty_like(values)
    _per_segment(kernel, values, offsets, address(values), address(reduced), address(grad), address(out))
    return out


def _extremes(values: Tensor, offsets: Tensor, fill: float, sign: int) -> tuple[Tensor, Tensor]:
    values, offsets = lay_out(values), lay_out(offsets)
    out = values.new_empty(len(offsets) - 1, values.shape[1])
    where = offsets.new_empty(out.shape)
    _per_segment(_extreme, values, offsets, address(values), address(out), address(where), float(fill), sign)
    return out, where


def _per_segment(kernel: Any, values: Tensor, offsets: Tensor, *args: Any) -> None:
    n, features = values.shape
    batch = len(offsets) - 1
    shape = block_shape(features)
    strips = -(-features // shape.across)
    launch(kernel, values, batch * strips, shape, *args, address(offsets), batch, n, features, LIKE[values.dtype])


@cuda.jit(device=True)
def _strip(task: Any, features: Any) -> Any:
    """(segment, column) of this thread for a block's task; the column may be behind the last one."""
    strips = (features + cuda.blockDim.x - 1) // cuda.blockDim.x
    return task // strips, task % strips * cuda.blockDim.x + cuda.threadIdx.x


@cuda.jit(device=True)
def _tasks(batch: Any, features: Any) -> Any:
    return batch * ((features + cuda.blockDim.x - 1) // cuda.blockDim.x)


@cuda.jit(device=True)
def _column_sum(own: Any, shared: Any) -> Any:
    """The sum of `own` over the threads of a column; every thread of the block must come here."""
    x, across, down = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockDim.y
    cuda.syncthreads()  # what the last call left has been read
    shared[cuda.threadIdx.y * across + x] = own
    cuda.syncthreads()
    total = _WIDE
    for y in range(down):
        total += shared[y * across + x]
    return total


@cuda.jit(device=True)
def _beats(value: Any, best: Any, sign: Any) -> bool:
    """NaN beats every number, as torch's maximum and minimum have it."""
    return value * sign > best * sign or (value != value and best == best)


@cuda.jit(device=True)
def _own_best(values: Any, first: Any, last: Any, d: Any, features: Any, sign: Any, like: Any) -> Any:
    """(value, index) of the first extreme among the rows of this thread, in column d; index -1 where it has none."""
    best, place = _WIDE, _INDEX - 1
    if d < features:
        for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
            value = load(values, i * features + d, like)
            if place < 0 or _beats(value, best, sign):
                best, place = value, i
    return best, place


@cuda.jit(device=True)
def _column_best(best: Any, place: Any, sign: Any, shared: Any, places: Any) -> Any:
    """The first extreme of a column from those of its threads; every thread of the block must come here."""
    x, across, down = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockDim.y
    cuda.syncthreads()
    shared[cuda.threadIdx.y * across + x], places[cuda.threadIdx.y * across + x] = best, place
    cuda.syncthreads()
    best, place = shared[x], places[x]
    for y in range(1, down):
        value, i = shared[y * across + x], places[y * across + x]
        earlier = i < place and not _beats(best, value, sign)
        if i >= 0 and (place < 0 or _beats(value, best, sign) or earlier):
            best, place = value, i
    return best, place


@cuda.jit(device=True)
def _exp_sum(values: Any, first: Any, last: Any, d: Any, features: Any, shared: Any, places: Any, like: Any) -> Any:
    """(top, sum of exp(value - top)) of column d of a segment, top its maximum; every thread must come here."""
    best, place = _own_best(values, first, last, d, features, 1, like)
    best, _ = _column_best(best, place, 1, shared, places)
    top = cast(best, like)  # a float32's own exp is far faster
    own = _WIDE
    if d < features:
        for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
            own += math.exp(load(values, i * features + d, like) - top)
    return top, _column_sum(own, shared)


@cuda.jit(cache=True)
def _sum(values: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        own = _WIDE
        if d < features:
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                own += load(values, i * features + d, like)
        total = _column_sum(own, shared)
        if d < features and cuda.threadIdx.y == 0:
            store(out, b * features + d, total, like)


@cuda.jit(cache=True)
def _extreme(
    values: Any,
    out: Any,
    where: Any,
    fill: Any,
    sign: Any,
    offsets: Any,
    batch: Any,
    n: Any,
    features: Any,
    like: Any,
) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    places = cuda.shared.array(THREADS, np.int64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        best, place = _own_best(values, first, last, d, features, sign, like)
        best, place = _column_best(best, place, sign, shared, places)
        if d < features and cuda.threadIdx.y == 0:
            store(out, b * features + d, fill if place < 0 else best, like)
            store(where, b * features + d, place, _INDEX)


@cuda.jit(cache=True)
def _logsumexp(values: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    places = cuda.shared.array(THREADS, np.int64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        top, total = _exp_sum(values, first, last, d, features, shared, places, like)
        if d < features and cuda.threadIdx.y == 0:
            if first >= last:
                store(out, b * features + d, -math.inf, like)
            elif math.isinf(top):  # inf - inf in the sum was NaN
                store(out, b * features + d, top, like)
            else:
                store(out, b * features + d, math.log(total) + top, like)


@cuda.jit(cache=True)
def _softmax(values: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    places = cuda.shared.array(THREADS, np.int64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        top, total = _exp_sum(values, first, last, d, features, shared, places, like)
        if d < features:
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                e = math.exp(load(values, i * features + d, like) - top)
                store(out, i * features + d, e / total, like)


@cuda.jit(cache=True)
def _softmax_grad(y: Any, dy: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        own = _WIDE
        if d < features:
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                own += load(y, i * features + d, like) * load(dy, i * features + d, like)
        mean = _column_sum(own, shared)
        if d < features:
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                at = i * features + d
                store(out, at, load(y, at, like) * (load(dy, at, like) - mean), like)


@cuda.jit(cache=True)
def _logsumexp_grad(
    values: Any, top: Any, grad: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any
) -> None:
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        if d < features:
            base, scale = load(top, b * features + d, like), load(grad, b * features + d, like)
            if base == -math.inf:
                base = cast(_WIDE, like)
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                at = i * features + d
                store(out, at, math.exp(load(values, at, like) - base) * scale, like)


@cuda.jit(cache=True)
def _extreme_grad(
    values: Any, best: Any, grad: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any
) -> None:
    shared = cuda.shared.array(THREADS, np.float64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        own, top = _WIDE, cast(_WIDE, like)
        if d < features:
            top = load(best, b * features + d, like)
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                own += load(values, i * features + d, like) == top
        equal = _column_sum(own, shared)
        if d < features:
            share = load(grad, b * features + d, like) / max(equal, 1.0)
            for i in range(first + cuda.threadIdx.y, last, cuda.blockDim.y):
                at = i * features + d
                store(out, at, share if load(values, at, like) == top else 0.0, like)


@cuda.jit(cache=True)
def _cumsum(values: Any, out: Any, offsets: Any, batch: Any, n: Any, features: Any, like: Any) -> None:
    """Each thread has a run of rows: it adds them up, learns what came before, and adds them up again."""
    shared = cuda.shared.array(THREADS, np.float64)
    for task in range(cuda.blockIdx.x, _tasks(batch, features), cuda.gridDim.x):
        b, d = _strip(task, features)
        first, last = bounds_of(offsets, b, n)
        run = (last - first + cuda.blockDim.y - 1) // cuda.blockDim.y
        begin = first + cuda.threadIdx.y * run
        end = min(begin + run, last)
        own = _WIDE
        if d < features:
            for i in range(begin, end):
                own += load(values, i * features + d, like)
        cuda.syncthreads()
        shared[cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x] = own
        cuda.syncthreads()
        total = _WIDE
        for before in range(cuda.threadIdx.y):
            total += shared[before * cuda.blockDim.x + cuda.threadIdx.x]
        if d < features:
            for i in range(begin, end):
                total += load(values, i * features + d, like)
                store(out, i * features + d, total, like)
        cuda.syncthreads()  # before the next task writes what others still read
