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
from tensorloop.kernels.cpu.past import Ints, Laid, bend, keep
from tensorloop.kernels.cpu.pointers import LIKE, pointer, prefetch
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import addresses, lay_all
from tensorloop.kernels.past import Sight

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
    rows, size, heads, heads_kv, width, length = sizes
    (_, _, first), (scale, cap, _, bias, each_bias), (drop, grown, seed, slots) = sight
    each, slot, group = heads * width, heads_kv * width, heads // heads_kv
    state, states = pointer(shared, like), pointer(own, like)
    at, scores = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.float32)
    top, total = np.empty(size * heads, np.float32), np.empty(size * heads, np.float32)
    for b in range(begin, end):
        q_b, out_b = q + 4 * b * size * each, out + 4 * b * size * each
        result, log = _floats(out_b), _floats(lse + 4 * b * size * heads)
        result_size = size * each
        for i in range(result_size):
            result[i] = 0
        top[:], total[:] = -np.inf, 0
        low = max(pointer(first, np.int64(0))[b], 0) if first else 0
        added, mark = bias + 4 * each_bias * b, b * size * heads * slots + seed
        for start in range(low, n_before, BLOCK):
            count = min(BLOCK, n_before - start)
            for j in range(count):
                at[j] = ((start + j) * rows + b) * slot
            _block(
                q_b, out_b, k_before, v_before, top, total, at, count, scores, size, heads, group, width, scale, cap,
                added + 4 * start if bias else 0, size * length, length, mark + start, slots, drop, grown,
            )  # fmt: skip
        for start in range(max(low - n_before, 0), n_shared, BLOCK):
            count = min(BLOCK, n_shared - start)
            for j in range(count):
                t = start + j
                at[j] = ((t * rows + b) * size + state[t * rows + b]) * slot
                _expect(k + 4 * at[j], slot)
                _expect(v + 4 * at[j], slot)
            place = n_before + start
            _block(
                q_b, out_b, k, v, top, total, at, count, scores, size, heads, group, width, scale, cap,
                added + 4 * place if bias else 0, size * length, length, mark + place, slots, drop, grown,
            )  # fmt: skip
        for start in range(max(low - n_before - n_shared, 0), n_own, BLOCK):
            count, place = min(BLOCK, n_own - start), n_before + n_shared + start
            for i in range(size):
                for j in range(count):
                    t = start + j
                    at[j] = (((n_shared + t) * rows + b) * size + states[(t * rows + b) * size + i]) * slot
                _block(
                    q_b + 4 * i * each, out_b + 4 * i * each, k, v, top[i * heads :], total[i * heads :], at, count,
                    scores, 1, heads, group, width, scale, cap, added + 4 * (i * length + place) if bias else 0,
                    size * length, length, mark + i * heads * slots + place, slots, drop, grown,
                )  # fmt: skip
        for o in range(size * heads):
            if total[o] == 0:  # it sees nothing
                top[o], total[o] = 0, 1
            log[o] = top[o] + np.float32(math.log(total[o]))
            for d in range(width):
                result[o * width + d] /= total[o]


@summing
def _block(
    q: int, out: int, k: int, v: int, top: Any, total: Any, at: Any, count: int, scores: Any,
    size: int, heads: int, group: int, width: int, scale: Any, cap: Any, bias: int, by_head: int, by_query: int,
    mark: int, slots: int, drop: int, grown: Any,
) -> None:  # fmt: skip
    """Adds what `size` hypotheses see at `count` places to their outputs, before division by the totals.

    `bias` and `mark`, of which weights are dropped by a hash, are those of the first head, hypothesis and place.
    """
    full = (count + FEW - 1) // FEW * FEW
    for j in range(count, full):
        at[j] = at[count - 1]
    for h in range(heads):
        first = h // group * width
        for i in range(size):
            o = i * heads + h
            _scores(_floats(q + 4 * o * width), k + 4 * first, at, full, width, scale, scores)
            bend(scores, scores, 0, count, cap, False)
            if bias:
                more = _floats(bias + 4 * (h * by_head + i * by_query))
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
            if drop:
                keep(scores, scores, 0, count, mark + (i * heads + h) * slots, drop, grown)
            for j in range(count, full):
                scores[j] = 0
            top[o], total[o] = best, total[o] * kept + added
            _add(_floats(out + 4 * o * width), kept, v + 4 * first, at, full, width, scores)


@inlined
def _scores(query: Any, k: Any, at: Any, count: Any, width: Any, scale: Any, scores: Any) -> None:
    """scores[j] = scale * query . key at at[j]"""
    for j in range(0, count, FEW):
        k0, k1, k2, k3 = (
            _floats(k + 4 * at[j]),
            _floats(k + 4 * at[j + 1]),
            _floats(k + 4 * at[j + 2]),
            _floats(k + 4 * at[j + 3]),
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
            _floats(v + 4 * at[j]),
            _floats(v + 4 * at[j + 1]),
            _floats(v + 4 * at[j + 2]),
            _floats(v + 4 * at[j + 3]),
        )
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(width):
            out[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d])


@inlined
def _floats(address: Any) -> Any:
    return pointer(address, np.float32(0))


@inlined
def _expect(address: Any, count: Any) -> None:
    """Asks for float32s that are wanted soon."""
    for d in range(0, count, LINE):
        prefetch(address + 4 * d)
