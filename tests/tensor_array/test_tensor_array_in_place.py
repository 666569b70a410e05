"""Tensors changed in place behind a TensorArray's back: an error at the next use, never a wrong value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.attention import Sight, attend_past
from tests.support.array_kinds import KINDS

VALUES = torch.arange(1.0, 13.0).view(4, 3)
every_mode = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])

USES: dict[str, Callable[[tl.TensorArray], Any]] = {
    "stack": lambda a: a.stack(),
    "slice": lambda a: a[:1],
    "gather": lambda a: a.gather([0]),
    "extend": lambda a: a.extend(VALUES),
    "overwrite": lambda a: a.write(0, VALUES[0]),
    "scatter": lambda a: a.scatter([0], VALUES[:1]),
    "write_rows": lambda a: a.write_rows(torch.tensor([0, 0, 0]), VALUES[0]),
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda base, x: x.zero_(),
    "its base": lambda base, x: base.zero_(),
    "a view of it": lambda base, x: x[:1].zero_(),
    "a sibling view": lambda base, x: base[0, :1].zero_(),
    "its detached self": lambda base, x: x.detach().zero_(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_waiting_tensor_changed_in_place_is_an_error(
    change: Callable[[Tensor, Tensor], Any], use: Callable[[tl.TensorArray], Any]
) -> None:
    base = VALUES[:1].clone().requires_grad_() * 1
    array = tl.TensorArray().append(VALUES[3].clone().requires_grad_()).append(base[0])
    before = len(array)
    with torch.no_grad():
        change(base, base[0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"TensorArray.*slot 1 was changed in place.*clone\(\)"):
            use(array)
        assert len(array) == before
    with pytest.raises(RuntimeError, match=r"TensorArray\.read.*slot 1"):
        array.read(1)
    assert torch.equal(array.read(0), VALUES[3])


def test_what_waits_is_bounded_and_a_refused_append_is_not_kept() -> None:
    array, xs = tl.TensorArray(), torch.randn(5000, 2, requires_grad=True).unbind(0)
    array.append(first := xs[0] * 1)
    with torch.no_grad():
        first.zero_()
    with pytest.raises(RuntimeError, match=r"TensorArray\.append.*slot 0 was changed in place"):
        array.extend(xs)
    kept = len(array)
    assert kept < 5000
    for x in xs[:3]:
        with pytest.raises(RuntimeError, match="slot 0 was changed in place"):
            array.append(x)
    assert len(array) == kept
    assert torch.equal(array[-1], xs[kept - 2])  # the last one that was taken without an error


@every_mode
def test_values_without_gradient_may_change_once_written(mode: Callable[[], Any]) -> None:
    with mode():
        x = VALUES[0].clone()
        array = tl.TensorArray().append(x)
        x.zero_()
        array.write(1, x.fill_(2))
        x.fill_(3)
        array.extend(x[None]).scatter([0], x[None] + 1)
        x.zero_()
    assert torch.equal(array.stack()[:, 0], torch.tensor([4.0, 2.0, 3.0]))


NEXT_USES: dict[str, Callable[[tl.TensorArray], Any]] = {
    **USES,
    "read": lambda a: a.read(3),
    "iterate": lambda a: list(a),
    "append": lambda a: a.append(VALUES[0]).stack(),
    "append with gradient": lambda a: a.append(VALUES[0].clone().requires_grad_()).stack(),
}


@pytest.mark.parametrize("use", NEXT_USES.values(), ids=NEXT_USES)
@pytest.mark.parametrize("name", ["appended", "flushed", "unstacked", "overwritten"])
@every_mode
def test_a_view_changed_in_place_is_an_error_at_the_next_use(
    mode: Callable[[], Any], name: str, use: Callable[[tl.TensorArray], Any]
) -> None:
    array = KINDS[name](VALUES)
    other = array[2:]
    view = array[:2]
    try:
        with mode():
            view[0].zero_()
    except RuntimeError:  # autograd refuses it itself
        assert view.requires_grad
        assert torch.equal(array.stack(), VALUES)
        return
    assert torch.equal(other, VALUES[2:])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"TensorArray.*changed in place.*clone\(\)"):
            use(array)


@pytest.mark.parametrize("use", NEXT_USES.values(), ids=NEXT_USES)
@pytest.mark.parametrize("needs_grad", [False, True])
@every_mode
def test_a_tensor_changed_after_unstack_is_an_error_at_the_next_use(
    mode: Callable[[], Any], needs_grad: bool, use: Callable[[tl.TensorArray], Any]
) -> None:
    base = VALUES.clone().requires_grad_(needs_grad) * 1
    array = tl.TensorArray.unstack(base)
    assert torch.equal(array[0], VALUES[0])
    with mode():
        base[3].zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"TensorArray.*unstack\(\) was changed in place.*clone\(\)"):
            use(array)


@every_mode
def test_a_view_changed_in_place_is_an_error_where_slots_are_read_as_they_lie(mode: Callable[[], Any]) -> None:
    values = torch.randn(3, 2, 1, 4)
    keys, others = tl.TensorArray().extend(values), tl.TensorArray().extend(values)
    view, q = keys[:1], values[0][:, None]
    with mode():
        attend_past(q, keys, others, Sight(1.0))
        view.zero_()
        with pytest.raises(RuntimeError, match=r"changed in place.*clone\(\)"):
            attend_past(q, keys, others, Sight(1.0))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_unstack_copies_at_the_first_write_and_not_before(needs_grad: bool) -> None:
    base = VALUES.clone().requires_grad_(needs_grad) * 1
    array = tl.TensorArray.unstack(base)
    assert array.stack().data_ptr() == base.data_ptr()
    assert array.nbytes == base.nbytes
    array.append(VALUES[0]) if needs_grad else array.write(0, VALUES[0])
    base.zero_()
    assert torch.equal(array[:4], VALUES)
    assert array.stack().data_ptr() != base.data_ptr()
