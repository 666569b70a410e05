"""TensorArray held to its memory contract: bytes counted by hand, for loops that read back what they wrote.

`ELEMENT` is the bytes of one slot, (B, D) float32. Every bound is so many slots; what a step's own operations save is
counted beside it, operation by operation.
"""

import math
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.memory import LiveStorages, collector_off, growth, peak, saved
from tensorloop.testing import (
    assert_growth,
    assert_linear_memory,
    assert_matches_reference,
    assert_no_leak,
    assert_saved_bytes,
)

B, D = 2, 8
FLOAT = 4
ELEMENT = B * D * FLOAT
SIZES = [32, 64, 128, 256]


class Cache(Protocol):
    """Grows by one element, gives all of them (n, B, D)."""

    def append(self, x: Tensor) -> object: ...

    def all(self) -> Tensor: ...


class ArrayCache:
    def __init__(self, capacity: int | None = None) -> None:
        self.array = tl.TensorArray(capacity=capacity)

    def append(self, x: Tensor) -> None:
        self.array.append(x)

    def all(self) -> Tensor:
        return self.array[: len(self.array)]


class CatCache:
    def __init__(self) -> None:
        self.values = torch.zeros(0, B, D)

    def append(self, x: Tensor) -> None:
        self.values = torch.cat([self.values, x[None]])

    def all(self) -> Tensor:
        return self.values


class ListCache:
    """What a list of slots that is stacked at each read would keep."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.values.append(x)

    def all(self) -> Tensor:
        return torch.stack(self.values)


# -- W3: a loop that attends to everything it wrote


def weights() -> list[Tensor]:
    return [(torch.randn(D, D) / math.sqrt(D)).requires_grad_() for _ in range(5)]


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q (B, D) over keys and values (n, B, D)."""
    p = torch.softmax(torch.einsum("bd,tbd->bt", q, keys) / math.sqrt(D), -1)
    return torch.einsum("bt,tbd->bd", p, values)


def attention_loop(xs: Tensor, *weights: Tensor, cache: Callable[[], Cache] = ArrayCache) -> Tensor:
    w_x, w_o, w_q, w_k, w_v = weights
    keys, values = cache(), cache()
    o, loss = torch.zeros(B, D), torch.zeros(())
    for x in xs.unbind(0):
        h = torch.tanh(x @ w_x + o @ w_o)
        keys.append(h @ w_k)
        values.append(h @ w_v)
        o = attend(h @ w_q, keys.all(), values.all())
        loss = loss + (o**2).sum()
    return loss


def w3(cache: Callable[[], Cache] = ArrayCache) -> Callable[[int], Callable[[], Tensor]]:
    def make(T: int) -> Callable[[], Tensor]:
        xs, ws = torch.randn(T, B, D, requires_grad=True), weights()
        return lambda: attention_loop(xs, *ws, cache=cache)

    return make


def softmax_rows(T: int) -> int:
    """Bytes of the attention weights, (B, t + 1) at step t: quadratic, and the body's own."""
    return B * T * (T + 1) // 2 * FLOAT


def other_residuals(T: int) -> int:
    """Bytes of h, q and o of each step, and of the first o."""
    return (3 * T + 1) * ELEMENT


def test_w3_keeps_two_arrays_and_what_its_steps_save():
    for T in SIZES:
        bound = 2 * (2 * T * ELEMENT) + other_residuals(T) + softmax_rows(T)
        found = assert_saved_bytes(w3()(T), at_most=bound)
        assert found.bytes >= 2 * T * ELEMENT + other_residuals(T) + softmax_rows(T)


def test_w3_is_linear_but_for_the_softmax():
    found = assert_growth(w3(), SIZES, 1, tolerance=0.01, subtract=softmax_rows)
    assert max(found.bytes[i] / T for i, T in enumerate(SIZES)) <= (2 * 2 + 3 + 1) * ELEMENT


def test_w3_with_a_capacity_keeps_no_slot_too_many():
    for T in (31, 32, 33):
        exactly = 2 * T * ELEMENT + other_residuals(T) + softmax_rows(T)
        assert_saved_bytes(w3(lambda T=T: ArrayCache(capacity=T))(T), exactly=exactly)


@pytest.mark.parametrize("T", [31, 33, 48, 65, 100])
def test_w3_of_any_length_keeps_at_most_four_times_its_values(T: int):
    """Prefixes read before each growth stay as they are: buffers of 1, 2, 4... slots beside the last one."""
    assert_saved_bytes(w3()(T), at_most=4 * 2 * T * ELEMENT + other_residuals(T) + softmax_rows(T))


@pytest.mark.parametrize("cache", [CatCache, ListCache])
def test_w3_without_an_array_is_quadratic(cache: Callable[[], Cache]):
    found = assert_growth(w3(cache), SIZES, 2, tolerance=0.15, subtract=softmax_rows)
    prefixes = [2 * T * (T + 1) // 2 * ELEMENT for T in SIZES]
    assert all(n >= p for n, p in zip(found.bytes, prefixes, strict=True))
    with pytest.raises(AssertionError, match="expected at most bytes"):
        assert_linear_memory(w3(cache), SIZES, subtract=softmax_rows)


def test_w3_values_and_gradients_are_those_of_cat():
    xs = torch.randn(9, B, D, dtype=torch.float64, requires_grad=True)
    ws = [w.detach().double().requires_grad_() for w in weights()]
    with_cat = lambda *args: attention_loop(*args, cache=lambda: DoubleCatCache())  # noqa: E731
    assert_matches_reference(lambda *args: DoubleLoop.run(*args), with_cat, xs, *ws)
