"""Reductions and running operations over the dims of a packed tensor, the ragged one and the batch among them.

Whatever the dims, the work is one operation on segments of rows. Over the ragged dim the segments are the rows. Over
the batch dim the entries are put into time order first, where the rows at one t are a segment. Feature dims reduced
together with either become more entries of each segment.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop import _ragged, _ragged_reduce
from tensorloop._packed_base import Packed, dim_number, dim_numbers, is_packed, refused
from tensorloop._packed_dim import Dim
from tensorloop._packed_ops import fall_back, handles, rewrap


class _Segments(NamedTuple):
    """The entries to reduce, and the segments they are in."""

    values: Tensor  # (N * K, *rest): K numbers of each entry are reduced together
    offsets: Tensor
    dim: Dim  # what gives the segments: rows, or the rows at each t
    order: Tensor | None  # the entries in time order
    inner: int  # K


def _segments(p: Packed, dims: tuple[int, ...]) -> _Segments:
    """`dims` holds 0 or 1, not both, and any feature dims."""
    values, dim, order = p.values, p._dim, None
    if 0 in dims:
        dim, order, inverse = p._dim.by_time
        values = _ragged.permute(values, order, inverse)
    features = [d - 1 for d in dims if d > 1]
    if not features:
        return _Segments(values, dim._offsets, dim, order, 1)
    inner = prod(values.shape[d] for d in features)
    rest = [d for d in range(1, values.dim()) if d not in features]
    moved = values.permute(0, *sorted(features), *rest)
    moved = moved.reshape(len(values) * inner, *(values.shape[d] for d in rest))
    return _Segments(moved, dim._offsets * inner, dim, order, inner)


def _kept_dims(out: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The reduced dims back as 1."""
    for d in sorted(dims) if keepdim else ():
        out = out.unsqueeze(d)
    return out


def _wide(values: Tensor) -> Tensor:
    """In the dtype of sums: counts and squares of half precision overflow, or lose their digits, before the result."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _root(square: Tensor) -> Tensor:
    """The square root, with the slope 0 at 0, as torch's norms and deviations have it."""
    return torch.where(square == 0, 0, torch.where(square == 0, 1, square).sqrt())


def _over(func: Any, p: Packed, dim: Any, keepdim: bool, on_segments: Any, kwargs: dict[str, Any]) -> Any:
    """A reduction over `dim`: torch's own where no dim, all dims or only feature dims are reduced."""
    name = func.__name__
    dims = dim_numbers(p, dim, name)
    plain = getattr(torch, name)
    if {0, 1} <= set(dims):
        out = plain(p.values, dim=tuple(sorted({max(d - 1, 0) for d in dims})), **kwargs)
        return _kept_dims(out, dims, keepdim)
    if not {0, 1} & set(dims):
        return p._with(plain(p.values, dim=tuple(d - 1 for d in dims), keepdim=keepdim, **kwargs))
    return _kept_dims(on_segments(_segments(p, dims)), dims, keepdim)


@handles("sum", "nansum")
def _sum(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    def reduce(s: _Segments) -> Tensor:
        values = s.values if dtype is None else s.values.to(dtype)
        if not values.is_floating_point() and not values.is_complex():
            values = values.to(dtype or torch.int64)
        if func.__name__ == "nansum":
            values = values.nan_to_num(0, torch.inf, -torch.inf)
        return _ragged.sum(values, s.offsets)

    return _over(func, input, dim, keepdim, reduce, {"dtype": dtype})


@handles("mean", "nanmean")
def _mean(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    name = func.__name__

    def reduce(s: _Segments) -> Tensor:
        values = s.values if dtype is None else s.values.to(dtype)
        if not values.is_floating_point() and not values.is_complex():
            raise TypeError(f"{name}: a mean needs floating point, got {values.dtype}; give dtype=")
        wide = _wide(values)
        if name == "mean":
            return _ragged.mean(wide, s.offsets).to(values.dtype)
        there = wide.isnan().logical_not().to(wide.dtype)
        total = _ragged.sum(wide.nan_to_num(0, torch.inf, -torch.inf), s.offsets)
        return (total / _ragged.sum(there, s.offsets)).to(values.dtype)

    return _over(func, input, dim, keepdim, reduce, {"dtype": dtype})


@handles("amax", "amin")
def _amax(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
    """`initial` counts as one more entry of everything that is reduced: of an empty row it is the result."""
    name = func.__name__
    which = name[1:]

    def reduce(s: _Segments) -> Tensor:
        if initial is None:
            _no_empty(s, name)
        return _ragged_reduce.amax(s.values, s.offsets, which, 0 if initial is None else initial)

    out = _over(func, input, dim, keepdim, reduce, {})
    if initial is None:
        return out
    return torch.clamp(out, min=initial) if which == "max" else torch.clamp(out, max=initial)


def _no_empty(s: _Segments, name: str) -> None:
    if s.dim.has_empty_rows or (s.inner == 0 and len(s.dim)):
        row = int((s.dim._lens == 0).nonzero()[0]) if s.dim.has_empty_rows else 0
        hint = "; give initial=" if name in ("amax", "amin") else "; leave such rows out, or use amax with initial="
        raise ValueError(f"{name}: row {row} is empty and has no {'minimum' if 'min' in name else 'maximum'}{hint}")


@handles("max", "min")
def _max(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    name = func.__name__
    dim = kwargs.pop("other", dim)
    if is_packed(dim) or (is_packed(input) and isinstance(dim, Tensor)):  # of two tensors
        return getattr(torch, f"{name}imum")(input, dim)
    if not is_packed(input):
        return getattr(torch, f"{name}imum")(input, dim)
    if dim is None:
        return func(input.values)
    d = dim_number(input, dim, name)
    if d > 1:
        return rewrap(input, func(input.values, d - 1, keepdim))
    values, index = _best(input, d, name, name)
    result = getattr(torch.return_types, name)
    return result((_kept_dims(values, (d,), keepdim), _kept_dims(index, (d,), keepdim)))


@handles("argmax", "argmin")
def _argmax(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    name = func.__name__
    if dim is None:
        raise refused(name, "without dim it counts the entries of a padded tensor", "give dim")
    d = dim_number(input, dim, name)
    if d > 1:
        return input._with(func(input.values, d - 1, keepdim))
    return _kept_dims(_best(input, d, name[3:], name)[1], (d,), keepdim)


def _best(p: Packed, d: int, which: str, name: str) -> tuple[Tensor, Tensor]:
    """The best of each segment, and its index along dim d."""
    s = _segments(p, (d,))
    _no_empty(s, name)
    values, where = _ragged_reduce.extreme(s.values, s.offsets, which)
    if s.order is not None:  # the row that the entry at this t is in
        return values, p._dim._row_ids[s.order][where]
    return values, where - s.offsets[:-1].view(-1, *[1] * (where.dim() - 1))


@handles("logsumexp")
def _logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False) -> Any:
    return _over(func, input, dim, keepdim, lambda s: _ragged_reduce.logsumexp(s.values, s.offsets), {})


def _square(x: Tensor) -> Tensor:
    """|x|^2"""
    return torch.real(x * torch.conj(x)) if x.is_complex() else x * x


def _variance(s: _Segments, correction: float) -> tuple[Tensor, Tensor]:
    """(variance, mean): NaN where a segment has no more than `correction` entries, or is empty."""
    mean = _ragged.mean(s.values, s.offsets)
    centred = s.values - _ragged.spread(mean, s.offsets, len(s.values))
    total = _ragged.sum(_square(centred), s.offsets)
    number = _ragged.counts(s.offsets, total)
    return total / torch.where(number > correction, number - correction, torch.nan), mean


@handles("std", "var", "std_mean", "var_mean")
def _std(
    func: Any, input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    name = func.__name__
    if isinstance(dim, bool):  # std(x, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = dim_numbers(input, dim, name)
    if {0, 1} <= set(dims) or not {0, 1} & set(dims):
        inner = tuple(sorted({max(d - 1, 0) for d in dims}))
        whole = {0, 1} <= set(dims)
        out = func(input.values, dim=inner, correction=correction, keepdim=keepdim and not whole)
        if not whole:
            return rewrap(input, out)
        return tuple(_kept_dims(x, dims, keepdim) for x in out) if "_" in name else _kept_dims(out, dims, keepdim)
    if not input.is_floating_point() and not input.is_complex():
        raise TypeError(f"{name}: a deviation needs floating point, got {input.dtype}; convert with .float()")
    var, mean = _variance(_segments(input._with(_wide(input.values)), dims), correction)
    spread = _root(var) if "std" in name else var
    spread, mean = _kept_dims(spread, dims, keepdim).to(input.dtype.to_real()), _kept_dims(mean, dims, keepdim)
    return (spread, mean.to(input.dtype)) if "_" in name else spread


@handles("any", "all")
def _any(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    def reduce(s: _Segments) -> Tensor:
        wanted = (s.values != 0) if func.__name__ == "any" else (s.values == 0)
        found = _ragged.sum(wanted.to(torch.int64), s.offsets) > 0
        return found if func.__name__ == "any" else ~found

    return _over(func, input, dim, keepdim, reduce, {})


@handles("count_nonzero")
def _count_nonzero(func: Any, input: Any, dim: Any = None) -> Any:
    return torch.sum(input != 0, dim_numbers(input, dim, "count_nonzero"))


@handles("norm", "vector_norm", "linalg_vector_norm")
def _norm(
    func: Any, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, ord: Any = None
) -> Any:
    p = {"fro": 2, None: 2}.get(p if ord is None else ord, p if ord is None else ord)
    x = input if dtype is None else input.to(dtype)
    if not x.is_floating_point() and not x.is_complex():
        raise TypeError(f"norm: it needs floating point, got {x.dtype}; convert with .float()")
    dims = dim_numbers(x, dim, "norm")
    if not {0, 1} & set(dims):
        inner = tuple(d - 1 for d in dims)
        return x._with(torch.linalg.vector_norm(x.values, p, inner, keepdim=keepdim))
    if p == torch.inf:
        return _amax(torch.amax, torch.abs(x), dims, keepdim, initial=0)
    if p == 1:
        return torch.sum(torch.abs(x), dims, keepdim)
    if p == 2:
        return _root(torch.sum(x._with(_square(_wide(x.values))), dims, keepdim)).to(x.dtype.to_real())
    raise refused("norm", f"order {p!r} over the batch or ragged dim", "use 1, 2 or inf")


@handles("normalize")
def _normalize(func: Any, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    return input / torch.clamp(_norm(func, input, p, dim, True), min=eps)


# -- what keeps the shape


def _shaped(func: Any, p: Packed, dim: Any, on_segments: Any, *args: Any, **kwargs: Any) -> Any:
    """A function along one dim: torch's own along a feature dim, `on_segments(values, offsets)` along the others."""
    d = dim_number(p, dim, func.__name__)
    if d > 1:
        return rewrap(p, func(p.values, d - 1, *args, **kwargs))
    if d == 1:
        return p._with(on_segments(p.values, p._dim._offsets))
    turned, order, inverse = p._dim.by_time
    out = on_segments(_ragged.permute(p.values, order, inverse), turned._offsets)
    return p._with(_ragged.permute(out, inverse, order))


def _softmax_like(func: Any, input: Any, dim: Any, dtype: Any, run: Any) -> Any:
    if dim is None:
        raise TypeError(f"{func.__name__}: give dim; a packed tensor has no default for it")
    x = input if dtype is None else input.to(dtype)
    return _shaped(func, x, dim, run)


@handles("softmax", "special_softmax")
def _softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax_like(torch.softmax, input, dim, dtype, _ragged_reduce.softmax)


@handles("log_softmax", "special_log_softmax")
def _log_softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax_like(torch.log_softmax, input, dim, dtype, _ragged_reduce.log_softmax)


@handles("softmin")
def _softmin(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax_like(torch.softmax, -input, dim, dtype, _ragged_reduce.softmax)


@handles("cumsum")
def _cumsum(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if not x.values.is_floating_point() and not x.values.is_complex() and dtype is None:
        x = x.to(torch.int64)
    return _shaped(torch.cumsum, x, dim, _ragged.cumsum)


@handles("cumprod", "cummax", "cummin", "logcumsumexp")
def _running(func: Any, input: Any, dim: Any) -> Any:
    name = func.__name__
    d = dim_number(input, dim, name)
    if d > 1:
        return rewrap(input, func(input.values, d - 1))
    if d == 0:
        raise refused(name, "it does not run over the batch dim", "use .pad(value) and choose the value")
    return fall_back(name, input, lambda x: func(x, 1), 1 if name == "cumprod" else 0)


@handles("prod")
def _prod(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if dim is None:
        return torch.prod(x.values)
    d = dim_number(x, dim, "prod")
    if d > 1:
        return x._with(torch.prod(x.values, d - 1, keepdim))
    return fall_back("prod", x, lambda padded: torch.prod(padded, d, keepdim), 1, reduces=True)


@handles("flip")
def _flip(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    (dims,) = (kwargs.get("dims", dims),)
    numbers = dim_numbers(input, dims[0] if len(dims) == 1 else tuple(dims), "flip")
    if 0 in numbers:
        raise refused("flip", "dim 0 would put rows in another order", "use p[::-1] or p[index]")
    features = tuple(d - 1 for d in numbers if d > 1)
    values = input.values.flip(features) if features else input.values
    return input._with(_ragged.flip(values, input._dim._offsets) if 1 in numbers else values)
