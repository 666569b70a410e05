"""Factorings of matrices, as LAPACK has them: pivots, signs and what counts as singular are its."""

import math
from collections.abc import Callable

from tensorloop.compiler.emitter.ir.code import Index, Value
from tensorloop.compiler.emitter.write.matrices import Cells, Matrices

DEGREE = 16  # of the series of an exponential, whose terms beyond vanish where the norm is below a half
SWEEPS = 30  # of rotations, at most; eight are many


def cholesky(m: Matrices) -> None:
    """L of A = L L.T, from the lower half; (L, the order of the first minor that is not positive)."""
    n, code, maths = m.kernel.ins[0].shape[-1], m.code, m.math
    done = m.cells(n, n)

    def rest(i: Index, j: Index) -> Value:
        (found,) = m.fold(0, j, [m.read(0, i, j)], lambda k, x: [m.less(done.get(i, k), done.get(j, k), x)])
        return found

    def column(j: Index, info: Value) -> list[Value]:
        square = rest(j, j)
        root = maths.sqrt(square)
        scale = maths.div(m.constant(1), root)
        done.put(root, j, j)
        m.write(root, 0, j, j)

        def row(i: Index) -> None:
            value = maths.mul(rest(i, j), scale)
            done.put(value, i, j)
            m.write(value, 0, i, j)
            m.write(m.constant(0), 0, j, i)

        m.each(code.add(j, 1), n, row)
        return [m.first(info, maths.invert(maths.compare("gt", square, m.constant(0))), j)]  # NaN is not positive

    (info,) = m.fold(0, n, [m.constant(0, "i64")], column)
    m.write(info, 1)
    m.note(info)


def triangular(m: Matrices) -> None:
    """x of L x = b, where `option` says that L has ones on its diagonal."""
    n, x = m.kernel.ins[0].shape[-1], m.cells(m.kernel.ins[0].shape[-1])

    def row(i: Index) -> None:
        (rest,) = m.fold(0, i, [m.read(1, i)], lambda j, total: [m.less(m.read(0, i, j), x.get(j), total)])
        value = rest if m.kernel.option else m.math.div(rest, m.read(0, i, i))
        x.put(value, i)
        m.write(value, 0, i)

    m.each(0, n, row)


def permute(m: Matrices) -> None:
    """x with each element in turn exchanged with the one that a pivot names; from the last one on with `option`."""
    count, n = m.kernel.ins[0].shape[-1], m.kernel.ins[1].shape[-1]
    code, maths, x = m.code, m.math, m.cells(n)
    m.each(0, n, lambda i: x.put(m.read(1, i), i))

    def exchange(turn: Index) -> None:
        i = code.add(count - 1, code.times(turn, -1)) if m.kernel.option else turn
        pivot = maths.sub(maths.cast(m.read(0, i), "i64"), m.constant(1, "i64"))

        def one(j: Index, here: Value) -> list[Value]:
            there, hit = x.get(j), maths.compare("eq", pivot, m.lanes(j))
            x.put(maths.where(hit, here, there), j)
            return [maths.where(hit, there, here)]

        (last,) = m.fold(0, n, [x.get(i)], one)  # pivots of others may name an earlier one
        x.put(last, i)

    m.each(0, count, exchange)
    m.each(0, n, lambda i: m.write(x.get(i), 0, i))


def lu(m: Matrices) -> None:
    """(L and U in one, pivots from 1 on, the first that is 0): the first of the largest in its column is a pivot."""
    rows, columns = m.kernel.ins[0].shape[-2:]
    code, maths, a = m.code, m.math, m.cells(rows, columns)
    _load(m, a, rows, columns)

    def step(k: Index, info: Value) -> list[Value]:
        def better(i: Index, place: Value, best: Value) -> list[Value]:
            size = maths.abs(a.get(i, k))
            larger = maths.compare("gt", size, best)
            return [maths.where(larger, m.lanes(i), place), maths.where(larger, size, best)]

        after = code.add(k, 1)
        place, _ = m.fold(after, rows, [m.lanes(k), maths.abs(a.get(k, k))], better)
        m.write(maths.add(place, m.constant(1, "i64")), 1, k)
        _swap(m, a, k, place, rows, columns)
        pivot = a.get(k, k)
        none = maths.compare("eq", pivot, m.constant(0))

        def eliminate(i: Index) -> None:
            value = a.get(i, k)
            factor = maths.where(none, value, maths.div(value, pivot))
            a.put(factor, i, k)
            m.each(after, columns, lambda j: a.put(m.less(factor, a.get(k, j), a.get(i, j)), i, j))

        m.each(after, rows, eliminate)
        return [m.first(info, none, k)]

    (info,) = m.fold(0, min(rows, columns), [m.constant(0, "i64")], step)
    m.each(0, rows, lambda i: m.each(0, columns, lambda j: m.write(a.get(i, j), 0, i, j)))
    m.write(info, 2)
    m.note(info)


def _load(m: Matrices, cells: Cells, rows: int, columns: int) -> None:
    m.each(0, rows, lambda i: m.each(0, columns, lambda j: cells.put(m.read(0, i, j), i, j)))


def _swap(m: Matrices, a: Cells, k: Index, place: Value, rows: int, columns: int) -> None:
    """Exchanges row k with a later one, another in each lane."""
    maths = m.math
    if m.width == 1 and not m.unrolled:

        def whole(j: Index) -> None:
            one, other = a.get(k, j), a.get(place.text, j)
            a.put(other, k, j)
            a.put(one, place.text, j)

        m.each(0, columns, whole)
        return

    def row(i: Index) -> None:
        hit = maths.compare("eq", place, m.lanes(i))

        def element(j: Index) -> None:
            one, other = a.get(k, j), a.get(i, j)
            a.put(maths.where(hit, other, one), k, j)
            a.put(maths.where(hit, one, other), i, j)

        m.each(0, columns, element)

    m.each(m.code.add(k, 1), rows, row)


def qr(m: Matrices) -> None:
    """(Q, R) by reflections, Q where `option`: R's diagonal has the other sign than what was reflected."""
    rows, columns = m.kernel.ins[0].shape[-2:]
    code, maths, a = m.code, m.math, m.cells(rows, columns)
    count = min(rows, columns)
    scales = m.cells(count)
    _load(m, a, rows, columns)

    def reflect(target: Cells, k: Index, low: Index, high: Index, scale: Value) -> None:
        def column(j: Index) -> None:
            after = code.add(k, 1)
            (total,) = m.fold(
                after, rows, [target.get(k, j)], lambda i, t: [maths.fma(a.get(i, k), target.get(i, j), t)]
            )
            total = maths.mul(total, scale)
            target.put(maths.sub(target.get(k, j), total), k, j)
            m.each(after, rows, lambda i: target.put(m.less(a.get(i, k), total, target.get(i, j)), i, j))

        m.each(low, high, column)

    def step(k: Index) -> None:
        after, alpha = code.add(k, 1), a.get(k, k)
        # Of numbers divided by the largest: squares of large ones would be infinite, of small ones 0.
        (most,) = m.fold(after, rows, [maths.abs(alpha)], lambda i, x: [maths.maximum(x, maths.abs(a.get(i, k)))])
        some = maths.where(maths.compare("eq", most, m.constant(0)), m.constant(1), most)

        def square(x: Value, total: Value) -> Value:
            x = maths.div(x, some)
            return maths.fma(x, x, total)

        (below,) = m.fold(after, rows, [m.constant(0)], lambda i, t: [square(a.get(i, k), t)])
        stays = maths.compare("eq", below, m.constant(0))
        norm = maths.mul(some, maths.sqrt(square(alpha, below)))
        beta = maths.where(stays, alpha, maths.neg(maths.copysign(norm, alpha)))
        scale = maths.where(stays, m.constant(0), maths.div(maths.sub(beta, alpha), beta))
        divisor = maths.where(stays, m.constant(1), maths.sub(alpha, beta))
        a.put(beta, k, k)
        m.each(after, rows, lambda i: a.put(maths.div(a.get(i, k), divisor), i, k))
        scales.put(scale, k)
        reflect(a, k, after, columns, scale)

    m.each(0, count, step)
    height = m.kernel.outs[-1].shape[-2]

    def upper(i: Index) -> None:
        m.each(0, i, lambda j: m.write(m.constant(0), len(m.kernel.outs) - 1, i, j))
        m.each(i, columns, lambda j: m.write(a.get(i, j), len(m.kernel.outs) - 1, i, j))

    m.each(0, count, upper)
    below = lambda i: m.each(0, columns, lambda j: m.write(m.constant(0), len(m.kernel.outs) - 1, i, j))  # noqa: E731
    m.each(count, height, below)
    if m.kernel.option:
        width = m.kernel.outs[0].shape[-1]
        q = m.cells(rows, width)
        _identity(m, q, rows, width)

        def back(turn: Index) -> None:
            k = code.add(count - 1, code.times(turn, -1))
            reflect(q, k, k, width, scales.get(k))

        m.each(0, count, back)
        m.each(0, rows, lambda i: m.each(0, width, lambda j: m.write(q.get(i, j), 0, i, j)))


def _identity(m: Matrices, cells: Cells, rows: int, columns: int) -> None:
    m.each(0, rows, lambda i: m.each(0, columns, lambda j: cells.put(m.constant(0), i, j)))
    m.each(0, min(rows, columns), lambda i: cells.put(m.constant(1), i, i))


def exponential(m: Matrices) -> None:
    """The exponential: of A / 2**s by its series, squared s times."""
    n, maths, code = m.kernel.ins[0].shape[-1], m.math, m.code
    powers = [m.cells(n, n) for _ in range(4)]
    total, other = m.cells(n, n), m.cells(n, n)
    halvings, scale = _scale(m, n)
    _every(m, n, lambda i, j: powers[0].put(maths.mul(m.read(0, i, j), scale), i, j))
    for made, a, b in ((1, 0, 0), (2, 1, 0), (3, 1, 1)):
        _product(m, powers[made], powers[a], powers[b], n)

    def terms(start: int, count: int, i: Index, j: Index, x: Value | None) -> Value:
        """The terms from a power of four on, at one place."""
        for k in range(count):
            factor = m.constant(1 / math.factorial(start + k + 1))
            power = powers[k].get(i, j)
            x = maths.mul(factor, power) if x is None else maths.fma(factor, power, x)
        assert x is not None
        ones = maths.where(maths.compare("eq", m.lanes(i), m.lanes(j)), m.constant(1), m.constant(0))
        return maths.fma(m.constant(1 / math.factorial(start)), ones, x)

    _every(m, n, lambda i, j: total.put(terms(DEGREE - 4, 4, i, j, None), i, j))
    for start in range(DEGREE - 8, -1, -4):
        _product(m, other, powers[3], total, n)
        _every(m, n, lambda i, j, start=start: total.put(terms(start, 3, i, j, other.get(i, j)), i, j))
    with code.loop(0, m.largest(halvings).text) as loop:
        _product(m, other, total, total, n)
        more = maths.compare("lt", m.lanes(loop.index), halvings)
        _every(m, n, lambda i, j: total.put(maths.where(more, other.get(i, j), total.get(i, j)), i, j))
    _every(m, n, lambda i, j: m.write(total.get(i, j), 0, i, j))


def _scale(m: Matrices, n: int) -> tuple[Value, Value]:
    """(s, 2**-s) so that the largest sum of a column's sizes is below a half."""
    maths = m.math

    def column(j: Index, most: Value) -> list[Value]:
        return [
            maths.maximum(
                most,
                m.fold(0, n, [m.constant(0)], lambda i, x: [maths.add(x, maths.abs(m.read(0, i, j)))])[0],
            )
        ]

    (norm,) = m.fold(0, n, [m.constant(0)], column)
    bits, bias, highest = (23, 127, 126) if m.kind == "float" else (52, 1023, 1022)
    exponent = maths.bit("lshr", maths._bits(norm), maths.like(maths._bits(norm), bits))
    halvings = maths.at_least(maths.sub(exponent, maths.like(exponent, bias - 2)), 0)
    halvings = maths.at_most(halvings, highest)
    return maths.cast(halvings, "i64"), maths._power(maths.neg(halvings))


def _every(m: Matrices, n: int, body: Callable[[Index, Index], None]) -> None:
    m.each(0, n, lambda i: m.each(0, n, lambda j: body(i, j)))


def _product(m: Matrices, out: Cells, a: Cells, b: Cells, n: int) -> None:
    """out = a b, four columns at a time."""
    code = m.code

    def columns(i: Index, start: Index, count: int) -> None:
        def more(k: Index, *totals: Value) -> list[Value]:
            left = a.get(i, k)
            return [m.math.fma(left, b.get(k, code.add(start, c)), t) for c, t in enumerate(totals)]

        for c, value in enumerate(m.fold(0, n, [m.constant(0)] * count, more)):
            out.put(value, i, code.add(start, c))

    def row(i: Index) -> None:
        if n >= 4:
            with code.loop(0, n - n % 4, 4) as loop:
                columns(i, loop.index, 4)
        if n % 4:
            columns(i, n - n % 4, n % 4)

    m.each(0, n, row)


def eigh(m: Matrices) -> None:
    """(eigenvalues from the smallest on, their vectors where `option`) by rotations; reads the lower half."""
    n, maths, code = m.kernel.ins[0].shape[-1], m.math, m.code
    a, v, left = m.cells(n, n), m.cells(n, n), m.cells(1)

    # Of numbers divided by the largest: squares of large ones would be infinite, of small ones 0.
    (most,) = m.fold(
        0, n, [m.constant(0)],
        lambda i, x: m.fold(0, code.add(i, 1), [x], lambda j, x: [maths.maximum(x, maths.abs(m.read(0, i, j)))]),
    )  # fmt: skip
    some = maths.where(maths.compare("eq", most, m.constant(0)), m.constant(1), most)

    def copy(i: Index, j: Index) -> None:
        value = maths.div(m.read(0, i, j), some)
        a.put(value, i, j)
        a.put(value, j, i)

    m.each(0, n, lambda i: m.each(0, code.add(i, 1), lambda j: copy(i, j)))
    _identity(m, v, n, n)

    def size(low: Callable[[Index], Index]) -> Value:
        """The sum of squares of each row up to some place."""
        (total,) = m.fold(
            0, n, [m.constant(0)],
            lambda i, t: m.fold(0, low(i), [t], lambda j, t: [maths.fma(a.get(i, j), a.get(i, j), t)]),
        )  # fmt: skip
        return total

    small = m.constant((2.0**-24 if m.kind == "float" else 2.0**-53) ** 2 / 16)
    enough = maths.mul(size(lambda i: n), small)
    left.put(m.constant(1), 0)

    def sweep(_: Index) -> None:
        with code.when(maths.compare("gt", m.largest(left.get(0)), Value("0.0", m.kind))):
            m.each(0, n, lambda p: m.each(code.add(p, 1), n, lambda q: _rotate(m, a, v, n, p, q)))
            off = maths.compare("gt", size(lambda i: i), enough)
            left.put(maths.where(off, m.constant(1), m.constant(0)), 0)

    m.each(0, SWEEPS, sweep)
    _in_order(m, a, v, n)
    m.each(0, n, lambda i: m.write(maths.mul(a.get(i, i), some), 0, i))
    if m.kernel.option:
        _every(m, n, lambda i, j: m.write(v.get(i, j), 1, i, j))
    sane = maths.compare("lt", most, m.constant(float("inf")))
    m.note(maths.where(sane, m.constant(0, "i64"), m.constant(1, "i64")))


def _rotate(m: Matrices, a: Cells, v: Cells, n: int, p: Index, q: Index) -> None:
    """Turns dims p and q so that a[p, q] is 0."""
    maths, one = m.math, m.constant(1)
    off = a.get(p, q)
    none = maths.compare("eq", off, m.constant(0))
    half = maths.sub(a.get(q, q), a.get(p, p))
    angle = maths.div(half, maths.mul(m.constant(2), maths.where(none, one, off)))
    tangent = maths.div(one, maths.add(maths.abs(angle), maths.sqrt(maths.fma(angle, angle, one))))
    tangent = maths.where(none, m.constant(0), maths.copysign(tangent, angle))
    cosine = maths.div(one, maths.sqrt(maths.fma(tangent, tangent, one)))
    sine = maths.mul(tangent, cosine)

    def turn(cells: Cells, first: tuple[Index, Index], second: tuple[Index, Index]) -> None:
        x, y = cells.get(*first), cells.get(*second)
        cells.put(m.less(sine, y, maths.mul(cosine, x)), *first)
        cells.put(maths.fma(sine, x, maths.mul(cosine, y)), *second)

    m.each(0, n, lambda k: turn(a, (k, p), (k, q)))
    m.each(0, n, lambda k: turn(a, (p, k), (q, k)))
    m.each(0, n, lambda k: turn(v, (k, p), (k, q)))
    for place in ((p, q), (q, p)):
        a.put(m.constant(0), *place)


def _in_order(m: Matrices, a: Cells, v: Cells, n: int) -> None:
    """Exchanges neighbours until eigenvalues rise."""
    maths, code = m.math, m.code

    def exchange(cells: Cells, wrong: Value, first: tuple[Index, Index], second: tuple[Index, Index]) -> None:
        x, y = cells.get(*first), cells.get(*second)
        cells.put(maths.where(wrong, y, x), *first)
        cells.put(maths.where(wrong, x, y), *second)

    def pair(i: Index) -> None:
        j = code.add(i, 1)
        wrong = maths.compare("gt", a.get(i, i), a.get(j, j))
        exchange(a, wrong, (i, i), (j, j))
        m.each(0, n, lambda k: exchange(v, wrong, (k, i), (k, j)))

    m.each(0, n, lambda last: m.each(0, code.add(n - 1, code.times(last, -1)), pair))


ALGORITHMS: dict[str, Callable[[Matrices], None]] = {
    "cholesky": cholesky,
    "triangular": triangular,
    "permute": permute,
    "lu": lu,
    "qr": qr,
    "exp": exponential,
    "eigh": eigh,
}
