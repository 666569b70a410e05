"""Elementwise operations with special cases: division, remainder, powers, clamp, where, casts."""

from typing import Any

import torch

from tensorloop.compiler.emitter.ir.code import BITS, KINDS, Value
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import Call, computed_in
from tensorloop.compiler.emitter.lower.pointwise import handles, square
from tensorloop.compiler.step import Unsupported


@handles("div")
def div(call: Call, a: Any, b: Any, rounding_mode: str | None = None) -> Array:
    """A quotient; rounded down or towards zero where asked, as it must be of integers."""
    if not call.dtype.is_floating_point:
        assert rounding_mode is not None
        _refuse_zero(b, call.dtype)
        return call.low.compute(
            "div", lambda m, x, y: whole_quotient(m, x, y, rounding_mode), (a, b), call.dtype, call.shape
        )
    a, b = call.low.met(a, call.dtype), call.low.factor(b, call.dtype)
    if rounding_mode is None:
        return call.low.compute("div", Math.div, (a, b), call.dtype, call.shape)
    if rounding_mode == "floor":
        return call.low.compute("div", floor_quotient, (a, b), call.dtype, call.shape)
    many = isinstance(b, Array) and b.numel != 1

    def cut(m: Math, x: Value, y: Value) -> Value:  # of two bytes, a quotient by no number is rounded before it is cut
        quotient = m.div(x, y)
        return m.rounded("trunc", m.cast(m.cast(quotient, KINDS[call.dtype]), x.kind) if many else quotient)

    return call.low.compute("div", cut, (a, b), call.dtype, call.shape)


def _refuse_zero(b: Any, dtype: torch.dtype) -> None:
    """Refuses divisors that may be 0 as integers of a dtype (2**32 is, of 32 bits): torch raises where one is."""
    number = b.buffer.value if isinstance(b, Array) and b.buffer.value is not None else b
    if isinstance(number, Array) or not torch.tensor(number).to(dtype):
        raise Unsupported("of integers by what may be 0")


def whole_quotient(m: Math, x: Value, y: Value, mode: str) -> Value:
    """Divides integers; by 0 (refused before), and the smallest of all by -1, the instruction would end the process."""
    zero, one = m.like(y, 0), m.like(y, 1)
    minus = m.compare("eq", y, m.like(y, -1)) if y.kind != "u8" else m.like(m.compare("eq", y, y), 0)
    quotient = m.code.binary("udiv" if y.kind == "u8" else "sdiv", x, m.where(minus, one, y))
    quotient = m.where(minus, m.neg(x), quotient)
    if mode == "floor" and y.kind != "u8":
        rest = m.sub(x, m.mul(quotient, y))
        apart = m.compare("lt", m.bit("xor", rest, y), zero)
        down = m.code.binary("and", apart, m.compare("ne", rest, zero))
        quotient = m.sub(quotient, m.cast(down, y.kind))
    return quotient


@handles("remainder", "fmod")
def remainder(call: Call, a: Any, b: Any) -> Array:
    """The rest of a division, with the sign of b (remainder) or of a (fmod)."""
    mode = "floor" if call.name == "remainder" else "trunc"

    if not call.dtype.is_floating_point:
        _refuse_zero(b, call.dtype)

    def of(m: Math, x: Value, y: Value) -> Value:
        if not x.floating:
            return m.sub(x, m.mul(whole_quotient(m, x, y, mode), y))
        rest = m.fmod(x, y)
        return rest if mode == "trunc" else m.where(_other_sign(m, rest, y), m.add(rest, y), rest)

    a, b = call.low.met(a, call.dtype), call.low.met(b, call.dtype)
    return call.low.compute("remainder", of, (a, b), call.dtype, call.shape)


def _other_sign(m: Math, rest: Value, y: Value) -> Value:
    """Whether a rest is not 0, and has another sign than what was divided by."""
    zero = m.like(y, 0)
    differ = m.code.binary("xor", m.compare("lt", rest, zero), m.compare("lt", y, zero))
    return m.code.binary("and", differ, m.compare("ne", rest, zero))


def floor_quotient(m: Math, x: Value, y: Value) -> Value:
    """floor(x / y) of floats by the rest, as torch has it: 1.0 // 0.1 is 9, though 1.0 / 0.1 is rounded to 10."""
    zero, quotient = m.like(x, 0), m.div(x, y)
    rest = m.fmod(x, y)
    found = m.div(m.sub(x, rest), y)
    found = m.where(_other_sign(m, rest, y), m.sub(found, m.like(x, 1)), found)
    down = m.rounded("floor", found)
    down = m.where(m.compare("gt", m.sub(found, down), m.like(x, 0.5)), m.add(down, m.like(x, 1)), down)
    made = m.where(m.compare("eq", found, zero), m.copysign(zero, quotient), down)
    return m.where(m.compare("eq", y, zero), quotient, made)


@handles("pow")
def power(call: Call, a: Any, b: Any) -> Array:
    """Returns a to the b; small known powers are products."""
    known = {
        1: lambda m, x: x,
        2: square,
        3: lambda m, x: m.mul(m.mul(x, x), x),
    }
    floats = {
        0.5: Math.sqrt,
        -0.5: lambda m, x: m.div(m.like(x, 1), m.sqrt(x)),
        -1: lambda m, x: m.div(m.like(x, 1), x),
        -2: lambda m, x: m.div(m.like(x, 1), m.mul(x, x)),
    }
    if not isinstance(b, Array) and isinstance(a, Array):
        if call.dtype.is_floating_point:
            known |= floats
        if b in known:
            return call.low.compute("pow", known[b], (a,), call.dtype, call.shape)
    if not call.dtype.is_floating_point:
        raise Unsupported("of integers")
    a, b = call.low.met(a, call.dtype), call.low.met(b, call.dtype)
    return call.low.compute("pow", Math.power, (a, b), call.dtype, call.shape)


@handles("clamp", "clamp_min", "clamp_max")
def clamp(call: Call, x: Array, low: Any = None, high: Any = None, **named: Any) -> Array:
    """Keeps numbers between limits, each of which is optional."""
    low, high = named.get("min", low), named.get("max", high)
    if call.name == "clamp_max":
        low, high = None, low
    made = x
    if low is not None:
        made = call.low.compute("clamp", Math.maximum, (made, low), call.dtype, call.shape)
    return call.low.compute("clamp", Math.minimum, (made, high), call.dtype, call.shape) if high is not None else made


@handles("bitwise_left_shift", "bitwise_right_shift")
def shift(call: Call, a: Any, b: Any) -> Array:
    """Bits moved; by as many as there are, or less than none, all of them go, but the sign in a shift to the right."""
    name = "shl" if call.name == "bitwise_left_shift" else "ashr" if call.dtype.is_signed else "lshr"

    def shifted(m: Math, x: Value, by: Value) -> Value:
        last = m.like(by, BITS[by.kind] - 1)
        inside = m.code.compare("ule", by, last)
        made = m.bit(name, x, m.where(inside, by, last))
        return made if name == "ashr" else m.where(inside, made, m.like(x, 0))

    return call.low.compute("shift", shifted, (a, b), call.dtype, call.shape)


@handles("nextafter")
def next_after(call: Call, a: Any, b: Any) -> Array:
    """The number next to another."""
    if computed_in(call.dtype) is not call.dtype:
        raise Unsupported("of two-byte floats")
    return call.low.compute("nextafter", Math.next_after, (a, b), call.dtype, call.shape)


@handles("where")
def where(call: Call, condition: Array, a: Any, b: Any) -> Array:
    """Chooses a where the condition holds, else b."""
    kind = KINDS[call.dtype]

    def chosen(m: Math, c: Value, x: Value, y: Value) -> Value:
        return m.where(m.cast(c, "i1"), m.cast(x, kind), m.cast(y, kind))

    inner = computed_in(call.dtype)
    ins = [condition, call.low.array(a, inner), call.low.array(b, inner)]
    return call.low.point("where", chosen, ins, call.dtype, call.shape)


@handles("_to_copy")
def to(call: Call, x: Any, *args: Any, **kwargs: Any) -> Array:
    """A cast, of a number too; what stays as it is needs no copy, as nothing is changed in place."""
    return call.low.cast(call.low.array(x, call.dtype), call.dtype)


@handles("clone")
def same(call: Call, x: Array, **kwargs: Any) -> Array:
    """Gives the tensor itself: nothing is changed in place."""
    return x
