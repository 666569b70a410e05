"""Attention of running hypotheses to their histories on the CPU: slots are read where they are, nothing is gathered.

What the function gives is said in `kernels/eager/attend.py`. A task is a row of the batch. Its slots are gone through a
block at a time, with the maximum and the sum of each softmax carried along: what all hypotheses see is then in the
first cache when the second of them comes. Float32 only: libm's exp of a float64 takes one number at a time.

Source: Milakov & Gimelshein 2018 (online softmax).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import inlined, summing
from tensorloop.kernels.cpu.exponential import exp
from tensorloop.kernels.cpu.past import Ints, Laid, bend, floats, keep
from tensorloop.kernels.cpu.pointers import LIKE, pointer, prefetch
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import addresses, lay_all
from tensorloop.kernels.sight import Sight

BLOCK = 64  # slots
FEW = 4  # slots that are added up at once; divides BLOCK
LINE = 16  # float32s in a cache line


def beam_attend(
    q: Tensor, prefix: Sequence[Tensor], slots: Sequence[Tensor], shared: Tensor, own: Tensor, sight: Sight
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of the scores."""
    rows, size, _, width = q.shape
    q, shared, own, *kv = lay_all((q, shared, own, *prefix, *slots))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    held = [q, out, lse, shared, own, *kv]
    at = addresses(held)
    n_before, n_shared, n_own = prefix[0].shape[0] if prefix else 0, shared.shape[0], own.shape[0]
    heads_kv = kv[0].shape[-2]
    laid = Laid(q, n_before + n_shared + n_own, heads_kv, sight)
    of_prefix, of_slots = at[5 : 5 + len(prefix)], at[5 + len(prefix) :]
    arrays = (*_pair(of_prefix), *_pair(of_slots), n_before, n_shared, n_own)
    args = (tuple(at[:5]), arrays, laid.sizes, laid.sight, LIKE[own.dtype])
    seen = n_before + n_shared + size * n_own
    held += laid.tensors
    share(_attend, rows, 8 * rows * seen * heads_kv * width, args, held)
    return out, lse


def _pair(places: Sequence[int]) -> tuple[int, int]:
    """Returns the places of keys and of values, which may be the same one; (0, 0) where there are none."""
    return (places[0], places[-1]) if places else (0, 0)


@summing
def _attend(
    begin: int, end: int, tensors: Ints, arrays: Ints, sizes: Ints, sight: tuple[tuple[Any, ...], ...], like: Any
) -> None:
    q, out, lse, shared, own = tensors
    k_before, v_before, k, v, n_before, n_shared, n_own = arrays
    rows, size, heads, heads_kv, width, _ = sizes
    (_, _, first), rules, noise = sight
    each, slot = heads * width, heads_kv * width
    state, states = pointer(shared, like), pointer(own, like)
    room = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.float32)
    at = room[0]
    top, total = np.empty(size * heads, np.float32), np.empty(size * heads, np.float32)
    for b in range(begin, end):
        result, log = floats(out + 4 * b * size * each), floats(lse + 4 * b * size * heads)
        result_size = size * each
        for i in range(result_size):
            result[i] = 0
        top[:], total[:] = -np.inf, 0
        low = max(pointer(first, np.int64(0))[b], 0) if first else 0
        for start in range(low, n_before, BLOCK):
            count = min(BLOCK, n_before - start)
            for j in range(count):
                at[j] = ((start + j) * rows + b) * slot
            _block((q, out, k_before, v_before), (b, 0, size), (start, count), (top, total), room, sizes, rules, noise)
        for start in range(max(low - n_before, 0), n_shared, BLOCK):
            count, place = min(BLOCK, n_shared - start), n_before + start
            for j in range(count):
                t = start + j
                at[j] = ((t * rows + b) * size + state[t * rows + b]) * slot
                _expect(k + 4 * at[j], slot)
                _expect(v + 4 * at[j], slot)
            _block((q, out, k, v), (b, 0, size), (place, count), (top, total), room, sizes, rules, noise)
        for start in range(max(low - n_before - n_shared, 0), n_own, BLOCK):
            count, place = min(BLOCK, n_own - start), n_before + n_shared + start
            for i in range(size):
                for j in range(count):
                    t = start + j
                    at[j] = (((n_shared + t) * rows + b) * size + states[(t * rows + b) * size + i]) * slot
                _block((q, out, k, v), (b, i, i + 1), (place, count), (top, total), room, sizes, rules, noise)
        for o in range(size * heads):
            if total[o] == 0:  # it sees nothing
                top[o], total[o] = 0, 1
            log[o] = top[o] + np.float32(math.log(total[o]))
            for d in range(width):
                result[o * width + d] /= total[o]


@summing
def _block(tensors: Ints, whose: Ints, slots: Ints, sums: Any, room: Any, sizes: Ints, rules: Any, noise: Any) -> None:
    """Adds what hypotheses see at some places to their outputs, before division by the totals.

    `whose`: row b, its hypotheses from one to another. `slots`: the number of the first, and how many. `sums`: top and
    total, of all in row b. `room`: where the slots are, and room for scores.
    """
    (q, out, k, v), (_, size, heads, heads_kv, width, length) = tensors, sizes
    (b, low, high), (place, count), (at, scores), (top, total) = whose, slots, room, sums
    scale, cap, _, bias, each = rules
    full = (count + FEW - 1) // FEW * FEW
    for j in range(count, full):
        at[j] = at[count - 1]
    for h in range(heads):
        first = h // (heads // heads_kv) * width
        for i in range(low, high):
            o = i * heads + h
            query = 4 * (b * size * heads + o) * width
            _scores(floats(q + query), k + 4 * first, at, full, width, scale, scores)
            bend(scores, scores, 0, count, cap, False)
            if bias:
                more = floats(bias + 4 * (each * b + (h * size + i) * length + place))
                for j in range(count):
                    scores[j] += more[j]
            best = top[o]
            for j in range(count):
                best = max(best, scores[j])
            base = best if best > -np.inf else np.float32(0)
            kept, added = exp(top[o] - base), np.float32(0)
            for j in range(count):
                scores[j] = exp(scores[j] - base)
                added += scores[j]
            if noise[0]:
                keep(scores, 0, count, b * size + i, h, place, noise)
            for j in range(count, full):
                scores[j] = 0
            top[o], total[o] = best, total[o] * kept + added
            _add(floats(out + query), kept, v + 4 * first, at, full, width, scores)


@inlined
def _scores(query: Any, k: Any, at: Any, count: Any, width: Any, scale: Any, scores: Any) -> None:
    """scores[j] = scale * query . key at at[j]"""
    for j in range(0, count, FEW):
        k0, k1, k2, k3 = (
            floats(k + 4 * at[j]),
            floats(k + 4 * at[j + 1]),
            floats(k + 4 * at[j + 2]),
            floats(k + 4 * at[j + 3]),
        )
        s0 = s1 = s2 = s3 = np.float32(0)
        for d in range(width):
            s0 += query[d] * k0[d]
            s1 += query[d] * k1[d]
            s2 += query[d] * k2[d]
            s3 += query[d] * k3[d]
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale


@inlined
def _add(out: Any, kept: Any, v: Any, at: Any, count: Any, width: Any, weights: Any) -> None:
    """out = kept * out + the sum of weights[j] * value at at[j]"""
    for d in range(width):
        out[d] *= kept
    for j in range(0, count, FEW):
        v0, v1, v2, v3 = (
            floats(v + 4 * at[j]),
            floats(v + 4 * at[j + 1]),
            floats(v + 4 * at[j + 2]),
            floats(v + 4 * at[j + 3]),
        )
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(width):
            out[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])


@inlined
def _expect(address: Any, count: Any) -> None:
    """Asks for float32s that are wanted soon."""
    for d in range(0, count, LINE):
        prefetch(address + 4 * d)
