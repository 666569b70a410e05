"""Elementwise operations of aten that are a formula of their arguments, and the table of all handlers."""

from collections.abc import Callable
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.code import KINDS, Value
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.ir.vector_math import LN2, Math
from tensorloop.compiler.emitter.lower.lowering import Call, Handler, computed_in
from tensorloop.compiler.lengths import LENGTH_MARKS, actual
from tensorloop.compiler.step import Unsupported

HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Puts a handler into the table."""

    def put(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return put


def square(m: Math, x: Value) -> Value:
    """Multiplies a number by itself."""
    return m.mul(x, x)


def _log_of_base(number: float) -> Callable[[Math, Value], Value]:
    return lambda m, x: m.mul(m.log(x), m.like(x, number))


def _half_power(m: Math, a: Value) -> Value:
    """exp(a) / 2, which is finite a little longer than exp(a)."""
    root = m.exp(m.mul(a, m.like(a, 0.5)))
    return m.mul(m.mul(root, m.like(a, 0.5)), root)


def _sinh(m: Math, x: Value) -> Value:
    a = m.abs(x)
    t = m.expm1(a)
    usual = m.mul(m.like(x, 0.5), m.add(t, m.div(t, m.add(t, m.like(x, 1)))))
    return m.copysign(m.where(m.compare("gt", a, m.like(x, 30)), _half_power(m, a), usual), x)


def _cosh(m: Math, x: Value) -> Value:
    half = _half_power(m, m.abs(x))
    return m.add(half, m.div(m.like(x, 0.25), half))


def _asinh(m: Math, x: Value) -> Value:
    a, one = m.abs(x), m.like(x, 1)
    usual = m.log1p(m.add(a, m.div(m.mul(a, a), m.add(one, m.sqrt(m.fma(a, a, one))))))
    large = m.add(m.log(a), m.like(x, LN2))
    return m.copysign(m.where(m.compare("gt", a, m.like(x, 1e8)), large, usual), x)


def _acosh(m: Math, x: Value) -> Value:
    t = m.sub(x, m.like(x, 1))
    usual = m.log1p(m.add(t, m.sqrt(m.mul(t, m.add(t, m.like(x, 2))))))
    made = m.where(m.compare("gt", x, m.like(x, 1e8)), m.add(m.log(x), m.like(x, LN2)), usual)
    return m.where(m.compare("lt", x, m.like(x, 1)), m.like(x, float("nan")), made)


def _atanh(m: Math, x: Value) -> Value:
    a = m.abs(x)
    half = m.mul(m.like(x, 0.5), m.log1p(m.div(m.add(a, a), m.sub(m.like(x, 1), a))))
    return m.copysign(half, x)


def _hypot(m: Math, x: Value, y: Value) -> Value:
    a, b = m.abs(x), m.abs(y)
    large, small = m.maximum(a, b), m.minimum(a, b)
    ratio = m.div(small, large)
    usual = m.mul(large, m.sqrt(m.fma(ratio, ratio, m.like(x, 1))))
    made = m.where(m.compare("eq", large, m.like(x, 0)), large, usual)
    infinite = m.code.binary("or", *(m.compare("eq", v, m.like(x, float("inf"))) for v in (a, b)))
    return m.where(infinite, m.like(x, float("inf")), made)


# of floats (integers are cast before), the result in the same dtype
FLOAT = {
    "exp": Math.exp,
    "exp2": lambda m, x: m.power(m.like(x, 2), x),
    "expm1": Math.expm1,
    "log": Math.log,
    "log2": _log_of_base(1.4426950408889634),
    "log10": _log_of_base(0.4342944819032518),
    "log1p": Math.log1p,
    "tanh": Math.tanh,
    "sigmoid": Math.sigmoid,
    "sin": Math.sin,
    "cos": Math.cos,
    "tan": lambda m, x: m.div(m.sin(x), m.cos(x)),
    "sinh": _sinh,
    "cosh": _cosh,
    "sqrt": Math.sqrt,
    "rsqrt": lambda m, x: m.div(m.like(x, 1), m.sqrt(x)),
    "reciprocal": lambda m, x: m.div(m.like(x, 1), x),
    "atan": Math.atan,
    "atan2": Math.atan2,
    "asin": lambda m, x: m.atan2(x, m.sqrt(m.mul(m.sub(m.like(x, 1), x), m.add(m.like(x, 1), x)))),
    "acos": lambda m, x: m.atan2(m.sqrt(m.mul(m.sub(m.like(x, 1), x), m.add(m.like(x, 1), x))), x),
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "erf": Math.erf,
    "erfc": Math.erfc,
    "hypot": _hypot,
}
# in the result's dtype, whatever it is
SAME = {
    "add": Math.add,
    "sub": Math.sub,
    "mul": Math.mul,
    "maximum": Math.maximum,
    "minimum": Math.minimum,
    "fmax": lambda m, a, b: m.where(m.isnan(a), b, m.where(m.compare("lt", a, b), b, a)),
    "fmin": lambda m, a, b: m.where(m.isnan(a), b, m.where(m.compare("gt", a, b), b, a)),
    "neg": Math.neg,
    "abs": Math.abs,
    "sgn": Math.sign,
    "sign": Math.sign,
    "relu": lambda m, x: m.at_least(x, 0),
    "floor": lambda m, x: m.rounded("floor", x),
    "ceil": lambda m, x: m.rounded("ceil", x),
    "trunc": lambda m, x: m.rounded("trunc", x),
    "round": lambda m, x: m.rounded("roundeven", x),
    "bitwise_and": lambda m, a, b: m.bit("and", a, b),
    "bitwise_or": lambda m, a, b: m.bit("or", a, b),
    "bitwise_xor": lambda m, a, b: m.bit("xor", a, b),
    "bitwise_not": Math.invert,
    "copysign": Math.copysign,
}
# of operands promoted together, to bool
COMPARED = {
    name: (lambda how: lambda m, a, b: m.compare(how, a, b))(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
COMPARED |= {
    "isnan": Math.isnan,
    "isinf": lambda m, x: m.compare("eq", m.abs(x), m.like(x, float("inf"))),
    "signbit": lambda m, x: m.compare("lt", m.copysign(m.like(x, 1), x), m.like(x, 0)),
}
# of operands cast to bool
LOGICAL = {
    "logical_and": lambda m, a, b: m.bit("and", a, b),
    "logical_or": lambda m, a, b: m.bit("or", a, b),
    "logical_xor": lambda m, a, b: m.bit("xor", a, b),
    "logical_not": Math.invert,
}


def straight(name: str, function: Any) -> Handler:
    """The handler of an operation that is this function of its operands, in the result's dtype."""

    def handler(call: Call, *args: Any, **kwargs: Any) -> Array:
        if any(value is not None for value in kwargs.values()):
            raise Unsupported(f"arguments {kwargs}")
        second = call.low.factor if name == "mul" else call.low.met
        ins = [*(call.low.met(one, call.dtype) for one in args[:1]), *(second(one, call.dtype) for one in args[1:])]
        return call.low.compute(name, function, ins, call.dtype, call.shape)

    return handler


def _compared(name: str, function: Any) -> Handler:
    def handler(call: Call, *args: Any) -> Array:
        dtype = promoted(*args)
        inner = computed_in(dtype)
        kind = KINDS[inner]
        if name == "isinf" and not inner.is_floating_point:
            return call.low.compute(name, lambda m, x: m.like(x, 0), args, torch.bool, call.shape)
        if name == "signbit" and not inner.is_floating_point:
            raise Unsupported("of integers")

        def cast(math: Math, *values: Value) -> Value:
            return function(math, *(math.cast(value, kind) for value in values))

        ins = [call.low.array(call.low.met(one, dtype), inner) for one in args]
        return call.low.point(name, cast, ins, torch.bool, call.shape)

    return handler


def promoted(*args: Any) -> torch.dtype:
    """The dtype in which operands meet, by torch's rules."""
    metas = [
        torch.empty((1,) * len(a.shape), dtype=a.dtype, device="meta")
        if isinstance(a, Array)
        else actual(a, LENGTH_MARKS)
        for a in args
    ]
    return metas[0].dtype if len(metas) == 1 else torch.result_type(*metas)


HANDLERS |= {name: straight(name, function) for name, function in (FLOAT | SAME).items()}
HANDLERS |= {name: _compared(name, function) for name, function in COMPARED.items()}
HANDLERS |= {name: straight(name, function) for name, function in LOGICAL.items()}
