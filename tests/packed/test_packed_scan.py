"""scan over packed xs: each row is as if alone, in values and gradients, with and without checkpoints."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tensorloop import reference
from tensorloop.packed import Dim, PackedTensor
from tests.support.loop_cases import cotangents, randn, rotate, with_and_without_checkpoints

LENS = [3, 0, 5, 1, 5, 2]
F = 4


def cell(w: Tensor) -> Any:
    def body(carry: Any, x: Tensor) -> Any:
        h, n = carry
        h = rotate(h) * w + x.sin()
        return (h, n + 1), (h * 2, h.sum(-1))

    return body


@with_and_without_checkpoints
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lens", [LENS, [1], [4, 4], [0, 2, 0], [1, 2, 3, 4, 5, 6, 7]])
def test_each_row_is_as_if_alone(lens: list[int], reverse: bool, checkpoints: Any) -> None:
    values, h, w = randn(sum(lens), F), randn(len(lens), F, seed=1), randn(F, seed=2)
    init = h, torch.zeros(len(lens), dtype=torch.int64)
    (last, n), ys = tl.scan(cell(w), init, PackedTensor(values, lens), reverse=reverse, checkpoints=checkpoints)
    (true_last, true_n), true_ys = reference.scan_packed(cell(w), init, values, lens, reverse)
    assert all(type(y) is PackedTensor and torch.equal(y.lens, torch.tensor(lens)) for y in ys)
    outs, true = [last, *(y.values for y in ys)], [true_last, *true_ys]
    torch.testing.assert_close((outs, n), (true, true_n))
    wanted, given = (values, h, w), cotangents(outs)
    torch.testing.assert_close(grad(outs, wanted, given), grad(true, wanted, given))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans(), st.sampled_from([None, 1, 2, 4]))
def test_any_lengths(lens: list[int], reverse: bool, checkpoints: int | None) -> None:
    if sum(lens):
        test_each_row_is_as_if_alone(lens, reverse, checkpoints)


@with_and_without_checkpoints
def test_context_shrinks_along(checkpoints: Any) -> None:
    values, scale = randn(sum(LENS), F), randn(len(LENS), F, seed=1)
    array = tl.TensorArray.unstack(randn(2, len(LENS), F, seed=2).detach())

    def body(h: Tensor, x: Tensor, context: Any) -> Any:
        factor, slots = context
        assert len(h) == len(x) == len(factor) == slots[0].shape[0]
        h = rotate(h) + x * factor + slots[1]
        return h, h

    init = torch.zeros(len(LENS), F, dtype=torch.float64)
    _, ys = tl.scan(body, init, PackedTensor(values, LENS), context=(scale, array), checkpoints=checkpoints)
    row_ids = PackedTensor(values, LENS).row_ids
    each = values * scale[row_ids] + array[1][row_ids]
    _, true = reference.scan_packed(lambda c, x: (rotate(c) + x, rotate(c) + x), init, each, LENS)
    torch.testing.assert_close(ys.values, true)
    given = cotangents([ys.values])
    torch.testing.assert_close(grad([ys.values], (values, scale), given), grad([true], (values, scale), given))


@with_and_without_checkpoints
def test_arrays_in_the_carry_keep_all_rows(checkpoints: Any) -> None:
    values = randn(sum(LENS), F)

    def body(carry: Any, x: Tensor) -> Any:
        array, h = carry
        h = rotate(h) + x
        return (array.append(h), h), None

    init = tl.TensorArray(), torch.zeros(len(LENS), F, dtype=torch.float64)
    (array, _), nothing = tl.scan(body, init, PackedTensor(values, LENS), checkpoints=checkpoints)
    assert nothing is None
    steps = tl.scan(lambda h, x: (rotate(h) + x, rotate(h) + x), init[1], PackedTensor(values, LENS))[1]
    torch.testing.assert_close(array.stack(), steps.pad().transpose(0, 1))
    torch.testing.assert_close(grad(array.stack().sin().sum(), values), grad(steps.values.sin().sum(), values))


@with_and_without_checkpoints
def test_second_order(checkpoints: Any) -> None:
    values, w = randn(sum(LENS), F), randn(F, seed=2)

    def loss(packed: bool) -> Tensor:
        h = torch.ones(len(LENS), F, dtype=torch.float64)
        init = h, torch.zeros(len(LENS), dtype=torch.int64)
        if packed:
            (last, _), ys = tl.scan(cell(w), init, PackedTensor(values, LENS), checkpoints=checkpoints)
            return last.sin().sum() + ys[0].values.square().sum()
        (last, _), true = reference.scan_packed(cell(w), init, values, LENS)
        return last.sin().sum() + true[0].square().sum()

    found = []
    for packed in (True, False):
        first = grad(loss(packed), (values, w), create_graph=True)
        found.append([*first, *grad(first[0].square().sum() + first[1].sin().sum(), (values, w))])
    torch.testing.assert_close(found[0], found[1])


def test_several_leaves_of_one_dim_and_none() -> None:
    dim = Dim("time", LENS)
    a, b = PackedTensor(randn(dim.total, F), dim), PackedTensor(torch.arange(dim.total), LENS)
    _, ys = tl.scan(lambda c, x: (c, (x["a"].sum(-1), x["b"], x["none"])), (), {"a": a, "b": b, "none": None})
    torch.testing.assert_close(ys[0].values, a.values.sum(-1))
    assert torch.equal(ys[1].values, b.values)
    assert ys[2] is None


def test_work_is_n_rows() -> None:
    seen: list[int] = []

    def body(carry: Any, x: Tensor) -> Any:
        seen.append(len(x))
        return carry, None

    tl.scan(body, (), PackedTensor(torch.zeros(sum(LENS)), LENS))
    assert seen == [5, 4, 3, 2, 2]


@with_and_without_checkpoints
@pytest.mark.parametrize("rows", [3, 0])
def test_no_entries(rows: int, checkpoints: Any) -> None:
    h, lens = randn(rows, F), [0] * rows
    carry, ys = tl.scan(
        lambda c, x: (c + x, (c * x, x.sum(-1))), h, PackedTensor(torch.zeros(0, F), lens), checkpoints=checkpoints
    )
    assert torch.equal(carry, h)
    assert [(y.values.shape, y.lens.tolist()) for y in ys] == [((0, F), lens), ((0,), lens)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("lens", [[], [0], [0, 0, 0], [0, 2]])
def test_no_entries_and_ys_that_are_none_or_numbers(
    lens: list[int], checkpoints: Any, context: bool, reverse: bool, compile: bool
) -> None:
    h, xs = randn(len(lens), F), PackedTensor(randn(sum(lens), F, seed=1), lens)
    options: Any = {"context": h} if context else {}
    options |= {"reverse": reverse, "checkpoints": checkpoints, "compile": compile}
    whole: Any = {"none": None, "pair": (None, None), "mixed": [None, h, 2], "number": 1.5}
    for kind, y in whole.items():

        def body(c: Tensor, x: Tensor, *context: Tensor, y: Any = y) -> Any:
            return c + x, [None, c * x, 2] if isinstance(y, list) else y

        carry, ys = tl.scan(body, h, xs, **options)
        steps = max(lens, default=0)
        if kind == "mixed":
            assert ys[0] is None
            assert ys[1].lens.tolist() == lens
            torch.testing.assert_close(ys[2], torch.full((steps,), 2))
        elif kind == "number":
            torch.testing.assert_close(ys, torch.full((steps,), 1.5))
        else:
            assert ys == y
        assert carry.shape == h.shape
        if lens:
            assert grad(carry.sum(), h)[0].eq(1).all()


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_under_transforms(name: str) -> None:
    values, w = randn(sum(LENS), F).detach(), randn(F, seed=2).detach()

    def loss(w: Tensor) -> Tensor:
        h = torch.ones(len(LENS), F, dtype=torch.float64)
        (last, _), ys = tl.scan(cell(w), (h, torch.zeros(len(LENS))), PackedTensor(values, LENS))
        return last.sin().sum() + ys[0].values.square().sum()

    if name == "grad":
        v = w.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(w), grad(loss(v), v)[0])
    else:
        many = torch.stack([w, w * 2])
        torch.testing.assert_close(torch.func.vmap(loss)(many), torch.stack([loss(w), loss(w * 2)]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"xs": (PackedTensor(torch.zeros(3), [1, 2]), PackedTensor(torch.zeros(3), [2, 1]))},
            ValueError,
            "the first row that differs is 0",
        ),
        ({"xs": (PackedTensor(torch.zeros(3), [1, 2]), torch.zeros(3))}, TypeError, r"xs\[1\] is .* beside packed"),
        ({"until": lambda c: False}, ValueError, "until= and packed xs do not go together"),
        ({"length": 3}, ValueError, "length is 3, but the longest row of packed xs has 2"),
        ({"dim": 2}, ValueError, "packed xs run over their ragged dim"),
        ({"init": torch.zeros(3, 1)}, ValueError, r"packed xs have 2 rows, but c \(c is .* is Tensor \(3, 1\)"),
        ({"body": lambda c, x: (c, x.sum())}, ValueError, "an output has the rows of its step, here 2"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    body = options.pop("body", lambda c, x: (c, None))
    xs, init = options.pop("xs", PackedTensor(torch.zeros(3), [1, 2])), options.pop("init", torch.zeros(2, 1))
    with pytest.raises(error, match=message):
        tl.scan(body, init, xs, **options)


def test_map_takes_no_packed_tensors() -> None:
    with pytest.raises(TypeError, match="map: xs is packed"):
        tl.map(lambda x: x, PackedTensor(torch.zeros(3), [1, 2]))


def test_packed_outputs_of_a_plain_loop_are_refused() -> None:
    """Stacked, the values of all steps would stand under the lens of one."""
    p = tl.PackedTensor(torch.randn(11, 6), [3, 1, 5, 2])
    xs = torch.randn(3, 6)
    for run in (
        lambda: tl.scan(lambda carry, x: (carry, {"y": p * x}), torch.zeros(1), xs),
        lambda: tl.map(lambda x: p * x, xs),
        lambda: tl.map(lambda x: p * x, xs, batch_size=2),
    ):
        with pytest.raises(TypeError, match=r"y holds a PackedTensor, which does not stack; return its \.values"):
            run()
    with pytest.raises(TypeError, match="associative_scan: xs is packed, and would be combined across its rows"):
        tl.associative_scan(torch.add, p)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"the leaf of its tree must be values \(11, \.\.\.\), got \(3, 11, 6\)"):
        torch.vmap(lambda x: p * x)(xs)
