"""What operations on complex numbers do to pairs of real ones, operation by operation."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.compiler.operations import aten


class Pair(NamedTuple):
    """A complex tensor: its real and its imaginary part. Of a Python number, two floats."""

    re: Any
    im: Any


def _pair(x: Any) -> Pair:
    """Whatever an operand is, in two parts."""
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
    scale = torch.where((scale == 0) | torch.isinf(scale), 1.0, scale)
    re, im = b.re / scale, b.im / scale
    square = re * re + im * im
    found = _mul(a, Pair(re / square, -im / square))
    return Pair(found.re / scale, found.im / scale)


def _abs(x: Pair) -> Tensor:
    """The gradient at 0 is 0."""
    zero = (x.re == 0) & (x.im == 0)
    return torch.where(zero, 0.0, torch.hypot(torch.where(zero, 1.0, x.re), torch.where(zero, 0.0, x.im)))


def _angle(x: Pair) -> Tensor:
    zero = (x.re == 0) & (x.im == 0)
    safe = torch.atan2(torch.where(zero, 0.0, x.im), torch.where(zero, 1.0, x.re))
    return torch.where(zero, torch.atan2(x.im, x.re).detach(), safe)


def _sgn(x: Pair) -> Pair:
    """Of 0 it is 0, and so is its gradient."""
    size = _abs(x)
    zero = size == 0
    size = torch.where(zero, 1.0, size)
    return Pair(torch.where(zero, 0.0, x.re) / size, torch.where(zero, 0.0, x.im) / size)


def _polar(size: Tensor, angle: Tensor) -> Pair:
    return Pair(size * torch.cos(angle), size * torch.sin(angle))


def _exp(x: Pair) -> Pair:
    return _polar(torch.exp(x.re), x.im)


def _log(x: Pair) -> Pair:
    return Pair(torch.log(torch.hypot(x.re, x.im)), torch.atan2(x.im, x.re))


def _sqrt(x: Pair) -> Pair:
    return _polar(torch.sqrt(_abs(x)), _angle(x) / 2)


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


def _equal(a: Any, b: Any) -> Tensor:
    a, b = _pair(a), _pair(b)
    return (a.re == b.re) & (a.im == b.im)


def _norm(x: Pair, p: Any = 2, dim: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([x.re, x.im]) if p == 2 and dim is None else _abs(x), p, dim, keep)


_EACH = (
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "select"),
    *("slice", "diagonal", "alias", "detach", "clone", "flip", "roll", "sum", "mean", "cumsum", "neg", "_neg_view"),
    *("index_select", "gather", "index", "repeat", "narrow", "unfold", "split", "split_with_sizes", "unbind", "trace"),
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
    "fill": lambda x, value: _sum(_like(0)(x), value),
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
    """By overload: all of an operation have one rule."""
    found: dict[Any, Callable[..., Any]] = {}
    for names, make in ((_EACH, _each), (_TOGETHER, _together), (_NAMED, None)):
        for name in names:
            packet = getattr(aten, name)
            for overload in packet.overloads():
                target = getattr(packet, overload)
                found[target] = _NAMED[name] if make is None else make(target)
    return found
