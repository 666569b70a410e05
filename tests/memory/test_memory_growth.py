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
from tensorloop.memory import LiveStorages, collector_off, peak, saved
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
        self.values: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.values = [torch.cat([*self.values, x[None]])]

    def all(self) -> Tensor:
        return self.values[0]


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
    o, loss = xs.new_zeros(B, D), xs.new_zeros(())
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
    found = assert_growth(w3(cache), SIZES[:3], 2, tolerance=0.15, subtract=softmax_rows)
    assert found.bytes == tuple(T * (T + 1) * ELEMENT + other_residuals(T) for T in SIZES[:3])
    with pytest.raises(AssertionError, match="expected at most bytes"):
        assert_linear_memory(w3(cache), SIZES[:3], subtract=softmax_rows)


def test_w3_values_and_gradients_are_those_of_cat():
    xs = torch.randn(9, B, D, dtype=torch.float64, requires_grad=True)
    ws = [w.detach().double().requires_grad_() for w in weights()]
    assert_matches_reference(attention_loop, lambda *args: attention_loop(*args, cache=CatCache), xs, *ws)


def test_w3_gives_all_of_it_back():
    xs, ws = torch.randn(20, B, D, requires_grad=True), weights()
    assert_no_leak(attention_loop, xs, *ws)
    assert_no_leak(lambda: torch.autograd.grad(attention_loop(xs, *ws), [xs, *ws]))
    assert_no_leak(lambda: torch.autograd.grad(attention_loop(xs, *ws), [xs, *ws], create_graph=True))


# -- backward


def backward_bytes(fn: Callable[[], Tensor], inputs: list[Tensor]) -> int:
    """The most bytes that backward has alive beyond what was saved for it."""
    with collector_off(), LiveStorages() as live:
        loss = fn()
        before = live.bytes
        live.reset_peak()
        torch.autograd.grad(loss, inputs)
    return live.peak - before


@pytest.mark.parametrize("T", SIZES)
def test_prefix_reads_share_one_gradient_buffer(T: int):
    w = torch.randn(B, D, requires_grad=True)

    def fn() -> Tensor:
        array, loss = tl.TensorArray(), torch.zeros(())
        for t in range(T):
            array.append(w * (t + 1))
            loss = loss + array[: t + 1].sum()  # its gradient is one number, expanded
        return loss

    buffer = T * ELEMENT
    assert buffer <= backward_bytes(fn, [w]) <= buffer + 4 * ELEMENT


@pytest.mark.parametrize("T", SIZES)
def test_w3_backward_needs_a_gradient_buffer_for_each_array_and_one_read(T: int):
    xs, ws = torch.randn(T, B, D, requires_grad=True), weights()
    buffers, reads = 2 * T * ELEMENT, 2 * T * ELEMENT  # a read's gradient, as attend gives it, is alive once
    weight_gradients = 2 * sum(w.nbytes for w in ws)  # the sum so far, and the sum with one step more
    extra = backward_bytes(lambda: attention_loop(xs, *ws), [xs, *ws])
    assert extra <= buffers + reads + weight_gradients + 4 * ELEMENT


# -- W1: one read, one write


def w1(T: int) -> tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]]:
    """(inputs, the loop over arrays, the same over unbind, a list and torch.stack)."""
    values = torch.randn(T, B, D, requires_grad=True)

    def arrays() -> Tensor:
        xs, ys = tl.TensorArray.unstack(values), tl.TensorArray()
        for t in range(T):
            ys.append(xs[t] * math.sqrt(t))
        return ys.stack().sum()

    def lists() -> Tensor:
        xs, ys = values.unbind(0), []
        for t in range(T):
            ys.append(xs[t] * math.sqrt(t))
        return torch.stack(ys).sum()

    return values, arrays, lists


@pytest.mark.parametrize("T", SIZES)
def test_w1_saves_nothing_and_peaks_within_one_buffer_of_a_list(T: int):
    values, arrays, lists = w1(T)
    assert_saved_bytes(arrays, exactly=saved(lists).bytes)
    assert peak(arrays) <= peak(lists) + (T + 1) * ELEMENT
    both = [peak(lambda fn=fn: torch.autograd.grad(fn(), values)) for fn in (arrays, lists)]
    assert both[0] <= both[1] + (T + 1) * ELEMENT


def test_w1_is_linear_forward_and_backward():
    def make(T: int) -> Callable[[], tuple[Tensor, ...]]:
        values, arrays, _ = w1(T)
        return lambda: torch.autograd.grad(arrays(), values)

    assert_linear_memory(make, SIZES, measure=peak)


# -- append and stack


def recurrence(T: int, collect: Callable[[], Cache]) -> Callable[[], Tensor]:
    xs, w = torch.randn(T, B, D), torch.randn(B, D, requires_grad=True)

    def fn() -> Tensor:
        h, hs = w, collect()
        for x in xs.unbind(0):
            h = torch.sin(h + x)  # keeps h + x
            hs.append(h)
        return (hs.all() ** 2).sum()  # keeps what was stacked

    return fn


@pytest.mark.parametrize("T", [31, 32, 33, 256])
def test_append_and_stack_keep_what_a_list_and_stack_keep(T: int):
    array, list_ = recurrence(T, ArrayCache), recurrence(T, ListCache)
    assert saved(list_).bytes == 2 * T * ELEMENT
    assert_saved_bytes(array, exactly=2 * T * ELEMENT)
    assert peak(array) <= peak(list_) + (T + 1) * ELEMENT


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("T", [1, 31, 32, 33, 100])
def test_a_living_array_holds_at_most_twice_its_values(T: int, requires_grad: bool):
    values = torch.randn(T, B, D, requires_grad=requires_grad)
    with LiveStorages() as live:
        array = tl.TensorArray()
        for x in values.unbind(0):
            array.append(1 * x)
            assert live.bytes <= (2 * len(array) + 1) * ELEMENT
            array[-1]
        array.stack()
        assert array.nbytes <= live.bytes <= 2 * T * ELEMENT + FLOAT  # FLOAT: the number that tokens are made of


def test_unstack_copies_at_the_first_write_and_not_before():
    values = torch.randn(50, B, D, requires_grad=True)
    with LiveStorages() as live:
        array = tl.TensorArray.unstack(values)
        view = array[:30]
        assert live.bytes <= FLOAT
        array[0] = view[1]
        assert 50 * ELEMENT <= live.bytes <= 51 * ELEMENT


# -- a ring buffer: M slots, overwritten round robin


def ring(T: int, M: int, in_full: bool) -> Callable[[], Tensor]:
    """Each step reads one slot, or all of them, and writes one."""
    xs, init = torch.randn(T, B, D), torch.randn(M, B, D, requires_grad=True)
    rotation = torch.linalg.qr(torch.randn(D, D))[0].requires_grad_()

    def fn() -> Tensor:
        slots, loss = tl.TensorArray().extend(init), torch.zeros(())
        for t, x in enumerate(xs.unbind(0)):
            # One slot is kept by the product, all of them by the sine.
            read = slots.stack().sin().sum(0) if in_full else slots[t % M]
            h = torch.sin(read @ rotation + x)  # keeps the argument of this sine
            slots[t % M] = h
            loss = loss + h.sum()
        return loss

    return fn


@pytest.mark.parametrize("M", [1, 4, 16])
def test_a_ring_read_slot_by_slot_does_not_pay_for_its_slots(M: int):
    for T in (32, 64):
        assert_saved_bytes(ring(T, M, in_full=False), exactly=2 * T * ELEMENT)
    assert_growth(lambda T: ring(T, M, in_full=False), SIZES, 1, tolerance=0.01)


@pytest.mark.parametrize("M", [1, 4, 16])
def test_a_ring_read_in_full_is_copied_at_each_overwrite(M: int):
    """Under plain autograd each full read is kept for backward, M slots a step: T * M * D."""
    for T in (32, 64):
        exactly = (T * M + 2 * T) * ELEMENT
        assert_saved_bytes(ring(T, M, in_full=True), exactly=exactly)


def test_rings_give_all_of_it_back():
    assert_no_leak(ring(20, 4, in_full=False))
    assert_no_leak(ring(20, 4, in_full=True))


# -- memory is free when it is dropped


@pytest.mark.parametrize("drop_arrays_first", [False, True])
def test_a_loop_dropped_half_way_is_free_at_once(drop_arrays_first: bool):
    T = 20
    xs, ws = torch.randn(T, B, D, requires_grad=True), weights()
    with collector_off(), LiveStorages() as live:
        caches = [ArrayCache(), ArrayCache()]
        loss = attention_loop(xs, *ws, cache=iter(caches).__next__)
        if drop_arrays_first:
            caches.clear()
            assert live.bytes >= 2 * T * ELEMENT  # the graph behind the loss needs them
            del loss
        else:
            del loss
            assert live.bytes >= 2 * T * ELEMENT
            caches.clear()
        assert live.bytes == 0


def test_values_that_wait_are_free_when_the_array_is_dropped():
    w = torch.randn(B, D, requires_grad=True)
    with collector_off(), LiveStorages() as live:
        array = tl.TensorArray()
        for t in range(10):
            array.append(w * t)
        assert live.bytes >= 10 * ELEMENT
        del array
        assert live.bytes == 0


def test_backward_frees_the_buffers_that_nobody_else_holds():
    w = torch.randn(B, D, requires_grad=True)
    with collector_off(), LiveStorages() as live:
        array = tl.TensorArray()
        for t in range(10):
            array.append(w * t)
        loss = (array.stack() ** 2).sum()
        del array
        assert live.bytes >= 10 * ELEMENT
        (gradient,) = torch.autograd.grad(loss, w)
        assert live.bytes == gradient.nbytes + FLOAT  # and the loss
