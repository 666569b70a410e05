"""Products of many factors, each a number of ordinary size and a power of 2: no product overflows or vanishes.

A state may stay small where the product of its factors does not: 0 times 1e30 a hundred times is 0, and inf times 0
would be NaN. Integers wrap, as in a loop.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Scaled(NamedTuple):
    """numbers * 2 ** exponents, exponents int64 broadcasting to numbers, one for each matrix."""

    numbers: Tensor
    exponents: Tensor

    def after(self, first: "Scaled", matrix: bool) -> "Scaled":
        """The product with what comes before it."""
        numbers = self.numbers @ first.numbers if matrix else self.numbers * first.numbers
        found = scaled(numbers, matrix)
        return Scaled(found.numbers, found.exponents + self.exponents + first.exponents)

    def take(self, at: slice) -> "Scaled":
        """Some of them, along the first dim."""
        return Scaled(self.numbers[at], self.exponents[at])


def scaled(x: Tensor, matrix: bool) -> Scaled:
    """x as numbers from 0.5 to 1, of a matrix the largest one; what is not finite stays as it is."""
    size = x.abs()
    if matrix:
        size = size.amax((-2, -1), keepdim=True)
    if not (x.is_floating_point() or x.is_complex()):
        return Scaled(x, torch.zeros_like(size, dtype=torch.int64))
    exponents = torch.where(size.isfinite(), torch.frexp(size).exponent, 0).long()
    return Scaled(times_power(x, -exponents), exponents)


def times_power(x: Tensor, exponents: Tensor) -> Tensor:
    """x * 2 ** exponents, in four factors, as the power itself may not be a number of x's dtype."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    real = x.real.dtype if x.is_complex() else x.dtype
    largest = torch.frexp(torch.tensor(torch.finfo(real).max, dtype=real)).exponent.item() - 4
    exponents = exponents.clamp(-4 * largest, 4 * largest)
    part = torch.div(exponents, 4, rounding_mode="floor")
    for e in (part, part, part, exponents - 3 * part):
        x = x * torch.pow(torch.tensor(2, dtype=real, device=x.device), e.to(real))
    return x


def product(a: Tensor, n: int, matrix: bool) -> Scaled:
    """The product of n > 0 factors (n, ...), the last one first; or of one (1, ...) n times."""
    if len(a) == 1:
        found = power = scaled(a, matrix)
        for bit in f"{n:b}"[1:]:
            found = found.after(found, matrix)
            found = found.after(power, matrix) if bit == "1" else found
        return found
    if not matrix and a.is_floating_point():
        return _of_numbers(a)
    found = scaled(a, matrix)
    while (n := len(found.numbers)) > 1:
        pairs = found.take(slice(1, None, 2)).after(found.take(slice(0, n // 2 * 2, 2)), matrix)
        left = found.take(slice(n // 2 * 2, None))  # the last one, of an odd number
        found = Scaled(*(torch.cat(both) for both in zip(pairs, left, strict=True)))
    return found


def _of_numbers(a: Tensor) -> Scaled:
    """The same of real numbers, with two passes over them: so many numbers from 0.5 to 1 make no product too small."""
    most = int(-torch.tensor(torch.finfo(a.dtype).tiny, dtype=torch.float64).log2()) // 2
    total = torch.zeros_like(a[:1], dtype=torch.int64)
    while True:
        numbers, exponents = torch.frexp(a)
        total = total + exponents.sum(0, keepdim=True)
        if len(numbers) == 1:
            return Scaled(numbers, torch.where(numbers.isfinite(), total, 0))
        whole = len(numbers) // most * most
        rest = [numbers[whole:].prod(0, keepdim=True)] if whole < len(numbers) else []
        a = torch.cat([numbers[:whole].unflatten(0, (-1, most)).prod(1), *rest]) if whole else rest[0]
