"""Linear recurrences in torch operations, on any device: neighbours in pairs, in 2 log2 T rounds."""

import torch
from torch import Tensor


def linear_recurrence(a: Tensor, b: Tensor, init: Tensor, dim: int, reverse: bool) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t] along `dim`, T > 0, from `init` of length 1 there; `a` may be of 1 in any dim."""
    a, b, init = (x.movedim(dim, 0) for x in (a, b, init))
    if reverse:
        a, b = a.flip(0), b.flip(0)
    a = a.expand(len(b), *a.shape[1:])
    h = _prefixes(a, torch.cat([a[:1] * init + b[:1], b[1:]]))
    return (h.flip(0) if reverse else h).movedim(0, dim)


def _prefixes(a: Tensor, b: Tensor) -> Tensor:
    """From 0: two steps are one, with the product of their factors; half as many give every second answer."""
    n = len(b)
    if n == 1:
        return b
    even, odd = slice(0, n // 2 * 2, 2), slice(1, None, 2)
    h = torch.empty_like(b)
    h[odd] = _prefixes(a[odd] * a[even], a[odd] * b[even] + b[odd])
    h[0] = b[0]
    h[2::2] = a[2::2] * h[1 : n - 1 : 2] + b[2::2]
    return h
