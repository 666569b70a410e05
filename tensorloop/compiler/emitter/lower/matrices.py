"""Linear algebra of small matrices: factorings, and what is made of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.code import Value
from tensorloop.compiler.emitter.ir.failures import ELEMENT
from tensorloop.compiler.emitter.ir.kernels import Check, Matrix
from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.calling import CHECKED_AS
from tensorloop.compiler.emitter.lower.lowering import Call, Lowering
from tensorloop.compiler.emitter.lower.pointwise import handles
from tensorloop.compiler.lengths import grows
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import Unsupported

# The longest side of a matrix for which the step's own code is the faster one.
SIDES = {"cholesky": 64, "triangular": 64, "permute": 64, "lu": 64, "qr": 32, "exp": 64, "eigh": 32}
_FLOATS = (torch.float32, torch.float64)


def _kernel(
    low: Lowering,
    how: str,
    ins: Sequence[Array],
    outs: Sequence[Array],
    batch: int,
    option: bool = False,
    check: Check | None = None,
) -> None:
    if any(grows(array.shape) or grows((array.offset,)) for array in (*ins, *outs)):
        raise Unsupported("of matrices as many or as long as an array in the carry")
    sides = ins[0].shape[batch:]
    if max(sides) > SIDES[how]:
        raise Unsupported(f"of a matrix with a side of {max(sides)}: machine code is for {SIDES[how]} at most")
    if outs[0].dtype not in _FLOATS:
        raise Unsupported(f"of {outs[0].dtype}")
    if ins[0].numel and outs[0].numel:
        low.kernels.append(Matrix(how, tuple(map(low.placed, ins)), tuple(outs), batch, option, check))
        return
    for out in outs:
        low.copy(low.number(0, out.dtype), out)


def _check(call: Call, wanted: bool, batch: Sequence[int]) -> Check | None:
    if not wanted:
        return None
    if math.prod(batch) > 2**ELEMENT:
        raise Unsupported(f"of {math.prod(batch)} matrices, any of which may be singular")
    return Check(CHECKED_AS[call.name], tuple(batch))


def _turned(x: Array) -> Array:
    """The matrices the other way round."""
    (*batch, m, n), (*steps, a, b) = x.shape, x.strides
    return Array(x.buffer, (*batch, n, m), (*steps, b, a), x.offset)


def _diagonal(x: Array) -> Array:
    (*batch, m, n), (*steps, a, b) = x.shape, x.strides
    return Array(x.buffer, (*batch, min(m, n)), (*steps, a + b), x.offset)


def _column(x: Array) -> Array:
    return Array(x.buffer, (*x.shape, 1), (*x.strides, 1), x.offset)


def _for_columns(x: Array, batch: Sequence[int], count: int, rank: int) -> Array:
    """Returns a view that repeats matrices, or pivots, for each column of a right-hand side."""
    own = x.shape[len(x.shape) - rank :]
    wide = x.expand((*batch, *own))
    k = len(batch)
    return Array(x.buffer, (*batch, count, *own), (*wide.strides[:k], 0, *wide.strides[k:]), wide.offset)


# -- what is solved by


def _triangular(low: Lowering, a: Array, b: Array, out: Array, *, upper: bool, unit: bool) -> Array:
    """Solves a x = b for a triangular a, column by column."""
    *batch, _, columns = out.shape
    a, b, x = _for_columns(a, batch, columns, 2), _turned(b.expand(out.shape)), _turned(out)
    if upper:
        k = len(batch) + 1
        a, b, x = a.flip([k, k + 1]), b.flip([k]), x.flip([k])
    _kernel(low, "triangular", [a, b], [x], len(batch) + 1, unit)
    return out


def _permuted(low: Lowering, pivots: Array, b: Array, out: Array, *, back: bool) -> Array:
    *batch, _, columns = out.shape
    ins = [_for_columns(pivots, batch, columns, 1), _turned(b.expand(out.shape))]
    _kernel(low, "permute", ins, [_turned(out)], len(batch) + 1, back)
    return out


def _lu(low: Lowering, a: Array, check: Check | None = None) -> tuple[Array, Array, Array]:
    """(L and U in one, pivots, infos)."""
    *batch, m, n = a.shape
    made = low.new(a.shape, a.dtype), low.new((*batch, min(m, n)), torch.int32), low.new(batch, torch.int32)
    _kernel(low, "lu", [a], made, len(batch), check=check)
    return made


def _lu_solved(low: Lowering, lu: Array, pivots: Array, b: Array, out: Array, *, adjoint: bool) -> Array:
    first, second = (low.new(out.shape, out.dtype) for _ in range(2))
    if adjoint:
        lu = _turned(lu)
        _triangular(low, lu, b, first, upper=False, unit=False)
        _triangular(low, lu, first, second, upper=True, unit=True)
        return _permuted(low, pivots, second, out, back=True)
    _permuted(low, pivots, b, first, back=False)
    _triangular(low, lu, first, second, upper=False, unit=True)
    return _triangular(low, lu, second, out, upper=True, unit=False)


def _identity(low: Lowering, n: int, dtype: torch.dtype) -> Array:
    return low.constant(torch.eye(n, dtype=dtype, device=HOST))


# -- operations


@handles("linalg_cholesky_ex")
def cholesky(call: Call, a: Array, upper: bool = False, check_errors: bool = False) -> Any:
    """Returns (L of A = L L.T, or its transpose, infos)."""
    low, batch = call.low, a.shape[:-2]
    out, infos = low.new(a.shape, a.dtype), low.new(batch, torch.int32)
    check = _check(call, check_errors, batch)
    ins, outs = [_turned(a) if upper else a], [_turned(out) if upper else out, infos]
    _kernel(low, "cholesky", ins, outs, len(batch), check=check)
    return out, infos


@handles("linalg_solve_triangular")
def solve_triangular(
    call: Call, a: Array, b: Array, upper: bool, left: bool = True, unitriangular: bool = False
) -> Array:
    """Solves a x = b or x a = b, where only one half of a is read."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    if left:
        return _triangular(low, a, b, out, upper=upper, unit=unitriangular)
    _triangular(low, _turned(a), _turned(b), _turned(out), upper=not upper, unit=unitriangular)
    return out


@handles("linalg_lu_factor_ex")
def lu_factor(call: Call, a: Array, pivot: bool = True, check_errors: bool = False) -> Any:
    """Returns (L and U in one, pivots, infos)."""
    if not pivot:
        raise Unsupported("without pivots")
    return _lu(call.low, a, _check(call, check_errors, a.shape[:-2]))


@handles("linalg_lu_solve")
def lu_solve(call: Call, lu: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    """Solves by a factoring."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    if left:
        return _lu_solved(low, lu, pivots, b, out, adjoint=adjoint)
    _lu_solved(low, lu, pivots, _turned(b), _turned(out), adjoint=not adjoint)
    return out


@handles("_linalg_solve_ex")
def solve(call: Call, a: Array, b: Array, left: bool = True, check_errors: bool = False) -> Any:
    """Returns (x, the factoring, its pivots, infos)."""
    low = call.low
    lu, pivots, infos = _lu(low, a, _check(call, check_errors, a.shape[:-2]))
    out = low.new(tuple(call.value[0].shape), a.dtype)
    vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and b.shape == a.shape[:-1])
    right, x = (_column(b), _column(out)) if vector else (b, out)
    right, x = (right, x) if left else (_turned(right), _turned(x))
    _lu_solved(low, lu, pivots, right, x, adjoint=not left)
    return out, lu, pivots, infos


@handles("linalg_inv_ex")
def inverse(call: Call, a: Array, check_errors: bool = False) -> Any:
    """Returns (the inverse, infos)."""
    low, out = call.low, call.low.new(a.shape, a.dtype)
    lu, pivots, infos = _lu(low, a, _check(call, check_errors, a.shape[:-2]))
    _lu_solved(low, lu, pivots, _identity(low, a.shape[-1], a.dtype), out, adjoint=False)
    return out, infos


def _parity(low: Lowering, pivots: Array, dtype: torch.dtype) -> Array:
    """Returns the sign of a permutation, which each exchange turns."""

    def one(math: Math, pivot: Value, place: Value) -> Value:
        return math.where(math.compare("eq", pivot, place), math.like(pivot, 1), math.like(pivot, -1))

    places = low.constant(torch.arange(1, pivots.shape[-1] + 1, dtype=torch.int32, device=HOST))
    return low.reduce("prod", low.compute("exchanges", one, [pivots, places], dtype), [-1], False)


@handles("_linalg_det")
def det(call: Call, a: Array) -> Any:
    """(the determinant, the factoring of the transpose, its pivots), as torch does it of rows in order."""
    low = call.low
    lu, pivots, _ = _lu(low, _turned(a))
    size = low.reduce("prod", _diagonal(lu), [-1], False)
    found = low.compute("mul", lambda math, x, y: math.mul(x, y), [size, _parity(low, pivots, a.dtype)], a.dtype)
    return found, lu, pivots


@handles("_linalg_slogdet")
def slogdet(call: Call, a: Array) -> Any:
    """(the determinant's sign, the logarithm of its size, the factoring of the transpose, its pivots)."""
    low = call.low
    lu, pivots, _ = _lu(low, _turned(a))
    diagonal = _diagonal(lu)
    signs = low.reduce("prod", low.compute("sign", lambda math, x: math.sign(x), [diagonal], a.dtype), [-1], False)
    sign = low.compute("mul", lambda math, x, y: math.mul(x, y), [signs, _parity(low, pivots, a.dtype)], a.dtype)
    logs = low.compute("log", lambda math, x: math.log(math.abs(x)), [diagonal], a.dtype)
    return sign, low.reduce("sum", logs, [-1], False), lu, pivots


@handles("cholesky_solve")
def cholesky_solve(call: Call, b: Array, factor: Array, upper: bool = False) -> Array:
    """Solves by a Cholesky factor."""
    low, shape = call.low, call.shape
    lower = _turned(factor) if upper else factor
    first = _triangular(low, lower, b, low.new(shape, call.dtype), upper=False, unit=False)
    return _triangular(low, _turned(lower), first, low.new(shape, call.dtype), upper=True, unit=False)


@handles("lu_unpack")
def lu_unpack(call: Call, lu: Array, pivots: Array, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """Returns (P, L, U) of P L U = A, given the factoring."""
    low, (*batch, m, n), dtype = call.low, lu.shape, lu.dtype
    k, nothing = min(m, n), low.new((0,), lu.dtype)
    lower = upper = p = nothing
    if unpack_pivots:
        p = low.new((*batch, m, m), dtype)
        _permuted(low, pivots, _identity(low, m, dtype), p, back=True)
    if unpack_data:
        whole = torch.ones(m, n, dtype=torch.bool, device=HOST)
        lower = _masked(low, _cut(lu, m, k), whole.tril(-1)[:, :k], _identity(low, m, dtype))
        upper = _masked(low, _cut(lu, k, n), whole.triu()[:k], low.number(0, dtype))
    return p, lower, upper


def _cut(x: Array, m: int, n: int) -> Array:
    return Array(x.buffer, (*x.shape[:-2], m, n), x.strides, x.offset)


def _masked(low: Lowering, x: Array, mask: torch.Tensor, other: Array) -> Array:
    other = _cut(other, *mask.shape) if other.shape else other
    found = [low.constant(mask), x, other]
    return low.point("where", lambda math, c, a, b: math.where(c, a, b), found, x.dtype, x.shape)


@handles("linalg_lu")
def lu_apart(call: Call, a: Array, pivot: bool = True) -> Any:
    """(P, L, U) of P L U = A."""
    if not pivot:
        raise Unsupported("without pivots")
    lu, pivots, _ = _lu(call.low, a)
    return lu_unpack(call, lu, pivots)


@handles("linalg_qr")
def qr(call: Call, a: Array, mode: str = "reduced") -> Any:
    """Returns (Q, R)."""
    low, (*batch, m, n) = call.low, a.shape
    k = m if mode == "complete" else min(m, n)
    q, r = low.new((*batch, m, k) if mode != "r" else (0,), a.dtype), low.new((*batch, k, n), a.dtype)
    if mode == "complete" and not n and m:
        raise Unsupported("of no columns")
    _kernel(low, "qr", [a], [r] if mode == "r" else [q, r], len(batch), mode != "r")
    return q, r


@handles("_linalg_eigh")
def eigh(call: Call, a: Array, UPLO: str = "L", compute_v: bool = True) -> Any:
    """(eigenvalues, vectors): of either sign, as there is no right one."""
    low, (*batch, n, _) = call.low, a.shape
    values, vectors = low.new((*batch, n), a.dtype), low.new(a.shape if compute_v else (0,), a.dtype)
    a = _turned(a) if UPLO.upper() == "U" else a
    outs = [values, vectors] if compute_v else [values]
    _kernel(low, "eigh", [a], outs, len(batch), compute_v, _check(call, True, batch))
    return values, vectors


@handles("linalg_matrix_exp")
def matrix_exp(call: Call, a: Array) -> Array:
    """The exponential."""
    out = call.low.new(a.shape, a.dtype)
    _kernel(call.low, "exp", [a], [out], len(a.shape) - 2)
    return out
