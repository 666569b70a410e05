"""What TensorArray refuses: the message says where, what came, what was expected, and the array is as it was."""

import copy
import io
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop._common.errors import Fact
from tests.support.array_kinds import KINDS, PLAIN, WITH_GRADIENT, Kind
from tests.support.devices import ON

N = 4
VALUES = torch.arange(1.0, 13.0).view(N, 3)
GOOD = torch.tensor([7.0, 8.0, 9.0])
META = torch.empty(3, device="meta")
DOUBLE = torch.zeros(3, dtype=torch.float64)
FEW = ("appended", "unstacked", "listed", "partly_waiting", "flushed")
some_kinds = pytest.mark.parametrize("kind", [KINDS[name] for name in FEW], ids=FEW)

Case = tuple[str, Callable[[Any], Any], type[Exception], tuple[str, ...]]


def rows(*pos: int) -> Tensor:
    return torch.tensor(pos)


def slots(array: tl.TensorArray) -> list[Tensor | None]:
    """Every slot; None for a hole."""

    def slot(i: int) -> Tensor | None:
        try:
            return array.read(i).detach().clone()
        except IndexError:
            return None

    return [slot(i) for i in range(len(array))]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def facts(array: tl.TensorArray) -> tuple[Any, ...]:
    return len(array), array.element_shape, array.dtype, array.device, repr(array)


def refuses(array: tl.TensorArray, call: Callable[[Any], Any], error: type[Exception], *words: str) -> None:
    """The call raises, with all these words in its message, and changes nothing."""
    known, before = facts(array), slots(array)
    with pytest.raises(error) as caught:
        call(array)
    for word in words:
        assert word in str(caught.value)
    assert not isinstance(caught.value, Fact)  # it has the name of what was called
    assert facts(array) == known
    assert same(slots(array), before)


def is_usable(array: tl.TensorArray, x: Tensor) -> bool:
    """Whether the array goes on as if nothing had been refused."""
    before = slots(array)
    array.append(x)
    array[len(array) - 1] = x
    return same(slots(array), [*before, x]) and torch.equal(array[len(before) :], x[None])


# What can be wrong with a value: (name, value, error, words)
BAD_VALUES: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("short", torch.zeros(2), ValueError, ("(2,)", "(3,)")),
    ("broadcast", torch.zeros(1), ValueError, ("(1,)", "(3,)")),
    ("0-d", torch.zeros(()), ValueError, ("()", "(3,)")),
    ("one dim more", torch.zeros(1, 3), ValueError, ("(1, 3)", "(3,)")),
    ("double", DOUBLE, TypeError, ("torch.float64", "torch.float32", ".to(torch.float32)")),
    ("half", torch.zeros(3, dtype=torch.float16), TypeError, ("torch.float16", ".to(torch.float32)")),
    ("integers", torch.zeros(3, dtype=torch.int64), TypeError, ("torch.int64", ".to(torch.float32)")),
    ("device", META, ValueError, ("meta", ON, ".to()")),
    ("list", [1.0, 2.0, 3.0], TypeError, ("list [1.0, 2.0, 3.0]", "torch.as_tensor")),
    ("array", np.zeros(3, dtype=np.float32), TypeError, ("ndarray", "torch.as_tensor")),
    ("number", 1.0, TypeError, ("float 1.0", "torch.as_tensor")),
    ("None", None, TypeError, ("NoneType",)),
    ("sparse", torch.zeros(3, device="cpu").to_sparse(), TypeError, ("torch.sparse_coo", "to_dense()")),
]
BAD_INTS: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("float", 1.0, TypeError, ("int", "float 1.0")),
    ("numpy float", np.float32(1), TypeError, ("int", "float32")),
    ("bool", True, TypeError, ("int", "bool True")),
    ("numpy bool", np.bool_(True), TypeError, ("int", "bool")),
    ("text", "1", TypeError, ("int", "str '1'")),
    ("None", None, TypeError, ("int", "NoneType")),
    ("float tensor", torch.tensor(1.0), TypeError, ("int", "torch.float32")),
    ("bool tensor", torch.tensor(True), TypeError, ("int", "torch.bool")),
    ("tensor of slots", torch.tensor([0, 1]), TypeError, ("int", "(2,)", "gather()", "scatter()")),
    ("pair", (0, 1), TypeError, ("int", "tuple (0, 1)")),
    ("ellipsis", ..., TypeError, ("int", "ellipsis")),
    ("below", -5, IndexError, ("slot -5", "4 slots")),
]
BAD_LISTS: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("floats", [0, 1.0], TypeError, ("indices[1]", "float 1.0")),
    ("bools", [True, False], TypeError, ("indices[0]", "bool True")),
    ("nested", [[0, 1]], TypeError, ("indices[0]", "list [0, 1]")),
    ("float tensor", torch.tensor([0.0, 1.0]), TypeError, ("integers", "torch.float32")),
    ("mask", torch.tensor([True, False]), TypeError, ("integers", "torch.bool")),
    ("below", [0, -5], IndexError, ("indices[1] is -5", "-4")),
    ("device", torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, ("meta", ON)),
    ("int", 1, TypeError, ("int",)),
    ("None", None, TypeError, ("None",)),
]
CASES: list[Case] = [
    *((f"append {n}", lambda a, x=x: a.append(x), e, ("TensorArray.append: slot 4", *w)) for n, x, e, w in BAD_VALUES),
    *((f"write {n}", lambda a, x=x: a.write(1, x), e, ("TensorArray.write: slot 1", *w)) for n, x, e, w in BAD_VALUES),
    *((f"set {n}", lambda a, x=x: a.__setitem__(-1, x), e, ("TensorArray", "slot", *w)) for n, x, e, w in BAD_VALUES),
    *((f"read at {n}", lambda a, i=i: a.read(i), e, ("TensorArray.read", *w)) for n, i, e, w in BAD_INTS),
    *((f"get at {n}", lambda a, i=i: a[i], e, ("TensorArray", *w)) for n, i, e, w in BAD_INTS),
    *((f"write at {n}", lambda a, i=i: a.write(i, GOOD), e, ("TensorArray.write", *w)) for n, i, e, w in BAD_INTS),
    *((f"set at {n}", lambda a, i=i: a.__setitem__(i, GOOD), e, ("TensorArray", *w)) for n, i, e, w in BAD_INTS),
    *((f"gather {n}", lambda a, i=i: a.gather(i), e, ("TensorArray.gather", *w)) for n, i, e, w in BAD_LISTS),
    *(
        (f"scatter at {n}", lambda a, i=i: a.scatter(i, VALUES[:2]), e, ("TensorArray.scatter", *w))
        for n, i, e, w in BAD_LISTS
    ),
    ("read above", lambda a: a.read(4), IndexError, ("TensorArray.read", "slot 4", "4 slots")),
    ("get above", lambda a: a[4], IndexError, ("slot 4", "4 slots")),
    ("write above", lambda a: a.write(6, GOOD), IndexError, ("TensorArray.write: slot 6", "4 slots", "capacity=")),
    ("set above", lambda a: a.__setitem__(6, GOOD), IndexError, ("slot 6", "4 slots", "capacity=")),
    ("truncate above", lambda a: a.truncate(5), IndexError, ("TensorArray.truncate: length", "[0, 4]", "got 5")),
    ("truncate below", lambda a: a.truncate(-1), IndexError, ("TensorArray.truncate: length", "[0, 4]", "got -1")),
    ("truncate float", lambda a: a.truncate(1.0), TypeError, ("TensorArray.truncate: length", "float 1.0")),
    ("set slice", lambda a: a.__setitem__(slice(0, 2), VALUES[:2]), TypeError, ("TensorArray", "slice", "scatter()")),
    ("step 0", lambda a: a[::0], ValueError, ("zero",)),
    ("float slice", lambda a: a[:1.5], TypeError, ("integer",)),
    ("gather above", lambda a: a.gather([0, 4]), IndexError, ("TensorArray.gather", "indices[1] is 4", "index < 4")),
    ("gather above in 2-d", lambda a: a.gather(torch.tensor([[0, 1], [2, 9]])), IndexError, ("indices[1, 1] is 9",)),
    ("gather far above", lambda a: a.gather([10**30]), IndexError, ("TensorArray.gather",)),
    ("extend short", lambda a: a.extend(torch.zeros(2, 2)), ValueError, ("TensorArray.extend", "(2,)", "(3,)")),
    ("extend 0-d", lambda a: a.extend(torch.tensor(1.0)), ValueError, ("TensorArray.extend", "leading dim", "0-d")),
    ("extend element", lambda a: a.extend(GOOD), ValueError, ("TensorArray.extend", "()", "(3,)")),
    ("extend double", lambda a: a.extend(DOUBLE[None]), TypeError, ("TensorArray.extend", ".to(torch.float32)")),
    ("extend device", lambda a: a.extend(META[None]), ValueError, ("TensorArray.extend", "meta", ON)),
    ("extend sparse", lambda a: a.extend(VALUES.to_sparse()), TypeError, ("TensorArray.extend", "to_dense()")),
    ("extend number", lambda a: a.extend(5), TypeError, ("TensorArray.extend", "int")),
    ("extend None", lambda a: a.extend(None), TypeError, ("TensorArray.extend", "None")),
    ("extend lists", lambda a: a.extend([[1.0, 2.0, 3.0]]), TypeError, ("TensorArray", "slot 4", "torch.as_tensor")),
    ("scatter skips", lambda a: a.scatter([6, 4], VALUES[:2]), IndexError, ("slot 5", "skipped", "capacity=")),
    ("scatter lengths", lambda a: a.scatter([0, 1], VALUES), ValueError, ("TensorArray.scatter", "(2,)", "(4, 3)")),
    ("scatter 2-d", lambda a: a.scatter(rows(0, 1)[None], VALUES[:1]), ValueError, ("TensorArray.scatter", "(1, 2)")),
    ("scatter 0-d values", lambda a: a.scatter([0], torch.tensor(1.0)), ValueError, ("TensorArray.scatter", "()")),
    ("scatter element", lambda a: a.scatter([0], torch.zeros(1, 2)), ValueError, ("TensorArray.scatter", "(2,)")),
    ("scatter double", lambda a: a.scatter([4], DOUBLE[None]), TypeError, ("TensorArray.scatter", "torch.float64")),
    ("scatter device", lambda a: a.scatter([0], META[None]), ValueError, ("TensorArray.scatter", "meta")),
    ("scatter list", lambda a: a.scatter([0], [[1.0] * 3]), TypeError, ("TensorArray.scatter", "torch.as_tensor")),
    ("scatter sparse", lambda a: a.scatter([0], VALUES[:1].to_sparse()), TypeError, ("to_dense()",)),
    ("rows above", lambda a: a.write_rows(rows(0, 1, 5), GOOD), IndexError, ("write_rows", "pos[2] is 5", "index < 5")),
    ("rows below", lambda a: a.write_rows(rows(0, -1, 2), GOOD), IndexError, ("write_rows", "pos[1] is -1", "0 <=")),
    (
        "rows above, masked",
        lambda a: a.write_rows(rows(9, 1, 9), GOOD, torch.tensor([False, True, True])),
        IndexError,
        ("TensorArray.write_rows", "pos[2] is 9"),
    ),
    ("rows few", lambda a: a.write_rows(rows(0, 1), GOOD), ValueError, ("write_rows", "pos", "(2,)", "(3,)")),
    ("rows many", lambda a: a.write_rows(rows(0, 1, 2, 3), VALUES[0]), ValueError, ("write_rows", "(4,)", "(3,)")),
    ("rows wide", lambda a: a.write_rows(rows(0, 1, 2, 4), torch.zeros(4)), ValueError, ("write_rows", "(4,)", "(3,)")),
    ("rows 0-d pos", lambda a: a.write_rows(torch.tensor(0), GOOD), ValueError, ("write_rows", "pos", "()")),
    ("rows 2-d pos", lambda a: a.write_rows(rows(0, 1, 2)[None], GOOD[None]), ValueError, ("write_rows", "(1, 3)")),
    ("rows 0-d x", lambda a: a.write_rows(rows(0), torch.tensor(1.0)), ValueError, ("write_rows", "()")),
    ("rows float", lambda a: a.write_rows(torch.zeros(3), GOOD), TypeError, ("write_rows", "torch.float32")),
    ("rows bool", lambda a: a.write_rows(torch.ones(3) > 0, GOOD), TypeError, ("write_rows", "torch.bool")),
    ("rows int", lambda a: a.write_rows(1, GOOD), TypeError, ("write_rows", "pos", "int")),
    ("rows floats", lambda a: a.write_rows([0.0, 1.0, 2.0], GOOD), TypeError, ("write_rows", "pos[0]", "float 0.0")),
    ("rows double", lambda a: a.write_rows(rows(4, 1, 2), DOUBLE), TypeError, ("write_rows", "torch.float64")),
    ("rows device", lambda a: a.write_rows(rows(0, 1, 2), META), ValueError, ("write_rows", "meta", ON)),
    ("rows list", lambda a: a.write_rows(rows(0, 1, 2), [1.0] * 3), TypeError, ("write_rows", "torch.as_tensor")),
    ("rows sparse", lambda a: a.write_rows(rows(0, 1, 2), GOOD.to_sparse()), TypeError, ("write_rows", "to_dense()")),
    ("where list", lambda a: a.write_rows(rows(0, 1, 2), GOOD, [True] * 3), TypeError, ("write_rows: where", "list")),
    ("where ints", lambda a: a.write_rows(rows(0, 1, 2), GOOD, rows(1, 1, 1)), TypeError, ("where", "torch.int64")),
    (
        "where short",
        lambda a: a.write_rows(rows(0, 1, 2), GOOD, torch.tensor([True])),
        ValueError,
        ("write_rows: where", "(3,)", "(1,)"),
    ),
]


@some_kinds
@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
@pytest.mark.extended("unstacked", "flushed", "listed")
def test_bad_input_is_refused_and_nothing_changes(
    kind: Kind, call: Callable[[Any], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    array = kind(VALUES)
    refuses(array, call, error, *words)
    assert is_usable(array, GOOD)
    assert torch.equal(array.stack(), torch.cat([VALUES, GOOD[None]]))


@pytest.mark.parametrize("kind", [PLAIN["appended"], WITH_GRADIENT["waiting"]])
def test_extend_keeps_what_came_before_the_bad_one(kind: Kind) -> None:
    array = kind(VALUES)
    with pytest.raises(ValueError, match="slot 5"):
        array.extend([GOOD, torch.zeros(2), GOOD])
    assert torch.equal(array.stack(), torch.cat([VALUES, GOOD[None]]))


def test_a_huge_index_costs_nothing() -> None:
    array, far = PLAIN["appended"](VALUES), 10**6
    calls: list[Callable[[], Any]] = [
        lambda: array.scatter([far], VALUES[:1]),
        lambda: array.write(far, GOOD),
        lambda: array.write_rows(rows(0, far, 0), GOOD),
        lambda: array.gather([far]),
    ]
    for call in calls:
        tracemalloc.start()
        with pytest.raises(IndexError):
            call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10**5


# -- empty arrays, given facts


EMPTY: list[Case] = [
    ("read", lambda a: a.read(0), IndexError, ("TensorArray.read", "slot 0", "0 slots")),
    ("last", lambda a: a[-1], IndexError, ("slot -1", "0 slots")),
    ("stack", lambda a: a.stack(), ValueError, ("TensorArray.stack", "empty", "element_shape=")),
    ("slice", lambda a: a[:0], ValueError, ("TensorArray", "empty", "element_shape=")),
    ("steps", lambda a: a[::2], ValueError, ("TensorArray", "empty", "element_shape=")),
    ("gather", lambda a: a.gather([]), ValueError, ("TensorArray.gather", "empty", "element_shape=")),
    ("set last", lambda a: a.__setitem__(-1, GOOD), IndexError, ("slot -1", "0 slots")),
    ("skip", lambda a: a.write(1, GOOD), IndexError, ("slot 1", "0 slots", "capacity=")),
    ("scatter skips", lambda a: a.scatter([1], VALUES[:1]), IndexError, ("slot 0", "skipped")),
    ("scatter below", lambda a: a.scatter([-1], VALUES[:1]), IndexError, ("indices[0] is -1",)),
    ("rows", lambda a: a.write_rows(rows(0, 0, 1), GOOD), IndexError, ("pos[2] is 1",)),
    ("bad value", lambda a: a.append(None), TypeError, ("TensorArray.append: slot 0", "NoneType")),
    ("sparse", lambda a: a.append(GOOD.to_sparse()), TypeError, ("slot 0", "to_dense()")),
    ("extend", lambda a: a.extend(torch.tensor(1.0)), ValueError, ("0-d",)),
]


@pytest.mark.parametrize("shape", [None, (None,)], ids=str)
@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in EMPTY], ids=[c[0] for c in EMPTY])
def test_empty_arrays_refuse_and_stay_empty(
    call: Callable[[Any], Any], error: type[Exception], words: tuple[str, ...], shape: Any
) -> None:
    array = tl.TensorArray(element_shape=shape)
    refuses(array, call, error, *words)
    assert is_usable(array, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("array", [tl.TensorArray(), tl.TensorArray(element_shape=(3,))], ids=["unknown", "known"])
def test_gather_of_slots_that_are_not_there(array: tl.TensorArray) -> None:
    refuses(array, lambda a: a.gather([0]), ValueError if array.element_shape is None else IndexError, "gather")


GIVEN: list[tuple[dict[str, Any], Tensor, Tensor, type[Exception], tuple[str, ...]]] = [
    ({"element_shape": (3, None)}, torch.zeros(2, 2), torch.zeros(3, 7), ValueError, ("(2, 2)", "(3, None)")),
    ({"element_shape": (3, None)}, torch.zeros(3), torch.zeros(3, 7), ValueError, ("(3,)", "(3, None)")),
    ({"element_shape": (3, None)}, torch.zeros(3, 4, 5), torch.zeros(3, 0), ValueError, ("(3, 4, 5)", "(3, None)")),
    ({"element_shape": ()}, torch.zeros(1), torch.zeros(()), ValueError, ("(1,)", "()")),
    ({"dtype": torch.int64}, torch.zeros(2), torch.zeros(2, dtype=torch.int64), TypeError, (".to(torch.int64)",)),
    ({"device": "meta"}, torch.zeros(2), torch.zeros(2, device="meta"), ValueError, (ON, "meta")),
]


@pytest.mark.parametrize(("given", "bad", "good", "error", "words"), GIVEN, ids=str)
def test_given_facts_hold_from_the_first_write(
    given: dict[str, Any], bad: Tensor, good: Tensor, error: type[Exception], words: tuple[str, ...]
) -> None:
    array = tl.TensorArray(capacity=4, **given)
    refuses(array, lambda a: a.append(bad), error, "TensorArray.append: slot 0", *words)
    refuses(array, lambda a: a.write(2, bad), error, "TensorArray.write: slot 2", *words)
    refuses(array, lambda a: a.extend(bad[None]), error, "TensorArray.extend", *words)
    refuses(array, lambda a: a.scatter([0], bad[None]), error, "TensorArray.scatter", *words)
    assert array.append(good).element_shape == tuple(good.shape)


def test_the_first_write_fixes_what_was_partly_known() -> None:
    array = tl.TensorArray(element_shape=(3, None)).append(torch.zeros(3, 7))
    refuses(array, lambda a: a.append(torch.zeros(3, 8)), ValueError, "slot 1", "(3, 8)", "(3, 7)")


CONSTRUCTOR: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    (lambda: tl.TensorArray(capacity=-1), ValueError, ("TensorArray", "capacity", "-1")),
    (lambda: tl.TensorArray(capacity=2.0), TypeError, ("TensorArray", "capacity", "float 2.0")),  # pyright: ignore
    (lambda: tl.TensorArray(capacity=True), TypeError, ("TensorArray", "capacity", "bool True")),
    (lambda: tl.TensorArray(dtype="float32"), TypeError, ("TensorArray", "dtype", "str 'float32'")),  # pyright: ignore
    (lambda: tl.TensorArray(dtype=float), TypeError, ("TensorArray", "dtype", "float")),  # pyright: ignore
    (lambda: tl.TensorArray(element_shape=3), TypeError, ("element_shape", "(3,)")),  # pyright: ignore
    (lambda: tl.TensorArray(element_shape=2.5), TypeError, ("TensorArray", "element_shape", "2.5")),  # pyright: ignore
    (lambda: tl.TensorArray(element_shape=(2.0,)), TypeError, ("element_shape", "float 2.0")),  # pyright: ignore
    (lambda: tl.TensorArray(element_shape=(2, -1)), ValueError, ("element_shape", "(2, -1)")),
    (lambda: tl.TensorArray.unstack(torch.tensor(1.0)), ValueError, ("TensorArray.unstack", "leading dim", "0-d")),
    (lambda: tl.TensorArray.unstack([GOOD]), TypeError, ("TensorArray.unstack", "list")),  # pyright: ignore
    (lambda: tl.TensorArray.unstack(None), TypeError, ("TensorArray.unstack", "NoneType")),  # pyright: ignore
    (lambda: tl.TensorArray.unstack(VALUES.to_sparse()), TypeError, ("TensorArray.unstack", "to_dense()")),
]


@pytest.mark.parametrize(("make", "error", "words"), CONSTRUCTOR)
def test_constructors_refuse(make: Callable[[], Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    assert not isinstance(caught.value, Fact)  # it has the name of what was called


# -- holes


def holed(needs_grad: bool) -> tl.TensorArray:
    """Slots 0 and 4 are written, 1 to 3 are holes."""
    values = VALUES.clone().requires_grad_(needs_grad)
    array = tl.TensorArray(capacity=6).append(values[0])
    array[4] = values[1]
    return array


HOLES: list[Case] = [
    ("read", lambda a: a.read(1), IndexError, ("TensorArray.read", "slot 1 is a hole", "never written")),
    ("get", lambda a: a[-2], IndexError, ("slot 3 is a hole",)),
    ("slice", lambda a: a[2:], IndexError, ("TensorArray[a:b]", "slot 2 is a hole")),
    ("steps", lambda a: a[::2], IndexError, ("slot 2 is a hole",)),
    ("stack", lambda a: a.stack(), IndexError, ("TensorArray.stack", "slot 1 is a hole")),
    ("gather", lambda a: a.gather([0, 3]), IndexError, ("TensorArray.gather", "slot 3 is a hole")),
    ("gather negative", lambda a: a.gather(torch.tensor([[-4]])), IndexError, ("slot 1 is a hole",)),
    ("iterate", lambda a: list(a), IndexError, ("TensorArray.__iter__", "slot 1 is a hole")),
    ("write", lambda a: a.write(1, torch.zeros(2)), ValueError, ("slot 1",)),
    ("write beyond", lambda a: a.write(6, GOOD), IndexError, ("slot 6",)),
    ("scatter", lambda a: a.scatter([2, 1], torch.zeros(2, 2)), ValueError, ("TensorArray.scatter",)),
    ("scatter beyond", lambda a: a.scatter([6, 1], VALUES[:2]), IndexError, ("slot 5",)),
    ("rows dtype", lambda a: a.write_rows(rows(1, 2, 3), DOUBLE), TypeError, ("TensorArray.write_rows",)),
    ("rows shape", lambda a: a.write_rows(rows(1, 2), torch.zeros(2)), ValueError, ("TensorArray.write_rows",)),
    ("rows range", lambda a: a.write_rows(rows(1, 2, 9), GOOD), IndexError, ("pos[2] is 9",)),
]


@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant", "gradient"])
@pytest.mark.parametrize(("call", "error", "words"), [c[1:] for c in HOLES], ids=[c[0] for c in HOLES])
def test_holes_are_refused_and_stay_holes(
    call: Callable[[Any], Any], error: type[Exception], words: tuple[str, ...], needs_grad: bool
) -> None:
    array = holed(needs_grad)
    refuses(array, call, error, *words)
    assert same(slots(array), [VALUES[0], None, None, None, VALUES[1]])
    assert is_usable(array, GOOD)


# -- copies of arrays with a graph


@pytest.mark.parametrize("kind", WITH_GRADIENT.values(), ids=WITH_GRADIENT)
@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps, lambda a: torch.save(a, io.BytesIO())])
def test_a_graph_is_not_copied(kind: Kind, how: Callable[[Any], Any]) -> None:
    array = kind(VALUES)
    refuses(array, how, RuntimeError, "TensorArray", "autograd graph", "detach()")
    assert is_usable(array, GOOD)
    assert torch.equal(copy.deepcopy(array.detach()).stack(), torch.cat([VALUES, GOOD[None]]))
