"""Attention of the last tokens to all of an array on the CPU: slots are read, and their gradients added, in place.

What the functions give is said in `kernels/eager/past.py`. A task is a row of the batch. Float32
only: libm's exp of a float64 takes one number at a time.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import inlined, summing
from tensorloop.kernels.cpu.exponential import exp
from tensorloop.kernels.cpu.pointers import pointer
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.eager import past as eager
from tensorloop.kernels.memory import address, addresses, lay_all, lay_out
from tensorloop.kernels.scores import FACTORS, least_kept
from tensorloop.kernels.sight import Sight

BLOCK = 32  # slots that are gone through for all heads, while they are in the first cache
FEW = 4  # slots that are read at once; divides BLOCK
FIRST, SECOND = FACTORS
Ints = tuple[int, ...]


def past_attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of the scores."""
    if k.shape[-1] != v.shape[-1]:
        return eager.past_attend(q, k, v, sight)
    q, k, v = lay_all((q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    ours, held = Laid(q, k.shape[0], k.shape[2], sight), (q, k, v, out, lse)
    args = (tuple(addresses(held)), ours.sizes, ours.sight)
    share(_attend, ours.rows * ours.new, ours.size, args, (*held, *ours.tensors))
    return out, lse


def past_attend_grad(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of q and of the bias; those of k and v are added to `of_k` and `of_v`."""
    if k.shape[-1] != v.shape[-1]:
        return eager.past_attend_grad(grad, q, k, v, out, lse, sight, of_k, of_v)
    grad, q, k, v, out, lse, *laid = lay_all((grad, q, k, v, out, lse, of_k, of_v))
    (rows, new, heads, _), (length, _, heads_kv, _) = q.shape, k.shape
    dq, ours = torch.empty_like(q), Laid(q, length, heads_kv, sight)
    of_bias = None if sight.bias is None else q.new_zeros(rows, heads, new, length)
    bias = 0 if of_bias is None else address(of_bias)
    held, gradients = (grad, q, k, v, out, lse), (dq, *laid)
    args = (tuple(addresses(held)), (*addresses(gradients), bias), ours.sizes, ours.sight)
    kept = () if of_bias is None else (of_bias,)
    share(_reverse, ours.rows, 3 * ours.size, args, (*held, *gradients, *kept, *ours.tensors))
    for into, found in zip((of_k, of_v), laid, strict=True):
        if found is not into:
            into.copy_(found)
    if of_bias is not None and sight.bias is not None:
        of_bias = of_bias.sum_to_size(sight.bias.shape).to(sight.bias.dtype)
    return dq, of_bias


class Laid:
    """A `Sight` of queries (B, t, heads, D) as kernels get it: addresses, 0 for what there is not, and numbers.

    They stand in plain tuples, which kernels unpack: a NamedTuple would cost numba 3 us more in each call.
    """

    def __init__(self, q: Tensor, length: int, heads_kv: int, sight: Sight) -> None:
        rows, new, heads, width = q.shape
        first, seen, bias = sight.first, sight.seen, sight.bias
        first = None if first is None else lay_out(first.long())
        seen = None if seen is None else lay_out(seen.expand(rows, new, length).view(torch.uint8))
        bias = None if bias is None else lay_out(bias.to(q.dtype).expand(-1, heads, new, length))
        each = 0 if bias is None or len(bias) == 1 else heads * new * length
        self.tensors: list[Tensor] = []
        self.rows, self.new = rows, new
        self.size = 8 * new * length * rows * heads * width
        places = [0, 0, 0]
        for i, x in enumerate((first, seen, bias)):
            if x is not None:
                self.tensors.append(x)
                places[i] = address(x)
        self.sizes = (rows, new, heads, heads_kv, width, length)
        scale, cap, grown = map(np.float32, (sight.scale, sight.softcap, 1 / (1 - sight.dropout)))
        noise = (sight.dropout > 0, grown, least_kept(sight.dropout), sight.seed, sight.begin)
        self.sight = ((sight.causal, sight.window, places[0]), (scale, cap, places[1], places[2], each), noise)


@summing
def _attend(begin: int, end: int, tensors: Ints, sizes: Ints, sight: tuple[tuple[Any, ...], ...]) -> None:
    q, k, v, out, lse = tensors
    rows, new, heads, heads_kv, width, length = sizes
    range_of, (scale, cap, seen, bias, each), noise = sight
    group, slot, step = heads // heads_kv, heads_kv * width, rows * heads_kv * width
    table = np.empty((heads, length + FEW), np.float32)
    for task in range(begin, end):
        b, i = task // new, task % new
        k_b, v_b = k + 4 * b * slot, v + 4 * b * slot
        low, high = _slots_seen(range_of, b, length, length - new + i)
        q_i, out_i, log = q + 4 * task * heads * width, out + 4 * task * heads * width, floats(lse + 4 * task * heads)
        for start in range(low, high, BLOCK):  # all heads of a slot stand together
            stop = min(start + BLOCK, high)
            for h in range(heads):
                at = 4 * (h // group) * width
                _score(floats(q_i + 4 * h * width), k_b + at, step, start, stop, width, scale, _row(table, h))
        for h in range(heads):
            scores = _row(table, h)
            bend(scores, scores, low, high, cap, False)
            _shift(scores, low, high, bias, each * b + (h * new + i) * length, seen, task * length)
            best = np.float32(-np.inf)
            for j in range(low, high):
                best = max(best, scores[j])
            log[h] = 0
            total = np.float32(1)
            if best > -np.inf:
                total = np.float32(0)
                for j in range(low, high):
                    scores[j] = exp(scores[j] - best)
                    total += scores[j]
                log[h] = best + np.float32(math.log(total))
            else:
                for j in range(low, high):
                    scores[j] = 0
            for j in range(low, high):
                scores[j] /= total
            if noise[0]:
                keep(scores, low, high, task, h, 0, noise)
            result = floats(out_i + 4 * h * width)
            for d in range(width):
                result[d] = 0
        for start in range(low, high, BLOCK):
            stop = min(start + BLOCK, high)
            for h in range(heads):
                at = v_b + 4 * (h // group) * width
                _mix(floats(out_i + 4 * h * width), at, step, start, stop, width, _row(table, h))


@summing
def _reverse(
    begin: int, end: int, tensors: Ints, gradients: Ints, sizes: Ints, sight: tuple[tuple[Any, ...], ...]
) -> None:
    grad, q, k, v, out, lse = tensors
    of_q, of_k, of_v, of_bias = gradients
    rows, new, heads, heads_kv, width, length = sizes
    range_of, (scale, cap, seen, bias, each), noise = sight
    group, slot, step = heads // heads_kv, heads_kv * width, rows * heads_kv * width
    size = (heads, length + FEW)
    weights, slopes, bends = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    for task in range(begin * new, end * new):
        b, i = task // new, task % new
        low, high = _slots_seen(range_of, b, length, length - new + i)
        row, at_b = 4 * task * heads * width, 4 * b * slot
        log = floats(lse + 4 * task * heads)
        for start in range(low, high, BLOCK):
            stop = min(start + BLOCK, high)
            for h in range(heads):
                at = at_b + 4 * (h // group) * width
                query, coming = floats(q + row + 4 * h * width), floats(grad + row + 4 * h * width)
                _score(query, k + at, step, start, stop, width, scale, _row(weights, h))
                _score(coming, v + at, step, start, stop, width, np.float32(1), _row(slopes, h))
        for h in range(heads):
            weight, slope, turn = _row(weights, h), _row(slopes, h), _row(bends, h)
            coming, mixed = floats(grad + row + 4 * h * width), floats(out + row + 4 * h * width)
            found, delta = floats(of_q + row + 4 * h * width), np.float32(0)
            for d in range(width):
                found[d] = 0
                delta += coming[d] * mixed[d]
            bend(weight, turn, low, high, cap, True)
            _shift(weight, low, high, bias, each * b + (h * new + i) * length, seen, task * length)
            for j in range(low, high):
                weight[j] = exp(min(weight[j] - log[h], np.float32(0)))
            if noise[0]:
                keep(slope, low, high, task, h, 0, noise)
            for j in range(low, high):
                slope[j] = weight[j] * (slope[j] - delta)
            if noise[0]:
                keep(weight, low, high, task, h, 0, noise)
            if of_bias:
                into = floats(of_bias + 4 * ((b * heads + h) * new + i) * length)
                for j in range(low, high):
                    into[j] = slope[j]
            for j in range(low, high):
                slope[j] *= scale
            if cap > 0:
                for j in range(low, high):
                    slope[j] *= turn[j]
        for start in range(low, high, BLOCK):
            stop = min(start + BLOCK, high)
            for h in range(heads):
                at = at_b + 4 * (h // group) * width
                query, coming = floats(q + row + 4 * h * width), floats(grad + row + 4 * h * width)
                weight, slope = _row(weights, h), _row(slopes, h)
                _mix(floats(of_q + row + 4 * h * width), k + at, step, start, stop, width, slope)
                for j in range(start, stop):
                    key_grad, value_grad = floats(of_k + at + 4 * j * step), floats(of_v + at + 4 * j * step)
                    s, w = slope[j], weight[j]
                    for d in range(width):
                        key_grad[d] += s * query[d]
                        value_grad[d] += w * coming[d]


@inlined
def _slots_seen(range_of: Any, b: Any, length: Any, last: Any) -> Any:
    """The slots that a query of row b sees lie in range(low, high); `last` is the slot of its own token."""
    causal, window, first = range_of
    high = last + 1 if causal else length
    low = min(max(pointer(first, np.int64(0))[b], 0), high) if first else 0
    low = min(max(low, last + 1 - window), high) if window else low
    return low, high


@inlined
def bend(scores: Any, slopes: Any, low: Any, high: Any, cap: Any, sloped: Any) -> None:
    """scores = cap * tanh(scores / cap) where there is a cap, and then its slopes where they are wanted."""
    if cap > 0:
        for j in range(low, high):
            x = np.float32(math.tanh(scores[j] / cap))
            scores[j] = cap * x
            if sloped:
                slopes[j] = 1 - x * x


@inlined
def _shift(scores: Any, low: Any, high: Any, bias: Any, at: Any, seen: Any, place: Any) -> None:
    """Adds the bias, and hides what is not seen."""
    if bias:
        added = floats(bias + 4 * at)
        for j in range(low, high):
            scores[j] += added[j]
    if seen:
        flags = pointer(seen + place, np.uint8(0))
        for j in range(low, high):
            scores[j] = scores[j] if flags[j] else np.float32(-np.inf)


@inlined
def _score(query: Any, k: Any, step: Any, low: Any, high: Any, width: Any, scale: Any, scores: Any) -> None:
    """scores[j] = scale * query . slot j, of low <= j < high"""
    full = low + (high - low) // FEW * FEW
    for j in range(low, full, FEW):
        k0, k1 = floats(k + 4 * j * step), floats(k + 4 * (j + 1) * step)
        k2, k3 = floats(k + 4 * (j + 2) * step), floats(k + 4 * (j + 3) * step)
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(width):
            s0 += query[d] * k0[d]
            s1 += query[d] * k1[d]
            s2 += query[d] * k2[d]
            s3 += query[d] * k3[d]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    for j in range(full, high):
        k0 = floats(k + 4 * j * step)
        s0 = np.float32(0)
        for d in range(width):
            s0 += query[d] * k0[d]
        scores[j] = s0 * scale


@inlined
def _mix(out: Any, v: Any, step: Any, low: Any, high: Any, width: Any, weights: Any) -> None:
    """out += the sum of weights[j] * slot j"""
    full = low + (high - low) // FEW * FEW
    for j in range(low, full, FEW):
        v0, v1 = floats(v + 4 * j * step), floats(v + 4 * (j + 1) * step)
        v2, v3 = floats(v + 4 * (j + 2) * step), floats(v + 4 * (j + 3) * step)
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(width):
            out[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])
    for j in range(full, high):
        v0 = floats(v + 4 * j * step)
        for d in range(width):
            out[d] += weights[j] * v0[d]


@inlined
def keep(weights: Any, low: Any, high: Any, query: Any, head: Any, place: Any, noise: Any) -> None:
    """Drops weights by the hash of `keep` in `kernels/scores.py`, and grows the rest; weights[0] is that of `place`."""
    _, grown, least, seed, begin = noise
    mark = _scramble(_scramble(np.int64(query + seed)) + head) + begin + place
    for j in range(low, high):
        x = (mark + j) * FIRST
        x = (x ^ (x >> 29)) * SECOND
        weights[j] = weights[j] * grown if x >= least else np.float32(0)


@inlined
def _scramble(x: Any) -> Any:
    x = (x ^ (x >> 33)) * FIRST
    x = (x ^ (x >> 29)) * SECOND
    return x ^ (x >> 32)


@inlined
def _row(table: Any, i: Any) -> Any:
    """A row of an array, without the looks at the sign of every index that keep loops from being vectorized."""
    return floats(table.ctypes.data + 4 * i * table.shape[1])


@inlined
def floats(address: Any) -> Any:
    """The float32s at an address."""
    return pointer(address, np.float32(0))
