"""Choosing the best continuations of a beam, and reading them back, on the CPU: one pass over the log-probabilities.

What the functions give is said in `kernels/eager/beam.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, inlined
from tensorloop.kernels.cpu.pointers import LIKE, intrinsic, pointer
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.eager import beam
from tensorloop.kernels.memory import address, addresses, is_laid, lay_all, lay_out

Ints = tuple[int, ...]
BLOCK = 32  # continuations that are compared with the worst one kept at once; as many bits tell which are looked at


def beam_best(
    keys: Tensor, log_probs: Tensor, count: int, eos_id: int, ids: Tensor | None = None, high: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best continuations, and the ends."""
    keys, log_probs = lay_all((keys, log_probs))
    (rows, size, vocabulary), every = log_probs.shape, len(keys)
    values, ends = keys.new_empty(every, count), keys.new_empty(every, size)
    parents = keys.new_empty(every, count, dtype=torch.int64)
    tokens = parents.new_empty(every, count)
    if ids is not None:
        ids = lay_out(ids)
        for x, fill in ((values, -torch.inf), (ends, -torch.inf), (parents, 0), (tokens, 0)):
            x.fill_(fill)
    alive = (keys, log_probs, values, parents, tokens, ends)
    sizes = size, vocabulary, count, eos_id, high, keys.element_size()
    args = ((*addresses(alive), _address(ids)), sizes, LIKE[keys.dtype])
    share(_best, rows, log_probs.nbytes, args, (*alive, keys if ids is None else ids))
    return values, parents, tokens, ends


def beam_pool(
    ends: Sequence[Tensor],
    runs: Sequence[Tensor],
    pool: Sequence[Tensor],
    searching: Tensor,
    t: int,
    rule: str,
    ranked: Tensor | None = None,
) -> int:
    """Takes the ends of a step into the pool, and tells what has come of it."""
    if ranked is not None or not all(map(is_laid, pool)):
        return beam.beam_pool(ends, runs, pool, searching, t, rule, ranked)
    *given, searching = lay_all((*ends, *runs, searching))
    keys, sums, *_ = pool
    at, sizes = addresses((*given, *pool, searching)), (*runs[0].shape, keys.shape[1], t)
    return _pool(tuple(at), sizes, (rule == "exact", rule == "first_n"), (LIKE[keys.dtype], LIKE[sums.dtype]))


def beam_chosen(
    parents: Tensor, tokens: Tensor, ids: Tensor | None, vocabulary: int, eos_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, and where parents and log-probabilities are."""
    parents, tokens = lay_all((parents, tokens))
    ids = None if ids is None else lay_out(ids)
    size, rows = parents.shape[1], len(parents) if ids is None else len(ids)
    small = torch.int32 if rows * size * vocabulary < 1 << 31 else torch.int64
    places, chosen = tokens.new_empty(rows * size, dtype=small), tokens.new_empty(2 * rows * size, dtype=small)
    taken = tokens.new_empty(rows, size)
    at = addresses((parents, tokens, taken, places, chosen))
    _chosen((*at, _address(ids)), (rows, size, vocabulary, eos_id), LIKE[small])
    return taken, places, chosen


def beam_ancestors(table: Tensor, kept: Tensor, parents: Tensor, ids: Tensor | None, first: int, t: int) -> int:
    """Takes the ancestors on to state t, and keeps the parents."""
    if not (is_laid(table) and is_laid(kept)):
        return beam.beam_ancestors(table, kept, parents, ids, first, t)
    _, rows, size = table.shape
    parents, ids = lay_out(parents), None if ids is None else lay_out(ids)
    count = rows if ids is None else len(ids)
    tensors = *addresses((table, kept, parents)), _address(ids)
    return _ancestors(tensors, (count, rows, size, first, t), LIKE[table.dtype])


def beam_trace(parents: Tensor, lens: Tensor, places: Tensor) -> Tensor:
    """The places of ancestors after each step."""
    parents, lens, places = map(lay_out, (parents, lens, places))
    (steps, rows, size), each = parents.shape, places.shape[1]
    out = parents.new_zeros(steps, rows, each)
    args = (tuple(addresses((parents, lens, places, out))), (steps, rows, size, each))
    share(_trace, rows, 16 * out.numel(), args, (parents, lens, places, out))
    return out


def _address(ids: Tensor | None) -> int:
    return 0 if ids is None else address(ids)


@intrinsic
def _above(typingctx: Any, address: Any, key: Any, worst: Any) -> Any:
    """A bit for each of BLOCK numbers at an address: whether key + number is above `worst`, or NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block, bits = ir.VectorType(args[1].type, BLOCK), ir.IntType(BLOCK)

        def spread(x: Any) -> Any:
            first = builder.insert_element(ir.Constant(block, ir.Undefined), x, ir.IntType(32)(0))
            return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), None))

        width = context.get_abi_sizeof(args[1].type)
        numbers = builder.load(builder.inttoptr(args[0], block.as_pointer()), align=width)
        found = builder.fcmp_unordered(">", builder.fadd(spread(args[1]), numbers), spread(args[2]))
        return builder.zext(builder.bitcast(found, bits), ir.IntType(64))

    return types.uint64(types.int64, key, key), codegen


@intrinsic
def _lowest(typingctx: Any, bits: Any) -> Any:
    """The place of the lowest bit; there must be one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


@compiled
def _best(begin: int, end: int, tensors: Ints, sizes: Ints, like: Any) -> None:
    keys, log_probs, values, parents, tokens, ends, ids = tensors
    size, vocabulary, count, eos, high, width = sizes
    row_of = pointer(ids, np.int64(0))
    for row in range(begin, end):
        b = row_of[row] if ids else row
        key, end_of = pointer(keys + b * size * width, like), pointer(ends + b * size * width, like)
        kept = pointer(values + b * count * width, like)
        parent, token = pointer(parents + b * count * 8, np.int64(0)), pointer(tokens + b * count * 8, np.int64(0))
        for j in range(count):
            kept[j], parent[j], token[j] = -np.inf, 0, 0
        spoilt = False
        for k in range(size):
            scores = log_probs + (row * size + k) * vocabulary * width
            score = pointer(scores, like)
            end_of[k] = key[k] + score[eos]
            for start in range(0, vocabulary, BLOCK):
                bits = _to_look_at(scores, start, vocabulary, width, key[k], kept[count - 1])
                while bits:
                    v = start + _lowest(bits)
                    bits &= bits - np.uint64(1)
                    x = key[k] + score[v]
                    if v != eos and not x <= kept[count - 1]:
                        spoilt = spoilt or x != x
                        _insert(kept, parent, token, count, x, k, v)
        for j in range(count):
            if kept[j] == -np.inf:
                parent[j], token[j] = parent[0], token[0]
        if high:
            _drop_low(end_of, kept, parent, token, size, count, eos, high)
        if spoilt:
            kept[0] = np.nan


@inlined
def _drop_low(
    ends: Any, kept: Any, parent: Any, token: Any, size: Any, count: Any, eos: Any, high: Any
) -> None:  # fmt: skip
    """Makes ends -inf that are not among the `high` best of all: behind as many that run on, and other ends."""
    ranks = np.zeros(size, np.int64)
    for k in range(size):
        for j in range(count):
            first = parent[j] < k or (parent[j] == k and token[j] < eos)
            ranks[k] += kept[j] > ends[k] or (kept[j] == ends[k] and first)
        for i in range(size):
            ranks[k] += ends[i] > ends[k] or (ends[i] == ends[k] and i < k)
    for k in range(size):
        if ranks[k] >= high:
            ends[k] = -np.inf


@inlined
def _to_look_at(scores: Any, start: Any, vocabulary: Any, width: Any, key: Any, worst: Any) -> Any:
    """A bit for each token of the block at `start`. The last of several is read from BLOCK before the end."""
    over = max(start + BLOCK - vocabulary, 0)
    if over > start:
        return np.uint64((1 << vocabulary) - 1)
    return _above(scores + (start - over) * width, key, worst) >> np.uint64(over)


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
def _trace(begin: int, end: int, tensors: Ints, sizes: Ints) -> None:
    (parents, lens, places, out), (steps, rows, size, each) = tensors, sizes
    parent, length, place = pointer(parents, np.int64(0)), pointer(lens, np.int64(0)), pointer(places, np.int64(0))
    found = pointer(out, np.int64(0))
    for b in range(begin, end):
        for i in range(b * each, (b + 1) * each):
            k = place[i]
            for t in range(min(length[i], steps) - 1, -1, -1):
                found[t * rows * each + i] = k
                k = parent[(t * rows + b) * size + k]


@compiled
def _pool(tensors: Ints, sizes: Ints, rule: tuple[bool, bool], likes: tuple[Any, Any]) -> int:
    ends, end_sums, runs, bounds, pool_keys, pool_sums, pool_ends, most, lost, searching = tensors
    (rows, size, count, t), (exact, first_n), (like, like_sum) = sizes, rule, likes
    end, end_sum = pointer(ends, like), pointer(end_sums, like_sum)
    key, bound = pointer(runs, like), pointer(bounds, like)
    kept, kept_sum, at = pointer(pool_keys, like), pointer(pool_sums, like_sum), pointer(pool_ends, np.int64(0))
    top, left, searches = pointer(most, like), pointer(lost, like), pointer(searching, np.uint8(0))
    said = 0
    for b in range(rows):
        first, last = b * count, (b + 1) * count - 1
        top[b], left[b], possible, spoilt = -np.inf, -np.inf, False, False
        for i in range(b * size, (b + 1) * size):
            possible |= key[i] > -np.inf or end[i] > -np.inf
            spoilt |= not (key[i] < np.inf and end[i] < np.inf)
            if key[i] > -np.inf:
                top[b] = max(top[b], bound[i])
            if not searches[b]:
                continue
            left[b] = max(left[b], min(end[i], kept[last]))
            if end[i] > kept[last]:
                j = last
                while j > first and kept[j - 1] < end[i]:
                    kept[j], kept_sum[j], at[j] = kept[j - 1], kept_sum[j - 1], at[j - 1]
                    j -= 1
                kept[j], kept_sum[j], at[j] = end[i], end_sum[i], t * size + i - b * size
        if searches[b]:
            over = kept[last] >= top[b] if exact else top[b] == -np.inf or (first_n and kept[last] > -np.inf)
            said |= (1 if spoilt or not possible else 0) | (2 if over else 0)
    return said


@compiled
def _chosen(tensors: Ints, sizes: Ints, like: Any) -> None:
    (parents, tokens, taken, places, chosen, ids), (rows, size, vocabulary, eos) = tensors, sizes
    parent, token, row_of = pointer(parents, np.int64(0)), pointer(tokens, np.int64(0)), pointer(ids, np.int64(0))
    to, place, pick = pointer(taken, np.int64(0)), pointer(places, like), pointer(chosen, like)
    for b in range(rows):
        row = row_of[b] if ids else b
        for k in range(size):
            i, j = b * size + k, row * size + k
            before = b * size + parent[j]
            to[i], place[i] = token[j], before
            pick[i + b * size], pick[i + (b + 1) * size] = before * vocabulary + token[j], i * vocabulary + eos


@compiled
def _ancestors(tensors: Ints, sizes: Ints, like: Any) -> int:
    (table, kept, parents, ids), (count, rows, size, first, t) = tensors, sizes
    place, keep, old = pointer(table, like), pointer(kept, like), np.full(size, like)
    parent, row_of = pointer(parents, np.int64(0)), pointer(ids, np.int64(0))
    for i in range(rows * size):
        keep[i] = parent[i]
    for j in range(first, t + 1):
        for b in range(rows):
            at = (j * rows + b) * size
            for k in range(size):
                old[k] = place[at + k] if j < t else k
            for k in range(size):
                place[at + k] = old[parent[b * size + k]] if j < t else k
    shared = first
    while shared < t:
        for i in range(count):
            at = (shared * rows + (row_of[i] if ids else i)) * size
            for k in range(1, size):
                if place[at + k] != place[at]:
                    return shared
        shared += 1
    return shared
