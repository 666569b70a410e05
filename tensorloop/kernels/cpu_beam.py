"""Choosing the best continuations of a beam, and reading them back, on the CPU: one pass over the log-probabilities.

What the functions give is said in `eager_beam.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels._compiled import compiled, inlined
from tensorloop.kernels._pointers import pointer
from tensorloop.kernels._threads import share

BLOCK = 64  # continuations that are compared with the worst one kept before any of them is looked at alone


def beam_best(keys: Tensor, log_probs: Tensor, count: int, eos_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best continuations, and the ends."""
    keys, log_probs = keys.contiguous(), log_probs.contiguous()
    rows, size, vocabulary = log_probs.shape
    values, ends = keys.new_empty(rows, count), keys.new_empty(rows, size)
    parents = keys.new_empty(rows, count, dtype=torch.int64)
    tokens = parents.new_empty(rows, count)
    every = (keys, log_probs, values, parents, tokens, ends)
    like = np.float32(0) if keys.element_size() == 4 else np.float64(0)
    args = (*(x.data_ptr() for x in every), size, vocabulary, count, eos_id, keys.element_size(), like)
    share(_best, rows, log_probs.nbytes, args, every)
    return values, parents, tokens, ends


def beam_trace(parents: Tensor, lens: Tensor, places: Tensor) -> Tensor:
    """The places of ancestors after each step."""
    parents, lens, places = parents.contiguous(), lens.contiguous(), places.contiguous()
    (steps, rows, size), each = parents.shape, places.shape[1]
    out = parents.new_zeros(steps, rows, each)
    args = (parents.data_ptr(), lens.data_ptr(), places.data_ptr(), out.data_ptr(), steps, rows, size, each)
    share(_trace, rows, 16 * out.numel(), args, (parents, lens, places, out))
    return out


@compiled
def _best(
    begin: int, end: int, keys: int, log_probs: int, values: int, parents: int, tokens: int, ends: int,
    size: int, vocabulary: int, count: int, eos: int, width: int, like: Any,
) -> None:  # fmt: skip
    for b in range(begin, end):
        key, end_of = pointer(keys + b * size * width, like), pointer(ends + b * size * width, like)
        kept = pointer(values + b * count * width, like)
        parent, token = pointer(parents + b * count * 8, np.int64(0)), pointer(tokens + b * count * 8, np.int64(0))
        for j in range(count):
            kept[j], parent[j], token[j] = -np.inf, 0, 0
        spoilt = False
        for k in range(size):
            score = pointer(log_probs + (b * size + k) * vocabulary * width, like)
            end_of[k] = key[k] + score[eos]
            for start in range(0, vocabulary, BLOCK):
                stop = min(start + BLOCK, vocabulary)
                if not _any_above(score, start, stop, key[k], kept[count - 1]):
                    continue
                for v in range(start, stop):
                    x = key[k] + score[v]
                    if v != eos and not x <= kept[count - 1]:
                        spoilt = spoilt or x != x
                        _insert(kept, parent, token, count, x, k, v)
        for j in range(count):
            if kept[j] == -np.inf:
                parent[j], token[j] = parent[0], token[0]
        if spoilt:
            kept[0] = np.nan


@inlined
def _any_above(score: Any, start: Any, stop: Any, key: Any, worst: Any) -> Any:
    """Whether one of these is above the worst that is kept, or NaN."""
    found = False
    for v in range(start, stop):
        found |= not (key + score[v] <= worst)
    return found


@inlined
def _insert(kept: Any, parent: Any, token: Any, count: Any, x: Any, k: Any, v: Any) -> None:
    """Puts x in its place, behind all that are not smaller. NaN goes nowhere."""
    j = count - 1
    if x != x:
        return
    while j > 0 and kept[j - 1] < x:
        kept[j], parent[j], token[j] = kept[j - 1], parent[j - 1], token[j - 1]
        j -= 1
    kept[j], parent[j], token[j] = x, k, v


@compiled
def _trace(
    begin: int, end: int, parents: int, lens: int, places: int, out: int, steps: int, rows: int, size: int, each: int
) -> None:
    parent, length, place, found = (
        pointer(parents, np.int64(0)), pointer(lens, np.int64(0)), pointer(places, np.int64(0)),
        pointer(out, np.int64(0)),
    )  # fmt: skip
    for b in range(begin, end):
        for i in range(b * each, (b + 1) * each):
            k = place[i]
            for t in range(min(length[i], steps) - 1, -1, -1):
                found[t * rows * each + i] = k
                k = parent[(t * rows + b) * size + k]
