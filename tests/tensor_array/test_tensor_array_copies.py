"""Copies of a TensorArray: copy.copy, deepcopy, pickle, torch.save, detach and to."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensorloop as tl
from tests.support.array_kinds import KINDS, PLAIN, WITH_GRADIENT, Kind, holds
from tests.support.devices import HERE, ON

VALUES = torch.arange(1.0, 13.0).view(4, 3)
NEW = torch.full((3,), -1.0)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def through_file(array: tl.TensorArray) -> tl.TensorArray:
    file = io.BytesIO()
    torch.save(array, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


FORKS: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "detach": lambda array: array.detach()}
DEEP: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda array: pickle.loads(pickle.dumps(array)),
    "old pickle": lambda array: pickle.loads(pickle.dumps(array, protocol=2)),
    "save": through_file,
}
COPIES = FORKS | DEEP | {"to": lambda array: array.to(copy=True)}
every_copy = pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)


def of(kind: Kind, how: Callable[[Any], Any]) -> tl.TensorArray:
    """An array that `how` can copy: deep copies refuse a graph."""
    array = kind(VALUES)
    return array.detach() if how in DEEP.values() else array


@every_kind
@every_copy
def test_a_copy_is_equal_and_goes_its_own_way(how: Callable[[Any], Any], kind: Kind) -> None:
    for first in (0, 1):
        array = of(kind, how)
        twin = how(array)
        assert holds(twin, VALUES)
        assert twin is not array
        assert (twin.dtype, twin.device, twin.element_shape) == (torch.float32, HERE, (3,))
        pair = [array, twin]
        pair[first].append(NEW)
        assert holds(pair[1 - first], VALUES)
        pair[1 - first].append(2 * NEW).append(3 * NEW)
        pair[first][0] = NEW
        pair[1 - first].write_rows(torch.tensor([3, 3, 6]), NEW)
        pair[1 - first].scatter([1, 7], torch.stack([NEW, NEW]))
        assert holds(pair[first], torch.stack([NEW, *VALUES[1:], NEW]))
        expected = torch.stack([VALUES[0], NEW, *VALUES[2:], 2 * NEW, 3 * NEW, 0 * NEW, NEW])
        expected[[3, 3, 6], [0, 1, 2]] = NEW
        assert holds(pair[1 - first], expected)


@pytest.mark.parametrize("how", FORKS.values(), ids=FORKS)
def test_the_first_to_append_takes_the_free_tail_and_the_other_copies(how: Callable[[Any], Any]) -> None:
    for first in (0, 1):
        array = tl.TensorArray(capacity=10).extend(VALUES)
        start = array[:1].data_ptr()
        pair = [array, how(array)]
        assert pair[1][:1].data_ptr() == start
        pair[first].append(NEW)
        assert pair[first][:1].data_ptr() == start
        pair[1 - first].append(2 * NEW)
        assert pair[1 - first][:1].data_ptr() != start
        pair[first].append(3 * NEW)
        assert pair[first][:1].data_ptr() == start
        assert holds(pair[first], torch.stack([*VALUES, NEW, 3 * NEW]))
        assert holds(pair[1 - first], torch.stack([*VALUES, 2 * NEW]))


@every_kind
def test_copies_of_copies(kind: Kind) -> None:
    family = [(kind(VALUES), list(VALUES))]
    for step in range(12):
        array, expected = family[(step * step) % len(family)]
        family.append((copy.copy(array), list(expected)))
        x = NEW * step
        array.append(x)
        expected.append(x)
        array, expected = family[(step * 5) % len(family)]
        array[step % 4] = x
        expected[step % 4] = x
    assert all(holds(array, torch.stack(expected)) for array, expected in family)


def test_a_copy_of_what_was_unstacked_reads_its_rows_by_one_operation_too() -> None:
    twin = copy.copy(tl.TensorArray.unstack(VALUES.clone().requires_grad_()))
    rows = [twin.read(i) for i in range(len(twin))]
    assert holds(twin, VALUES)
    assert len({row.grad_fn for row in rows}) == 1


def test_reads_of_a_twin_stay_what_they_were() -> None:
    array = PLAIN["appended"](VALUES)
    twin = copy.copy(array)
    views = array.stack(), twin[:3]
    for i in range(4):
        array[i] = NEW
        twin[3 - i] = 2 * NEW
    assert torch.equal(views[0], VALUES)
    assert torch.equal(views[1], VALUES[:3])


@pytest.mark.parametrize("how", (FORKS | DEEP).values(), ids=FORKS | DEEP)
@pytest.mark.parametrize("given", [{}, {"element_shape": (3, None), "dtype": torch.float64, "capacity": 4}], ids=str)
def test_copies_of_an_empty_array(how: Callable[[Any], Any], given: dict[str, Any]) -> None:
    array = tl.TensorArray(**given)
    twin = how(array)
    assert (len(twin), repr(twin)) == (0, repr(array))
    twin.append(torch.zeros(3, 2, dtype=torch.float64))
    assert (len(array), len(twin)) == (0, 1)
    array.append(torch.zeros(3, 5, dtype=torch.float64))
    assert (array.element_shape, twin.element_shape) == ((3, 5), (3, 2))


@every_copy
@pytest.mark.parametrize("written", [False, True])
def test_copies_have_their_own_holes(how: Callable[[Any], Any], written: bool) -> None:
    array = tl.TensorArray(capacity=6)
    if written:
        array[2] = VALUES[2]
    twin = how(array)
    array.write(4, NEW)
    twin.extend(VALUES[:1])
    assert len(twin) == (4 if written else 1)
    assert torch.equal(twin[-1], VALUES[0])
    if written:
        array[0] = NEW
        with pytest.raises(IndexError, match="slot 0 is a hole"):
            twin.read(0)
        twin.write_rows(torch.tensor([1, 1, 1]), NEW)
        with pytest.raises(IndexError, match="slot 1 is a hole"):
            array.read(1)
        assert torch.equal(twin[1:], torch.stack([NEW, VALUES[2], VALUES[0]]))
    else:
        twin[5] = NEW  # the permission to leave holes is copied too
        assert torch.equal(twin[5], NEW)


@pytest.mark.parametrize("how", [*DEEP.values(), COPIES["to"]], ids=[*DEEP, "to"])
def test_a_deep_copy_shares_nothing_and_costs_its_original_nothing(how: Callable[[Any], Any]) -> None:
    array = tl.TensorArray(capacity=8).extend(VALUES)
    start = array[:1].data_ptr()
    twin = how(array)
    assert twin.stack().data_ptr() != start
    array[2] = NEW
    assert array[:1].data_ptr() == start
    assert holds(twin, VALUES)


def test_a_deep_copy_of_a_structure_keeps_one_array_one() -> None:
    array = PLAIN["appended"](VALUES)
    left, right = copy.deepcopy([array, array])
    assert left is right
    assert left is not array


@pytest.mark.parametrize("kind", WITH_GRADIENT.values(), ids=WITH_GRADIENT)
def test_detach_cuts_the_gradient_and_leaves_the_original_its_own(kind: Kind) -> None:
    array = kind(VALUES)
    cut = array.detach()
    for out in (cut.stack(), cut[0], cut[:2], cut.gather([1]), *cut):
        assert not out.requires_grad
    assert array.stack().requires_grad
    cut.append(VALUES[0].clone().requires_grad_())
    assert cut.stack().requires_grad


# -- to


@every_kind
def test_to_changes_the_dtype(kind: Kind) -> None:
    array = kind(VALUES)
    other = array.to(torch.float64)
    assert (other.dtype, other.element_shape, len(other)) == (torch.float64, (3,), 4)
    assert holds(other, VALUES.double())
    assert holds(array, VALUES)
    assert other.stack().requires_grad is (kind in WITH_GRADIENT.values())
    other.append(NEW.double())
    with pytest.raises(TypeError, match=r"torch\.float64"):
        other.append(NEW)


@every_kind
def test_to_where_it_is_gives_itself(kind: Kind) -> None:
    array = kind(VALUES)
    for args in ((ON,), (torch.float32,), (HERE, torch.float32), (VALUES,)):
        assert array.to(*args) is array
    assert array.to(dtype=torch.float32, device=ON) is array
    assert array.to(torch.float32, copy=True) is not array


def test_to_another_device() -> None:
    other = PLAIN["appended"](VALUES).to("meta")
    assert (other.device, other.dtype, other.stack().shape) == (torch.device("meta"), torch.float32, (4, 3))
    other = PLAIN["appended"](VALUES).to("meta", torch.int32)
    assert (other.stack().device.type, other.dtype) == ("meta", torch.int32)
    with pytest.raises(ValueError, match=ON):
        other.append(NEW.int())


def test_to_keeps_the_facts_of_an_empty_array() -> None:
    array = tl.TensorArray(element_shape=(None, 2), dtype=torch.int64, capacity=3).to(torch.int32)
    assert (array.element_shape, array.dtype) == ((None, 2), torch.int32)
    array[2] = torch.ones(1, 2, dtype=torch.int32)
    assert array.element_shape == (1, 2)


def test_to_fixes_what_it_is_given_and_nothing_else() -> None:
    assert repr(tl.TensorArray().to(copy=True)) == repr(tl.TensorArray())
    moved = tl.TensorArray().to("meta")
    assert (moved.device, moved.dtype) == (torch.device("meta"), None)
    assert tl.TensorArray().to(torch.float32).dtype is torch.float32
    assert tl.TensorArray().to(torch.float64).dtype is torch.float64


def test_to_keeps_holes_and_capacity() -> None:
    array = tl.TensorArray(capacity=6).append(VALUES[0])
    array[3] = VALUES[3]
    other = array.to(torch.float64)
    with pytest.raises(IndexError, match="slot 1 is a hole"):
        other.stack()
    other.scatter([1, 2], VALUES[1:3].double())
    assert holds(other, VALUES.double())
    other[5] = VALUES[0].double()
    assert len(other) == 6
    with pytest.raises(IndexError, match="slot 2 is a hole"):
        array.read(2)
