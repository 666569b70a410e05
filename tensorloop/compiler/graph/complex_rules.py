"""What operations on complex numbers do to pairs of real ones, operation by operation."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.compiler.custom_functions import BEGIN, COMING, END
from tensorloop.compiler.graph import fourier
from tensorloop.compiler.operations import aten


class Pair(NamedTuple):
    """A complex tensor: its real and its imaginary part. Of a Python number, two floats."""

    re: Any
    im: Any


def _pair(x: Any) -> Pair:
    """Returns an operand, real or complex, as a pair of its parts."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, Tensor):
        return Pair(x, torch.zeros_like(x))
    return Pair(float(x.real), float(x.imag))


def _real_of(x: Any) -> Any:
    """The one part of what is real, None for what is not."""
    if isinstance(x, Pair):
        return None
    return x if isinstance(x, Tensor) or not isinstance(x, complex) else x.real if not x.imag else None


def _each(target: Any) -> Callable[..., Any]:
    """An operation that does the same to both parts."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = [target(*_part(args, k), **kwargs) for k in range(2)]
        return Pair(*found) if isinstance(found[0], Tensor) else [Pair(*x) for x in zip(*found, strict=True)]

    return run


def _part(x: Any, k: int) -> Any:
    if isinstance(x, Pair):
        return x[k]
    return [_part(y, k) for y in x] if isinstance(x, (list, tuple)) else x


def _together(target: Any) -> Callable[..., Any]:
    """An operation on a list of tensors, of which some may be real, that does the same to both parts."""
    return lambda xs, *rest: _each(target)([_pair(x) for x in xs], *rest)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    return _sum(a, b if alpha == 1 else _mul(b, alpha))


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Pair:
    return _sum(a, _mul(b, -alpha))


def _sum(a: Any, b: Any) -> Pair:
    for x, y in ((a, b), (b, a)):
        if (real := _real_of(y)) is not None:
            x = _pair(x)
            return Pair(x.re + real, x.im)
    a, b = _pair(a), _pair(b)
    return Pair(a.re + b.re, a.im + b.im)


def _mul(a: Any, b: Any) -> Pair:
    for x, y in ((a, b), (b, a)):
        if (real := _real_of(y)) is not None:
            x = _pair(x)
            return Pair(x.re * real, x.im * real)
    a, b = _pair(a), _pair(b)
    return Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def _div(a: Any, b: Any) -> Pair:
    if (real := _real_of(b)) is not None:
        a = _pair(a)
        return Pair(a.re / real, a.im / real)
    if isinstance(b, complex):
        return _mul(a, 1 / b)
    # Scaled, so that squares are no larger than they need be; the quotient does not depend on the scale.
    scale = torch.maximum(b.re.abs(), b.im.abs()).detach()
    endless = scale == math.inf
    scale = torch.where((scale == 0) | endless, 1.0, scale)
    re, im = torch.where(endless, 1.0, b.re) / scale, torch.where(endless, 0.0, b.im) / scale
    square = re * re + im * im
    # 1 / infinity is 0 where one part is infinite, and no number where both are.
    none = (1 / (b.re.abs() - b.im.abs())).detach()
    found = _mul(a, Pair(*(torch.where(endless, none, x / square) for x in (re, -im))))
    return Pair(found.re / scale, found.im / scale)


def _abs(x: Pair) -> Tensor:
    """Returns the absolute value, whose gradient at 0 is 0."""
    zero = (x.re == 0) & (x.im == 0)
    return torch.where(zero, 0.0, torch.hypot(torch.where(zero, 1.0, x.re), torch.where(zero, 0.0, x.im)))


def _angle(x: Pair) -> Tensor:
    zero = (x.re == 0) & (x.im == 0)
    safe = torch.atan2(torch.where(zero, 0.0, x.im), torch.where(zero, 1.0, x.re))
    return torch.where(zero, torch.atan2(x.im, x.re).detach(), safe)


def _sgn(x: Pair) -> Pair:
    """Returns x / |x|; at 0 it is 0, and so is its gradient."""
    size = _abs(x)
    zero = size == 0
    size = torch.where(zero, 1.0, size)
    return Pair(torch.where(zero, 0.0, x.re) / size, torch.where(zero, 0.0, x.im) / size)


def _polar(size: Tensor, angle: Tensor) -> Pair:
    return Pair(size * torch.cos(angle), size * torch.sin(angle))


def _exp(x: Pair) -> Pair:
    """Returns exp(x), which is 0 where the real part is -inf, whatever the angle."""
    return _polar(torch.exp(x.re), torch.where(x.re == -math.inf, 0.0, x.im))


def _log(x: Pair) -> Pair:
    return Pair(torch.log(torch.hypot(x.re, x.im)), torch.atan2(x.im, x.re))


def _sqrt(x: Pair) -> Pair:
    found = _polar(torch.sqrt(_abs(x)), _angle(x) / 2)
    # Along the real axis infinity stays on an axis: no part of it is 0 times infinity.
    along, far = torch.isinf(x.re) & ~(torch.isinf(x.im) | torch.isnan(x.im)), x.re.detach()
    up = torch.copysign(torch.relu(-far), x.im.detach())
    return Pair(torch.where(along, torch.relu(far), found.re), torch.where(along, up, found.im))


def _pow(a: Any, b: Any) -> Pair:
    if not isinstance(b, (Pair, Tensor)):
        if b == 0:
            return Pair(torch.ones_like(a.re), torch.zeros_like(a.im))
        if b == 0.5:
            return _sqrt(a)
        if isinstance(b, int) and abs(b) <= 8:
            found = a
            for _ in range(abs(b) - 1):
                found = _mul(found, a)
            return found if b > 0 else _div(1, found)
    if not isinstance(a, (Pair, Tensor)):
        assert isinstance(b, Pair)
        a = Pair(torch.full_like(b.re, complex(a).real), torch.full_like(b.re, complex(a).imag))
    a = _pair(a)
    if not isinstance(b, (Pair, complex)):
        return _exp(_mul(_log(a), b))
    # 0 to the power of what has a positive real part is 0, whose logarithm would be turned by infinity.
    up: Any = b.re if isinstance(b, Pair) else b.real
    zero = (a.re == 0) & (a.im == 0) & (up > 0)
    if isinstance(b, Pair):  # an endless turn has no end, but where the size is 0 for certain
        zero = zero & ~(torch.isinf(b.im) & ~torch.isinf(b.re))
    found = _exp(_mul(_log(Pair(torch.where(zero, 1.0, a.re), a.im)), b))
    return Pair(torch.where(zero, 0.0, found.re), torch.where(zero, 0.0, found.im))


def _product(target: Any) -> Callable[[Any, Any], Pair]:
    """A product of matrices."""

    def run(a: Any, b: Any) -> Pair:
        a, b = _pair(a), _pair(b)
        return Pair(target(a.re, b.re) - target(a.im, b.im), target(a.re, b.im) + target(a.im, b.re))

    return run


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_complex:
        return x.re.to(dtype)  # what torch does, with a warning
    return _pair(x)


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Pair:
    real = None if dtype is None else dtype.to_real()
    return Pair(*(torch.full(list(size), part, dtype=real) for part in (value.real, value.imag)))


def _like(value: Any) -> Callable[..., Pair]:
    def run(x: Any, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Pair:
        x = _pair(x)
        return Pair(torch.full_like(x.re, value), torch.zeros_like(x.re))

    return run


def _where(condition: Tensor, a: Any, b: Any) -> Pair:
    a, b = _pair(a), _pair(b)
    return Pair(torch.where(condition, a.re, b.re), torch.where(condition, a.im, b.im))


def _is_other_than_0(x: Any) -> Tensor:
    return (x.re != 0) | (x.im != 0) if isinstance(x, Pair) else x != 0


def _equal(a: Any, b: Any) -> Tensor:
    a, b = _pair(a), _pair(b)
    return (a.re == b.re) & (a.im == b.im)


def _norm(x: Pair, p: Any = 2, dim: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(
        torch.stack([x.re, x.im]) if p == 2 and dim is None and not keep else _abs(x), p, dim, keep
    )


def _begin(values: Sequence[Any], inputs: Sequence[Any], *rest: Any) -> list[Any]:
    """A custom Function's results, of which complex ones are two."""
    parts = [[p for x in xs for p in (x if isinstance(x, Pair) else [x])] for xs in (values, inputs)]
    left = iter(BEGIN(*parts, *rest))
    return [Pair(next(left), next(left)) if isinstance(x, Pair) else next(left) for x in values]


def _end(inputs: Sequence[Any], comings: Sequence[Any], found: Sequence[Any], *rest: Any) -> Tensor:
    """The gradients of a custom Function's inputs; autograd takes the real part of one for a real input."""
    grads = list[Any]()
    for x, g in zip(inputs, found, strict=True):
        if isinstance(x, Pair):
            grads += (None, None) if g is None else _pair(g)
        else:
            grads.append(g.re if isinstance(g, Pair) else g)
    parts = [[p for x in xs for p in (x if isinstance(x, Pair) else [x])] for xs in (inputs, comings)]
    return END(*parts, grads, *rest)


# -- functions


def _tanh(x: Pair) -> Pair:
    """Computes tanh by exp(-2 |re|), which is at most 1; where `re` is infinite the angle does not matter."""
    x = Pair(x.re, torch.where(torch.isinf(x.re), 0.0, x.im))
    turned = torch.where(x.re < 0, -1.0, 1.0).to(x.re.dtype)
    less = torch.expm1(-2 * x.re * turned)
    power, cos = less + 1, torch.cos(x.im)
    below = less * less + 4 * power * cos * cos
    return Pair(turned * -torch.expm1(-4 * x.re * turned) / below, 2 * power * torch.sin(2 * x.im) / below)


def _tan(x: Pair) -> Pair:
    found = _tanh(Pair(-x.im, x.re))
    return Pair(found.im, -found.re)


def _sigmoid(x: Pair) -> Pair:
    below = x.re < 0
    power = _exp(_where(below, x, Pair(-x.re, -x.im)))
    return _div(_where(below, power, _like(1)(power)), _sum(power, 1))


def _expm1(x: Pair) -> Pair:
    half = torch.sin(x.im / 2)
    return Pair(torch.expm1(x.re) * torch.cos(x.im) - 2 * half * half, torch.exp(x.re) * torch.sin(x.im))


def _log1p(x: Pair) -> Pair:
    """Computes log(1 + x); for a large x by a plain logarithm, which does not square it."""
    near = (x.re.abs() < 2) & (x.im.abs() < 2)
    re, im = torch.where(near, x.re, 0.0), torch.where(near, x.im, 0.0)
    small = 0.5 * torch.log1p(re * (2 + re) + im * im)
    large = torch.log(torch.hypot(torch.where(near, 1.0, 1 + x.re), torch.where(near, 0.0, x.im)))
    return Pair(torch.where(near, small, large), torch.atan2(x.im, 1 + x.re))


def _product_of(x: Pair, dim: int, running: bool = False) -> list[Pair]:
    """The product along a dim, or those of all elements so far."""
    parts = [Pair(x.re.select(dim, i), x.im.select(dim, i)) for i in range(x.re.shape[dim])]
    found = parts[:1] or [Pair(*(torch.full_like(y.sum(dim), z) for y, z in zip(x, (1.0, 0.0), strict=True)))]
    for one in parts[1:]:
        found.append(_mul(found[-1], one))
    return found if running else found[-1:]


def _prod(x: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = _pair(x)
    if dim is None:
        x, dim = Pair(x.re.reshape(-1), x.im.reshape(-1)), 0
    if x.re.dim() and x.re.shape[dim] > MOST_FACTORS:
        return NotImplemented
    found = _product_of(x, dim)[0] if x.re.dim() else x
    return Pair(*(y.unsqueeze(dim) for y in found)) if keepdim and x.re.dim() else found


def _cumprod(x: Any, dim: int, *, dtype: Any = None) -> Any:
    x = _pair(x)
    if not x.re.dim() or not x.re.shape[dim]:
        return x
    if x.re.shape[dim] > MOST_FACTORS:
        return NotImplemented
    return Pair(*(torch.stack(parts, dim) for parts in zip(*_product_of(x, dim, True), strict=True)))


MOST_FACTORS = 32


# -- Fourier transforms


def _scaled(found: Pair, sizes: Sequence[int], normalization: int) -> Pair:
    """Scales a transform of n numbers by 1, by 1 / sqrt(n) or by 1 / n."""
    factor = (1.0, math.prod(sizes) ** -0.5, 1 / math.prod(sizes))[normalization]
    return found if normalization == 0 else Pair(found.re * factor, found.im * factor)


def _fft(x: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    x = _pair(x)
    found = fourier.transform(x.re, x.im, dims, -1 if forward else 1)
    return NotImplemented if found is None else _scaled(Pair(*found), [x.re.shape[d] for d in dims], normalization)


def _real_fft(x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    found = fourier.of_real(x, dims[-1])
    if found is not None:
        found = fourier.transform(*(fourier.half(found, dims[-1]) if onesided else found), dims[:-1], -1)
    return NotImplemented if found is None else _scaled(Pair(*found), [x.shape[d] for d in dims], normalization)


def _to_real_fft(x: Pair, dims: Sequence[int], normalization: int, size: int) -> Any:
    found = fourier.transform(x.re, x.im, dims[:-1], 1)
    if found is not None:
        found = fourier.transform(*fourier.whole(*found, dims[-1], size), dims[-1:], 1)
    sizes = [*(x.re.shape[d] for d in dims[:-1]), size]
    return NotImplemented if found is None else _scaled(Pair(*found), sizes, normalization).re


_EACH = (
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "select"),
    *("slice", "diagonal", "alias", "detach", "clone", "flip", "roll", "sum", "mean", "cumsum", "neg", "_neg_view"),
    *(
        "index_select",
        "gather",
        "index",
        "repeat",
        "narrow",
        "take",
        "unfold",
        "split",
        "split_with_sizes",
        "unbind",
        "trace",
    ),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "rot90"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
    *("tril", "triu", "lift_fresh", "diag_embed", "unsafe_split", "chunk", "lift_fresh_copy", "resolve_neg"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "index_put", "scatter_add", "index_copy", "index_add"),
)
_TOGETHER = "cat", "stack"
_NAMED: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": lambda a, b, alpha=1: _sub(b, a, alpha=alpha),
    "mul": _mul,
    "div": _div,
    "reciprocal": lambda x: _div(1, x),
    "square": lambda x: _mul(x, x),
    "pow": _pow,
    "abs": _abs,
    "angle": _angle,
    "sgn": _sgn,
    "exp": _exp,
    "log": _log,
    "sqrt": _sqrt,
    "expm1": _expm1,
    "exp2": lambda x: _exp(_mul(x, math.log(2))),
    "log1p": _log1p,
    "log2": lambda x: _mul(_log(x), 1 / math.log(2)),
    "log10": lambda x: _mul(_log(x), 1 / math.log(10)),
    "rsqrt": lambda x: _div(1, _sqrt(x)),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "tan": _tan,
    "sinh": lambda x: Pair(torch.sinh(x.re) * torch.cos(x.im), torch.cosh(x.re) * torch.sin(x.im)),
    "cosh": lambda x: Pair(torch.cosh(x.re) * torch.cos(x.im), torch.sinh(x.re) * torch.sin(x.im)),
    "prod": _prod,
    "cumprod": _cumprod,
    "put": lambda x, index, source, accumulate=False: _each(aten.put.default)(
        _pair(x), index, _pair(source), accumulate
    ),
    "masked_scatter": lambda x, mask, source: _each(aten.masked_scatter.default)(_pair(x), mask, _pair(source)),
    "lerp": lambda x, y, weight: _sum(x, _mul(weight, _sub(y, x))),
    "isinf": lambda x: torch.isinf(x.re) | torch.isinf(x.im),
    "logical_not": lambda x: ~_is_other_than_0(x),
    "logical_and": lambda a, b: _is_other_than_0(a) & _is_other_than_0(b),
    "logical_or": lambda a, b: _is_other_than_0(a) | _is_other_than_0(b),
    "logical_xor": lambda a, b: _is_other_than_0(a) ^ _is_other_than_0(b),
    "empty": lambda size, **options: _full(size, 0, **options),
    "new_empty": lambda x, size, **options: _full(size, 0, dtype=options.get("dtype")),
    "_fft_c2c": _fft,
    "_fft_r2c": _real_fft,
    "_fft_c2r": _to_real_fft,
    "sin": lambda x: Pair(torch.sin(x.re) * torch.cosh(x.im), torch.cos(x.re) * torch.sinh(x.im)),
    "cos": lambda x: Pair(torch.cos(x.re) * torch.cosh(x.im), -torch.sin(x.re) * torch.sinh(x.im)),
    "_conj": lambda x: Pair(x.re, -x.im),
    "_conj_physical": lambda x: Pair(x.re, -x.im),
    "conj_physical": lambda x: Pair(x.re, -x.im),
    "resolve_conj": lambda x: x,
    "real": lambda x: x.re,
    "imag": lambda x: x.im,
    "view_as_real": lambda x: torch.stack([x.re, x.im], -1),
    "view_as_complex": lambda x: Pair(x.select(-1, 0), x.select(-1, 1)),
    "complex": Pair,
    "polar": _polar,
    "mm": _product(aten.mm.default),
    "bmm": _product(aten.bmm.default),
    "where": _where,
    "eq": _equal,
    "ne": lambda a, b: ~_equal(a, b),
    "isnan": lambda x: torch.isnan(x.re) | torch.isnan(x.im),
    "isfinite": lambda x: torch.isfinite(x.re) & torch.isfinite(x.im),
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "linalg_vector_norm": _norm,
    "_to_copy": _to_copy,
    "copy": lambda x, source, *_: _pair(source),
    "fill": lambda x, value: Pair(*(torch.fill(*parts) for parts in zip(x, _pair(value), strict=True))),
    "constant_pad_nd": lambda x, pad, value=0: Pair(
        aten.constant_pad_nd.default(x.re, pad, value.real), aten.constant_pad_nd.default(x.im, pad, value.imag)
    ),
    "full": _full,
    "zeros": lambda size, **options: _full(size, 0, **options),
    "ones": lambda size, **options: _full(size, 1, **options),
    "scalar_tensor": lambda value, **options: _full([], value, **options),
    "zeros_like": _like(0),
    "empty_like": _like(0),
    "ones_like": _like(1),
}


@cache
def rules() -> dict[Any, Callable[..., Any]]:
    """Returns the rules by overload; all overloads of an operation have one rule."""
    found: dict[Any, Callable[..., Any]] = {}
    for names, make in ((_EACH, _each), (_TOGETHER, _together), (_NAMED, None)):
        for name in names:
            packet = getattr(aten, name)
            for overload in packet.overloads():
                target = getattr(packet, overload)
                found[target] = _NAMED[name] if make is None else make(target)
    return found | {BEGIN: _begin, COMING: lambda x, n: Pair(COMING(x.re, n), COMING(x.im, n)), END: _end}
