"""Shapes of scores: heads exchanged, regrouped, joined with the batch; queries and keys exchanged."""

from math import prod
from typing import Any

import torch

from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import RaggedSize
from tensorloop.packed.scores.score_ops import cat, per_row
from tensorloop.packed.scores.scores import PackedScores
from tensorloop.packed.table.base import Packed, PackedView, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.heads_as_rows import divide, is_size_of, multiply


@handles
def _transpose(func: Any, input: Any, dim0: int, dim1: int) -> Any:
    """Two dims of heads exchanged, or queries and keys."""
    a, b = input.find(dim0), input.find(dim1)
    dims = list(range(-input.ndim, 0))
    dims[a], dims[b] = b, a
    return _permute(func, input, dims)


@handles
def _permute(func: Any, input: Any, *dims: Any) -> Any:
    """Heads in another order, queries and keys exchanged or not."""
    given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    order = [input.find(d) for d in given]
    if order == list(range(-input.ndim, 0)):
        return input
    if order[0] != -input.ndim or set(order[-2:]) != {-1, -2} or sorted(order) != list(range(-input.ndim, 0)):
        raise refusal(
            f"order {tuple(given)} of {input.shape}",
            "the batch stays first, queries and keys last: mix heads by einsum",
        )
    return per_row(input, lambda row: row.permute(order[1:]))


@handles
def _move(func: Any, input: Any, source: Any, destination: Any) -> Any:
    """Dims moved to other places; the rest keep their order."""
    pairs = ((x,) if isinstance(x, int) else x for x in (source, destination))
    moved = {input.find(to): input.find(d) for d, to in zip(*pairs, strict=True)}
    rest = iter(d for d in range(-input.ndim, 0) if d not in moved.values())
    return _permute(func, input, [moved[d] if d in moved else next(rest) for d in range(-input.ndim, 0)])


@handles
def _view_as(func: Any, input: Any, other: Any) -> Any:
    """With the sizes of other scores."""
    return _reshape(func, input, *other.shape)


@handles
def _reshape(func: Any, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """Heads regrouped, joined with the batch or parted from it; nothing is copied."""
    given = kwargs.get("shape", shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)
    *lead, t, s = given
    total, known = len(input.rows) * prod(input.lead), prod(n for n in lead if n != -1)
    if lead.count(-1) == 1 and known and total % known == 0:
        lead = [total // known if n == -1 else n for n in lead]
    ragged = [isinstance(n, (Dim, RaggedSize)) or n is None or n == -1 for n in (t, s)]
    if not all(ragged) or not lead or prod(lead) != total:
        raise refusal(
            f"{input.shape} as {tuple(given)} mixes queries or keys with other dims",
            "keep the last two; for relative positions see tensorloop.attention(relative=)",
        )
    queries, keys = (_count_rows(dim, lead[0]) for dim in (input.rows, input.columns))
    for n, new, dim in ((t, queries, input.rows), (s, keys, input.columns)):
        size = n._dim if isinstance(n, RaggedSize) else n
        if isinstance(size, Dim) and not (size.same(new) or size.same(dim)):
            raise describe_difference(dim, size, "a view by a size of other rows")
    return PackedScores(input.flat, input._like, queries, keys, tuple(lead[1:]))


def _count_rows(dim: Dim, n: int) -> Dim:
    """The dim as one of n rows: heads joined with the batch, or parted from it."""
    rows = len(dim)
    if n == rows:
        return dim
    if n > rows > 0 and n % rows == 0:
        return multiply(dim, n // rows)
    if n < 1 or rows % n:
        raise refusal(f"{rows} rows as {n}", "join all heads with the batch, or part as many as were joined")
    return divide(dim, rows // n)


@handles
def _flatten_dims(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Heads as one, or joined with the batch."""
    a, b = (input.find(d) + input.ndim for d in (start_dim, end_dim))
    if b > input.ndim - 3:
        raise refusal(f"dims {start_dim} to {end_dim} of {input.shape}", "keep the last two")
    shape = input.shape
    return _reshape(func, input, *shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :])


@handles
def _unflatten(func: Any, input: Any, dim: int, sizes: Any) -> Any:
    """One dim of heads as several, or the heads parted from the batch."""
    d, shape = input.find(dim) + input.ndim, input.shape
    return _reshape(func, input, *shape[:d], *sizes, *shape[d + 1 :])


@handles
def _unsqueeze(func: Any, input: Any, dim: int) -> Any:
    """A new dim of size 1 among those of heads."""
    d = dim % (input.ndim + 1)
    if not 1 <= d <= input.ndim - 2:
        raise refusal(f"dim {dim} of {input.shape}", "a new dim goes between the batch and the last two")
    shape = input.shape
    return _reshape(func, input, *shape[:d], 1, *shape[d:])


@handles
def _squeeze(func: Any, input: Any, dim: int) -> Any:
    """Without a dim of heads of size 1."""
    d, shape = input.find(dim) + input.ndim, input.shape
    if not 1 <= d <= input.ndim - 3:
        raise refusal(f"dim {dim} of {input.shape}", "batch, queries and keys stay")
    return _reshape(func, input, *shape[:d], *shape[d + 1 :]) if shape[d] == 1 else input


@handles
def _expand(func: Any, input: Any, *sizes: Any) -> Any:
    """Heads repeated."""
    given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if len(given) != input.ndim:
        raise refusal(f"{input.shape} as {given}", "unsqueeze before")
    own = [
        n == -1 or (isinstance(n, RaggedSize) and is_size_of(n._dim, d))
        for n, d in zip(given[-2:], (input.rows, input.columns), strict=True)
    ]
    if given[0] not in (-1, len(input.rows)) or not all(own):
        raise refusal(f"{input.shape} as {given}", "keep batch and last two, as -1 or as they stand in the shape")
    lead = [m if n == -1 else n for n, m in zip(given[1:-2], input.lead, strict=True)]
    return per_row(input, lambda row: row.expand(*lead, -1, -1))


@handles
def _expand_as(func: Any, input: Any, other: Any) -> Any:
    """To the shape of other scores."""
    if not isinstance(other, (Packed, PackedView)):
        raise refusal("only one of two tensors is packed", "scores broadcast as they are")
    return _expand(func, input, *other.shape)


@handles
def _repeat(func: Any, input: Any, *sizes: Any) -> Any:
    """Heads repeated."""
    given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if len(given) != input.ndim or any(n != 1 for n in (given[0], *given[-2:])):
        raise refusal(f"{given} of {input.shape}", "repeat heads alone: (1, n, 1, 1)")
    return per_row(input, lambda row: row.repeat(given[1:]))


@handles
def _stack(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Along a new dim of heads."""
    return cat(torch.cat, [_unsqueeze(func, x, dim) for x in tensors], dim)
