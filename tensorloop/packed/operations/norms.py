"""Norms of packed tensors over any dims, and what is made with them: normalize, cosine similarity."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType
from tensorloop.packed.operations.reduce import root, square, widen
from tensorloop.packed.table.base import check_same_rows, find_dim, find_dims, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import align


@handles
def _norm(
    func: Any, input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, *, ord: Any = None
) -> Any:
    """Vector norms of any order over any dims; over the batch or ragged dim of order 0 and more, or -inf."""
    p = p if ord is None else ord
    x = input if dtype is None else input.to(dtype)
    if not x.is_floating_point() and not x.values.is_complex():
        raise WrongType(f"it needs floating point, got {x.dtype}; convert with .float()")
    dims = find_dims(x, dim)
    if not {0, 1} & set(dims) and isinstance(p, str) and p != "fro":
        return x._with(torch.norm(x.values, p, tuple(d - 1 for d in dims), keepdim))
    p = 2 if p in ("fro", None) else p
    if not {0, 1} & set(dims):
        return x._with(torch.linalg.vector_norm(x.values, p, tuple(d - 1 for d in dims), keepdim=keepdim))
    if isinstance(p, str) or (p < 0 and p != -torch.inf):
        raise refusal(f"order {p!r} over the batch or ragged dim", "use an order of 0 or more, or -inf")
    if p == torch.inf:
        return x.abs().amax(dims, keepdim, initial=0)
    if p == -torch.inf:
        return x.abs().amin(dims, keepdim)
    if p == 0:
        return torch.sum(x != 0, dims, keepdim).to(x.dtype.to_real())
    if p == 1:
        return torch.sum(torch.abs(x), dims, keepdim)
    if p == 2:
        return root(torch.sum(x._with(square(widen(x.values))), dims, keepdim)).to(x.dtype.to_real())
    return root(torch.sum(x._with(_power(widen(x.values).abs(), p)), dims, keepdim), p).to(x.dtype.to_real())


def _power(size: Tensor, p: float) -> Tensor:
    """size ** p of what is not negative, with the slope 0 at 0 whatever the order, as torch's norms have it."""
    return torch.where(size == 0, 0, torch.where(size == 0, 1, size) ** p)


@handles
def _linalg_norm(
    func: Any, A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Gives norms of vectors along any dim, or of matrices over two feature dims."""
    dims = find_dims(A, dim)
    if len(dims) == 1 or ord is None:
        return _norm(func, A, ord, dims, keepdim, dtype)
    return _matrix_norm(func, A, ord, dims, keepdim, dtype=dtype)


@handles
def _matrix_norm(
    func: Any, A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Gives norms of matrices over two feature dims."""
    dims = find_dims(A, dim)
    if len(dims) != 2 or {0, 1} & set(dims):
        raise refusal(f"a norm of matrices over dims {dims} of {A.shape}", "give two feature dims, dim 2 and up")
    return A._with(torch.linalg.matrix_norm(A.values, ord, tuple(d - 1 for d in dims), keepdim, dtype=dtype))


@handles
def _normalize(func: Any, input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divided by the norm over `dim`."""
    return input / torch.clamp(torch.norm(input, p, dim, True), min=eps)


@handles
def _cosine_similarity(func: Any, x1: Any, x2: Any, dim: Any = 1, eps: float = 1e-8) -> Any:
    """Over any dim, of two packed tensors or of one and what broadcasts against it."""
    p = x1 if is_packed(x1) else x2
    d = find_dim(p, dim)
    if d > 1 and is_packed(x1) and is_packed(x2):
        check_same_rows(x1, x2)
        return p._with(func(x1.values, x2.values, d - 1, eps))
    others = (x if is_packed(x) else align(x, p) for x in (x1, x2))
    x1, x2 = (x if is_packed(x) else p._with(x.expand(torch.broadcast_shapes(x.shape, p.values.shape))) for x in others)
    if d > 1:
        return p._with(func(x1.values, x2.values, d - 1, eps))
    sides = [x / torch.clamp(torch.norm(x, 2, d, True), min=eps) for x in (x1, x2)]
    return torch.sum(sides[0] * sides[1], d)
