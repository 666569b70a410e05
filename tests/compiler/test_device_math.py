"""Functions that a device has no library for, far from 0 and at the ends."""

import itertools
import math

import pytest
import torch

from tensorloop.compiler.emitter.device.device_math import TWO_OVER_PI
from tensorloop.compiler.step import CoreCall
from tests.support.lanes import LanesCore
from tests.support.recurrences import Given, assert_same, places, recurrence

DTYPES = [torch.float64, torch.float32]


def test_the_table_is_two_over_pi() -> None:
    """Held against pi by Machin's formula, in whole numbers."""
    bits = 64 * (len(TWO_OVER_PI) - 1)
    one = 1 << (bits + 64)

    def arctan(n: int) -> int:
        total, term, k = 0, one // n, 1
        while term:
            total += term // k if k % 4 == 1 else -(term // k)
            term, k = term // (n * n), k + 2
        return total

    found = (2 * one * one // (16 * arctan(5) - 4 * arctan(239))) >> 64
    assert TWO_OVER_PI[0] == 0
    assert [found >> 64 * n & (2**64 - 1) for n in reversed(range(len(TWO_OVER_PI) - 1))] == [*TWO_OVER_PI[1:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sine_and_cosine_of_large_numbers(dtype: torch.dtype) -> None:
    most = 308 if dtype == torch.float64 else 38
    hard = 6381956970095103.0 * 2.0**797  # the double that is nearest to a multiple of half a turn, for its size
    chosen = [1e14, 1.0001e14, 1e22, torch.finfo(dtype).max, hard if most == 308 else 16367173.0 * 2.0**72]
    ends = [math.inf, math.nan, 0.0, 1.0, 9.9e13]
    x = torch.cat([torch.tensor([*chosen, *ends]).double(), 10 ** torch.empty(500).double().uniform_(13.9, most)])
    x = torch.cat([x, -x]).to(dtype)
    given: Given = [], [x[None]], [torch.zeros(1)]
    rec = recurrence(lambda inv, xs, carry: {"carry": carry, "outs": [xs[0].sin(), xs[0].cos()]}, *given)
    tolerance = 4e-16 if dtype == torch.float64 else 1.3e-7
    assert_same(LanesCore(rec, 32), rec, 1, *given, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rest_of_a_division_is_exact(dtype: torch.dtype) -> None:
    """As C has it: torch's own gives NaN for some quotients."""
    finfo = torch.finfo(dtype)
    ends = [0.0, -0.0, 1.0, -5.5, 0.1, math.inf, -math.inf, math.nan, finfo.tiny / 8, finfo.smallest_normal, finfo.max]
    smallest = finfo.tiny * finfo.eps
    pairs = torch.tensor([*itertools.product([*ends, smallest], repeat=2)], dtype=dtype).T
    drawn = torch.randn(2, 300).double() * 10 ** torch.empty(2, 300).double().uniform_(-35, 35)
    x, y = torch.cat([pairs, drawn.to(dtype)], 1)
    given: Given = [], [x[None], y[None]], [torch.zeros(1)]
    rec = recurrence(lambda inv, xs, carry: {"carry": carry, "outs": [torch.fmod(*xs)]}, *given)
    (found,), sums = places(rec, 1)
    LanesCore(rec, 32)(CoreCall(1, *given, [found], sums))

    def rest(a: float, b: float) -> float:
        return math.fmod(a, b) if math.isfinite(a) and b else math.nan

    expected = torch.tensor([rest(*pair) for pair in zip(x.tolist(), y.tolist(), strict=True)], dtype=dtype)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[0].signbit(), expected.signbit() | (found[0].isnan() & found[0].signbit()))
