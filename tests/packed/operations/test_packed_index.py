"""Indexing of packed tensors, against lists of rows."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorloop.packed import PackedTensor

MIXED = [3, 0, 4, 1]
BOUND = st.none() | st.integers(-6, 6)


def packed(lens: list[int] = MIXED) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), 2, dtype=torch.float64, requires_grad=True), lens)


def assert_rows(got: Any, want: list[Tensor], values: Tensor) -> None:
    assert isinstance(got, PackedTensor)
    assert got.lens.tolist() == [len(x) for x in want]
    joined = torch.cat(want) if want else got.values
    assert torch.equal(got.values, joined)
    if got.values.numel():
        weight = torch.randn_like(joined)
        torch.testing.assert_close(*(torch.autograd.grad((x * weight).sum(), values)[0] for x in (got.values, joined)))


@given(lens=st.lists(st.integers(0, 4), max_size=4), start=BOUND, stop=BOUND, step=st.sampled_from([None, 1, 2, 3]))
def test_slices_of_time(lens: list[int], start: int | None, stop: int | None, step: int | None):
    p = packed(lens)
    assert_rows(p[:, start:stop:step], [row[start:stop:step] for row in p.unbind()], p.values)


@given(
    lens=st.lists(st.integers(0, 4), max_size=4), start=BOUND, stop=BOUND, step=st.sampled_from([None, 1, 2, -1, -2])
)
def test_slices_of_rows(lens: list[int], start: int | None, stop: int | None, step: int | None):
    p = packed(lens)
    assert_rows(p[start:stop:step], list(p.unbind())[start:stop:step], p.values)


@given(rows=st.lists(st.integers(-4, 3), max_size=6))
def test_rows_by_number(rows: list[int]):
    p = packed()
    want = [p.unbind()[i] for i in rows]
    for index in (rows, torch.tensor(rows, dtype=torch.int64)):
        assert_rows(p[index], want, p.values)
    assert_rows(torch.index_select(p, 0, torch.tensor(rows, dtype=torch.int64)), want, p.values)  # pyright: ignore


def test_rows_by_mask():
    p = packed()
    assert_rows(p[p.lens > 0], [row for row in p.unbind() if len(row)], p.values)
    assert_rows(p[[True, False, True, False]], [p[0], p[2]], p.values)
    assert_rows(p.repeat_interleave(2, 0), [p[b] for b in (0, 0, 1, 1, 2, 2, 3, 3)], p.values)


def test_one_row():
    p = packed()
    for b in (0, 2, -1, -3):
        assert torch.equal(p[b], p.unbind()[b])
    assert torch.equal(p[2, 1:3], p.unbind()[2][1:3])
    assert torch.equal(p[2, -1], p.unbind()[2][-1])
    assert torch.equal(p[2, 1, 0], p.unbind()[2][1, 0])
    assert torch.equal(p[2, :, 0], p.unbind()[2][:, 0])
    assert torch.equal(p[2, [0, 3]], p.unbind()[2][[0, 3]])
    assert torch.equal(p[torch.tensor(2)], p.unbind()[2])


def test_one_step():
    p = packed()
    full = p[p.lens > 0]
    for t in (0, -1):
        got, want = full[:, t], torch.stack([row[t] for row in full.unbind()])
        assert torch.equal(got, want)
        weight = torch.randn_like(want)
        a, b = (torch.autograd.grad((x * weight).sum(), p.values, retain_graph=True)[0] for x in (got, want))
        assert torch.equal(a, b)
    assert torch.equal(full[:, 0, 1], torch.stack([row[0, 1] for row in full.unbind()]))
    longer = p[[0, 2]]
    assert torch.equal(longer[:, [2, 0]], torch.stack([row[[2, 0]] for row in longer.unbind()]))


def test_pairs():
    p = packed()
    rows, times = torch.tensor([2, 0, 3, 2]), torch.tensor([3, -1, 0, 3])
    assert torch.equal(p[rows, times], torch.stack([p[int(b), int(t)] for b, t in zip(rows, times, strict=True)]))
    assert torch.equal(p[rows, times, 1], p[rows, times][:, 1])
    full = p[p.lens > 0]
    assert torch.equal(full[torch.arange(3), full.lens - 1], full[:, -1])


def test_features_of_lists_of_steps_and_rows():
    lens = [3, 2, 4, 3]
    p = PackedTensor(torch.randn(12, 3, 4, requires_grad=True), lens)
    padded, every = p.pad(), slice(None)
    two, three, pairs = torch.tensor([0, 1]), [2, 0, 1], torch.tensor([[0, 1], [1, 0]])
    rows, times, numbers = torch.arange(4), torch.tensor(lens) - 1, torch.tensor([0, 2, 1, 1])
    keys = [
        *((every, two, 0), (every, two, every, 0), (every, two, slice(1, 3)), (every, two, 0, slice(1, 3))),
        *((every, two, ..., -1), (every, two, None), (every, two, two), (every, two, pairs), (every, two, 0, two)),
        *((rows, times, numbers), (rows, times, 1), (rows, times, every, numbers), (rows, times, numbers, numbers)),
        *(
            (rows, 0, numbers),
            (rows[:, None], two, 0),
            (rows[:, None], two[None], every, slice(1)),
            (rows, 1, every, 0),
        ),
        *(
            (1, two, 0),
            (1, two, two),
            (1, slice(2), two),
            (1, two, every, two),
            (every, 0, three),
            (every, 1, every, two),
        ),
    ]
    for key in keys:
        got, want = p[key], padded[key]
        weight = torch.randn_like(want)
        assert torch.equal(got, want), key
        grads = (torch.autograd.grad((x * weight).sum(), p.values, retain_graph=True)[0] for x in (got, want))
        torch.testing.assert_close(*grads)
    for key in ((every, two, every, two), (rows, every, numbers), (rows, slice(2), [0, 1, 2, 0])):
        with pytest.raises(TypeError, match="indexing: lists of"):
            p[key]


def test_masks_of_entries():
    p = packed()
    assert torch.equal(p[p > 0], p.values[p.values > 0])
    keep = p[..., 0] > 0
    assert torch.equal(p[keep], p.values[p.values[:, 0] > 0])


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("row", lambda p: p[4], IndexError, "row 4 is out of range for a packed tensor of 4 rows"),
    ("row below", lambda p: p[-5], IndexError, "row -5 is out of range"),
    ("t", lambda p: p[:, 2], IndexError, "t = 2 is out of range for row 1 of length 0"),
    ("t in a row", lambda p: p[3, 1], IndexError, "t = 1 is out of range for row 3 of length 1"),
    ("ts in a row", lambda p: p[3, [0, 1]], IndexError, r"times\[1\] is 1"),
    ("t below", lambda p: p[:, -1], IndexError, "t = -1 is out of range for row 1 of length 0"),
    ("ts", lambda p: p[[0, 2]][:, [0, 3]], IndexError, "t = 3 is out of range for row 0 of length 3"),
    ("rows", lambda p: p[[0, 4]], IndexError, r"rows\[1\] is 4, expected -4 <= index < 4"),
    ("pairs", lambda p: p[torch.tensor([0, 3]), torch.tensor([0, 1])], IndexError, r"times\[1\] is 1"),
    ("mask", lambda p: p[[True, False]], IndexError, r"a mask must be \(4,\), one bool a row, got \(2,\)"),
    ("too many", lambda p: p[0, 0, 0, 0], IndexError, "4 indices for a packed tensor of 3 dims"),
    ("float", lambda p: p[torch.tensor([0.5])], TypeError, "rows must be integers, got dtype torch.float32"),
    ("string", lambda p: p["time"], TypeError, "index must be an int"),
    ("step", lambda p: p[:, ::-1], ValueError, "step must be at least 1, got -1; use flip"),
    ("2-d rows", lambda p: p[torch.zeros(2, 2, dtype=torch.int64)], IndexError, r"rows must be \(M,\)"),
    ("packed index", lambda p: p[p.long()], TypeError, "a packed index must be one bool tensor"),
    ("other mask", lambda p: p[p[:3] > 0], ValueError, "packed tensors of 4 and 3 rows"),
]


@pytest.mark.parametrize(("call", "error", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_is_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(packed())


def test_a_table_by_packed_indices():
    table = torch.randn(5, 3, requires_grad=True)
    ids = PackedTensor(torch.randint(0, 5, (8,)), MIXED)
    got = table[ids]  # pyright: ignore
    assert torch.equal(got.values, table[ids.values])  # pyright: ignore
    places = PackedTensor(table[ids.positions], ids.dims[0])
    assert torch.equal((got + places).values, table[ids.values] + table[ids.positions])  # pyright: ignore
    with pytest.raises(TypeError, match=r"len: a packed tensor has B rows"):
        len(ids)
