"""Operations that take elements together: sums, maxima, softmax, norms, products of matrices."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.arrays import Array, broadcast
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import Call, Lowering, computed_in
from tensorloop.compiler.emitter.lower.pointwise import handles
from tensorloop.compiler.step import Unsupported


def _dims(x: Array, dim: Any) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(len(x.shape)))
    return [dim] if isinstance(dim, int) else list(dim)


def _name(call: Call) -> str:
    return str(call.node.target)[5:].split(".")[0]


@handles("sum", "amax", "amin", "prod", "any", "all")
def reduce(call: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """One of the plain reductions."""
    low, how = call.low, _name(call)
    if how in ("any", "all"):
        x = low.cast(x, torch.bool)
    elif how in ("sum", "prod"):
        x = low.cast(x, computed_in(call.dtype))
    made = low.reduce(how, x, _dims(x, dim), keepdim, computed_in(call.dtype))
    return low.cast(made, call.dtype)


@handles("mean")
def mean(call: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """The sum over how many there are."""
    dims = _dims(x, dim)
    total = call.low.reduce("sum", call.low.cast(x, computed_in(call.dtype)), dims, keepdim)
    return _over(call, total, math.prod(x.shape[d] for d in dims))


def _over(call: Call, total: Array, count: float) -> Array:
    if count == 0:
        return call.low.compute("div", Math.div, (total, 0), call.dtype)
    return call.low.compute("div", lambda m, x: m.mul(x, m.like(x, 1 / count)), (total,), call.dtype)


@handles("max", "min")
def extreme(call: Call, x: Array, dim: Any = None, keepdim: bool = False) -> Any:
    """Over everything, or the values and where they are."""
    low, name = call.low, _name(call)
    if isinstance(dim, Array):
        dtype = call.dtype
        return low.compute(name, Math.maximum if name == "max" else Math.minimum, (x, dim), dtype, call.shape)
    if dim is None:
        return low.reduce("a" + name, x, _dims(x, None), False)
    wide = low.cast(x, computed_in(x.dtype))
    return low.reduce("a" + name, x, [dim], keepdim), low.reduce("arg" + name, wide, [dim], keepdim)


@handles("argmax", "argmin")
def argmax(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The first place of the largest; NaN is larger than all."""
    low, x = call.low, call.low.cast(x, computed_in(x.dtype))
    if dim is not None:
        return low.reduce(_name(call), x, [dim], keepdim)
    place = low.reduce(_name(call), low.reshape(x, (x.numel,)), [0], False)
    return low.reshape(place, call.shape)


@handles("linalg_vector_norm")
def vector_norm(
    call: Call, x: Array, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Array:
    """Of order 1, 2, or the largest element."""
    low, dims, inner = call.low, _dims(x, dim), computed_in(call.dtype)
    x = low.cast(x, inner)
    sizes = low.compute("norm", (lambda m, v: m.mul(v, v)) if order == 2 else Math.abs, (x,), inner)
    if order not in (1, 2, math.inf):
        raise Unsupported(f"of order {order}")
    made = low.reduce("amax" if order == math.inf else "sum", sizes, dims, keepdim)
    return low.cast(low.compute("sqrt", Math.sqrt, (made,), inner) if order == 2 else made, call.dtype)


@handles("var", "std", "var_mean")
def variance(
    call: Call, x: Array, dim: Any = None, unbiased: Any = None, keepdim: bool = False, correction: Any = None
) -> Any:
    """From the differences to the mean."""
    low, name = call.low, _name(call)
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    correction = (1 if unbiased in (None, True) else 0) if correction is None else correction
    if x.dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"of {x.dtype}")
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    if count == 0:
        raise Unsupported("of no elements")
    average = low.compute(
        "div", lambda m, v: m.mul(v, m.like(v, 1 / count)), (low.reduce("sum", x, dims, True),), x.dtype
    )
    apart = low.compute("sub", Math.sub, (x, average), x.dtype)
    squares = low.reduce("sum", low.compute("square", lambda m, v: m.mul(v, v), (apart,), x.dtype), dims, keepdim)
    divisor = max(0.0, count - correction)
    made = low.compute("div", Math.div, (squares, divisor), x.dtype)
    if name == "var_mean":
        shape = tuple(call.value[1].shape)
        return made, low.reshape(average, shape)
    return low.compute("sqrt", Math.sqrt, (made,), x.dtype) if name == "std" else made


def _exponentials(low: Lowering, x: Array, dim: int) -> tuple[Array, Array, Array]:
    """(x - its maximum, exp of that, the sum of those)."""
    top = low.reduce("amax", x, [dim], True)
    apart = low.compute("sub", Math.sub, (x, top), x.dtype)
    powers = low.compute("exp", Math.exp, (apart,), x.dtype)
    return apart, powers, low.reduce("sum", powers, [dim], True)


@handles("_softmax", "softmax", "_safe_softmax")
def softmax(call: Call, x: Array, dim: int, *args: Any) -> Array:
    """exp(x - max) over its sum."""
    low = call.low
    if not x.numel or not x.shape:
        return low.number(1, call.dtype).expand(call.shape)
    _, powers, total = _exponentials(low, low.cast(x, computed_in(call.dtype)), dim)
    made = low.compute("div", Math.div, (powers, total), call.dtype)
    if "safe" in str(call.node.target):
        raise Unsupported("of rows that are all -inf")
    return made


@handles("_log_softmax", "log_softmax")
def log_softmax(call: Call, x: Array, dim: int, *args: Any) -> Array:
    """x - max - log of the sum."""
    low = call.low
    if not x.numel or not x.shape:
        return low.number(0, call.dtype).expand(call.shape)
    apart, _, total = _exponentials(low, low.cast(x, computed_in(call.dtype)), dim)
    logs = low.compute("log", Math.log, (total,), total.dtype)
    return low.compute("sub", Math.sub, (apart, logs), call.dtype)


@handles("_softmax_backward_data")
def softmax_backward(call: Call, grad: Array, y: Array, dim: int, dtype: Any) -> Array:
    """y (grad - sum(grad y))."""
    low, inner = call.low, computed_in(call.dtype)
    grad, y = low.cast(grad, inner), low.cast(y, inner)
    if not y.shape:
        return low.number(0, call.dtype)
    product = low.compute("mul", Math.mul, (grad, y), inner)
    total = low.reduce("sum", product, [dim], True)
    return low.compute("sub", lambda m, p, y, t: m.sub(p, m.mul(y, t)), (product, y, total), call.dtype)


@handles("_log_softmax_backward_data")
def log_softmax_backward(call: Call, grad: Array, y: Array, dim: int, dtype: Any) -> Array:
    """grad - exp(y) sum(grad)."""
    low, inner = call.low, computed_in(call.dtype)
    grad, y = low.cast(grad, inner), low.cast(y, inner)
    if not y.shape:
        return low.number(0, call.dtype)
    total = low.reduce("sum", grad, [dim], True)
    return low.compute("sub", lambda m, g, y, t: m.sub(g, m.mul(m.exp(y), t)), (grad, y, total), call.dtype)


@handles("logsumexp")
def logsumexp(call: Call, x: Array, dim: Any, keepdim: bool = False) -> Array:
    """log of the sum of exp, from the maximum (0 where that is infinite)."""
    low, dims = call.low, _dims(x, dim)
    if not x.shape:
        return x
    x = low.cast(x, computed_in(call.dtype))
    top = low.reduce("amax", x, dims, True)

    def finite(m: Math, v: Any) -> Any:
        return m.where(m.compare("eq", m.abs(v), m.like(v, float("inf"))), m.like(v, 0), v)

    top = low.compute("finite", finite, (top,), x.dtype)
    powers = low.compute("exp", lambda m, v, t: m.exp(m.sub(v, t)), (x, top), x.dtype)
    total = low.reduce("sum", powers, dims, True)
    made = low.compute("log", lambda m, s, t: m.add(m.log(s), t), (total, top), call.dtype)
    return low.reshape(made, call.shape)


@handles("mm", "bmm", "matmul", "mv", "dot", "vdot")
def matmul(call: Call, a: Array, b: Array) -> Array:
    """Products of matrices, and of vectors as matrices of one row or column."""
    return _product(call.low, a, b, call.dtype, call.shape)


def _product(low: Lowering, a: Array, b: Array, dtype: torch.dtype, shape: Sequence[int]) -> Array:
    inner = computed_in(dtype)
    a, b = low.cast(a, inner), low.cast(b, inner)
    if len(a.shape) == 1:
        a = Array(a.buffer, (1, *a.shape), (0, *a.strides), a.offset)
    if len(b.shape) == 1:
        b = Array(b.buffer, (*b.shape, 1), (*b.strides, 0), b.offset)
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    made = low.matmul(a.expand((*batch, *a.shape[-2:])), b.expand((*batch, *b.shape[-2:])))
    return low.cast(low.reshape(made, shape), dtype)


@handles("addmm", "baddbmm", "addmv")
def addmm(call: Call, x: Array, a: Array, b: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """beta x + alpha (a @ b)."""
    low, inner = call.low, computed_in(call.dtype)
    product = _product(low, a, b, inner, call.shape)

    def scaled(m: Math, p: Any, x: Any) -> Any:
        p = p if alpha == 1 else m.mul(p, m.like(p, alpha))
        return p if beta == 0 else m.add(p, x if beta == 1 else m.mul(x, m.like(x, beta)))

    plain = alpha == 1 and beta == 1
    return low.compute(
        "add" if plain else "scaled", Math.add if plain else scaled, (product, x), call.dtype, call.shape
    )


@handles("native_layer_norm")
def layer_norm(call: Call, x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float) -> Any:
    """(normalized, mean, 1 / deviation)."""
    low, inner = call.low, computed_in(x.dtype)
    x = low.cast(x, inner)
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    count = math.prod(shape)
    if not count:
        raise Unsupported("of no elements")

    def over(m: Math, v: Any) -> Any:
        return m.mul(v, m.like(v, 1 / count))

    average = low.compute("mean", over, (low.reduce("sum", x, dims, True),), inner)
    squares = low.compute("square", lambda m, v, a: m.mul(m.sub(v, a), m.sub(v, a)), (x, average), inner)
    total = low.reduce("sum", squares, dims, True)
    scale = low.compute(
        "rsqrt", lambda m, v: m.div(m.like(v, 1), m.sqrt(m.add(over(m, v), m.like(v, eps)))), (total,), inner
    )
    affine = [one for one in (weight, bias) if one is not None]

    def normalized(m: Math, v: Any, a: Any, s: Any, *rest: Any) -> Any:
        made = m.mul(m.sub(v, a), s)
        if weight is not None:
            made = m.mul(made, rest[0])
        return m.add(made, rest[-1]) if bias is not None else made

    made = low.compute("normalized", normalized, (x, average, scale, *affine), call.value[0].dtype)
    means, scales = (low.cast(one, value.dtype) for one, value in zip((average, scale), call.value[1:], strict=True))
    return made, means, scales
