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
    ends: Sequence[Tensor],
    runs: Sequence[Tensor],
    pool: Sequence[Tensor],
    searching: Tensor,
    t: int,
    rule: str,
    ranked: Tensor | None = None,
) -> int:
    """Takes the ends of step t into the pool, in place, and tells what has come of it.

    `ends`: keys and sums (B, K) of hypotheses that end; `runs`: keys (B, K) of those that run on, and bounds on what
    they can still reach. `pool`: keys, sums and ends (step * K + place) of the n best, (B, n) each, the best first, of
    equal ones the earlier; then, (B,) each, to be written: the largest bound, and the largest key left out. Only rows
    that are `searching` take anything.
    The answer has 1 if in one of those rows there is no hypothesis any more, or one whose key is NaN or inf, and 2 if
    one of them is over: by the rule "exact" where the n-th of its pool is no worse than the largest bound; else where
    nothing runs on, and by "first_n" where n have ended. It has 4 if in one of them the order of `ranked` (B, n), keys
    in falling order, is no matter of the keys alone: two are equal, or all but the last are not hypotheses.
    """
    keys, sums, at, most, lost = pool
    (new, new_sums), (running, bounds) = ends, runs
    size, n = new.shape[1], keys.shape[1]
    reach = running if bounds is running else bounds.masked_fill(running == -torch.inf, -torch.inf)
    torch.amax(reach, 1, out=most)
    every, order = descending(torch.cat([keys, new.masked_fill(~searching[:, None], -torch.inf)], 1))
    lost.copy_(every[:, n])
    order = order[:, :n]
    keys.copy_(every[:, :n])
    torch.gather(torch.cat([sums, new_sums.to(sums.dtype)], 1), 1, order, out=sums)
    here = torch.arange(t * size, (t + 1) * size, device=at.device).expand(len(at), -1)
    torch.gather(torch.cat([at, here], 1), 1, order, out=at)
    # One copy to the CPU has all that the answer follows from: what it says is worked out there, without launches.
    parts = [new, running, keys[:, -1:], most[:, None], searching[:, None], *(() if ranked is None else (ranked,))]
    told = torch.cat([x.to(keys.dtype) for x in parts], 1).cpu().split([x.shape[1] for x in parts], 1)
    best = torch.maximum(told[0].amax(1), told[1].amax(1))
    worst, reached, here = (x[:, 0] for x in told[2:5])
    over = worst >= reached if rule == "exact" else reached == -torch.inf
    if rule == "first_n":
        over = over | (worst > -torch.inf)
    said = [~(best.abs() < torch.inf), over]
    if ranked is not None:
        order = told[5]
        equal = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] > -torch.inf)
        said.append((equal | (order[:, :-1] == -torch.inf)).any(1))
    return sum(int((x & (here > 0)).any()) << i for i, x in enumerate(said))


def beam_chosen(
    parents: Tensor, tokens: Tensor, ids: Tensor | None, vocabulary: int, eos_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a step of the rows `ids` in the batch (of all where None) needs of its decisions (B, K).

    Tokens (b, K), places of the parents in flat (b, K), and in flat log-probabilities (b, K, V) for each row those of
    the tokens, then those of every end.
    """
    if ids is not None:
        parents, tokens = parents.index_select(0, ids), tokens.index_select(0, ids)
    rows, size = parents.shape
    dtype = torch.int32 if rows * size * vocabulary < 1 << 31 else torch.int64
    count, device = rows * size, parents.device
    # Written as `dtype` at once: no number is larger than that of all log-probabilities.
    places, picked = (parents.new_empty(rows, size, dtype=dtype) for _ in range(2))
    torch.add(parents, torch.arange(0, count, max(size, 1), device=device)[:, None], out=places)
    torch.add(tokens, places, alpha=vocabulary, out=picked)
    stop = eos_id + max(count - 1, 0) * vocabulary + 1
    ends = torch.arange(eos_id, stop, vocabulary, dtype=dtype, device=device)[:count]
    return tokens.clone(), places.flatten(), torch.cat([picked, ends.view(rows, size)], 1).flatten()


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
    runs = lens > torch.arange(len(parents), device=places.device)[:, None, None]
    found = [places]
    for t in range(len(parents) - 1, 0, -1):
        found.append(torch.where(runs[t], parents[t].gather(1, found[-1]), found[-1]))
    return torch.stack(found[::-1])[: len(parents)] * runs
