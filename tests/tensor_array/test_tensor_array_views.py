"""What a TensorArray hands out: views that stay what they were, copies, modes, and what it costs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.memory import LiveStorages
from tests.support.array_kinds import KINDS, PLAIN, WITH_GRADIENT, Kind

VALUES = torch.arange(1.0, 13.0).view(4, 3)
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
BUFFERED = {name: kind for name, kind in KINDS.items() if name != "listed"}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_buffered_kind = pytest.mark.parametrize("kind", BUFFERED.values(), ids=BUFFERED)
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
ELEMENT = 4 * 16  # bytes of an element in the tests of cost


def element(needs_grad: bool = False) -> Tensor:
    return torch.randn(16, requires_grad=needs_grad)


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


# -- views and copies


@every_buffered_kind
@every_mode
def test_slices_are_views_of_one_buffer(kind: Kind, mode: Callable[[], Any]) -> None:
    array = kind(VALUES)
    with mode():
        whole = array.stack()
        for start, stop in ((0, 4), (0, 2), (1, 3), (3, 4)):
            part = array[start:stop]
            assert part.data_ptr() == whole[start:].data_ptr()
            assert torch.equal(part, VALUES[start:stop])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_prefix_reads_allocate_nothing(needs_grad: bool) -> None:
    array = tl.TensorArray(capacity=64)
    for _ in range(64):
        array.append(element(needs_grad))
    first = array.stack()
    with LiveStorages() as live:
        views = [array[:t] for t in range(65)] + [array[t:] for t in range(65)]
    assert live.bytes == live.peak == 0
    assert {storage(view) for view in views} == {storage(first)}


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_capacity_is_allocated_once(needs_grad: bool) -> None:
    array = tl.TensorArray(capacity=50)
    seen = set()
    for t in range(50):
        array.append(element(needs_grad))
        seen.add(array[t // 2 :].data_ptr() - t // 2 * ELEMENT)
    assert len(seen) == 1
    assert array.nbytes == 50 * ELEMENT
    array.append(element(needs_grad))
    assert array.stack().data_ptr() not in seen


@every_kind
@every_mode
def test_a_single_read_is_no_view(kind: Kind, mode: Callable[[], Any]) -> None:
    """Except that grad mode gives the tensor written itself, while it waits (tested below)."""
    array = kind(VALUES)
    if mode is torch.enable_grad:
        array.stack()
    reads: list[Callable[[], Tensor]] = [
        lambda: array[1],
        lambda: array.read(-1),
        lambda: array.gather([0, 1]),
        lambda: array.gather([]),
        lambda: array[::2],
        lambda: array[::-1],
        lambda: next(iter(array)),
    ]
    for read in reads:
        with mode():
            out = read()
            expected = out.clone()
            out.mul_(-1)
            again = read()
        assert torch.equal(again, expected)
        assert torch.equal(array.stack(), VALUES)


@pytest.mark.parametrize("kind", [PLAIN["appended"], PLAIN["unstacked"], WITH_GRADIENT["flushed"]])
@every_mode
def test_gather_at_one_index_is_no_view(kind: Kind, mode: Callable[[], Any]) -> None:
    array = kind(VALUES)
    with mode():
        out = array.gather(torch.tensor(2))
        assert out.shape == (3,)
        out.mul_(-1)
    assert torch.equal(array.stack(), VALUES)


@every_mode
def test_all_slots_of_an_unstacked_array_can_be_changed_as_they_are_read(mode: Callable[[], Any]) -> None:
    values = torch.randn(200, 2)
    array = tl.TensorArray.unstack(values.clone())
    with mode():
        for i in range(200):
            array[i].zero_()
    assert all(torch.equal(a, b) for a, b in zip(array, values, strict=True))
    assert torch.equal(array.stack(), values)


def test_a_waiting_slot_is_the_tensor_written() -> None:
    xs = [element(True) * 2 for _ in range(3)]
    array = tl.TensorArray().extend(xs)
    assert array[1] is xs[1]
    assert all(array[i] is xs[i] for i in range(3))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = array[1]
            assert out is not xs[1]
            assert not out.requires_grad
            out.zero_()
    array.stack()
    assert array[1] is not xs[1]
    assert storage(array[1]) != storage(xs[1])


@every_mode
def test_a_constant_that_waits_behind_others_is_not_handed_out(mode: Callable[[], Any]) -> None:
    array, x = tl.TensorArray().append(VALUES[0].clone().requires_grad_()), VALUES[1].clone()
    array.append(x)
    with mode():
        out = array[1]
        assert storage(out) != storage(x)
        out.zero_()
    assert torch.equal(array.stack(), VALUES[:2])


# -- what was read stays what it was


@every_kind
def test_reads_stay_what_they_were(kind: Kind) -> None:
    array = kind(VALUES)
    taken = [array[:2], array[1:], array.stack(), array[0], array.gather([1, 1]), *array]
    copies = [x.detach().clone() for x in taken]
    new = torch.full((3,), -5.0)
    for step in range(4):
        array[step] = new
        taken.append(array[: step + 1])
        copies.append(taken[-1].detach().clone())
        array.append(new)
        array.scatter([0, 5 + step], torch.stack([new * step, new]))
        array.write_rows(torch.tensor([1, 2, 6 + step]), new * step)
        assert all(torch.equal(a, b) for a, b in zip(taken, copies, strict=True))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_ring_buffer_keeps_its_windows(needs_grad: bool) -> None:
    array, expected, windows = tl.TensorArray(), [], []
    for t in range(40):
        x = element(needs_grad)
        array.write(t % 8, x)
        expected[t % 8 : t % 8 + 1] = [x.detach()]
        windows.append((array.stack(), torch.stack(expected)))
        if t % 3 == 0:
            windows.append((array[2:5], torch.stack(expected)[2:5]))
    assert len(array) == 8
    assert all(torch.equal(a, b) for a, b in windows)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_memory_network_keeps_what_it_read(needs_grad: bool) -> None:
    slots = torch.randn(6, 3)
    array, reads = tl.TensorArray.unstack(slots.clone().requires_grad_(needs_grad)), []
    for t in range(12):
        memory = array.stack()
        weights = torch.softmax(memory @ torch.ones(3) * (t % 4), 0)
        reads.append((memory, slots.clone()))
        where = torch.tensor([t % 6, (5 * t) % 6, t % 6])
        x = (weights[:, None] * memory).sum(0) + t
        array.write_rows(where, x)
        slots[where, torch.arange(3)] = x.detach()
    assert all(torch.equal(a, b) for a, b in reads)
    assert torch.equal(array.stack(), slots)


# -- copies on write


@every_buffered_kind
def test_an_overwrite_copies_only_if_a_view_covers_the_slot(kind: Kind) -> None:
    array = kind(VALUES).append(VALUES[0])
    array[3] = VALUES[3]  # what was shared or waited is now the array's own
    start = array[:1].data_ptr()
    for slot in (1, 4, 3, 1):
        array[slot] = -VALUES[0]
        assert len(list(array)) == len(array[::2]) + 2 == len(array.gather([0, 2])) + 3 == 5
        assert array[:1].data_ptr() == start
    array[0] = -VALUES[0]
    moved = array[4:].data_ptr()
    array[0] = VALUES[0]
    assert moved != start + 4 * 12
    assert array[:1].data_ptr() == moved - 4 * 12


def test_an_empty_slice_covers_nothing() -> None:
    array = PLAIN["appended"](VALUES)
    start = array[:1].data_ptr()
    assert array[3:3].shape == (0, 3)
    array[2] = VALUES[0]
    assert array[:1].data_ptr() == start


@pytest.mark.parametrize("needs_grad", [False, True])
def test_overwrites_without_views_allocate_one_buffer_at_most(needs_grad: bool) -> None:
    array = tl.TensorArray(capacity=32).extend(torch.randn(32, 16))
    xs = torch.randn(100, 16, requires_grad=needs_grad)
    with LiveStorages() as live:
        for t in range(100):
            array[t % 32] = xs[t]
    assert live.peak < 32 * ELEMENT / 4  # tokens and index arithmetic, no copy of the buffer


# -- modes


@pytest.mark.parametrize("later", MODES.values(), ids=MODES)
@pytest.mark.parametrize("made", MODES.values(), ids=MODES)
@pytest.mark.parametrize("tensors", MODES.values(), ids=MODES)
def test_every_mode_may_make_write_and_read(
    tensors: Callable[[], Any], made: Callable[[], Any], later: Callable[[], Any]
) -> None:
    with tensors():
        values = VALUES.clone()
        learnt = values if values.is_inference() else values.clone().requires_grad_()
    with made():
        arrays = [
            tl.TensorArray().append(values[0]).append(learnt[1]),
            tl.TensorArray(capacity=2).extend(learnt[:2]),
            tl.TensorArray.unstack(values[:2]),
            tl.TensorArray.unstack(learnt[:2]),
        ]
    expected = torch.stack([*VALUES[[3, 0, 2, 3, 1]], torch.zeros(3)])
    expected[[5, 2, 2], [0, 1, 2]] = VALUES[0]
    for array in arrays:
        with later():
            assert torch.equal(array[0], VALUES[0])
            assert torch.equal(array[:1], VALUES[:1])
            array.append(learnt[2]).append(values[3])
            array[0] = learnt[3]
            array.scatter([1, 4], learnt[:2])
            array.write_rows(torch.tensor([5, 2, 2]), learnt[0])
            assert torch.equal(array.stack(), expected)
        assert torch.equal(array.stack(), expected)
        assert [torch.equal(x, y) for x, y in zip(array, expected, strict=True)] == [True] * 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_kind
def test_reads_without_gradient_need_none(kind: Kind, mode: Callable[[], Any]) -> None:
    array = kind(VALUES)
    with mode():
        for out in (array[0], array[:2], array.stack(), array.gather([1]), array[::2], *array):
            assert not out.requires_grad
    needs_grad = kind in WITH_GRADIENT.values()
    assert array.stack().requires_grad is needs_grad
    assert array[0].requires_grad is needs_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_arrays_made_without_gradient_are_trained_later(mode: Callable[[], Any]) -> None:
    w = torch.ones(3, requires_grad=True)
    with mode():
        arrays = [PLAIN["appended"](VALUES), PLAIN["unstacked"](VALUES), tl.TensorArray().append(w * 0).extend(VALUES)]
    for array in arrays:
        array.append(w * 2)
        array[1] = w * 3
        (grad,) = torch.autograd.grad(array.stack().sum(), w)
        assert torch.equal(grad, torch.full((3,), 5.0))


# -- cost


@pytest.mark.parametrize("read", ["never", "often"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_bytes_held_are_at_most_twice_the_values(needs_grad: bool, read: str) -> None:
    array = tl.TensorArray()
    with LiveStorages() as live:
        for n in range(1, 201):
            array.append(element(needs_grad))
            if read == "often" and n % 7 == 0:
                array.stack()
            assert n * ELEMENT <= array.nbytes <= 2 * n * ELEMENT
            if not needs_grad:
                assert live.bytes <= 2 * n * ELEMENT + ELEMENT
    assert array.nbytes <= 400 * ELEMENT


def test_bytes_held_are_at_most_four_times_the_values_if_every_view_is_kept() -> None:
    array, views = tl.TensorArray(), []
    with LiveStorages() as live:
        for n in range(1, 201):
            array.append(element())
            views.append(array.stack())
            assert live.bytes <= 4 * n * ELEMENT + ELEMENT


def test_growing_copies_each_value_a_few_times_at_most() -> None:
    array, moves = tl.TensorArray(), []
    last = -1
    for n in range(1, 1001):
        array.append(element())
        if (start := array[:1].data_ptr()) != last:
            moves.append(n)
            last = start
    assert sum(moves) <= 2 * 1000
