"""Functions of floats where there is no C library: what is done there for arguments far from 0 is done here."""

import itertools

from tensorloop.compiler.emitter.device.devices import Device
from tensorloop.compiler.emitter.ir.code import Code, Value
from tensorloop.compiler.emitter.ir.vector_math import FAR, Math

# 64 zeros, then the bits of 2 / pi behind the point: as many as the largest double needs.
TWO_OVER_PI = (
    *(0x0000000000000000, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561),
    *(0xB7246E3A424DD2E0, 0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41),
    *(0x3991D639835339F4, 0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7),
    *(0x4F463F669E5FEA2D, 0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB),
    *(0xF0CFBC209AF4361D, 0xA9E391615EE61B08),
)


class DeviceMath(Math):
    """Writes exp, sine, remainder and their like for single values of a device, which has no C library."""

    def __init__(self, code: Code, device: Device) -> None:
        super().__init__(code)
        self.device = device

    def inverse(self, b: Value) -> Value:
        """Returns 1 / b by Newton's method, without the branch of a division that takes any number.

        Behind a branch nothing else of the lane goes on, so that four gates of a cell would be one after the other.
        """
        r, one = self.device.reciprocal(self.code, b), self.like(b, 1)
        for _ in range(1 if b.kind == "float" else 2):  # each doubles the right bits: 23 of a float, of a double 20
            r = self.fma(r, self.fma(self.neg(b), r, one), r)
        return r

    def ratio(self, a: Value, b: Value) -> Value:
        """Returns a / b as a times 1 / b, what that misses of a put right."""
        r = self.inverse(b)
        q = self.mul(a, r)
        return self.fma(self.fma(self.neg(b), q, a), r, q)

    def quarter(self, x: Value) -> tuple[Value, Value]:
        """(r, n): x = n pi / 2 + r, however large x is; NaN of an infinity."""
        code = self.code
        r, n = super().quarter(x)
        far = self.compare("gt", self.abs(x), self.like(x, FAR))
        before, inside, after = code.block, code.name("far")[1:], code.name("near")[1:]
        code.line(f"br i1 {far.text}, label %{inside}, label %{after}")
        code.label(inside)
        exact, turns = self._far_quarter(self.cast(x, "double"))
        exact = self.cast(exact, x.kind)
        last = code.block
        code.line(f"br label %{after}")
        code.label(after)
        ends = [f"[ {a.text}, %{before} ], [ {b.text}, %{last} ]" for a, b in ((r, exact), (n, turns))]
        return code.op(f"phi {r.type} {ends[0]}", r.kind), code.op(f"phi i64 {ends[1]}", "i64")

    def beyond(self, name: str, x: Value, made: Value) -> Value:
        """Returns what was made: here it is right beyond FAR, too."""
        return made

    def fmod(self, x: Value, y: Value) -> Value:
        """Computes C's fmod exactly: takes away the divisor times falling powers of 2, a bit of the quotient each."""
        if x.kind != "double":  # what is left has no more digits than a float
            return self.cast(self.fmod(self.cast(x, "double"), self.cast(y, "double")), x.kind)
        code, a, b = self.code, self.abs(x), self.abs(y)
        gap = self.sub(self._exponent(a), self._exponent(b))
        third = code.op(f"sdiv i64 {gap.text}, 3", "i64")
        near = self.compare("lt", gap, self.like(gap, 0))
        third = self.where(near, self.like(gap, 0), third)
        rest = self.where(near, self.like(gap, 0), self.sub(gap, self.add(third, third)))
        # The same exponent as a, which a power alone might be too large for; halved so often it is b again. Each
        # difference is exact: it is of numbers less than a factor of two apart.
        scaled = self.mul(self.mul(self.mul(b, self._power(third)), self._power(third)), self._power(rest))
        turns = code.op(f"add i64 {gap.text}, 1", "i64").text
        with code.loop(0, turns, 1, [a, scaled]) as loop:
            left, part = loop.values
            fits = self.compare("ge", left, part)
            loop.carry([self.where(fits, self.sub(left, part), left), self.mul(part, self.like(part, 0.5))])
        made = self.copysign(loop.results[0], x)
        endless = self.compare("eq", a, self.like(a, float("inf")))
        none = code.binary("or", endless, self.compare("eq", b, self.like(b, 0)))
        none = code.binary("or", none, code.binary("or", self.isnan(a), self.isnan(b)))
        return self.where(none, self.like(x, float("nan")), made)

    def _exponent(self, a: Value) -> Value:
        """Returns the biased exponent of a double that is not negative; it goes on falling below the normal numbers."""
        low = self.compare("lt", a, self.like(a, 2.2250738585072014e-308))
        bits = self._bits(self.where(low, self.mul(a, self.like(a, 2.0**54)), a))
        found = self.bit("lshr", bits, self.like(bits, 52))
        return self.where(low, self.sub(found, self.like(found, 54)), found)

    def _far_quarter(self, x: Value) -> tuple[Value, Value]:
        """(r, n) of a double from 2^46 on: a window of 192 bits of 2 / pi times the 53 bits of x.

        x is m 2^e with a whole m, and of 2 / pi the bit behind the point with number j is worth 2^-j. Times x, those
        before j = e - 1 are whole numbers of four quarters, which turn nothing. What is left is a number of 192 bits,
        of which two are the quarter and the rest, as one number with a sign, the part of the next one.
        """
        code = self.code
        bits = self._bits(x)

        def op(text: str, kind: str = "i64") -> str:
            return code.op(text, kind).text

        fraction = op(f"and i64 {bits.text}, {2**52 - 1}")
        whole = op(f"or i64 {fraction}, {2**52}")
        exponent = op(f"and i64 {op(f'lshr i64 {bits.text}, 52')}, 2047")
        # The window begins at bit e - 1, that is 63 further in the table, and e is the exponent less 1075.
        start = op(f"sub i64 {exponent}, {1075 + 1 - 63}")
        word, shift = op(f"lshr i64 {start}, 6"), op(f"and i64 {start}, 63")
        code.declared["two_over_pi"] = _TABLE
        words = []
        for n in range(4):
            place = code.pointer("@two_over_pi", code.times(op(f"add i64 {word}, {n}"), 8))
            words.append(op(f"load i64, ptr {place}, align 8"))
        window = [op(f"call i64 @llvm.fshl.i64(i64 {a}, i64 {b}, i64 {shift})") for a, b in itertools.pairwise(words)]
        code.declare("llvm.fshl.i64", "i64", ["i64", "i64", "i64"])
        high, middle, low = window
        wide = op(f"zext i64 {whole} to i128")

        def times(part: str) -> str:
            return op(f"mul i128 {wide}, {op(f'zext i64 {part} to i128')}")

        def upper(number: str) -> str:
            return op(f"lshr i128 {number}, 64")

        last = times(low)
        second = op(f"add i128 {times(middle)}, {upper(last)}")
        top = op(f"trunc i128 {op(f'add i128 {times(high)}, {upper(second)}')} to i64")
        second, last = (op(f"trunc i128 {number} to i64") for number in (second, last))
        # The part of a quarter, from -1/2 on: a half and more belongs to the next quarter.
        part = op(f"call i64 @llvm.fshl.i64(i64 {top}, i64 {second}, i64 2)")
        rest = op(f"call i64 @llvm.fshl.i64(i64 {second}, i64 {last}, i64 2)")
        turns = op(f"add i64 {op(f'lshr i64 {top}, 62')}, {op(f'lshr i64 {part}, 63')}")
        coarse = code.op(f"sitofp i64 {part} to double", "double")
        fine = code.op(f"uitofp i64 {rest} to double", "double")
        quarters = self.fma(fine, self.like(fine, 2.0**-128), self.mul(coarse, self.like(coarse, 2.0**-64)))
        r = self.fma(
            quarters, self.like(x, 1.5707963267948966), self.mul(quarters, self.like(x, 6.123233995736766e-17))
        )
        minus = self.compare("lt", x, self.like(x, 0))
        n = Value(turns, "i64")
        r, n = self.where(minus, self.neg(r), r), self.where(minus, self.neg(n), n)
        infinite = self.compare("eq", self.abs(x), self.like(x, float("inf")))
        return self.where(infinite, self.like(x, float("nan")), r), n


_TABLE = (
    "@two_over_pi = internal constant [22 x i64] ["
    + ", ".join(f"i64 {word - 2**64 if word >> 63 else word}" for word in TWO_OVER_PI)
    + "], align 8"
)
