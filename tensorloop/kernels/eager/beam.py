"""Choosing the best continuations of a beam, and reading them back: torch operations on any device.

B rows, K hypotheses, V tokens. Keys rank; -inf is no hypothesis, NaN counts as the largest of all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop._common.ranking import best_pairs, descending, find_highest, widened


def beam_best(
    keys: Tensor, log_probs: Tensor, count: int, eos_id: int, ids: Tensor | None = None, high: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `count` best of keys (B, K) + log_probs (B, K, V) that do not end, and all ends.

    (values, parents, tokens), (B, count) each, the best first, of equal ones the smaller parent, then the smaller
    token, first; short of that -inf, with parent and token of the first (0, 0 where there is none): what is computed
    for it is then as fine as for that one. The ends: (B, K), keys + log_probs of eos_id; with `high`, no more than
    `count`, -inf for those that are not among the `high` best of all continuations. With `ids` log_probs are of
    these rows, in rising order; the others have no hypothesis: keys of -inf, parent and token 0.
    """
    every = (keys if ids is None else keys.index_select(0, ids))[:, :, None] + log_probs
    ends = every[:, :, eos_id].clone()
    if high:
        among = find_highest(every, high)[:, :, eos_id]
        ends = torch.where(among | ends.isnan(), ends, -torch.inf)
    every[:, :, eos_id] = -torch.inf
    values, parents, tokens = best_pairs(every, count)
    if ids is None:
        return values, parents, tokens, ends
    kinds = ((values, -torch.inf), (parents, 0), (tokens, 0), (ends, -torch.inf))
    return tuple(widened(x, ids, len(keys), fill) for x, fill in kinds)  # pyright: ignore[reportReturnType]


def beam_pool(
    ends: Sequence[Tensor], runs: Sequence[Tensor], pool: Sequence[Tensor], searching: Tensor, t: int, rule: str
) -> int:
    """Takes the ends of step t into the pool, in place, and tells what has come of it.

    `ends`: keys and sums (B, K) of hypotheses that end; `runs`: keys (B, K) of those that run on, and bounds on what
    they can still reach. `pool`: keys, sums and ends (step * K + place) of the n best, (B, n) each, the best first, of
    equal ones the earlier; then, (B,) each, to be written: the largest bound, and the largest key left out. Only rows
    that are `searching` take anything.
    The answer has 1 if in one of those rows there is no hypothesis any more, or one whose key is NaN or inf, and 2 if
    one of them is over: by the rule "exact" where the n-th of its pool is no worse than the largest bound; else where
    nothing runs on, and by "first_n" where n have ended.
    """
    keys, sums, at, most, lost = pool
    (new, new_sums), (running, bounds) = ends, runs
    size, n = new.shape[1], keys.shape[1]
    best = torch.maximum(running.amax(1), new.amax(1))
    most.copy_(torch.where(running > -torch.inf, bounds, -torch.inf).amax(1))
    every, order = descending(torch.cat([keys, torch.where(searching[:, None], new, -torch.inf)], 1))
    lost.copy_(every[:, n])
    order = order[:, :n]
    keys.copy_(every[:, :n])
    sums.copy_(torch.cat([sums, new_sums], 1).gather(1, order))
    here = torch.arange(size, device=at.device).expand(len(at), -1) + t * size
    at.copy_(torch.cat([at, here], 1).gather(1, order))
    over = keys[:, -1] >= most if rule == "exact" else most == -torch.inf
    if rule == "first_n":
        over = over | (keys[:, -1] > -torch.inf)
    said = torch.stack([~(best.abs() < torch.inf), over]) & searching
    bad, done = said.any(1).tolist()
    return bad + 2 * done


def beam_chosen(
    parents: Tensor, tokens: Tensor, ids: Tensor | None, vocabulary: int, eos_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a step of the rows `ids` in the batch (of all where None) needs of its decisions (B, K).

    Tokens (b, K), places of the parents in flat (b, K), and in flat log-probabilities (b, K, V) for each row those of
    the tokens, then those of every end.
    """
    if ids is not None:
        parents, tokens = parents.index_select(0, ids), tokens.index_select(0, ids)
    rows, size = parents.shape
    dtype = torch.int32 if rows * size * vocabulary < 1 << 31 else torch.int64
    every = torch.arange(rows * size, device=parents.device).view(rows, size)
    places = parents + every[:, :1]
    chosen = torch.cat([torch.add(tokens, places, alpha=vocabulary), every * vocabulary + eos_id], 1)
    return tokens.clone(), places.flatten().to(dtype), chosen.flatten().to(dtype)


def beam_ancestors(table: Tensor, kept: Tensor, parents: Tensor, ids: Tensor | None, first: int, t: int) -> int:
    """Takes a table (room, B, K) of ancestors in states `first` to t - 1 on to state t, in place.

    Hypothesis k of state t goes on from parents[b, k], and is its own ancestor there; `kept` (B, K), of the table's
    dtype, gets the parents. The answer: before which state each of the rows `ids` (all where None) has but one
    ancestor.
    """
    size = table.shape[2]
    kept.copy_(parents)
    table[first:t] = table[first:t].gather(2, parents.expand(t - first, -1, -1))
    table[t] = torch.arange(size, device=table.device)
    recent = table[first:t] if ids is None else table[first:t].index_select(1, ids)
    return first + int((recent == recent[:, :, :1]).all(2).all(1).sum())


def beam_trace(parents: Tensor, lens: Tensor, places: Tensor) -> Tensor:
    """(T, B, n): the places after each step of the ancestors of those at `places` after step lens - 1, (B, n) both.

    `parents` (T, B, K): hypothesis k after step t goes on from parents[t, b, k]. Places behind a length are 0.
    """
    out = torch.zeros(len(parents), *places.shape, dtype=torch.int64, device=places.device)
    for t in range(len(parents) - 1, -1, -1):
        runs = lens > t
        out[t] = torch.where(runs, places, 0)
        places = torch.where(runs, parents[t].gather(1, places), places)
    return out
