"""TensorArray: values, sizes, shapes, dtypes, layouts, indices and holes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import reference
from tests.support.array_kinds import KINDS, PLAIN, WITH_GRADIENT, Kind, holds

DTYPES = [
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip
VALUES = torch.arange(1.0, 31.0).view(5, 2, 3)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Index:
    """The least that Python takes for an integer."""

    def __init__(self, i: int) -> None:
        self.i = i

    def __index__(self) -> int:
        return self.i


INTS = [int, np.int64, np.int32, np.int8, torch.tensor, lambda i: torch.tensor(i, dtype=torch.int16), Index]
int_like = pytest.mark.parametrize("to_int", INTS, ids=["int", "np64", "np32", "np8", "tensor", "tensor16", "index"])


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN, so that what nobody wrote is seen."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(1).isnan()
    yield
    torch.set_deterministic_debug_mode(before)


def values_of(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 100, shape, dtype=dtype)


# -- reading


@every_kind
def test_single_reads_are_the_slots(kind: Kind) -> None:
    array = kind(VALUES)
    assert len(array) == 5
    for i in (3, 0, 0, 4, 2, -1, -5, -2, 1):
        assert torch.equal(array.read(i), VALUES[i])
        assert torch.equal(array[i], VALUES[i])


@every_kind
def test_bulk_reads_are_the_slots(kind: Kind) -> None:
    assert torch.equal(kind(VALUES).stack(), VALUES)
    assert torch.equal(kind(VALUES)[1:4], VALUES[1:4])
    assert torch.equal(kind(VALUES).gather([4, 0, 0]), VALUES[[4, 0, 0]])
    assert holds(kind(VALUES), VALUES)


@every_kind
def test_iteration_gives_the_slots_as_they_were_at_its_start(kind: Kind) -> None:
    array = kind(VALUES)
    seen: list[Tensor] = []
    for i, x in enumerate(array):
        array.append(x + 100)
        array[i] = torch.zeros(2, 3)
        seen.append(x)
    assert torch.equal(torch.stack(seen), VALUES)
    assert len(array) == 10
    assert torch.equal(array[5:], VALUES + 100)
    assert torch.equal(torch.stack(list(reversed(kind(VALUES)))), VALUES.flip(0))


SLICES = [
    slice(None), slice(1, 3), slice(None, 2), slice(2, None), slice(-2, None), slice(None, -1), slice(1, 100),
    slice(-100, 2), slice(3, 1), slice(5, 5), slice(9, 12), slice(0, 0), slice(None, None, 2), slice(1, None, 2),
    slice(None, None, -1), slice(4, 0, -3), slice(None, None, -2), slice(10, 0, -1), slice(0, 3, -1), slice(0, 5, 9),
]  # fmt: skip


@pytest.mark.parametrize("s", SLICES, ids=str)
@pytest.mark.parametrize("kind", [PLAIN["appended"], PLAIN["listed"], WITH_GRADIENT["waiting"], PLAIN["unstacked"]])
def test_slices_are_a_list_s(kind: Kind, s: slice) -> None:
    rows = list(range(5))[s]
    out = kind(VALUES)[s]
    assert out.shape == (len(rows), 2, 3)
    assert torch.equal(out, VALUES[rows])


@int_like
def test_whatever_counts_as_an_int_is_an_index(to_int: Any) -> None:
    array = tl.TensorArray(capacity=to_int(4)).extend(VALUES)
    assert torch.equal(array[to_int(2)], VALUES[2])
    assert torch.equal(array.read(to_int(-2)), VALUES[-2])
    assert torch.equal(array[to_int(1) : to_int(3)], VALUES[1:3])
    assert torch.equal(array.gather([to_int(1), to_int(-1)]), VALUES[[1, -1]])
    array[to_int(0)] = VALUES[4]
    array.write(to_int(5), VALUES[0])
    array.scatter([to_int(1), to_int(6)], VALUES[2:4])
    assert holds(array, VALUES[[4, 2, 2, 3, 4, 0, 3]])


@every_kind
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_gather_takes_indices_of_any_shape_and_integer_dtype(kind: Kind, dtype: torch.dtype) -> None:
    array = kind(VALUES)
    for index in ([1, 1, 2], [[0, 4], [3, 3]], 2, [], [[], []], [[[1]]]):
        where = torch.tensor(index, dtype=dtype)
        out = array.gather(where)
        assert out.shape == (*where.shape, 2, 3)
        assert torch.equal(out, VALUES[where.long()])


@every_kind
def test_gather_takes_sequences_and_negative_indices(kind: Kind) -> None:
    array = kind(VALUES)
    sequences: list[Any] = [[-1, 0, -5], (2,), range(1, 4), range(0), np.array([3, 3])]
    for index in sequences:
        assert torch.equal(array.gather(index), VALUES[torch.tensor(list(index), dtype=torch.int64)])
    assert torch.equal(array.gather(torch.tensor([[-1], [1]])), VALUES[torch.tensor([[-1], [1]])])
    for check in (True, False):
        assert torch.equal(array.gather(torch.tensor([-1, 1]), check=check), VALUES[[-1, 1]])


# -- writing


def test_writes_return_the_array_and_the_size_follows() -> None:
    array = tl.TensorArray()
    assert len(array) == 0
    steps = [
        (lambda: array.append(VALUES[0]), 1),
        (lambda: array.write(1, VALUES[1]), 2),
        (lambda: array.write(0, VALUES[2]), 2),
        (lambda: array.write(-1, VALUES[3]), 2),
        (lambda: array.extend(VALUES[:2]), 4),
        (lambda: array.extend(VALUES[:0]), 4),
        (lambda: array.extend([VALUES[4]]), 5),
        (lambda: array.extend(x for x in VALUES[:2]), 7),
        (lambda: array.extend([]), 7),
        (lambda: array.scatter([7, 0], VALUES[:2]), 8),
        (lambda: array.write_rows(torch.tensor([8, 1]), VALUES[1]), 9),
    ]
    for step, size in steps:
        assert step() is array
        assert len(array) == size
    rows = torch.stack([VALUES[1, 0], torch.zeros(3)])
    expected = [VALUES[1], torch.stack([VALUES[3, 0], VALUES[1, 1]]), *VALUES[[0, 1, 4, 0, 1, 0]], rows]
    assert holds(array, torch.stack(expected))


@every_kind
def test_overwriting_any_slot_leaves_the_others(kind: Kind) -> None:
    for slot in (0, 2, 4, -1, -5):
        array, expected, new = kind(VALUES), VALUES.clone(), torch.full((2, 3), -1.0)
        array[slot] = new
        expected[slot] = new
        assert holds(array, expected)
        assert holds(array.append(new), torch.cat([expected, new[None]]))


@every_kind
def test_an_array_extends_by_itself_once(kind: Kind) -> None:
    array = kind(VALUES)
    assert holds(array.extend(array), VALUES.repeat(2, 1, 1))  # pyright: ignore[reportArgumentType]
    array = kind(VALUES)
    assert holds(array.extend(array.stack()), VALUES.repeat(2, 1, 1))


@every_kind
def test_an_array_takes_its_own_slices(kind: Kind) -> None:
    array = kind(VALUES)
    array.scatter([1, 2, 3], array[:3])
    array[0] = array[4:][0]
    array.append(array[1:2][0])
    assert holds(array, VALUES[[4, 0, 1, 2, 4, 0]])


@every_kind
@pytest.mark.parametrize(
    ("index", "slots"),
    [
        ([3, 1], {3: 0, 1: 1}),
        ([0, 0, 0], {0: 2}),
        ([-1, 2, 4], {4: 2, 2: 1}),
        ([6, 5], {6: 0, 5: 1}),
        ([5, 2, 5], {5: 2, 2: 1}),
        ([], {}),
        (torch.tensor([2, 0], dtype=torch.uint8), {2: 0, 0: 1}),
        (range(4, 1, -2), {4: 0, 2: 1}),
    ],
    ids=str,
)
def test_scatter_writes_its_slots_and_keeps_the_others(kind: Kind, index: Any, slots: dict[int, int]) -> None:
    new = -VALUES[: len(index)]
    size = max([5, *(i + 1 for i in slots)])
    expected = torch.stack([-VALUES[slots[i]] if i in slots else VALUES[i] for i in range(size)])
    assert holds(kind(VALUES).scatter(index, new), expected)


def test_scatter_without_a_check_takes_negative_indices_as_gather_does() -> None:
    array = PLAIN["appended"](VALUES).scatter(torch.tensor([-1, 0]), -VALUES[:2], check=False)
    assert holds(array, torch.stack([-VALUES[1], *VALUES[1:4], -VALUES[0]]))


ROWS = [
    ([0, 1], None), ([5, 5], None), ([5, 2], None), ([4, 4], [True, False]), ([5, 0], [False, True]),
    ([0, 5], [False, True]), ([2, 3], [False, False]), ([9, -7], [False, False]), ([-1, 3], [False, True]),
]  # fmt: skip


@every_kind
@pytest.mark.parametrize(("pos", "where"), ROWS, ids=str)
def test_write_rows_writes_its_rows_and_keeps_the_others(kind: Kind, pos: list[int], where: list[bool] | None) -> None:
    x = -VALUES[3]
    expected = reference.write_rows(reference.unstack(VALUES), pos, x, where or [True, True])
    mask = None if where is None else torch.tensor(where)
    assert holds(kind(VALUES).write_rows(torch.tensor(pos, dtype=torch.int32), x, mask), reference.stack(expected))


def test_write_rows_begins_an_array() -> None:
    array = tl.TensorArray().write_rows(torch.tensor([0, 0]), VALUES[0], torch.tensor([False, False]))
    assert len(array) == 0
    array.write_rows(torch.tensor([0, 0]), VALUES[0], torch.tensor([False, True]))
    assert holds(array, torch.stack([torch.stack([torch.zeros(3), VALUES[0, 1]])]))
    for t in range(1, 5):  # two rows that grow at their own pace
        array.write_rows(torch.tensor([t, t // 2]), VALUES[t], torch.tensor([t < 3, t % 2 == 0]))
    assert torch.equal(array.stack()[:, 0], torch.stack([torch.zeros(3), *VALUES[1:3, 0]]))
    assert torch.equal(array.stack()[:, 1], torch.stack([VALUES[0, 1], VALUES[2, 1], VALUES[4, 1]]))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_nobody_sees_memory_that_nobody_wrote(needs_grad: bool) -> None:
    values = VALUES.clone().requires_grad_(needs_grad)
    array = tl.TensorArray(capacity=20).append(values[0])
    array.write_rows(torch.tensor([1, 1]), values[1], torch.tensor([True, False]))
    array[6] = values[2]
    array.write_rows(torch.tensor([4, 0]), values[3], torch.tensor([True, False]))
    array.scatter([10, 3, 5, 2], values[:4])
    array.scatter([7, 8, 9], values[:3])
    assert array.stack().isfinite().all()
    assert torch.equal(array[1], torch.stack([VALUES[1, 0], torch.zeros(3)]))
    assert torch.equal(array[4], torch.stack([VALUES[3, 0], torch.zeros(3)]))


# -- holes


def test_capacity_permits_holes_and_they_can_be_filled() -> None:
    array = tl.TensorArray(capacity=8)
    array[3] = VALUES[3]
    assert len(array) == 4
    array.append(VALUES[4])
    assert torch.equal(array[3:], VALUES[3:])
    assert torch.equal(array.gather([4, -2]), VALUES[[4, 3]])
    assert array[1:1].shape == (0, 2, 3)
    assert "holes=3" in repr(array)
    array.scatter([2, 0], VALUES[[2, 0]])
    assert torch.equal(array[:1], VALUES[:1])
    array.write_rows(torch.tensor([1, 1]), VALUES[1])
    assert "holes" not in repr(array)
    assert holds(array, VALUES)


def test_the_capacity_bounds_holes_and_nothing_else() -> None:
    array = tl.TensorArray(capacity=2)
    for x in VALUES:
        array.append(x)
    assert holds(array, VALUES)
    assert holds(tl.TensorArray(capacity=0).extend(VALUES), VALUES)
    array = tl.TensorArray(capacity=3)
    array[2] = VALUES[2]
    with pytest.raises(IndexError, match="slot 4"):
        array[4] = VALUES[4]
    assert len(array) == 3


# -- dtypes, shapes, layouts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_dtype_goes_in_and_comes_out_exactly(name: str, dtype: torch.dtype) -> None:
    if name in WITH_GRADIENT and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float64
    values, new = values_of(dtype, 5, 2, 3), values_of(dtype, 2, 3)
    array = KINDS[name](values)
    assert holds(array, values)
    assert torch.equal(array.gather([1, 1, 0]), values[[1, 1, 0]])
    assert torch.equal(array[::-2], values[[4, 2, 0]])
    array.scatter([5, 0, 0], values[1:4])
    array.write_rows(torch.tensor([6, 2]), new)
    array[1] = new
    zero = torch.zeros(3, dtype=dtype)
    expected = [
        values[3], new, torch.stack([values[2, 0], new[1]]), *values[3:], values[1], torch.stack([new[0], zero])
    ]  # fmt: skip
    assert holds(array, torch.stack(expected))


@pytest.mark.parametrize("shape", [(), (0,), (0, 1), (1,), (2, 0, 3), (1, 2, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_elements_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(4, *shape)
    array = KINDS[name](values)
    assert holds(array, values)
    assert array.gather(torch.tensor([[0, 1]])).shape == (1, 2, *shape)
    assert array[2:2].shape == (0, *shape)
    assert array[::2].shape == (2, *shape)
    assert [x.shape for x in array] == [shape] * 4
    array.scatter([4, 0], values[:2])
    array[1] = values[0]
    assert holds(array.extend(values[:1]), values[[1, 0, 2, 3, 0, 0]])


LAYOUTS = {
    "transposed": lambda: torch.randn(5, 2, 3, 4).transpose(1, 3),
    "strided": lambda: torch.randn(10, 4, 6)[::2, :, ::3],
    "slots last": lambda: torch.randn(3, 4, 5).movedim(2, 0),
    "expanded": lambda: torch.randn(3, 1).expand(5, 3, 4),
    "channels last": lambda: torch.randn(5, 2, 3, 3).to(memory_format=torch.channels_last),
    "conj view": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@every_kind
def test_values_of_any_layout(kind: Kind, make: Any) -> None:
    values = make()
    array = kind(values)
    assert holds(array, values)
    array.append(values[0])
    array[1] = values[2]
    array.scatter([0, 0], values[1:3])
    assert holds(array, torch.stack([values[i] for i in (2, 2, 2, 3, 4, 0)]))
