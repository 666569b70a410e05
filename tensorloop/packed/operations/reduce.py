"""Reductions and running operations over the dims of a packed tensor, the ragged one and the batch among them.

Whatever the dims, the work is one operation on segments of rows. Over the ragged dim the segments are the rows. Over
the batch dim the entries are put into time order first, where the rows at one t are a segment. Feature dims reduced
together with either become more entries of each segment.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.rows import segment_reduce, segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, PackedView, find_dim, find_dims, is_packed, refusal, restore_dims
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.fallback import fall_back
from tensorloop.packed.table.pointwise import rewrap

_EXTREMES = {"max": "maximum", "min": "minimum"}


class Segments(NamedTuple):
    """The entries to reduce, and the segments they are in."""

    values: Tensor  # (N * K, *rest): K numbers of each entry are reduced together
    offsets: Tensor
    dim: Dim  # what gives the segments: rows, or the rows at each t
    order: Tensor | None  # the entries in time order
    inner: int  # K


def divide(p: Packed, dims: tuple[int, ...]) -> Segments:
    """The entries divided into what is reduced together; `dims` holds 0 or 1, not both, and any feature dims."""
    values, dim, order = p.values, p._dim, None
    if 0 in dims:
        dim, order, inverse = p._dim.by_time
        values = segments.permute(values, order, inverse)
    features = [d - 1 for d in dims if d > 1]
    if not features:
        return Segments(values, dim._offsets, dim, order, 1)
    inner = prod(values.shape[d] for d in features)
    rest = [d for d in range(1, values.dim()) if d not in features]
    moved = values.permute(0, *sorted(features), *rest)
    moved = moved.reshape(len(values) * inner, *(values.shape[d] for d in rest))
    return Segments(moved, dim._offsets * inner, dim, order, inner)


def widen(values: Tensor) -> Tensor:
    """In the dtype of sums: counts and squares of half precision overflow, or lose their digits, before the result."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def root(power: Tensor, order: float = 2) -> Tensor:
    """The square root, or that of another order, with the slope 0 at 0, as torch's norms and deviations have it."""
    safe = torch.where(power == 0, 1, power)
    return torch.where(power == 0, 0, safe.sqrt() if order == 2 else safe ** (1 / order))


def _reduce(func: Any, p: Packed, dim: Any, keepdim: bool, on_segments: Any, kwargs: dict[str, Any]) -> Any:
    """A reduction over `dim`: torch's own where no dim, all dims or only feature dims are reduced."""
    dims, plain = find_dims(p, dim), getattr(torch, func.__name__)
    if {0, 1} <= set(dims):
        out = plain(p.values, dim=tuple(sorted({max(d - 1, 0) for d in dims})), **kwargs)
        return restore_dims(out, dims, keepdim)
    if not {0, 1} & set(dims):
        return p._with(plain(p.values, dim=tuple(d - 1 for d in dims), keepdim=keepdim, **kwargs))
    return restore_dims(on_segments(divide(p, dims)), dims, keepdim)


@handles
def _sum(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over the batch or ragged dim an ordinary tensor, over features a packed one; of an empty row 0."""

    def reduce(s: Segments) -> Tensor:
        values = s.values if dtype is None else s.values.to(dtype)
        if not values.is_floating_point() and not values.is_complex():
            values = values.to(dtype or torch.int64)
        if func.__name__ == "nansum":
            values = values.nan_to_num(0, torch.inf, -torch.inf)
        return segments.sum(values, s.offsets)

    return _reduce(func, input, dim, keepdim, reduce, {"dtype": dtype})


@handles
def _mean(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over the entries there are: of an empty row NaN."""

    def reduce(s: Segments) -> Tensor:
        values = s.values if dtype is None else s.values.to(dtype)
        if not values.is_floating_point() and not values.is_complex():
            raise WrongType(f"a mean needs floating point, got {values.dtype}; give dtype=")
        wide = widen(values)
        if func.__name__ == "mean":
            return segments.mean(wide, s.offsets).to(values.dtype)
        there = wide.isnan().logical_not().to(wide.dtype)
        total = segments.sum(wide.nan_to_num(0, torch.inf, -torch.inf), s.offsets)
        return (total / segments.sum(there, s.offsets)).to(values.dtype)

    return _reduce(func, input, dim, keepdim, reduce, {"dtype": dtype})


@handles
def _amax(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
    """`initial` counts as one more entry of everything that is reduced: of an empty row it is the result."""
    which = func.__name__[1:]

    def reduce(s: Segments) -> Tensor:
        if initial is None:
            refuse_empty(s, _EXTREMES[which], "give initial=")
        return segment_reduce.amax(s.values, s.offsets, which, 0 if initial is None else initial)

    if not input._dim.total and {0, 1} <= set(find_dims(input, dim)):
        if initial is None:
            raise WrongValue(f"there are no entries, and so no {_EXTREMES[which]}; give initial=")
        one = input.values.new_full((1, *input.values.shape[1:]), initial)
        input = input._with(torch.cat([input.values, one]), Dim(None, input._dim._lens.new_ones(1)))
    out = _reduce(func, input, dim, keepdim, reduce, {})
    if initial is None:
        return out
    return torch.clamp(out, min=initial) if which == "max" else torch.clamp(out, max=initial)


def refuse_empty(s: Segments, what: str, instead: str = "leave such rows out: p[p.lens > 0]") -> None:
    """Raises where a segment has no entry, and so no extreme and no middle."""
    if s.dim.has_empty_rows or (s.inner == 0 and len(s.dim)):
        row = int((s.dim._lens == 0).nonzero()[0]) if s.dim.has_empty_rows else 0
        raise WrongValue(f"row {row} is empty and has no {what}; {instead}")


@handles
def _max(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """(values, indices) over one dim, the first of equal entries; of two tensors the larger of each pair."""
    name = func.__name__
    dim = kwargs.pop("other", dim)
    if is_packed(dim) or (is_packed(input) and isinstance(dim, (Tensor, PackedView))):  # of two tensors
        return getattr(torch, f"{name}imum")(input, dim)
    if not is_packed(input):
        return getattr(torch, f"{name}imum")(input, dim)
    if dim is None:
        return func(input.values)
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, func(input.values, d - 1, keepdim))
    values, index = _find_best(input, d, name)
    result = getattr(torch.return_types, name)
    return result((restore_dims(values, (d,), keepdim), restore_dims(index, (d,), keepdim)))


@handles
def _argmax(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The place of the first extreme: along the ragged dim a position in the row, along the batch a row."""
    if dim is None:
        raise refusal("without dim it counts the entries of a padded tensor", "give dim")
    d = find_dim(input, dim)
    if d > 1:
        return input._with(func(input.values, d - 1, keepdim))
    return restore_dims(_find_best(input, d, func.__name__[3:])[1], (d,), keepdim)


def _find_best(p: Packed, d: int, which: str) -> tuple[Tensor, Tensor]:
    """The best of each segment, and its index along dim d."""
    s = divide(p, (d,))
    refuse_empty(s, _EXTREMES[which], "leave such rows out: p[p.lens > 0], or use amax with initial=")
    values, where = segment_reduce.extreme(s.values, s.offsets, which)
    if s.order is not None:  # the row that the entry at this t is in
        return values, p._dim._row_ids[s.order][where]
    return values, where - s.offsets[:-1].view(-1, *[1] * (where.dim() - 1))


@handles
def _logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Gives the log of the sum of exponentials: -inf for an empty row; integers count as torch's default dtype."""

    def reduce(s: Segments) -> Tensor:
        whole = _complex_logsumexp if s.values.is_complex() else segment_reduce.logsumexp
        return whole(s.values, s.offsets)

    exact = input.is_floating_point() or input.values.is_complex()
    return _reduce(func, input if exact else input.to(torch.get_default_dtype()), dim, keepdim, reduce, {})


def _complex_logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """By plain operations: the largest real part is taken off first, as it has no influence on the gradient."""
    top = segment_reduce.amax(values.detach().real, offsets).nan_to_num(0, 0, 0)
    powers = (values - segments.spread(top, offsets, len(values))).exp()
    return segments.sum(powers, offsets).log() + top


def square(x: Tensor) -> Tensor:
    """|x|^2"""
    return torch.real(x * torch.conj(x)) if x.is_complex() else x * x


def _find_variance(s: Segments, correction: float) -> tuple[Tensor, Tensor]:
    """(variance, mean), as torch has it where a segment has no more than `correction` entries.

    The value is a division by 0 there, inf or NaN; the slope is divided by the number less the correction all the same.
    """
    if s.values.is_complex():  # that of the real parts and that of the imaginary ones, as in torch
        parts = s._replace(values=torch.view_as_real(s.values.resolve_conj()))
        var, mean = _find_variance(parts, correction)
        return var.sum(-1), torch.view_as_complex(mean)
    mean = segments.mean(s.values, s.offsets)
    number = segments.count(s.offsets, mean)
    free = torch.where(number == 0, torch.nan, number - correction)
    # Slopes that are infinite would meet in the mean as NaN, and they are of no importance there: their sum is 0.
    middle = torch.where(free == 0, mean.detach(), mean)
    total = segments.sum(square(s.values - segments.spread(middle, s.offsets, len(s.values))), s.offsets)
    found = total / free
    return torch.where(free < 0, found + (total / 0 - found).detach(), found), mean


@handles
def _std(
    func: Any, input: Any, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    """Over the entries there are: inf or NaN where they are no more than the correction, which is 1."""
    name = func.__name__
    if isinstance(dim, bool):  # std(x, unbiased)
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = find_dims(input, dim)
    if {0, 1} <= set(dims) or not {0, 1} & set(dims):
        inner = tuple(sorted({max(d - 1, 0) for d in dims}))
        whole = {0, 1} <= set(dims)
        out = func(input.values, dim=inner, correction=correction, keepdim=keepdim and not whole)
        if not whole:
            return rewrap(input, out)
        return tuple(restore_dims(x, dims, keepdim) for x in out) if "_" in name else restore_dims(out, dims, keepdim)
    if not input.is_floating_point() and not input.is_complex():
        raise WrongType(f"a deviation needs floating point, got {input.dtype}; convert with .float()")
    var, mean = _find_variance(divide(input._with(widen(input.values)), dims), correction)
    spread = root(var) if "std" in name else var
    spread, mean = restore_dims(spread, dims, keepdim).to(input.dtype.to_real()), restore_dims(mean, dims, keepdim)
    return (spread, mean.to(input.dtype)) if "_" in name else spread


@handles
def _any(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Bools, and uint8 of uint8, as torch's; of an empty row False, and all of it True."""

    def reduce(s: Segments) -> Tensor:
        wanted = (s.values != 0) if func.__name__ == "any" else (s.values == 0)
        found = segments.sum(wanted.to(torch.int64), s.offsets) > 0
        found = found if func.__name__ == "any" else ~found
        return found.to(torch.uint8) if s.values.dtype is torch.uint8 else found

    return _reduce(func, input, dim, keepdim, reduce, {})


@handles
def _count_nonzero(func: Any, input: Any, dim: Any = None) -> Any:
    """How many entries are not zero."""
    return torch.sum(input != 0, find_dims(input, dim))


# -- what keeps the shape


def _run_along(func: Any, p: Packed, dim: Any, on_segments: Any, *args: Any, **kwargs: Any) -> Any:
    """A function along one dim: torch's own along a feature dim, `on_segments(values, offsets)` along the others."""
    d = find_dim(p, dim)
    if d > 1:
        return rewrap(p, func(p.values, d - 1, *args, **kwargs))
    if d == 1:
        return p._with(on_segments(p.values, p._dim._offsets))
    turned, order, inverse = p._dim.by_time
    out = on_segments(segments.permute(p.values, order, inverse), turned._offsets)
    return p._with(segments.permute(out, inverse, order))


def _run_softmax(func: Any, input: Any, dim: Any, dtype: Any, run: Any) -> Any:
    if dim is None:
        raise WrongType("give dim; a packed tensor has no default for it")
    x = input if dtype is None else input.to(dtype)
    return _run_along(func, x, dim, run)


@handles
def _softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Over the entries there are along `dim`: of each row by itself along the ragged dim."""
    return _run_softmax(torch.softmax, input, dim, dtype, segment_reduce.softmax)


@handles
def _log_softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """The logarithm of softmax."""
    return _run_softmax(torch.log_softmax, input, dim, dtype, segment_reduce.log_softmax)


@handles
def _softmin(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Softmax of the negative."""
    return _run_softmax(torch.softmax, -input, dim, dtype, segment_reduce.softmax)


@handles
def _cumsum(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Running sums along `dim`, of each row by itself along the ragged dim."""
    x = input if dtype is None else input.to(dtype)
    if not x.values.is_floating_point() and not x.values.is_complex() and dtype is None:
        x = x.to(torch.int64)
    return _run_along(torch.cumsum, x, dim, segments.cumsum)


@handles
def _running(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Along the ragged dim by padding, with a PackedFallbackWarning; `dtype` is for cumprod."""
    name = func.__name__
    if name == "cumprod":
        exact = input.is_floating_point() or input.values.is_complex()
        input = input.to(dtype or (input.dtype if exact else torch.int64))
    elif dtype is not None:
        raise WrongType(f"it has no dtype=; convert with .to({dtype})")
    d = find_dim(input, dim)
    if d > 1:
        return rewrap(input, func(input.values, d - 1))
    if d == 0:
        raise refusal("it does not run over the batch dim", "use .pad(value) and choose the value")
    return fall_back(name, input, lambda x: func(x, 1), 1 if name == "cumprod" else 0)


@handles
def _prod(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over features a packed tensor; over the ragged or batch dim by padding, with a PackedFallbackWarning."""
    x = input if dtype is None else input.to(dtype)
    if dim is None:
        return torch.prod(x.values)
    d = find_dim(x, dim)
    if d > 1:
        return x._with(torch.prod(x.values, d - 1, keepdim))
    return fall_back("prod", x, lambda padded: torch.prod(padded, d, keepdim), 1, reduces=True)


@handles
def _flip(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """Along the ragged dim each row from its end to its start."""
    (dims,) = (kwargs.get("dims", dims),)
    numbers = find_dims(input, dims[0] if len(dims) == 1 else tuple(dims))
    if 0 in numbers:
        raise refusal("dim 0 would put rows in another order", "use p[::-1] or p[index]")
    features = tuple(d - 1 for d in numbers if d > 1)
    values = input.values.flip(features) if features else input.values
    return input._with(segments.flip(values, input._dim._offsets) if 1 in numbers else values)
