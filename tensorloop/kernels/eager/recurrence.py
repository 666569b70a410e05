"""Linear recurrences in torch operations, on any device: neighbours in pairs, in 2 log2 T rounds.

With `starts`, bools that broadcast to b, there is no `init`: h is b alone where they are true, and what stands before
reaches no result.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tensorloop._torch import transforms

# Multiplications for the products of one step's matrices with others, from which on steps go one after another.
FEW, FEW_ON_A_GPU = 1 << 14, 1 << 22


def linear_recurrence(
    a: Tensor, b: Tensor, init: Tensor | None, dim: int, reverse: bool, starts: Tensor | None = None
) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t] along `dim`, T > 0, from `init` of length 1 there; `a` may be of 1 in any dim."""
    return _run(_in_rounds, a, b, init, dim, reverse, starts, torch.mul, torch.mul)


def matrix_recurrence(
    a: Tensor, b: Tensor, init: Tensor | None, dim: int, reverse: bool, starts: Tensor | None = None
) -> Tensor:
    """Computes a recurrence of the vectors along the last dim of b; a are matrices that broadcast to (*b.shape, F)."""
    few = FEW if b.is_cpu else FEW_ON_A_GPU
    by_step = a.shape[dim] > 1 and a.numel() // a.shape[dim] * b.shape[-1] > few
    return _run(_in_order if by_step else _in_rounds, a, b, init, dim, reverse, starts, by_vectors, torch.matmul)


def by_vectors(a: Tensor, x: Tensor) -> Tensor:
    """Matrices by vectors; a matrix that is the same along dims of the vectors is not repeated."""
    traced = torch.compiler.is_compiling()
    if not traced and (transforms.is_legacy_batched(a) or transforms.is_legacy_batched(x)):  # which have no einsum
        return (a * x.unsqueeze(-2)).sum(-1)
    return torch.einsum("...ij,...j->...i", a, x)


Product = Callable[[Tensor, Tensor], Tensor]


def _run(
    way: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    init: Tensor | None,
    dim: int,
    reverse: bool,
    starts: Tensor | None,
    apply: Product,
    product: Product,
) -> Tensor:
    """A recurrence as one from b alone, with its steps first and in their order."""
    a, b, *more = (x.movedim(dim, 0) for x in (a, b, init, starts) if x is not None)
    if reverse:
        a, b, *more = (x.flip(0) if len(x) > 1 else x for x in (a, b, *more))
    if init is not None:
        b = torch.cat([apply(a[:1], more[0]) + b[:1], b[1:]])
    h = way(a, b, more[0] if init is None else None, apply, product)
    h = h.flip(0) if reverse else h
    return h.movedim(0, dim) if dim else h  # no view where it need not be one: it could not be changed in place


def _in_order(a: Tensor, b: Tensor, starts: Tensor | None, apply: Product, product: Product) -> Tensor:
    h = [b[0]]
    for t in range(1, len(b)):
        new = apply(a[t], h[-1]) + b[t]
        h.append(new if starts is None else torch.where(starts[t], b[t], new))
    return torch.stack(h)


def _in_rounds(a: Tensor, b: Tensor, starts: Tensor | None, apply: Product, product: Product) -> Tensor:
    """Two steps are one, with the product of their factors; half as many give every second answer.

    A factor that is one for all steps stays one. That of two steps is not looked at where the second is a start.
    """
    n = len(b)
    if n == 1:
        return b
    even, odd = slice(0, n // 2 * 2, 2), slice(1, None, 2)
    of_odd, of_even, of_later = (a, a, a) if len(a) == 1 else (a[odd], a[even], a[2::2])

    def then(a: Tensor, before: Tensor, at: slice) -> Tensor:
        new = apply(a, before) + b[at]
        return new if starts is None else torch.where(starts[at], b[at], new)

    h = torch.empty_like(b)
    either = None if starts is None else starts[odd] | starts[even]
    h[odd] = _in_rounds(product(of_odd, of_even), then(of_odd, b[even], odd), either, apply, product)
    h[0] = b[0]
    h[2::2] = then(of_later, h[1 : n - 1 : 2], slice(2, None, 2))
    return h
