"""Choosing the best continuations of a beam, and reading them back: torch operations on any device.

B rows, K hypotheses, V tokens. Keys rank; -inf is no hypothesis, NaN counts as the largest of all.
"""

import torch
from torch import Tensor


def beam_best(keys: Tensor, log_probs: Tensor, count: int, eos_id: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The `count` best of keys (B, K) + log_probs (B, K, V) that do not end, and all ends.

    (values, parents, tokens), (B, count) each, the best first, of equal ones the smaller parent, then the smaller
    token, first; short of that -inf, with parent and token of the first (0, 0 where there is none): what is computed
    for it is then as fine as for that one. The ends: (B, K), keys + log_probs of eos_id.
    """
    every = keys[:, :, None] + log_probs
    ends = every[:, :, eos_id].clone()
    every[:, :, eos_id] = -torch.inf
    values, parents, tokens = best_pairs(every, count)
    return values, parents, tokens, ends


def best_pairs(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, parents, tokens) of the `count` largest of (B, K, V), as `beam_best` gives them."""
    values, places = largest(keys.flatten(1), count)
    none = values == -torch.inf
    places = torch.where(none, places[:, :1].masked_fill(none[:, :1], 0), places)
    parents = places.div(keys.shape[2], rounding_mode="floor")
    return values, parents, places - parents * keys.shape[2]


def largest(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of (B, N), of equal ones the first; short of that -inf at place 0: (values, places)."""
    more = min(count + 1, keys.shape[1])  # one more shows whether there is a tie for the last place
    values, places = keys.topk(more, 1)
    tied = ((values[:, 1:] == values[:, :-1]) & (values[:, 1:] > -torch.inf)).any(1)
    if bool(tied.any()):  # topk says nothing of their order, nor of which of them it takes
        rows = tied.nonzero()[:, 0]
        every, order = descending(keys[rows])
        values[rows], places[rows] = every[:, :more], order[:, :more]
    if more < count:
        missing = count - more
        values = torch.cat([values, values.new_full((len(keys), missing), -torch.inf)], 1)
        places = torch.cat([places, places.new_zeros(len(keys), missing)], 1)
    return values[:, :count], places[:, :count]


def descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, places) along the last dim, the largest first, of equal ones the first."""
    return torch.sort(x, dim=-1, descending=True, stable=True)


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
