"""The kernels that write and take rows of a loop buffer in place, beside a loop over the rows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorloop import reference
from tensorloop.kernels import find
from tensorloop.kernels.cpu import slots as cpu_slots
from tensorloop.kernels.cpu import threads
from tensorloop.kernels.eager import slots as eager_slots

BOTH = [cpu_slots, eager_slots]
SIZES = [(0, 0, 3), (1, 1, 1), (3, 0, 2), (5, 4, 0), (7, 5, 3), (4, 9, 257), (2, 3, 2000)]


def arguments(n: int, batch: int, features: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """(slots, pos, x, where)"""
    slots = (torch.randn(n, batch, features) * 3).to(dtype)
    pos = torch.randint(0, max(n, 1), (batch,))
    return slots, pos, (torch.randn(batch, features) * 3).to(dtype), torch.rand(batch) < 0.6


def written(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> Tensor:
    rows = reference.write_rows(slots.unbind(0), pos.tolist(), x, where.tolist())
    return torch.stack(rows) if rows else slots


def taken(slots: Tensor, pos: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    left, out = slots.clone(), torch.zeros(slots.shape[1:], dtype=slots.dtype)
    for b in range(len(pos)):
        if where[b]:
            out[b], left[pos[b], b] = slots[pos[b], b], 0
    return out, left


def check(module: Any, slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    # What stands at a slot is a copy of each test's own, in the layout of the one given.
    target = torch.empty_strided(slots.shape, slots.stride(), dtype=slots.dtype).copy_(slots)
    module.write_rows(target, pos, x, where)
    assert torch.equal(target, written(slots, pos, x, where))
    target.copy_(slots)
    out, left = taken(slots, pos, where)
    assert torch.equal(module.take_rows(target, pos, where), out)
    assert torch.equal(target, left)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("sizes", SIZES)
def test_odd_sizes(module: Any, sizes: tuple[int, int, int]) -> None:
    n, batch, _ = sizes
    if n or not batch:  # without slots there is no place for a row
        check(module, *arguments(*sizes))


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_any_dtype(module: Any, dtype: torch.dtype) -> None:
    check(module, *arguments(6, 5, 7, dtype))


@pytest.mark.parametrize("module", BOTH)
def test_more_dims_and_none(module: Any) -> None:
    slots, pos, x, where = arguments(6, 5, 12)
    check(module, slots.view(6, 5, 3, 4), pos, x.view(5, 3, 4), where)
    check(module, slots[:, :, 0].contiguous(), pos, x[:, 0], where)


@pytest.mark.parametrize("module", BOTH)
def test_any_strides(module: Any) -> None:
    slots, pos, x, where = arguments(6, 5, 4)
    apart = torch.stack([pos, pos], 1)[:, 0], torch.stack([x, x], 2)[..., 0], torch.stack([where, ~where], 1)[:, 0]
    check(module, slots, *apart)
    check(module, slots.transpose(0, 2).contiguous().transpose(0, 2), pos, x, where)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 70))
def test_drawn_sizes(n: int, batch: int, features: int) -> None:
    check(cpu_slots, *arguments(n, batch, features))


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PIECE", 1)
    torch.set_num_threads(3)
    try:
        check(cpu_slots, *arguments(4, 100, 30))
    finally:
        torch.set_num_threads(1)


def test_positions_outside_touch_nothing() -> None:
    """Callers keep them inside. If one did not: memory before and after the slots stays what it was."""
    poisoned = torch.full((5, 4, 3), 7.0)
    slots = poisoned[1:4]
    pos = torch.tensor([-1, 3, 2**40, 1])
    cpu_slots.write_rows(slots, pos, torch.zeros(4, 3), torch.ones(4, dtype=torch.bool))
    expected = torch.full((5, 4, 3), 7.0)
    expected[2, 3] = 0
    assert torch.equal(poisoned, expected)
    poisoned.fill_(7.0)
    out = cpu_slots.take_rows(slots, pos, torch.ones(4, dtype=torch.bool))
    assert torch.equal(out, torch.tensor([0.0, 0.0, 0.0, 7.0])[:, None].expand(4, 3))
    assert torch.equal(poisoned, expected)


def test_the_table_has_them() -> None:
    x = torch.zeros(2, 3)
    assert find("write_rows", x) is cpu_slots.write_rows
    assert find("take_rows", x.to("meta")) is eager_slots.take_rows
