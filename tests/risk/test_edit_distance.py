"""Edit distances and alignments beside the plain table: kernels, torch operations, sizes, dtypes, threads."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensorloop import kernels, reference
from tensorloop.kernels.cpu import edits as cpu_edits
from tensorloop.kernels.cpu import threads
from tensorloop.kernels.eager import edits as eager_edits
from tensorloop.packed import Dim, PackedTensor, pack_padded
from tensorloop.reference import Cost, Row
from tensorloop.risk import EDITS, edit_distance


def by_pairs(a: Sequence[Row], b: Sequence[Row], *costs: Any) -> list[float]:
    each = len(a) // len(b) if a else 1
    return [reference.edit_distance(row, b[r // each], *costs) for r, row in enumerate(a)]


def drawn(lens: Sequence[int], tokens: int) -> list[list[int]]:
    return [torch.randint(0, tokens, (n,)).tolist() for n in lens]


def flat(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    values = torch.tensor([t for row in rows for t in row], dtype=torch.int64)
    return values, torch.tensor([0, *map(len, rows)]).cumsum(0)


rows_of_tokens = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4)


# ---- values ----


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [
        ("", "", 0),
        ("abc", "", 3),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("saturday", "sunday", 3),
        ("abcd", "abcd", 0),
        ("ab", "ba", 2),
        ("aaaa", "a", 3),
    ],
)
def test_by_hand(a: str, b: str, edits: int) -> None:
    found = edit_distance([list(a.encode())], [list(b.encode())])
    assert found.dtype is torch.int64
    assert found.tolist() == [edits] == [reference.edit_distance(list(a.encode()), list(b.encode()))]


@given(a=rows_of_tokens, b=rows_of_tokens, each=st.integers(1, 3))
def test_unit_costs(a: list[list[int]], b: list[list[int]], each: int) -> None:
    rows = [row for row in a for _ in range(each)][: len(b) * each]
    rows += [[] for _ in range(len(b) * each - len(rows))]
    expected = torch.tensor(by_pairs(rows, b))
    assert torch.equal(edit_distance(rows, b), expected)
    assert torch.equal(eager_edits.edit_distance(*flat(rows), *flat(b)), expected)


# A word has 64 bits: what is carried from one to the next shows at these lengths.
@pytest.mark.parametrize("size", [1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193])
@pytest.mark.parametrize("tokens", [1, 2, 5, 100])
@pytest.mark.extended("1-1", "5-", "100-62", "100-66", "100-19")
def test_lengths_about_a_word(size: int, tokens: int) -> None:
    a, b = drawn([size] * 5, tokens), drawn([size, size // 2, 2 * size, 0, size + 1], tokens)
    b[0] = a[0][1:] + a[0][:1]
    assert edit_distance(a, b).tolist() == by_pairs(a, b)
    assert edit_distance(b, a).tolist() == by_pairs(b, a)


@pytest.mark.parametrize("size", [0, 1, 40, 70, 130])
def test_all_substitutions_all_insertions_all_deletions(size: int) -> None:
    ones, twos = [1] * size, [2] * size
    assert edit_distance([ones, ones, [], ones], [twos, [], twos, ones]).tolist() == [size, size, size, 0]


def test_any_token_is_a_token() -> None:
    large = 2**63 - 1
    a = [[large, -large - 1, 0], [large - 1, 2**32, 0]]
    b = [[large, -large - 1, 0], [large, 0, 2**32]]
    assert edit_distance(a, b).tolist() == [0, 3]


def test_one_reference_for_consecutive_rows() -> None:
    a = [[1, 2], [1], [3], [4, 4, 4]]
    assert edit_distance(a, [[1, 2], [4]]).tolist() == [0, 1, 1, 2]
    assert edit_distance(a, [[1, 2]]).tolist() == [0, 1, 2, 3]
    assert edit_distance(a, a).tolist() == [0, 0, 0, 0]


def test_no_rows_and_empty_rows() -> None:
    none = PackedTensor(torch.empty(0, dtype=torch.int32), [])
    for a, b in [(none, none), ([], []), (none, [[1]]), ([], [[], []])]:
        found = edit_distance(a, b)
        assert (found.shape, found.dtype) == ((0,), torch.int64)
        found, steps = edit_distance(a, b, insertion=0.5, align=True)
        assert (found.shape, found.dtype, steps.shape) == ((0,), torch.float64, (0, None, 3))
    assert edit_distance([[], []], [[]]).tolist() == [0, 0]
    assert edit_distance([[], [1, 2]], [[3], []]).tolist() == [1, 2]
    assert eager_edits.edit_distance(*flat([[], []]), *flat([[]])).tolist() == [0, 0]


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("other", [torch.int64, torch.uint8])
def test_integers_of_all_kinds(dtype: torch.dtype, other: torch.dtype) -> None:
    a, b = drawn([3, 0, 5], 4), drawn([4, 1, 5], 4)
    packed = PackedTensor(flat(a)[0].to(dtype), [3, 0, 5])
    assert edit_distance(packed, [torch.tensor(row).to(other) for row in b]).tolist() == by_pairs(a, b)


def test_rows_come_packed_as_lists_or_tensors() -> None:
    padded = torch.tensor([[1, 2, 3], [4, 0, 0]])
    kinds = [
        pack_padded(padded, [3, 1]),
        PackedTensor(torch.tensor([1, 2, 3, 4]), Dim("time", [3, 1])),
        [[1, 2, 3], [4]],
        ((1, 2, 3), (4,)),
        [torch.tensor([1, 2, 3]), torch.tensor([4], dtype=torch.int8)],
        [[1, 2, 3], torch.tensor([4])],
    ]
    for a, b in itertools.product(kinds, kinds):
        assert edit_distance(a, b).tolist() == [0, 0]


def test_strides_do_not_matter() -> None:
    a, b = drawn([7, 3], 3), drawn([5, 6], 3)
    values, _ = flat(a)
    strided = torch.stack([values, values + 1], 1)[:, 0]
    assert not strided.is_contiguous()
    table = torch.rand(3, 3)
    expected = edit_distance(a, b, substitution=table)
    assert edit_distance(PackedTensor(strided, [7, 3]), b).tolist() == by_pairs(a, b)
    found = edit_distance(PackedTensor(strided, [7, 3]), b, substitution=table.t().contiguous().t())
    assert torch.equal(found, expected)


def test_nothing_is_changed_and_nothing_has_a_gradient() -> None:
    values = torch.tensor([1, 2, 3])
    table = torch.rand(4, 4)
    before = values.clone(), table.clone()
    found, steps = edit_distance(PackedTensor(values, [3]), [[1, 3]], substitution=table, align=True)
    assert not found.requires_grad
    assert not steps.values.requires_grad
    assert torch.equal(values, before[0])
    assert torch.equal(table, before[1])


def test_under_inference_mode_and_compile() -> None:
    with torch.inference_mode():
        assert edit_distance([torch.tensor([1, 2])], [torch.tensor([2])]).tolist() == [1]

    def rate(a: PackedTensor, b: PackedTensor) -> Tensor:
        return edit_distance(a, b) / b.lens

    a, b = PackedTensor(torch.tensor([1, 2]), [2]), PackedTensor(torch.tensor([2]), [1])
    assert torch.compile(rate, backend="eager")(a, b).tolist() == [1]
    torch.compiler.reset()


# ---- costs ----

COSTS: list[dict[str, Any]] = [
    {"insertion": 1.0},
    {"insertion": 0.3, "deletion": 0.7, "substitution": 1.1},
    {"insertion": 2, "deletion": 3, "substitution": 4},
    {"insertion": 0, "deletion": 0, "substitution": 1},
    {"substitution": torch.inf},
    {"substitution": 0.5, "deletion": torch.tensor(0.25)},
]


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_weighted(costs: dict[str, Any]) -> None:
    a, b = drawn([0, 4, 9, 30, 3, 0], 3), drawn([5, 0, 12, 8, 40, 0], 3)
    insertion, deletion, other = (float(costs.get(k, 1)) for k in ("insertion", "deletion", "substitution"))
    expected = by_pairs(a, b, insertion, deletion, lambda x, y: 0 if x == y else other)
    found = edit_distance(a, b, **costs)
    assert found.dtype is torch.float64
    assert found.tolist() == expected
    again = eager_edits.edit_cost(*flat(a), *flat(b), insertion, deletion, other)
    assert torch.equal(found, again)


@given(a=rows_of_tokens, b=rows_of_tokens, dtype=st.sampled_from([torch.float32, torch.float64, torch.int64]))
def test_a_table_has_rows_for_a_and_columns_for_b(a: list[list[int]], b: list[list[int]], dtype: torch.dtype) -> None:
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    torch.manual_seed(sum(map(len, a)))
    table = (torch.rand(4, 4) * 3).to(dtype)
    entries = table.tolist()
    expected = by_pairs(a, b, 0.75, 0.5, lambda x, y: entries[x][y])
    assert edit_distance(a, b, insertion=0.75, deletion=0.5, substitution=table).tolist() == expected
    assert eager_edits.edit_cost(*flat(a), *flat(b), 0.75, 0.5, table).tolist() == expected


def test_a_table_may_make_matches_cost() -> None:
    table = torch.tensor([[0.5, 0.0], [1.0, 0.5]])
    assert edit_distance([[0], [1]], [[0], [0]], substitution=table).tolist() == [0.5, 1.0]


def test_insertions_are_a_s_and_deletions_b_s() -> None:
    assert edit_distance([[1, 2, 3]], [[1]], insertion=10, deletion=0.5).tolist() == [20]
    assert edit_distance([[1]], [[1, 2, 3]], insertion=10, deletion=0.5).tolist() == [1]


def test_whole_rows() -> None:
    found, steps = edit_distance([[1, 2], [1], [], []], [[1, 2], [2], [1], []], whole=True, align=True)
    assert found.dtype is torch.int64
    assert found.tolist() == [0, 1, 1, 0]
    assert steps.lens.tolist() == [2, 1, 1, 0]


# ---- alignments ----


def cost_of(steps: list[list[int]], a: Row, b: Row, costs: tuple[float, float, Cost]) -> float:
    """What an alignment costs; asserts that it goes through both rows, in order, and names its steps rightly."""
    assert [i for _, i, _ in steps if i >= 0] == list(range(len(a)))
    assert [j for _, _, j in steps if j >= 0] == list(range(len(b)))
    total = 0.0
    for what, i, j in steps:
        kind = EDITS[what]
        assert (i >= 0, j >= 0) == {"insertion": (True, False), "deletion": (False, True)}.get(kind, (True, True))
        if kind in ("match", "substitution"):
            assert (a[i] == b[j]) == (kind == "match")
            total += costs[2](a[i], b[j])
        else:
            total += costs[0] if kind == "insertion" else costs[1]
    return total


@given(a=rows_of_tokens, b=rows_of_tokens, unit=st.booleans())
def test_alignments_cost_what_they_should(a: list[list[int]], b: list[list[int]], unit: bool) -> None:
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    table = 1 - torch.eye(4) if unit else torch.arange(16.0).view(4, 4) / 8
    costs = (1.0, 1.0) if unit else (0.75, 0.5)
    entries = table.tolist()
    found, steps = edit_distance(a, b, insertion=costs[0], deletion=costs[1], substitution=table, align=True)
    for r, path in enumerate(steps.unbind()):
        weights = (*costs, lambda x, y: entries[x][y])
        assert cost_of(path.tolist(), a[r], b[r], weights) == pytest.approx(found[r].item())
        assert [tuple(step) for step in path.tolist()] == reference.edit_path(a[r], b[r], *weights)
    again, lens = eager_edits.edit_paths(*flat(a), *flat(b), *costs, table)
    assert torch.equal(again, steps.values)
    assert torch.equal(lens, steps.lens)


@given(a=rows_of_tokens, b=rows_of_tokens, costs=st.lists(st.sampled_from([0, 0.1, 0.3, 1, math.inf]), min_size=3))
def test_alignments_of_any_costs(a: list[list[int]], b: list[list[int]], costs: list[float]) -> None:
    # What is free, forbidden or equal makes ties; sums of 0.1 and 0.3 round.
    insertion, deletion, other = map(float, costs[:3])
    n = min(len(a), len(b))
    found, steps = edit_distance(a[:n], b[:n], insertion=insertion, deletion=deletion, substitution=other, align=True)
    weights = (insertion, deletion, lambda x, y: 0 if x == y else other)
    assert found.tolist() == by_pairs(a[:n], b[:n], *weights)
    expected = [reference.edit_path(x, y, *weights) for x, y in zip(a, b, strict=False)]
    assert [[tuple(step) for step in path.tolist()] for path in steps.unbind()] == expected
    again, lens = eager_edits.edit_paths(*flat(a[:n]), *flat(b[:n]), insertion, deletion, other)
    assert torch.equal(again, steps.values)
    assert torch.equal(lens, steps.lens)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # Two ways of one edit: the first token of a pair is the odd one, as the last ones are matched first.
        ([1, 1], [1], [(2, 0, -1), (0, 1, 0)]),
        ([1], [1, 1], [(3, -1, 0), (0, 0, 1)]),
        # A substitution at the end goes before insertion and deletion.
        ([1, 2], [3], [(2, 0, -1), (1, 1, 0)]),
        ([1, 2], [2, 1], [(1, 0, 0), (1, 1, 1)]),
        ([], [5, 6], [(3, -1, 0), (3, -1, 1)]),
        ([5, 6], [], [(2, 0, -1), (2, 1, -1)]),
        ([], [], []),
    ],
)
def test_ties(a: Row, b: Row, expected: list[tuple[int, int, int]]) -> None:
    found, steps = edit_distance([a], [b], align=True)
    assert list(map(tuple, steps.values.tolist())) == expected == reference.edit_path(a, b)
    assert found.item() == sum(what > 0 for what, _, _ in expected)


def test_backwards_an_insertion_goes_before_a_deletion() -> None:
    _, steps = edit_distance([[1]], [[2]], substitution=2.0, align=True)
    assert steps.values.tolist() == [[1, 0, 0]]
    _, steps = edit_distance([[1]], [[2]], substitution=2.5, align=True)
    assert steps.values.tolist() == [[3, -1, 0], [2, 0, -1]]


def test_alignments_with_a_shared_reference() -> None:
    _, steps = edit_distance([[1], [2, 1], []], [[1]], align=True)
    assert [row.tolist() for row in steps.unbind()] == [[[0, 0, 0]], [[2, 0, -1], [0, 1, 0]], [[3, -1, 0]]]


# ---- kernels ----

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "edit_distance": (),
    "edit_cost": (0.5, 0.75, 1.5),
    "edit_paths": (0.5, 0.75, 1.5),
}


def same(found: Any, expected: Any) -> None:
    for x, y in zip(*([r] if isinstance(r, Tensor) else r for r in (found, expected)), strict=True):
        assert torch.equal(x, y)
        assert x.dtype is y.dtype


@pytest.fixture
def busy_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads and pieces of a few bytes, so that small work is shared, too."""
    monkeypatch.setattr(threads, "PIECE", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.usefixtures("busy_threads", "on_the_cpu")
def test_threads_change_nothing(operation: str) -> None:
    a, b = flat(drawn(torch.randint(0, 90, (60,)).tolist(), 4)), flat(drawn(torch.randint(0, 90, (20,)).tolist(), 4))
    for args in [(*a, *b), (*flat([]), *flat([])), (*flat([[1]]), *flat([[2]]))]:
        same(
            getattr(cpu_edits, operation)(*args, *ARGUMENTS[operation]),
            getattr(eager_edits, operation)(*args, *ARGUMENTS[operation]),
        )


@pytest.mark.usefixtures("on_the_cpu")
def test_the_table_has_them() -> None:
    tokens = torch.tensor([1, 2])
    for operation in ARGUMENTS:
        assert kernels.find(operation, tokens) is getattr(cpu_edits, operation)
        assert kernels.find(operation, tokens, tokens.to("meta")) is getattr(eager_edits, operation)
        assert kernels.find(operation, tokens.int()) is getattr(eager_edits, operation)


WRONG_OFFSETS = [[0, 3, 2, 5], [1, 2, 5], [0, 2, 6], [0, 2, 4], [0, -1, 5], []]


@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.parametrize("wrong", WRONG_OFFSETS, ids=str)
@pytest.mark.usefixtures("on_the_cpu")
def test_wrong_offsets_touch_no_memory(operation: str, wrong: list[int]) -> None:
    tokens, right = torch.arange(5), torch.tensor([0, 5])
    bad = torch.tensor(wrong, dtype=torch.int64)
    for args in [(tokens, bad, tokens, right), (tokens, right, tokens, bad)]:
        with pytest.raises(ValueError, match="offsets must rise from 0 to 5"):
            getattr(cpu_edits, operation)(*args, *ARGUMENTS[operation])


@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.usefixtures("on_the_cpu")
def test_rows_that_do_not_divide_touch_no_memory(operation: str) -> None:
    three, two, none = flat([[1], [2], [3]]), flat([[1], [2]]), flat([])
    for a, b in [(three, two), (two, three), (two, none)]:
        with pytest.raises(ValueError, match=r"rows of a cannot be shared among \d rows of b"):
            getattr(cpu_edits, operation)(*a, *b, *ARGUMENTS[operation])


@pytest.mark.parametrize("operation", ARGUMENTS)
@pytest.mark.usefixtures("on_the_cpu")
def test_nothing_around_the_rows_is_read(operation: str) -> None:
    # The rows lie within a buffer of other tokens; one read too many would change the result.
    a, b = drawn([64, 3, 0, 65], 3), drawn([63, 5, 2, 64], 3)
    expected = getattr(cpu_edits, operation)(*flat(a), *flat(b), *ARGUMENTS[operation])
    for poison in (0, 1, 2, 7):
        inside = []
        for rows in (a, b):
            values, offsets = flat(rows)
            buffer = torch.full((len(values) + 128,), poison)
            buffer[64:-64] = values
            inside += [buffer[64:-64], offsets]
        same(getattr(cpu_edits, operation)(*inside, *ARGUMENTS[operation]), expected)
