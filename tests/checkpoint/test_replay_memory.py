"""What checkpointed loops hold, counted to the byte: carries, weights, arrays, undo logs.

*Held* is what a forward pass leaves for backward (`memory.saved`), *peak* the most that both passes have alive at once.
No body contracts: x + tanh(xW)/10 keeps its size, and saves two tensors as large as the carry.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.memory import growth, peak, saved
from tests.support.devices import HERE

# Compiled loops keep other carries, in blocks of steps: tests/compiled/test_compiled_checkpoints.py counts theirs.
pytestmark = pytest.mark.eager_only("these are the bytes of an eager loop", run=False)
B, D, FLOAT = 4, 8, 4
CARRY = B * D * FLOAT
known_or_not = pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])

Make = Callable[[int], Callable[[], Tensor]]


def weight(width: int = D) -> Tensor:
    return (torch.randn(width, width) / math.sqrt(width)).requires_grad_()


def steps(T: int, plan: Any, *, known: bool = True, shape: tuple[int, int] = (B, D)) -> Callable[[], Tensor]:
    """T steps, and a loss that saves one more carry."""
    w, x = weight(shape[1]), torch.randn(shape, requires_grad=True)

    def step(h: Tensor) -> Tensor:
        return h + 0.1 * torch.tanh(h @ w)

    def loss() -> Tensor:
        if known:
            return tl.fori_loop(0, T, lambda i, h: step(h), x, checkpoints=plan).square().sum()
        start: Any = (x, 0)
        h, _ = tl.while_loop(lambda c: c[1] < T, lambda c: (step(c[0]), c[1] + 1), start, checkpoints=plan)
        return h.square().sum()

    return loss


def both_passes(loss: Callable[[], Tensor]) -> int:
    """Peak bytes of a forward and a backward pass."""
    return peak(lambda: loss().backward())


# -- carries


@known_or_not
@pytest.mark.parametrize("T", [16, 64, 256])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_k_snapshots_are_held_of_which_the_first_costs_nothing(k: int, T: int, known: bool) -> None:
    """k - 1 carries, as the first snapshot is init, and the one that the loss saves."""
    found = saved(steps(T, k, known=known))
    assert (found.bytes, found.count) == (k * CARRY, k)


def test_without_checkpoints_two_tensors_a_step_are_held() -> None:
    """The step's input, which the matmul saves, and tanh's output; nothing of the loop's own."""
    for T in (16, 64):
        assert saved(steps(T, None)).bytes == (2 * T + 1) * CARRY


@known_or_not
def test_fewer_steps_than_snapshots(known: bool) -> None:
    assert saved(steps(3, 100, known=known)).bytes == 3 * CARRY


@known_or_not
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.extended("1-known")
def test_the_peak_does_not_grow_with_the_steps(k: int, known: bool) -> None:
    """In backward: the snapshots, a state and its successor, one step's residuals, the gradients of it."""
    peaks = [both_passes(steps(T, k, known=known)) for T in (16, 64, 128)]
    assert max(peaks) <= (k - 1 + 12) * CARRY
    assert max(peaks) - min(peaks) <= CARRY


def test_the_peak_falls_short_of_the_plain_loop_also_with_retain_graph() -> None:
    def retained(plan: Any) -> int:
        loss = steps(128, plan)
        return peak(lambda: [out := loss(), out.backward(retain_graph=True), out.backward()])

    assert retained(4) <= 20 * CARRY < 256 * CARRY < retained(None)


# -- weights


@pytest.mark.parametrize("plan", [None, 1, 4])
def test_weights_are_saved_once_and_their_gradient_is_one_running_sum(plan: Any) -> None:
    """A weight of 64 carries: in backward there is the sum, one step's share and, while they are added, the new sum."""
    big = 64 * 64 * FLOAT
    assert saved(steps(8, plan, shape=(1, 64))).bytes < big
    peaks = [both_passes(steps(T, plan, shape=(1, 64))) for T in (8, 64)]
    residuals = 0 if plan else 2 * (64 - 8) * 64 * FLOAT
    assert max(peaks) <= 3 * big + big // 2 + residuals
    assert peaks[1] - peaks[0] <= residuals + 64 * FLOAT


# -- arrays


def attention(plan: Any) -> Make:
    """W3: each step appends to two arrays and reads both in full."""

    def make(T: int) -> Callable[[], Tensor]:
        xs = torch.randn(T, B, D, requires_grad=True)
        w_x, w_o, w_q, w_k, w_v = (weight() for _ in range(5))

        def body(carry: Any, x: Tensor) -> Any:
            keys, values, o = carry
            h = torch.tanh(x @ w_x + o @ w_o)
            keys, values = keys.append(h @ w_k), values.append(h @ w_v)
            p = torch.softmax(torch.einsum("bd,tbd->bt", h @ w_q, keys.stack()) / math.sqrt(D), -1)
            o = torch.einsum("bt,tbd->bd", p, values.stack())
            return (keys, values, o), (o**2).sum()

        init: Any = (tl.TensorArray(), tl.TensorArray(), torch.zeros(B, D))
        return lambda: tl.scan(body, init, xs, checkpoints=plan)[1].sum()

    return make


def test_arrays_of_a_checkpointed_loop_hold_their_slots_once() -> None:
    """A step more costs one slot in each array; of attention weights, h, q and o nothing is held."""
    held = {T: saved(attention(4)(T)).bytes for T in (64, 128, 256)}
    assert held[128] - held[64] == 64 * 2 * CARRY
    assert held[256] - held[128] == 128 * 2 * CARRY
    assert held[64] - 64 * 2 * CARRY <= 5 * CARRY


@pytest.mark.extended
def test_w3_is_linear_with_checkpoints_and_quadratic_without() -> None:
    """Both passes: without checkpoints there are B T (T + 1) / 2 attention weights."""
    sizes = (32, 64, 128, 256)
    measure = both_passes
    whole, replayed = growth(attention(None), sizes, measure=measure), growth(attention(4), sizes, measure=measure)
    assert replayed.marginal < 1.01
    assert whole.marginal > 1.3
    # A step: a slot in two arrays and two gradient buffers, x's gradient, its y. Once: attention over all steps, a
    # dozen rows of its weights in both passes, two gradients of a read.
    assert replayed.bytes[-1] <= 256 * (5 * CARRY + 3 * FLOAT) + 2 * 256 * CARRY + 12 * B * 256 * FLOAT + 60 * CARRY
    assert replayed.bytes[-1] < 0.3 * whole.bytes[-1]


SLOTS = 256


def memory_network(plan: Any) -> Make:
    """256 slots, read in full and overwritten in one place at every step."""

    def make(T: int) -> Callable[[], Tensor]:
        xs, start = torch.randn(T, D, requires_grad=True), torch.randn(SLOTS, D, requires_grad=True)
        w, places = weight(), torch.randint(SLOTS, (T,)).tolist()

        def body(carry: Any, x: Tensor) -> Any:
            memory, h, t = carry
            slots = memory.stack()
            h = torch.tanh(x @ w + torch.softmax(slots @ h, 0) @ slots)
            return (memory.write(places[t], h), h, t + 1), None

        def loss() -> Tensor:
            init: Any = (tl.TensorArray.unstack(start), torch.zeros(D), 0)
            (memory, h, _), _ = tl.scan(body, init, xs, checkpoints=plan)
            return h.sum() + memory.stack().square().sum()

        return loss

    return make


def test_a_memory_network_holds_one_slot_a_step_and_the_memory() -> None:
    """O(T D + M D): the undo log has a slot for each overwrite, whatever is read. Copies would be T M D."""
    slot, memory = D * FLOAT, SLOTS * D * FLOAT
    held = {T: saved(memory_network(4)(T)).bytes for T in (64, 128, 256)}
    assert held[128] - held[64] == 64 * slot
    assert held[256] - held[128] == 128 * slot
    assert held[256] <= 256 * slot + 2 * memory + 10 * slot  # the tape, and the array that was returned
    assert saved(memory_network(None)(256)).bytes > 256 * memory


def test_the_peak_of_a_memory_network() -> None:
    """The gradient buffer and one step's copies of the memory come to it, once."""
    slot, memory = D * FLOAT, SLOTS * D * FLOAT
    for T in (64, 128, 256):
        assert both_passes(memory_network(4)(T)) <= 6 * memory + T * 2 * slot + 40 * slot


def test_snapshots_of_arrays_cost_nothing() -> None:
    few, many = (saved(attention(k)(64)).bytes for k in (2, 16))
    assert many - few == 14 * CARRY  # o, and not an array


# -- rows that stop on their own


def rows(plan: Any, compact: bool) -> Make:
    """B rows, T steps: a quarter of the rows stops after each quarter of the steps."""

    def make(T: int) -> Callable[[], Tensor]:
        w, x = weight(), torch.randn(B, D, requires_grad=True)
        limits = torch.arange(1, B + 1) * (T // B)

        def body(carry: Any) -> Any:
            h, n, limits = carry
            return h + 0.1 * torch.tanh(h @ w), n + 1, limits

        def loss() -> Tensor:
            init: Any = (x, limits * 0, limits)
            return tl.while_loop(lambda c: c[1] < c[2], body, init, compact=compact, checkpoints=plan)[0].square().sum()

        return loss

    return make


def test_frozen_rows_cost_a_mask_each_time_a_row_stops() -> None:
    """Three masks (B,) beside the two tensors of each step: not one a step, and no frozen values."""
    for T in (32, 64, 128):
        assert saved(rows(None, False)(T)).bytes == (2 * T + 1) * CARRY + 3 * B


def test_rows_that_leave_the_batch_hold_nothing_more() -> None:
    """10 / 16 of the rows' steps remain; what a cut costs does not grow with T."""
    held = {T: saved(rows(None, True)(T)).bytes for T in (32, 64, 128)}
    assert held[64] - held[32] == 2 * 32 * CARRY * 10 // 16
    assert held[128] - held[64] == 2 * 64 * CARRY * 10 // 16
    known = 0 if HERE.type == "cpu" else 8 * (3 + 2 + 1)  # of a device the host has, too, which rows are left
    assert held[32] <= (2 * 32 * 10 // 16 + 2) * CARRY + known


@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_rows_with_checkpoints_hold_snapshots_of_carry_and_last_inputs(compact: bool) -> None:
    for T in (32, 64, 128):
        assert saved(rows(4, compact)(T)).bytes <= 12 * CARRY
        assert both_passes(rows(4, compact)(T)) <= 40 * CARRY
