"""Arithmetic on vectors: sums and products, comparisons, casts, the bits of floats."""

from collections.abc import Sequence

from tensorloop.compiler.emitter.ir.code import BITS, FLOATS, Code, Value


class Arithmetic:
    """Functions of values of one width; operands are of one kind unless said."""

    def __init__(self, code: Code) -> None:
        self.code = code

    # the ground

    def like(self, a: Value, number: float) -> Value:
        """A number in a's kind and width."""
        return self.code.constant(a.kind, number, a.width)

    def add(self, a: Value, b: Value) -> Value:
        """Returns a + b; of bools a or b."""
        return self.code.binary("or" if a.kind == "i1" else "fadd" if a.floating else "add", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """Returns a - b."""
        return self.code.binary("fsub" if a.floating else "sub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """Returns a b; of bools a and b."""
        return self.code.binary("and" if a.kind == "i1" else "fmul" if a.floating else "mul", a, b)

    def div(self, a: Value, b: Value) -> Value:
        """Returns a / b of floats."""
        return self.code.binary("fdiv", a, b)

    def ratio(self, a: Value, b: Value) -> Value:
        """Returns a / b where b, 1 / b and a / b are normal numbers or NaN, or a is 0."""
        return self.div(a, b)

    def inverse(self, b: Value) -> Value:
        """Returns 1 / b where both are normal numbers or NaN."""
        return self.div(self.like(b, 1), b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a b + c, rounded once."""
        return self.code.call("llvm.fma", a, b, c)

    def neg(self, a: Value) -> Value:
        """Returns -a."""
        if a.floating:
            return self.code.op(f"fneg {a.type} {a.text}", a.kind, a.width)
        return self.sub(self.like(a, 0), a)

    def bit(self, name: str, a: Value, b: Value) -> Value:
        """Writes a bitwise operation: and, or, xor, shl, lshr, ashr."""
        return self.code.binary(name, a, b)

    def invert(self, a: Value) -> Value:
        """Turns every bit the other way."""
        return self.code.binary("xor", a, self.like(a, 1 if a.kind == "i1" else -1))

    def compare(self, how: str, a: Value, b: Value) -> Value:
        """Compares by eq, ne, lt, le, gt or ge; with NaN only ne holds."""
        if a.floating:
            return self.code.compare("une" if how == "ne" else f"o{how}", a, b)
        signed = a.kind not in ("u8", "i1")
        return self.code.compare(how if how in ("eq", "ne") else ("s" if signed else "u") + how, a, b)

    def isnan(self, a: Value) -> Value:
        """Whether a is NaN."""
        return self.code.compare("uno", a, a) if a.floating else self.code.constant("i1", 0, a.width)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """Returns a where the condition holds, else b."""
        return self.code.select(condition, a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger, NaN if either is."""
        larger = self.where(self.compare("gt", a, b), a, b)
        return self.where(self.isnan(a), a, larger) if a.floating else larger

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller, NaN if either is."""
        smaller = self.where(self.compare("lt", a, b), a, b)
        return self.where(self.isnan(a), a, smaller) if a.floating else smaller

    def at_most(self, a: Value, number: float) -> Value:
        """Returns min(a, number), NaN kept."""
        limit = self.like(a, number)
        return self.where(self.compare("gt", a, limit), limit, a)

    def at_least(self, a: Value, number: float) -> Value:
        """Returns max(a, number), NaN kept."""
        limit = self.like(a, number)
        return self.where(self.compare("lt", a, limit), limit, a)

    def cast(self, a: Value, kind: str) -> Value:
        """Returns a in another kind, as torch's `to`; NaN and what does not fit may become any integer."""
        code = self.code
        if a.kind == kind:
            return a
        if a.kind == "half" and kind not in FLOATS:
            return self.cast(self.cast(a, "float"), kind)
        if kind == "i1":
            return (
                code.compare("une" if a.floating else "ne", a, self.like(self._wide(a), 0))
                if a.kind != "bfloat"
                else (self.cast(self._wide(a), kind))
            )
        if a.kind == "bfloat":
            return self.cast(self._wide(a), kind)
        if kind == "bfloat":
            return self._to_bfloat(self.cast(a, "float"))
        if a.kind == "double" and kind == "half":  # torch rounds twice too; at once is a call of a library
            return self.cast(self.cast(a, "float"), kind)
        if a.floating and kind in FLOATS:
            return code.convert("fpext" if BITS[kind] > BITS[a.kind] else "fptrunc", a, kind)
        if a.floating:  # through 64 bits and saturating: what is out of range would be poison
            return self.cast(self._to_integer(a), kind)
        unsigned = a.kind in ("i1", "u8")
        if kind in FLOATS:
            return code.convert("uitofp" if unsigned else "sitofp", a, kind)
        if BITS[kind] == BITS[a.kind]:
            return a._replace(kind=kind)
        return code.convert("trunc" if BITS[kind] < BITS[a.kind] else "zext" if unsigned else "sext", a, kind)

    def _wide(self, a: Value) -> Value:
        if a.kind != "bfloat":
            return a
        shifted = self.code.convert("zext", a._replace(kind="i16"), "i32")
        return self.code.convert("bitcast", self.bit("shl", shifted, self.like(shifted, 16)), "float")

    def _to_bfloat(self, a: Value) -> Value:
        """Rounds a float to even in its upper half; NaN stays NaN."""
        bits = self.code.convert("bitcast", a, "i32")
        odd = self.bit("and", self.bit("lshr", bits, self.like(bits, 16)), self.like(bits, 1))
        rounded = self.add(self.add(bits, odd), self.like(bits, 0x7FFF))
        rounded = self.where(self.isnan(a), self.like(bits, 0x7FC00000), rounded)
        return self.code.convert("trunc", self.bit("lshr", rounded, self.like(bits, 16)), "bfloat")

    def _to_integer(self, a: Value) -> Value:
        known = self.where(self.isnan(a), self.like(a, 0), a)
        limited = self.at_least(self.at_most(known, 9.223371487098962e18), -9.223371487098962e18)
        return self.code.convert("fptosi", limited, "i64")

    def poly(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Returns a polynomial of x, the highest power's coefficient first."""
        total = self.like(x, coefficients[0])
        for number in coefficients[1:]:
            total = self.fma(total, x, self.like(x, number))
        return total

    # bits of floats

    def _bits(self, a: Value) -> Value:
        return self.code.convert("bitcast", a, "i32" if a.kind == "float" else "i64")

    def _float(self, bits: Value) -> Value:
        return self.code.convert("bitcast", bits, "float" if bits.kind == "i32" else "double")

    def abs(self, a: Value) -> Value:
        """Returns |a|."""
        if a.floating:
            return self.code.call("llvm.fabs", a)
        return a if a.kind in ("u8", "i1") else self.where(self.compare("lt", a, self.like(a, 0)), self.neg(a), a)

    def copysign(self, a: Value, sign: Value) -> Value:
        """Returns |a| with the sign of another."""
        return self.code.call("llvm.copysign", a, sign)

    def next_after(self, a: Value, b: Value) -> Value:
        """The number next to a, on b's side."""
        bits, zero = self._bits(a), self.like(a, 0)
        grows = self.code.binary("xor", self.compare("lt", a, b), self.compare("lt", a, zero))
        step = self.where(grows, self.like(bits, 1), self.like(bits, -1))
        made = self._float(self.add(bits, step))
        made = self.where(self.compare("eq", a, zero), self.copysign(self._float(self.like(bits, 1)), b), made)
        none = self.code.binary("or", self.isnan(a), self.isnan(b))
        return self.where(self.compare("eq", a, b), b, self.where(none, self.add(a, b), made))

    def sign(self, a: Value) -> Value:
        """Returns -1, 0 or 1, and 0 for NaN."""
        zero = self.like(a, 0)
        up = self.cast(self.compare("gt", a, zero), a.kind)
        return up if a.kind in ("u8", "i1") else self.sub(up, self.cast(self.compare("lt", a, zero), a.kind))

    def sqrt(self, a: Value) -> Value:
        """The square root."""
        return self.code.call("llvm.sqrt", a)

    def fmod(self, x: Value, y: Value) -> Value:
        """Returns the remainder as C's fmod does, which is exact: a call for each element."""
        return self.code.binary("frem", x, y)

    def rounded(self, name: str, a: Value) -> Value:
        """Rounds to a whole number: floor, ceil, trunc, or roundeven as `nearbyint`."""
        return self.code.call(f"llvm.{name}", a) if a.floating else a

    def _power(self, n: Value) -> Value:
        """Returns 2 to an integer in the range of normal numbers."""
        bias, shift = (127, 23) if n.kind == "i32" else (1023, 52)
        return self._float(self.bit("shl", self.add(n, self.like(n, bias)), self.like(n, shift)))
