"""Fourier transforms of pairs of real tensors, as products with constant matrices.

A length that has divisors is taken apart by them, so that matrices stay small. Every function gives None for lengths
that leave a large one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 64  # the side of a matrix
Parts = tuple[Tensor, Tensor]


def of_real(x: Tensor, dim: int) -> Parts | None:
    """The transform of real numbers, not scaled: at frequency 0 and at the highest of an even number it is real."""
    found = transform(x, None, [dim], -1)
    if found is None:
        return None
    twice = 2 * torch.arange(x.shape[dim]).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return found[0], torch.where(twice % x.shape[dim] == 0, 0.0, found[1])


def transform(re: Tensor, im: Tensor | None, dims: Sequence[int], way: int) -> Parts | None:
    """The transform along dims: forward (way -1) or back (1), not scaled."""
    for dim in dims:
        found = _along(re.movedim(dim, -1), None if im is None else im.movedim(dim, -1), way)
        if found is None:
            return None
        re, im = (x.movedim(-1, dim) for x in found)
    return re, torch.zeros_like(re) if im is None else im


def half(parts: Parts, dim: int) -> Parts:
    """The frequencies that a transform of real numbers is told by."""
    count = parts[0].shape[dim] // 2 + 1
    return parts[0].narrow(dim, 0, count), parts[1].narrow(dim, 0, count)


def whole(re: Tensor, im: Tensor, dim: int, size: int) -> Parts:
    """Returns all frequencies from the half of them; those that are their own mirror images are taken to be real."""
    count, more = size // 2 + 1, (size - 1) // 2
    re, im = (_fitted(x, dim, count) for x in (re, im))
    own = torch.zeros_like(im.narrow(dim, 0, 1))
    inner = im.narrow(dim, 1, more)
    last = [own] if size > 1 and size % 2 == 0 else []
    ims = [own, inner, *last, -inner.flip(dim)]
    return torch.cat([re, re.narrow(dim, 1, more).flip(dim)], dim), torch.cat(ims, dim)


def _fitted(x: Tensor, dim: int, count: int) -> Tensor:
    """Cuts or pads with zeros to so many elements along a dim."""
    lacking = count - x.shape[dim]
    if lacking <= 0:
        return x.narrow(dim, 0, count)
    return torch.cat(
        [
            x,
            torch.zeros_like(x.narrow(dim, 0, 1)).expand(
                *(lacking if d == dim % x.dim() else n for d, n in enumerate(x.shape))
            ),
        ],
        dim,
    )


def _along(re: Tensor, im: Tensor | None, way: int) -> Parts | None:
    """Transforms along the last dim; None where its size has a prime factor above MOST."""
    n = re.shape[-1]
    if n <= MOST:
        each = torch.arange(n)
        return _turned(re, im, *_circle(each.unsqueeze(1) * each, n, way, re.dtype), product=True)
    first = max(p for p in range(1, MOST + 1) if n % p == 0)
    if first == 1:
        return None
    rest = n // first
    # element rest * i + j, frequency k + first * l: over i, turned by j k, over j

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(-1, (first, rest)).transpose(-1, -2)

    found = _along(apart(re), None if im is None else apart(im), way)
    assert found is not None
    turns = torch.arange(rest).unsqueeze(1) * torch.arange(first)
    re, im = _turned(*found, *_circle(turns, n, way, re.dtype), product=False)
    found = _along(re.transpose(-1, -2), im.transpose(-1, -2), way)
    return None if found is None else (found[0].transpose(-1, -2).flatten(-2), found[1].transpose(-1, -2).flatten(-2))


def _circle(turns: Tensor, n: int, way: int, dtype: torch.dtype) -> Parts:
    """cos and sin of so many n-ths of a turn; exactly 0 at quarters, so that what is real has no phase of rounding."""
    angle = (turns % n).to(torch.float64) * (way * 2 * math.pi / n)
    cos, sin = (torch.where(x.abs() < 1e-14, 0.0, x).to(dtype) for x in (torch.cos(angle), torch.sin(angle)))
    return cos, sin


def _turned(re: Tensor, im: Tensor | None, cos: Tensor, sin: Tensor, product: bool) -> Parts:
    """Multiplies complex numbers by others: a product of matrices, or of elements."""
    times = torch.matmul if product else torch.mul
    if im is None:
        return times(re, cos), times(re, sin)
    return times(re, cos) - times(im, sin), times(re, sin) + times(im, cos)
