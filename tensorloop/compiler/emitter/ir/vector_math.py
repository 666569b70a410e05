"""Elementary functions on vectors, in plain instructions: nothing is called from outside.

Sources: the reductions and polynomials of Cephes and fdlibm; errors are a few units in the last place.
"""

from tensorloop.compiler.emitter.ir.arithmetic import Arithmetic
from tensorloop.compiler.emitter.ir.code import Value

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
_EXP32 = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]
_EXP64 = [1.6059043836821613e-10, 2.08767569878681e-09, 2.505210838544172e-08, 2.755731922398589e-07,
          2.7557319223985893e-06, 2.48015873015873e-05, 0.0001984126984126984, 0.001388888888888889,
          0.008333333333333333, 0.041666666666666664, 0.16666666666666666, 0.5]  # fmt: skip
_LOG64 = [1.479819860511658591e-1, 1.531383769920937332e-1, 1.818357216161805012e-1, 2.222219843214978396e-1,
          2.857142874366239149e-1, 3.999999999940941908e-1, 6.666666666666735130e-1]  # fmt: skip
_LOG32 = [0.24279078841, 0.28498786688, 0.40000972152, 0.66666662693]
_SIN32 = [-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1]
_COS32 = [2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2]
_SIN64 = [1.58969099521155010221e-10, -2.50507602534068634195e-8, 2.75573137070700676789e-6,
          -1.98412698298579493134e-4, 8.33333333332248946124e-3, -1.66666666666666324348e-1]  # fmt: skip
_COS64 = [-1.13596475577881948265e-11, 2.08757232129817482790e-9, -2.75573143513906633035e-7,
          2.48015872894767294178e-5, -1.38888888888741095749e-3, 4.16666666666666019037e-2]  # fmt: skip

_ATAN32 = [8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1]
_ATAN64_TOP = [-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1,
               -1.228866684490136173410e2, -6.485021904942025371773e1]  # fmt: skip
_ATAN64_BELOW = [1.0, 2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2,
                 4.853903996359136964868e2, 1.945506571482613964425e2]  # fmt: skip
# erf(x) / x in x squared below 1, and erfc(x) exp(x x) (1 + x) in (x - 2) / (x + 2) above: Chebyshev fits
_ERF32 = [
    -9.667044571486996e-06, 0.00011265959025606609, -0.0008484080405535107, 0.005221031807858023,
    -0.026865430727670243, 0.11283782495236845, -0.3761263846802871, 1.1283791670615435,
]  # fmt: skip
_ERF64 = [
    5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08, -1.6350312701054695e-07,
    1.6461000484121368e-06, -1.4925595266831182e-05, 0.0001205533111164271, -0.000854832698083379,
    0.0052239776248180145, -0.026866170645076792, 0.11283791670954879, -0.3761263890318375,
    1.1283791670955126,
]  # fmt: skip
_ERFC32 = [
    0.0001101488386888412, -4.0479201283535504e-05, -0.0007654027810175054, 0.000134577964865372,
    0.0039520745878113385, -0.0005190404977484936, -0.025244707091704878, 0.04253644444508374,
    0.03781393110343337, -0.2599748385382894, 0.7661870287703769,
]  # fmt: skip
_ERFC64 = [
    -3.4212724964995674e-07, 1.9452436277577345e-06, -3.738694308982512e-06, 2.107092566185513e-06,
    1.0137595794604019e-07, 1.6599398862676508e-06, 2.950740342218689e-06, -4.8875940715331765e-06,
    -1.7606699934732126e-05, -7.710276554432033e-06, 6.173579124079435e-05, 0.00011694251523789261,
    -0.0001399898769475149, -0.0007066289314350391, 0.0001446809558132274, 0.003937755304489943,
    -0.0005182766709832682, -0.025243554293725826, 0.04253634950884578, 0.0378138983135877,
    -0.2599748369998522, 0.7661870289315172,
]  # fmt: skip


FAR = 1e14  # where a quarter turn in two doubles begins to say too little


class Math(Arithmetic):
    """Elementary functions of floats."""

    # exponentials

    def _reduced(self, x: Value) -> tuple[Value, Value]:
        """(r, n) with x = n ln 2 + r, n as an integer; x must lie within the range of exp."""
        small = x.kind == "float"
        magic = self.like(x, 1.5 * 2.0 ** (23 if small else 52))  # the sum's last bits are the integer
        high, low = (0.693359375, -2.12194440e-4) if small else (6.93147180369123816490e-1, 1.90821492927058770002e-10)
        shifted = self.fma(x, self.like(x, LOG2E), magic)
        n = self.sub(shifted, magic)
        r = self.fma(n, self.like(x, -low), self.fma(n, self.like(x, -high), x))
        return r, self.sub(self._bits(shifted), self._bits(magic))

    def _halves(self, n: Value) -> tuple[Value, Value]:
        """Two powers of 2 whose product is 2^n, where that itself may be out of range."""
        half = self.bit("ashr", n, self.like(n, 1))
        return self._power(half), self._power(self.sub(n, half))

    def _exp_minus_one(self, r: Value) -> Value:
        return self.fma(self.poly(r, _EXP32 if r.kind == "float" else _EXP64), self.mul(r, r), r)

    def exp(self, x: Value) -> Value:
        """e to the x."""
        small = x.kind == "float"
        x = self.at_least(self.at_most(x, 89.0 if small else 710.0), -105.0 if small else -746.0)
        r, n = self._reduced(x)
        first, second = self._halves(n)
        return self.mul(self.mul(self.add(self._exp_minus_one(r), self.like(x, 1)), first), second)

    def expm1(self, x: Value) -> Value:
        """exp(x) - 1."""
        small = x.kind == "float"
        limited = self.at_least(self.at_most(x, 89.0 if small else 710.0), -20.0 if small else -40.0)
        r, n = self._reduced(limited)
        first, second = self._halves(n)
        inner = self.sub(first, self.inverse(second))
        made = self.mul(self.fma(self._exp_minus_one(r), first, inner), second)
        return self.where(self.compare("eq", x, self.like(x, 0)), x, made)

    def tanh(self, x: Value) -> Value:
        """From expm1: t / (t + 2)."""
        edge = 9.2 if x.kind == "float" else 19.5
        limited = self.at_least(self.at_most(x, edge), -edge)
        r, n = self._reduced(self.add(limited, limited))
        power = self._power(n)
        t = self.fma(self._exp_minus_one(r), power, self.sub(power, self.like(x, 1)))
        return self.ratio(t, self.add(t, self.like(x, 2)))

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + exp(-x)); 0 where that is no normal number."""
        small, one = x.kind == "float", self.like(x, 1)
        lowest = -87.3 if small else -708.3
        r, n = self._reduced(self.neg(self.at_least(self.at_most(x, -lowest), lowest)))
        power = self._power(n)
        made = self.inverse(self.add(one, self.fma(self._exp_minus_one(r), power, power)))
        return self.where(self.compare("lt", x, self.like(x, lowest)), self.like(x, 0), made)

    # logarithms

    def _split(self, x: Value) -> tuple[Value, Value]:
        """(k, f): a positive x = 2^k (1 + f), 1 + f around 1."""
        small = x.kind == "float"
        mantissa, tiny = (23, 1.1754943508222875e-38) if small else (52, 2.2250738585072014e-308)
        subnormal = self.compare("lt", x, self.like(x, tiny))
        x = self.where(subnormal, self.mul(x, self.like(x, 2.0**mantissa)), x)
        bits = self._bits(x)
        # from the bits of sqrt(1/2) on, the exponent counts up
        start = self.like(bits, 0x3F3504F3 if small else 0x3FE6A09E667F3BCD)
        above = self.sub(bits, start)
        whole = self.bit("ashr", above, self.like(bits, mantissa))
        rest = self.add(self.bit("and", above, self.like(bits, (1 << mantissa) - 1)), start)
        k = self.cast(whole, x.kind) if small else self._small_integer(whole)
        k = self.sub(k, self.where(subnormal, self.like(k, mantissa), self.like(k, 0)))
        return k, self.sub(self._float(rest), self.like(x, 1))

    def _small_integer(self, n: Value) -> Value:
        """Returns an integer as a double; there is no instruction for vectors of i64 before AVX-512."""
        magic = self.like(n, 0x4338000000000000)
        return self.sub(self._float(self.add(n, magic)), self.code.constant("double", 6755399441055744.0, n.width))

    def _log_parts(self, x: Value) -> tuple[Value, Value]:
        """(k ln2's high part, the rest): their sum is log x for 0 < x < inf."""
        small = x.kind == "float"
        k, f = self._split(x)
        high, low = (
            (0.69313812256, 9.0580006145e-6) if small else (6.93147180369123816490e-1, 1.90821492927058770002e-10)
        )
        s = self.ratio(f, self.add(f, self.like(x, 2)))
        z = self.mul(s, s)
        r = self.mul(z, self.poly(z, _LOG32 if small else _LOG64))
        half = self.mul(self.mul(self.like(x, 0.5), f), f)
        inner = self.fma(s, self.add(half, r), self.mul(k, self.like(x, low)))
        return self.mul(k, self.like(x, high)), self.sub(f, self.sub(half, inner))

    def log(self, x: Value) -> Value:
        """The natural logarithm: -inf at 0, NaN below."""
        high, rest = self._log_parts(x)
        zero, infinity = self.like(x, 0), self.like(x, float("inf"))
        made = self.where(self.compare("lt", x, infinity), self.add(high, rest), x)
        made = self.where(self.compare("eq", x, zero), self.neg(infinity), made)
        return self.where(self.compare("lt", x, zero), self.like(x, float("nan")), made)

    def log1p(self, x: Value) -> Value:
        """log(1 + x), what 1 + x loses put right."""
        one = self.like(x, 1)
        u = self.add(one, x)
        lost = self.div(self.sub(x, self.sub(u, one)), u)
        usual = self.code.binary(
            "and", self.compare("gt", u, self.like(x, 0)), self.compare("lt", u, self.like(x, float("inf")))
        )
        made = self.add(self.log(u), self.where(usual, lost, self.like(x, 0)))
        return self.where(self.compare("eq", x, self.like(x, 0)), x, made)

    def power(self, x: Value, y: Value) -> Value:
        """x to the y, signs and the ends as C has them."""
        if x.kind == "float":
            return self.cast(self.power(self.cast(x, "double"), self.cast(y, "double")), "float")
        code, zero, one, infinity = self.code, self.like(x, 0), self.like(x, 1), self.like(x, float("inf"))
        base = self.abs(x)
        a, b = self._log_parts(base)
        high = self.add(a, b)
        low = self.add(self.sub(a, high), b)
        extreme = code.binary("or", self.compare("eq", base, zero), self.compare("eq", base, infinity))
        ends = self.where(self.compare("eq", base, zero), self.neg(infinity), infinity)
        high, low = self.where(extreme, ends, high), self.where(extreme, zero, low)
        product = self.mul(y, high)
        error = self.fma(y, low, self.fma(y, high, self.neg(product)))
        grown = self.exp(product)
        finite = self.compare("lt", self.abs(product), self.like(x, 800.0))
        finite = code.binary("and", finite, self.compare("lt", grown, infinity))
        grown = self.where(finite, self.fma(grown, error, grown), grown)
        whole = self.compare("eq", self.rounded("trunc", y), y)
        half = self.mul(y, self.like(y, 0.5))
        odd = code.binary("and", whole, self.compare("ne", self.rounded("trunc", half), half))
        negative = code.compare("slt", self._bits(x), self.code.constant("i64", 0, x.width))
        made = self.where(code.binary("and", negative, odd), self.neg(grown), grown)
        below = code.binary("and", self.compare("lt", x, zero), self.compare("gt", x, self.neg(infinity)))
        infinite = self.compare("eq", self.abs(y), infinity)
        imaginary = code.binary("and", below, code.binary("and", self.invert(whole), self.invert(infinite)))
        made = self.where(imaginary, self.like(x, float("nan")), made)
        made = self.where(code.binary("or", self.isnan(x), self.isnan(y)), self.like(x, float("nan")), made)
        ones = code.binary("or", self.compare("eq", x, one), self.compare("eq", y, zero))
        ones = code.binary("or", ones, code.binary("and", infinite, self.compare("eq", base, one)))
        return self.where(ones, one, made)

    # circles

    def quarter(self, x: Value) -> tuple[Value, Value]:
        """(r, n): x = n pi / 2 + r, in double; what is left of an x beyond FAR has no meaning."""
        wide = self.cast(x, "double")
        magic = self.like(wide, 1.5 * 2.0**52)
        shifted = self.fma(wide, self.like(wide, 0.6366197723675814), magic)
        n = self.sub(shifted, magic)
        r = self.fma(n, self.like(wide, -1.5707963267948966), wide)
        r = self.fma(n, self.like(wide, -6.123233995736766e-17), r)
        return self.cast(r, x.kind), self.sub(self._bits(shifted), self._bits(magic))

    def _sine(self, x: Value, turn: int) -> Value:
        r, n = self.quarter(x)
        n = self.add(n, self.like(n, turn))
        small, one = x.kind == "float", self.like(x, 1)
        z = self.mul(r, r)
        sine = self.fma(self.mul(self.poly(z, _SIN32 if small else _SIN64), z), r, r)
        half = self.mul(z, self.like(x, 0.5))
        w = self.sub(one, half)  # 1 - z/2, and what this loses
        rest = self.fma(self.mul(z, z), self.poly(z, _COS32 if small else _COS64), self.sub(self.sub(one, w), half))
        cosine = self.add(w, rest)
        swapped = self.compare("ne", self.bit("and", n, self.like(n, 1)), self.like(n, 0))
        made = self.where(swapped, cosine, sine)
        minus = self.compare("ne", self.bit("and", n, self.like(n, 2)), self.like(n, 0))
        return self.where(minus, self.neg(made), made)

    def sin(self, x: Value) -> Value:
        """The sine."""
        return self.beyond("llvm.sin", x, self._sine(x, 0))

    def cos(self, x: Value) -> Value:
        """The cosine."""
        return self.beyond("llvm.cos", x, self._sine(x, 1))

    def beyond(self, name: str, x: Value, made: Value) -> Value:
        """`made` and, in lanes beyond FAR, what the C library says, which knows enough digits of pi."""
        code, far = self.code, self.compare("gt", self.abs(x), self.like(x, FAR))
        some = far
        if far.width > 1:
            bits = code.op(f"bitcast {far.type} {far.text} to i{far.width}", f"i{far.width}")
            some = code.op(f"icmp ne i{far.width} {bits.text}, 0", "i1")
        before, inside, after = code.block, code.name("far")[1:], code.name("near")[1:]
        code.line(f"br i1 {some.text}, label %{inside}, label %{after}")
        code.label(inside)
        known = made
        for lane in range(x.width):
            one = code.call(name, x if x.width == 1 else code.extract(x, lane))
            text = f"insertelement {made.type} {known.text}, {one.type} {one.text}, i64 {lane}"
            known = one if x.width == 1 else code.op(text, made.kind, made.width)
        chosen = self.where(far, known, made)
        last = code.block
        code.line(f"br label %{after}")
        code.label(after)
        ends = f"[ {made.text}, %{before} ], [ {chosen.text}, %{last} ]"
        return code.op(f"phi {made.type} {ends}", made.kind, made.width)

    def atan(self, x: Value) -> Value:
        """The angle of a tangent."""
        small, one, a = x.kind == "float", self.like(x, 1), self.abs(x)
        steep = self.compare("gt", a, self.like(x, 2.414213562373095))
        middle = self.compare("gt", a, self.like(x, 0.4142135623730950 if small else 0.66))
        shifted = self.div(self.sub(a, one), self.add(a, one))
        r = self.where(steep, self.neg(self.div(one, a)), self.where(middle, shifted, a))
        z = self.mul(r, r)
        ratio = self.poly(z, _ATAN32) if small else self.div(self.poly(z, _ATAN64_TOP), self.poly(z, _ATAN64_BELOW))
        bent = self.fma(self.mul(z, ratio), r, r)
        zero, low = self.like(x, 0), 6.123233995736765886130e-17
        high = self.where(
            steep, self.like(x, 1.5707963267948966), self.where(middle, self.like(x, 0.7853981633974483), zero)
        )
        rest = self.where(steep, self.like(x, low), self.where(middle, self.like(x, low / 2), zero))
        return self.copysign(self.add(high, bent if small else self.add(bent, rest)), x)

    def atan2(self, y: Value, x: Value) -> Value:
        """The angle of a point."""
        a, b, pi = self.abs(y), self.abs(x), 3.141592653589793
        both = self.code.binary("and", *(self.compare("eq", v, self.like(v, float("inf"))) for v in (a, b)))
        none = self.code.binary("and", *(self.compare("eq", v, self.like(v, 0)) for v in (a, b)))
        ratio = self.where(both, self.like(x, 1), self.where(none, self.like(x, 0), self.div(a, b)))
        angle = self.atan(ratio)
        left = self.compare("lt", self.copysign(self.like(x, 1), x), self.like(x, 0))
        return self.copysign(self.where(left, self.sub(self.like(x, pi), angle), angle), y)

    # the normal distribution

    def _erf_near(self, x: Value) -> Value:
        return self.mul(x, self.poly(self.mul(x, x), _ERF32 if x.kind == "float" else _ERF64))

    def _erfc_far(self, a: Value) -> Value:
        """erfc of 1 and more."""
        a = self.at_most(a, 30.0)
        two, square = self.like(a, 2), self.mul(a, a)
        lost = self.fma(a, a, self.neg(square))  # what the square was rounded by
        t = self.div(self.sub(a, two), self.add(a, two))
        scaled = self.div(self.poly(t, _ERFC32 if a.kind == "float" else _ERFC64), self.add(a, self.like(a, 1)))
        power = self.exp(self.neg(square))
        return self.mul(self.sub(power, self.mul(power, lost)), scaled)

    def erf(self, x: Value) -> Value:
        """The error function."""
        a, one = self.abs(x), self.like(x, 1)
        far = self.copysign(self.sub(one, self._erfc_far(a)), x)
        return self.where(self.compare("lt", a, one), self._erf_near(x), far)

    def erfc(self, x: Value) -> Value:
        """1 - erf(x), exact where that is small."""
        a, one = self.abs(x), self.like(x, 1)
        far = self._erfc_far(a)
        far = self.where(self.compare("lt", x, self.like(x, 0)), self.sub(self.like(x, 2), far), far)
        return self.where(self.compare("lt", a, one), self.sub(one, self._erf_near(x)), far)
