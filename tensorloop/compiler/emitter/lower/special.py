"""Special functions of one number: gamma's logarithm and its derivatives, Bessel's, the normal distribution's inverse.

All are computed in double, whatever the dtype is. Where a series or an asymptotic expansion is short, its coefficients
follow from a formula; the others are fits in Chebyshev's polynomials, in a variable between -1 and 1.
"""

import math
from collections.abc import Callable

from tensorloop.compiler.emitter.ir.code import Value
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import Call
from tensorloop.compiler.emitter.lower.pointwise import HANDLERS, handles, straight
from tensorloop.compiler.step import Unsupported

_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510]  # B2, B4 ...
# log gamma(x) / (x - 1) in 2 x - 2, and log gamma(x) / (x - 2) in 2 x - 4
_GAMMA_AT_1 = [
    1.7378792315914402e-09, -3.363559408638273e-09, -5.211705188297646e-09, 9.209700135507925e-09,
    1.9048640112066067e-08, -3.484637781635018e-08, 2.2503569604917574e-09, -1.3369050270787026e-08,
    1.1339892029827825e-07, -2.288135010031852e-07, 4.121921067571674e-07, -8.806349918259239e-07,
    1.9127014915305183e-06, -4.0762781977342775e-06, 8.718134345421905e-06, -1.8780268965110512e-05,
    4.070049540330045e-05, -8.882269286509013e-05, 0.00019550669728001717, -0.0004348994238559354,
    0.0009805442982990572, -0.002250779640977753, 0.005298661780901225, -0.01296159693913534,
    0.033822601053479576, -0.1001714085966353, 0.41123351671205655, -0.5772156649015329,
]  # fmt: skip
_GAMMA_AT_2 = [
    -5.117684453811745e-13, 2.1270762170785405e-12, -6.566215046625873e-12, 2.8075860826633894e-11,
    -1.2481294697143873e-10, 5.352455971471404e-10, -2.3043102744274226e-09, 1.001249236957858e-08,
    -4.387339030049162e-08, 1.9425327031438992e-07, -8.716982449081134e-07, 3.981793088659667e-06,
    -1.8636779875052926e-05, 9.032844784489912e-05, -0.000461596939291756, 0.002572601053472542,
    -0.016838075263299536, 0.16123351671205663, 0.42278433509846713,
]  # fmt: skip
# sqrt(x) exp(-x) I(x) from 8 on, in 16 / x - 1: of order 0, of order 1
_BESSEL = ([
    -6.067631570603006e-11, -2.0260604287413626e-11, 4.577087631643623e-10, 1.5279202694981569e-10,
    -1.618980683624682e-09, -5.715843864202709e-10, 3.6379546359011143e-09, 1.5200816953924232e-09,
    -5.95356943826489e-09, -3.505966530879332e-09, 7.430464650325426e-09, 7.552583062123384e-09,
    -5.404771567579958e-09, -1.340891754008974e-08, -6.747657956107524e-09, 7.554691881248808e-09,
    2.1548377974791598e-08, 3.932584334552952e-08, 8.872219737904054e-08, 2.9735985885673923e-07,
    1.4838475658279249e-06, 1.1143033790932038e-05, 0.0001362160743919305, 0.0033605519836678614,
    0.4021765094450081,
], [
    6.305965197150057e-11, 1.8515118828852956e-11, -4.758818838703853e-10, -1.4011625179770627e-10,
    1.6848984479705146e-09, 5.295625441161261e-10, -3.794670896208339e-09, -1.4387250533041013e-09,
    6.242741219786445e-09, 3.4262341490077958e-09, -7.888351507862078e-09, -7.64239413436356e-09,
    5.974437608040264e-09, 1.4034238782067183e-08, 6.734464815301592e-09, -8.427766093735185e-09,
    -2.337392820814264e-08, -4.312917729178349e-08, -1.0001288294864884e-07, -3.483855761044295e-07,
    -1.8349101326980946e-06, -1.5038547200567216e-05, -0.00021923576383388928, -0.009749577193235737,
    0.38939845902587233,
])  # fmt: skip

Function = Callable[[Math, Value], Value]


def _of_doubles(function: Function) -> Function:
    return lambda m, x: m.cast(function(m, m.cast(x, "double")), x.kind)


def _half_turns(m: Math, x: Value) -> Value:
    """Returns x less the nearest whole number, of size 1/2 at most: sin(pi x) has the size of sin(pi times it)."""
    return m.sub(x, m.rounded("roundeven", x))


def _lgamma(m: Math, x: Value) -> Value:
    """log |gamma(x)|: below 1/2 from the value at 1 - x."""
    one = m.like(x, 1)
    below = m.compare("lt", x, m.like(x, 0.5))
    a = m.where(below, m.sub(one, x), x)
    product, z = one, a  # gamma(a) is the product times gamma(z), where z lies between 1.5 and 2.5
    for k in range(1, 7):
        next_z = m.sub(a, m.like(x, k))
        more = m.compare("ge", next_z, m.like(x, 1.5))
        product = m.where(more, m.mul(product, next_z), product)
        z = m.where(more, next_z, z)
    large = m.compare("ge", a, m.like(x, 8))
    log = m.log(m.where(large, a, product))
    around_1, around_2 = m.sub(a, one), m.sub(z, m.like(x, 2))
    near_1 = m.mul(around_1, m.poly(m.add(around_1, around_1), _GAMMA_AT_1))
    near_2 = m.fma(around_2, m.poly(m.add(around_2, around_2), _GAMMA_AT_2), log)
    # Stirling's: the last of these terms is the first that is less than a rounding error at 8
    terms = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)][::-1]
    inverse = m.div(one, a)
    rest = m.fma(m.poly(m.mul(inverse, inverse), terms), inverse, m.like(x, 0.5 * math.log(2 * math.pi) - 0.5))
    far = m.fma(m.sub(a, m.like(x, 0.5)), m.sub(log, one), rest)
    made = m.where(large, far, m.where(m.compare("lt", a, m.like(x, 1.5)), near_1, near_2))
    sine = m.abs(m.sin(m.mul(m.like(x, math.pi), _half_turns(m, x))))
    made = m.where(below, m.sub(m.sub(m.like(x, math.log(math.pi)), m.log(sine)), made), made)
    return m.where(m.compare("eq", m.abs(x), m.like(x, math.inf)), m.like(x, math.inf), made)


def _raised(m: Math, x: Value, least: int, term: Function) -> tuple[Value, Value]:
    """(x and as many ones that it is `least`, the sum of the terms at all numbers on the way), from positive x."""
    total = m.like(x, 0)
    for _ in range(least):
        more = m.compare("lt", x, m.like(x, least))
        total = m.where(more, m.add(total, term(m, x)), total)
        x = m.where(more, m.add(x, m.like(x, 1)), x)
    return x, total


def _digamma(m: Math, x: Value) -> Value:
    """The derivative of log gamma: of negative numbers from the value at 1 - x, NaN where they are whole."""
    zero, one = m.like(x, 0), m.like(x, 1)
    below = m.compare("lt", x, zero)
    a, sum_ = _raised(m, m.where(below, m.sub(one, x), x), 10, lambda m, x: m.div(one, x))
    square = m.div(one, m.mul(a, a))
    terms = [b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)][::-1]
    rest = m.fma(m.poly(square, terms), square, m.div(m.like(x, 0.5), a))
    made = m.sub(m.sub(m.log(a), rest), sum_)
    turn = m.mul(m.like(x, math.pi), _half_turns(m, x))
    reflected = m.sub(made, m.div(m.mul(m.like(x, math.pi), m.cos(turn)), m.sin(turn)))
    reflected = m.where(m.compare("eq", turn, zero), m.like(x, math.nan), reflected)
    made = m.where(below, reflected, made)
    return m.where(m.compare("eq", x, zero), m.copysign(m.like(x, math.inf), m.neg(x)), made)


def _trigamma(m: Math, x: Value) -> Value:
    """The second derivative of log gamma: below 1/2 from the value at 1 - x."""
    one = m.like(x, 1)
    below = m.compare("lt", x, m.like(x, 0.5))

    def term(m: Math, x: Value) -> Value:
        return m.div(one, m.mul(x, x))

    a, sum_ = _raised(m, m.where(below, m.sub(one, x), x), 10, term)
    inverse = m.div(one, a)
    square = m.mul(inverse, inverse)
    series = m.fma(m.poly(square, _BERNOULLI[::-1]), m.mul(square, inverse), m.mul(square, m.like(x, 0.5)))
    made = m.add(m.add(series, inverse), sum_)
    sine = m.sin(m.mul(m.like(x, math.pi), _half_turns(m, x)))
    turned = m.div(m.like(x, math.pi), sine)
    return m.where(below, m.sub(m.mul(turned, turned), made), made)


@handles("polygamma")
def polygamma(call: Call, n: int, x: object) -> object:
    """Derivatives of digamma: itself, and the first."""
    if n > 1:
        raise Unsupported(f"of order {n}")
    function = _of_doubles(_trigamma if n else _digamma)
    return call.low.compute("polygamma", function, (x,), call.dtype, call.shape)


def _bessel(order: int, scaled: bool) -> Function:
    """I(x), or exp(-|x|) I(x): below 8 by its series, whose terms are positive."""
    series = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(26)][::-1]

    def of(m: Math, x: Value) -> Value:
        a = m.abs(x)
        half = m.mul(x, m.like(x, 0.5))
        near = m.poly(m.mul(half, half), series)
        near = m.mul(near, half) if order else near
        t = m.sub(m.div(m.like(x, 16), a), m.like(x, 1))
        far = m.div(m.poly(t, _BESSEL[order]), m.sqrt(a))
        far = m.copysign(far, x) if order else far
        close = m.compare("lt", a, m.like(x, 8))
        if scaled:
            return m.where(close, m.mul(near, m.exp(m.neg(a))), far)
        power = m.exp(m.mul(a, m.like(x, 0.5)))  # its square is infinite a little before the product is
        return m.where(close, near, m.mul(m.mul(far, power), power))

    return of


def _erfinv(m: Math, x: Value) -> Value:
    """The inverse of erf: a rational start, then steps on erf, or on erfc where that is more exact."""
    a, one = m.abs(x), m.like(x, 1)
    square = m.mul(a, a)
    top, below = [-0.140543331, 0.914624893, -1.645349621, 0.886226899], [
        0.012229801, -0.329097515, 1.442710462, -2.118377725, 1.0]  # fmt: skip
    middle = m.div(m.mul(a, m.poly(square, top)), m.poly(square, below))
    rest = m.sub(one, a)
    root = m.sqrt(m.neg(m.log(m.mul(rest, m.like(x, 0.5)))))
    top, below = [1.641345311, 3.429567803, -1.624906493, -1.970840454], [1.637067800, 3.543889200, 1.0]
    y = m.where(m.compare("le", a, m.like(x, 0.7)), middle, m.div(m.poly(root, top), m.poly(root, below)))
    for _ in range(2):
        off = m.where(m.compare("lt", y, one), m.sub(m.erf(y), a), m.sub(rest, m.erfc(y)))
        slope = m.mul(m.like(x, 2 / math.sqrt(math.pi)), m.exp(m.neg(m.mul(y, y))))
        step = m.div(off, slope)
        y = m.sub(y, m.div(step, m.fma(y, step, one)))  # Halley's: the second derivative is -2 y times the first
    y = m.where(m.compare("lt", a, one), y, m.like(x, math.inf))
    y = m.where(m.compare("gt", a, one), m.like(x, math.nan), y)
    return m.copysign(m.where(m.isnan(x), x, y), x)


SPECIAL: dict[str, Function] = {
    "lgamma": _lgamma,
    "digamma": _digamma,
    "erfinv": _erfinv,
    "i0": _bessel(0, False),
    "special_i0e": _bessel(0, True),
    "special_i1": _bessel(1, False),
    "special_i1e": _bessel(1, True),
}
HANDLERS |= {name: straight(name, _of_doubles(function)) for name, function in SPECIAL.items()}
