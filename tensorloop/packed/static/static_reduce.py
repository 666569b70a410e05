"""Reductions of static packed tensors, softmax, and what goes along the rows."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType
from tensorloop.packed.static.static_ops import feature_dim, find_dims
from tensorloop.packed.table.base import refusal, restore_dims
from tensorloop.packed.table.dispatch import handles


def _reduce(func: Any, p: Any, dim: Any, keepdim: bool, over_rows: Any) -> Any:
    """Over feature dims torch's own, over the ragged one `over_rows(values)`, first the features then the rows."""
    dims = find_dims(p, dim)
    if 0 in dims:
        raise refusal("it does not reduce the batch dim alone", "reduce dims 0 and 1 together, or p.pad()")
    if 1 not in dims:
        return p._with(func(p.values, tuple(d - 1 for d in dims), keepdim))
    features = sorted(d - 1 for d in dims if d > 1)
    values = p.values
    if features:
        rest = [d for d in range(1, values.dim()) if d not in features]
        inner = values.permute(0, *rest, *features).flatten(1 + len(rest))
        values = func(inner, (-1,), False)
    return restore_dims(over_rows(values), dims, keepdim)


@handles
def sum_or_mean(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """By the name of `func`; of an empty row 0, or NaN."""
    p = input if dtype is None else input._with(input.values.to(dtype))
    rows, mean = p._rows, func.__name__ == "mean"
    if mean and not p.values.is_floating_point() and not p.values.is_complex():
        raise WrongType(f"a mean needs floating point, got {p.values.dtype}; give dtype=")
    if not mean and not p.values.is_floating_point() and not p.values.is_complex():
        p = p._with(p.values.to(dtype or torch.int64))
    dims = find_dims(p, dim)
    if {0, 1} <= set(dims):
        inner = tuple(sorted({max(d - 1, 0) for d in dims}))
        total = p.values.sum(inner)  # free entries are 0
        if mean:
            total = total / (rows.offsets[-1] * prod(p.values.shape[d] for d in inner[1:])).to(total.dtype)
        return restore_dims(total, dims, keepdim)
    plain = torch.mean if mean else torch.sum

    def over_rows(values: Tensor) -> Tensor:
        total = rows.sum(values)
        return total / rows.sizes(total) if mean else total

    return _reduce(plain, p, dim, keepdim, over_rows)


@handles
def _amax(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
    """Returns `initial` for an empty row; without it -inf, or the least of an integer dtype (amin: the other end)."""
    name, values = func.__name__, input.values
    if values.dtype is torch.bool:
        raise refusal("of bools", "use any or all")
    limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    end = limits.min if name == "amax" else limits.max
    if values.is_floating_point():
        end = -torch.inf if name == "amax" else torch.inf
    plain = torch.amax if name == "amax" else torch.amin
    dims = find_dims(input, dim)
    if {0, 1} <= set(dims):
        cleaned = input._rows.clean(values, end)
        out = restore_dims(plain(cleaned, tuple(sorted({max(d - 1, 0) for d in dims}))), dims, keepdim)
    else:
        out = _reduce(plain, input, dim, keepdim, lambda x: input._rows.extreme(x, name, end))
    if initial is None:
        return out
    return torch.clamp(out, min=initial) if name == "amax" else torch.clamp(out, max=initial)


@handles
def _any(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Returns False for an empty row; `all` returns True."""
    found = input.values != 0 if func.__name__ == "any" else input.values == 0
    count = sum_or_mean(torch.sum, input._with(found), dim, keepdim)
    return count > 0 if func.__name__ == "any" else count == 0


@handles
def _along_features(func: Any, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Along a feature dim, glu along the last one where none is given."""
    if dim is None and func.__name__ != "glu":
        raise refusal("without dim it counts the entries of a padded tensor", "give dim")
    return input._with(func(input.values, feature_dim(input, -1 if dim is None else dim), *args, **kwargs))


def _shift(rows: Any, values: Tensor) -> Tensor:
    """(B, *F): the maximum of each row, 0 where there is none or it is infinite; no gradient goes through it."""
    best = rows.extreme(values.detach(), "amax", 0)
    return torch.where(best.isfinite(), best, 0)


def _log_total(rows: Any, shifted: Tensor) -> Tensor:
    """(B, *F): log of the sum of exp over each row, -inf where that is 0, without a gradient there."""
    total = rows.sum(rows.clean(shifted.exp()))
    none = total == 0
    return torch.where(none, -torch.inf, torch.where(none, 1, total).log())


@handles
def _logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Returns -inf for an empty row."""
    rows = input._rows

    def over_rows(values: Tensor) -> Tensor:
        shift = _shift(rows, values)
        return _log_total(rows, values - rows.spread(shift)) + shift

    return _reduce(torch.logsumexp, input, dim, keepdim, over_rows)


@handles
def _softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    p = input if dtype is None else input._with(input.values.to(dtype))
    if dim is None:
        raise WrongType("give dim; a packed tensor has no default for it")
    plain = torch.softmax if func.__name__ == "softmax" else torch.log_softmax
    if find_dims(p, dim) != (1,):
        return p._with(plain(p.values, feature_dim(p, dim)))
    rows, values = p._rows, p.values
    shifted = values - rows.spread(_shift(rows, values))
    if func.__name__ == "log_softmax":
        return p._with(shifted - rows.spread(_log_total(rows, shifted)))
    weights = rows.clean(shifted.exp())
    return p._with(weights / rows.spread(rows.sum(weights), 1))


@handles
def _cumsum(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Along the ragged dim by way of (B, max_len, *F): sums over all rows at once would lose digits."""
    if find_dims(input, dim) == (1,):
        return input.pack(torch.cumsum(input.pad(), 1, dtype=dtype))
    return input._with(torch.cumsum(input.values, feature_dim(input, dim), dtype=dtype))


@handles
def _flip(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """Along the ragged dim each row from its end to its start."""
    (given,) = (kwargs.get("dims", dims),)
    numbers = find_dims(input, given[0] if len(given) == 1 else tuple(given))
    if 0 in numbers:
        raise refusal("dim 0 would put rows in another order", "use p.pad().flip(0)")
    rows, values = input._rows, input.values
    if features := [d - 1 for d in numbers if d > 1]:
        values = values.flip(features)
    if 1 in numbers:
        ends = rows.spread((rows.offsets[:-1] + rows.offsets[1:] - 1)[:, None]).squeeze(1)
        at = torch.arange(rows.capacity, device=values.device)
        values = values.index_select(0, torch.where(rows.there, ends - at, at))
    return input._with(values)
