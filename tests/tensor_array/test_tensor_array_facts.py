"""TensorArray: what is known of it before and after the first write, and on a device whose values cannot be seen."""

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tests.support.array_kinds import PLAIN, WITH_GRADIENT, holds
from tests.support.devices import HERE, ON

VALUES = torch.arange(1.0, 31.0).view(5, 2, 3)


def test_facts_are_unknown_until_given_or_written() -> None:
    array = tl.TensorArray()
    assert (array.element_shape, array.dtype, array.device, array.nbytes, len(array)) == (None, None, None, 0, 0)
    assert list(array) == []
    array.append(torch.zeros(2, 3, dtype=torch.float64))
    assert (array.element_shape, array.dtype, array.device) == ((2, 3), torch.float64, HERE)
    assert array.nbytes >= 48


def test_facts_given_are_known_at_once() -> None:
    array = tl.TensorArray(element_shape=[2, None], dtype=torch.int32, device=ON, capacity=4)
    assert (array.element_shape, array.dtype, array.device) == ((2, None), torch.int32, HERE)
    array.append(torch.ones(2, 5, dtype=torch.int32))
    assert array.element_shape == (2, 5)


def test_an_empty_array_of_known_shape_reads_as_empty() -> None:
    array = tl.TensorArray(element_shape=(0, 3), dtype=torch.int64)
    for out in (array.stack(), array[:], array[::2], array[3:1], array.gather([])):
        assert (out.shape, out.dtype) == ((0, 0, 3), torch.int64)
    assert array.gather(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 0, 3)
    assert list(array) == []
    assert holds(tl.TensorArray.unstack(VALUES[:0]), VALUES[:0])
    assert holds(tl.TensorArray.unstack(VALUES[:0]).extend(VALUES), VALUES)
    assert holds(tl.TensorArray().extend(VALUES[:0]), VALUES[:0])


def test_repr_tells_the_facts() -> None:
    assert repr(tl.TensorArray()) == "TensorArray(len=0, element_shape=None, dtype=None, device=None)"
    facts = f"TensorArray(len=5, element_shape=(2, 3), dtype=torch.float32, device={ON}"
    assert repr(PLAIN["appended"](VALUES)) == f"{facts})"
    assert repr(WITH_GRADIENT["waiting"](VALUES)) == f"{facts}, requires_grad=True)"
    assert repr(WITH_GRADIENT["flushed"](VALUES)) == f"{facts}, requires_grad=True)"


@pytest.mark.parametrize("values", [torch.arange(4.0), torch.arange(6.0).view(2, 3), torch.zeros(0), torch.zeros(0, 2)])
def test_unstack_again_makes_another_array(values: Tensor) -> None:
    first = tl.TensorArray.unstack(values)
    second = tl.TensorArray.unstack(values)
    second.append(torch.ones(values.shape[1:]))
    assert holds(first, values)
    assert len(second) == len(values) + 1


def test_arrays_made_in_a_branch_of_a_loop_are_independent() -> None:
    made: list[tl.TensorArray] = []
    for t, x in enumerate(VALUES):
        if t % 2 == 0:
            made.append(tl.TensorArray().append(x))
        made[-1].append(-x)
    assert [len(array) for array in made] == [3, 3, 2]
    for k, array in enumerate(made):
        expected = [VALUES[2 * k], -VALUES[2 * k], *-VALUES[2 * k + 1 : 2 * k + 2]]
        assert torch.equal(array.stack(), torch.stack(expected))


# -- a device whose values cannot be looked at


def test_indices_that_are_not_on_the_device_are_checked_and_grow_the_array() -> None:
    values = torch.empty(4, 3, device="meta")
    array = tl.TensorArray(device="meta").extend(values)
    with pytest.raises(IndexError, match="4"):
        array.gather([0, 4])
    assert array.gather([0, -1]).shape == (2, 3)
    assert len(array.scatter([5, 4], values[:2])) == 6
    assert len(array.write_rows(torch.tensor([6, 0, 0], device="cpu"), values[0])) == 7


def test_indices_on_a_device_are_not_looked_at() -> None:
    values = torch.empty(4, 3, device="meta")
    index = torch.empty(2, 2, dtype=torch.int64, device="meta")
    array = tl.TensorArray(capacity=6).extend(values)
    assert array.gather(index).shape == (2, 2, 3)
    assert len(array.scatter(index[0], values[:2])) == 4
    assert len(array.write_rows(torch.empty(3, dtype=torch.int64, device="meta"), values[0])) == 6
    assert (array.stack().shape, array.stack().device.type) == ((6, 3), "meta")
    with pytest.raises(ValueError, match=r"TensorArray.write_rows.*meta.*check=True.*capacity"):
        tl.TensorArray.unstack(values).write_rows(torch.empty(3, dtype=torch.int64, device="meta"), values[0])
