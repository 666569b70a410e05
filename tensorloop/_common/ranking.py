"""The largest of many numbers, in an order that is the same everywhere: of equal ones the first; NaN is the largest."""

import torch
from torch import Tensor


def best_pairs(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values, parents, tokens) of the `count` largest of (B, K, V), the best first.

    Short of that -inf, with parent and token of the first; 0, 0 where there is none.
    """
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


def find_highest(keys: Tensor, count: int) -> Tensor:
    """Bool (B, K, V): which are among the `count` largest of their row, of equal ones the first."""
    _, places = largest(keys.flatten(1), min(count, keys.shape[1] * keys.shape[2]))
    return torch.zeros_like(keys, dtype=torch.bool).flatten(1).scatter_(1, places, True).view_as(keys)


def descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, places) along the last dim, the largest first, of equal ones the first."""
    return torch.sort(x, dim=-1, descending=True, stable=True)


def widened(x: Tensor, ids: Tensor, rows: int, fill: float) -> Tensor:
    """(rows, ...) with x in the rows `ids`."""
    return x.new_full((rows, *x.shape[1:]), fill).index_copy_(0, ids, x)
