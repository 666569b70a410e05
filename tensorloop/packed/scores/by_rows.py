"""Operands cut into rows, and results of rows put together: for what meets along two dims of which one is ragged.

An operand is packed, seen in any order, scores, or an ordinary tensor with a batch dim or without. Its rows are
ordinary tensors without the batch dim. Each operation on rows is torch's own, as often differentiable as that is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.scores.scores import PackedScores
from tensorloop.packed.table.base import Packed, PackedView, refusal
from tensorloop.packed.table.layout import as_ordinary, layout_of, see, unwrap


def ragged_of(x: Any) -> dict[int, Dim]:
    """The ragged dims of an operand, counted from the last."""
    if isinstance(x, PackedScores):
        return {-2: x.rows, -1: x.columns}
    if isinstance(x, (Packed, PackedView)):
        return {layout_of(x).from_end[1]: unwrap(x)._dim}
    return {}


def open_only_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands, where packed ones of one row are ordinary if their batch meets another dim of the largest.

    `torch.zeros(1, T)` is one of them in a batch of one row, and an ordinary tensor, the same for all rows, in others.
    """
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, (Packed, PackedView))]
    largest = max(given, key=lambda x: x.ndim)
    batch = batch_of([largest])[0]

    def opened(x: Any) -> Any:
        if not isinstance(x, (Packed, PackedView)) or isinstance(x, PackedScores) or x.ndim == largest.ndim:
            return x
        place, count, _ = batch_of([x])
        return as_ordinary(x) if count == 1 and place != batch else x

    return tuple(map(opened, args)), {k: opened(x) for k, x in kwargs.items()}


def batch_of(operands: Any) -> tuple[int, int, Any]:
    """The place of the batch, counted from the last dim, the number of rows, and one packed operand's kind."""
    found = [x for x in operands if isinstance(x, (Packed, PackedView))]
    places = [-x.ndim if isinstance(x, PackedScores) else layout_of(x).from_end[0] for x in found]
    counts = [len(next(iter(ragged_of(x).values()))) for x in found]
    if len(set(places)) > 1:
        raise refusal(
            f"the batch dims of {found[0].shape} and {found[1].shape} do not meet, counted from the last",
            "unsqueeze the smaller one",
        )
    if len(set(counts)) > 1:
        raise WrongValue(f"packed tensors of {counts[0]} and {counts[1]} rows")
    like = found[0]._like if isinstance(found[0], PackedScores) else unwrap(found[0])
    return places[0], counts[0], like


def check_same(a: Dim, b: Dim) -> None:
    """Raises where two ragged dims that meet are of different lens."""
    if not a.same(b):
        raise describe_difference(a, b)


def cut(x: Any, batch: int, count: int, ragged: Mapping[int, Dim] | None = None) -> list[Any]:
    """The rows of an operand, its padded dims at `ragged` cut to them. Of no rows, one of length 0."""
    if isinstance(x, PackedScores):
        return list(x.unbind()) or [x.flat.new_zeros(*x.lead, 0, 0)]
    if isinstance(x, (Packed, PackedView)):
        p, layout = unwrap(x), layout_of(x)
        order = [d - 1 for d in layout.order if d]
        parts = p.values.split(p._dim._host_lens.tolist()) if count else (p.values[:0],)
        own = layout.from_end[1]
        beside = {place: dim for place, dim in (ragged or {}).items() if place != own}
        return _cut_dims([part.permute(order) for part in parts], layout.ndim, batch, beside)
    if not isinstance(x, Tensor):
        return [x] * max(count, 1)
    if not count and x.dim() >= -batch and not x.shape[batch]:
        x = x.new_zeros([max(n, 1) if d == x.dim() + batch else n for d, n in enumerate(x.shape)])
    return _cut_tensor(x, batch, max(count, 1), ragged or {})


def _cut_tensor(x: Tensor, batch: int, count: int, ragged: Mapping[int, Dim]) -> list[Tensor]:
    has_batch = x.dim() >= -batch
    if has_batch and x.shape[batch] not in (1, count):
        raise WrongValue(f"{tuple(x.shape)} has {x.shape[batch]} entries at dim {batch}, where there are {count} rows")
    if not has_batch:
        parts = [x] * count
    elif x.shape[batch] == 1:
        parts = [x.select(batch, 0)] * count
    else:
        parts = list(x.unbind(batch))
    return _cut_dims(parts, x.dim(), batch if has_batch else -x.dim() - 1, ragged)


def _cut_dims(parts: list[Tensor], ndim: int, batch: int, ragged: Mapping[int, Dim]) -> list[Tensor]:
    """Rows with the dims at these places cut from the length of the longest row to their own."""
    for place, dim in ragged.items():
        if ndim < -place:
            continue
        at = place + (place < batch)  # in a row, without the batch
        size = parts[0].shape[at]
        if size == 1 != dim.max_len:
            continue
        if size != dim.max_len:
            raise WrongValue(
                f"what stands beside packed tensors has {size} entries at dim {place}, where the longest row has "
                f"{dim.max_len}; as the ragged dim take 1 or {dim.max_len}"
            )
        lens = dim._host_lens.tolist() or [0]
        parts = [part.narrow(at, 0, n) for part, n in zip(parts, lens, strict=True)]
    return parts


def join(rows: list[Any], batch: int, count: int, ragged: Mapping[int, Dim], like: Packed) -> Any:
    """Results of rows put together: `ragged` are their dims that are, counted from the last."""
    ndim = rows[0].dim() + 1
    if not ragged:
        return torch.stack(rows, ndim + batch)[(slice(None),) * (ndim + batch) + (slice(0, count),)]
    if len(ragged) == 1:
        ((place, dim),) = ragged.items()
        values = torch.cat([row.movedim(place + (place < batch), 0) for row in rows])
        return see(like._with(values, dim), ndim + batch, ndim + place)
    if set(ragged) != {-1, -2} or batch != -ndim:
        raise refusal("its result has two ragged dims, not as the last ones, or no batch first", "move them there")
    flat = torch.cat([row.reshape(-1) for row in rows])
    return PackedScores(flat, like, ragged[-2], ragged[-1], tuple(rows[0].shape[:-2]))
