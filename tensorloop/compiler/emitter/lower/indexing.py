"""Operations that read or write at indices, and running sums."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.code import Value
from tensorloop.compiler.emitter.ir.kernels import Running, Scatter, identity
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, broadcast
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import Call, Lowering, computed_in
from tensorloop.compiler.emitter.lower.numbers import whole_quotient
from tensorloop.compiler.emitter.lower.pointwise import handles
from tensorloop.compiler.step import Unsupported


@handles("index_select")
def index_select(call: Call, x: Array, dim: int, index: Array) -> Array:
    """The slices along one dim that a vector of indices chooses."""
    low, dim = call.low, dim % max(1, len(x.shape))
    x, index = (one if one.shape else low.reshape(one, (1,)) for one in (x, index))
    return low.reshape(_index(call, x, {dim: index}, index.shape, dim, False), call.shape)


def _index(call: Call, x: Array, chosen: dict[int, Array], shape: Sequence[int], at: int, wraps: bool) -> Array:
    """x[chosen dims]: the dims of the indices, broadcast to `shape`, stand at `at` in the result.

    Indexing counts from the end (`wraps`); other operations refuse indices below 0, as torch's do.
    """
    rest = [dim for dim in range(len(x.shape)) if dim not in chosen]
    before, after = [d for d in rest if d < at], [d for d in rest if d >= at]
    full = (*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in after))
    strides = (*(x.strides[d] for d in before), *((0,) * len(shape)), *(x.strides[d] for d in after))
    free = Array(x.buffer, full, strides, x.offset)
    indices = []
    for index in chosen.values():
        wide = index.expand(shape)
        ones = (0,) * len(before), (0,) * len(after)
        indices.append(Array(wide.buffer, full, (*ones[0], *wide.strides, *ones[1]), wide.offset))
    return call.low.gather(x, list(chosen), indices, full, free, wraps)


@handles("index")
def index(call: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    """x[i, :, j]: tensors of integers, together."""
    chosen = {dim: one for dim, one in enumerate(indices) if one is not None}
    if any(one.dtype in (torch.bool, torch.uint8) for one in chosen.values()):
        raise Unsupported("with a mask: how many there are is not known before")
    dims = list(chosen)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    shape = broadcast(*(one.shape for one in chosen.values()))
    return _index(call, x, chosen, shape, dims[0] if adjacent else 0, True)


@handles("gather")
def gather(call: Call, x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """out[i, j] = x[i, index[i, j]]."""
    if not x.shape:
        return x
    dim %= len(x.shape)
    strides = tuple(0 if n == dim else stride for n, stride in enumerate(x.strides))
    return call.low.gather(x, [dim], [index], index.shape, Array(x.buffer, index.shape, strides, x.offset))


@handles("scatter", "scatter_add", "index_add", "index_copy")
def scatter(
    call: Call, x: Array, dim: int, index: Array, source: Any, reduce: str | None = None, alpha: Any = 1
) -> Array:
    """Copies x, then writes or adds to it one element after another."""
    if reduce not in (None, "add") or alpha != 1:
        raise Unsupported(f"reduce={reduce}, alpha={alpha}")
    return _written(call, x, dim, index, source, "sum" if "add" in call.name or reduce else "")


def _written(call: Call, x: Array, dim: int, index: Array, source: Any, how: str) -> Array:
    """A copy of x, into which `source` is written, or taken together with what is there."""
    low = call.low
    if not x.shape:
        x, index, source = (low.reshape(y, (y.numel,)) if isinstance(y, Array) else y for y in (x, index, source))
        return low.reshape(_written(call, x, 0, index, source, how), ())
    dim %= len(x.shape)
    out = low.copy(x, low.new(x.shape, x.dtype))
    source = low.cast(low.array(source, x.dtype), x.dtype)
    if "index_" in call.name:
        strides = tuple(index.strides[0] if n == dim and index.shape else 0 for n in range(len(x.shape)))
        shape = tuple(index.numel if n == dim else size for n, size in enumerate(x.shape))
        index = Array(index.buffer, shape, strides, index.offset)
    shape = index.shape
    taken = Array(source.buffer, shape, source.strides if source.shape else (0,) * len(shape), source.offset)
    if out.numel and index.numel:
        low.kernels.append(Scatter(index, taken, out, dim, how))
    return out


@handles("scatter_reduce", "index_reduce")
def scatter_reduce(
    call: Call, x: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    """Reduces all values that go to one place; what was there before counts only if `include_self`."""
    low, how = call.low, "sum" if reduce == "mean" else reduce
    begin = x if include_self else _written(call, x, dim, index, identity(how, x.dtype), "")
    found = _written(call, begin, dim, index, source, how)
    if reduce != "mean":
        return found
    ones = low.number(1, x.dtype)
    count = _written(call, low.number(int(include_self), x.dtype).expand(x.shape), dim, index, 1, "sum")
    count = low.compute("max", Math.maximum, (count, ones), x.dtype, x.shape)
    if x.dtype.is_floating_point:
        return low.compute("div", Math.div, (found, count), x.dtype, x.shape)
    return low.compute("div", lambda m, a, b: whole_quotient(m, a, b, "floor"), (found, count), x.dtype, x.shape)


@handles("index_put")
def index_put(call: Call, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """x[:, i, j] = values."""
    chosen = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    dims = [dim for dim, _ in chosen]
    if any(one.dtype == torch.bool for _, one in chosen):
        raise Unsupported("with a mask")
    low = call.low
    if dims != list(range(dims[0], dims[0] + len(dims))):  # the dims of the indices then stand first in `values`
        order = [*dims, *(d for d in range(len(x.shape)) if d not in dims)]
        first = low.view(x, torch.permute, order)
        made = index_put(call, first, [one for _, one in chosen], values, accumulate)
        return low.view(made, torch.permute, [order.index(d) for d in range(len(order))])
    dim, sizes = dims[0], x.shape[dims[0] : dims[-1] + 1]
    index = _joined(low, [one for _, one in chosen], sizes)
    before, after = x.shape[:dim], x.shape[dims[-1] + 1 :]
    source = low.reshape(
        low.cast(values, x.dtype).expand((*before, *index.shape, *after)), (*before, index.numel, *after)
    )
    one = low.reshape(index, (index.numel,))
    strides = tuple(one.strides[0] if n == dim else 0 for n in range(len(source.shape)))
    out = low.reshape(low.copy(x, low.new(x.shape, x.dtype)), (*before, math.prod(sizes), *after))
    if out.numel and source.numel:
        low.kernels.append(
            Scatter(
                Array(one.buffer, source.shape, strides, one.offset),
                source,
                out,
                dim,
                "sum" if accumulate else "",
                True,
            )
        )
    return low.reshape(out, x.shape)


def _joined(low: Lowering, indices: Sequence[Array], sizes: Sequence[int]) -> Array:
    """One index into dims taken as one; what is out of range in any is out of range in all."""
    shape = broadcast(*(one.shape for one in indices))
    if len(indices) == 1:
        return indices[0]

    def linear(m: Math, *values: Value) -> Value:
        total = bad = None
        for value, size in zip(values, sizes, strict=True):
            value = m.cast(value, "i64")
            wrapped = m.where(m.compare("lt", value, m.like(value, 0)), m.add(value, m.like(value, size)), value)
            outside = m.code.compare("uge", wrapped, m.like(wrapped, size))
            bad = outside if bad is None else m.code.binary("or", bad, outside)
            total = wrapped if total is None else m.add(m.mul(total, m.like(total, size)), wrapped)
        assert total is not None
        assert bad is not None
        return m.where(bad, m.like(total, math.prod(sizes)), total)

    return low.point("index", linear, [one.expand(shape) for one in indices], torch.int64, shape)


@handles("cumsum", "cumprod")
def running(call: Call, x: Array, dim: int, dtype: Any = None) -> Array:
    """Sums or products of all elements so far."""
    low = call.low
    x = low.cast(low.cast(x, call.dtype), computed_in(call.dtype))
    if not x.shape:
        return x
    out = low.new(call.shape, x.dtype)
    if out.numel:
        name = call.name.removeprefix("cum")
        low.kernels.append(Running(name, x, dim % len(x.shape), out))
    return low.cast(out, call.dtype)


@handles("cummax", "cummin")
def running_extreme(call: Call, x: Array, dim: int) -> tuple[Array, Array]:
    """The largest or smallest so far, and where the last of equal ones is; from the first NaN on, NaN."""
    low, how = call.low, {"cummax": "amax", "cummin": "amin"}[call.name]
    if not x.shape:
        return x, low.number(0, torch.int64)
    dim, wide = dim % len(x.shape), low.cast(x, computed_in(x.dtype))
    values, index = low.new(x.shape, wide.dtype), low.new(x.shape, torch.int64)
    if not values.numel:
        return low.cast(values, x.dtype), index
    low.kernels.append(Running(how, wide, dim, values))
    line = Array(Region("value", 0, 1, torch.int64), x.shape, tuple(int(d == dim) for d in range(len(x.shape))))

    def new(m: Math, one: Value, most: Value, place: Value) -> Value:
        found = m.code.binary("or", m.compare("eq", one, most), m.isnan(one))
        return m.where(found, place, m.like(place, 0))

    places = low.point("places", new, [wide, values, line], torch.int64, x.shape)
    low.kernels.append(Running("amax", places, dim, index))
    return low.cast(values, x.dtype), index
