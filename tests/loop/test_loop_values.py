"""What loops compute, against plain Python loops. Structure and errors are in test_loop_structure.py."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tests.support.loop_cases import Counter, Ours, cell, compare, randn, rotate, with_and_without_checkpoints

DTYPES = [torch.float16, torch.float32, torch.int32, torch.int64, torch.complex64, torch.bool]


def counts(n: int) -> Tensor:
    return torch.arange(n)


# -- scan


@with_and_without_checkpoints
def test_scan_with_carry_x_and_y_of_three_shapes(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        def body(carry: Tensor, x: Tensor) -> Any:
            carry = rotate(carry) + x.sum() * w
            return carry, torch.cat([x, carry.cos()])

        return loops.scan(body, init, xs)

    compare(program, randn(4), randn(7, 2), randn(4, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_reverse_gives_ys_at_their_index(checkpoints: Any) -> None:
    carry, ys = tl.scan(lambda c, x: (c + x, c + x), torch.tensor(0), counts(4), reverse=True, checkpoints=checkpoints)
    assert ys.tolist() == [6, 6, 5, 3]
    assert carry.item() == 6
    compare(
        lambda loops, init, xs, w: loops.scan(cell(w), init, xs, reverse=True),
        *(randn(4), randn(6, 3), randn(3, 4)),
        checkpoints=checkpoints,
    )


@with_and_without_checkpoints
@pytest.mark.parametrize("xs", [None, (), {}, [], {"a": None}], ids=repr)
def test_length_without_xs(xs: Any, checkpoints: Any) -> None:
    seen = []

    def body(carry: Tensor, x: Any) -> Any:
        seen.append(x)
        return rotate(carry), carry.sum()

    carry, ys = tl.scan(body, randn(2), xs, 5, checkpoints=checkpoints)
    assert seen == [xs] * 5
    assert ys.shape == (5,)
    torch.testing.assert_close(carry, rotate(randn(2), 4.5))


@with_and_without_checkpoints
def test_y_that_is_none_or_has_none_leaves(checkpoints: Any) -> None:
    assert tl.scan(lambda c, x: (c, None), torch.zeros(2), counts(3), checkpoints=checkpoints)[1] is None
    ys = tl.scan(lambda c, x: (c, {"a": None, "b": x}), (), counts(3), checkpoints=checkpoints)[1]
    assert ys["a"] is None
    assert ys["b"].tolist() == [0, 1, 2]


def test_numbers_in_ys_become_tensors() -> None:
    def body(i: int, x: Tensor) -> Any:
        return i + 1, {"int": i, "bool": i > 1, "float": i / 2, "complex": i * 1j}

    steps, ys = tl.scan(body, 0, counts(3))
    assert (steps, type(steps)) == (3, int)
    kinds = {key: y.dtype for key, y in ys.items()}
    assert kinds == {"int": torch.int64, "bool": torch.bool, "float": torch.float32, "complex": torch.complex64}
    assert {key: y.tolist() for key, y in ys.items()} == {
        "int": [0, 1, 2],
        "bool": [False, False, True],
        "float": [0.0, 0.5, 1.0],
        "complex": [0j, 1j, 2j],
    }
    ys = tl.scan(body, 0, counts(3), reverse=True)[1]
    assert ys["int"].tolist() == [2, 1, 0]


@with_and_without_checkpoints
def test_an_array_in_xs_gives_its_slots(checkpoints: Any) -> None:
    def program(loops: Any, values: Tensor, others: Tensor) -> Any:
        xs = {"slots": loops.array.unstack(values * 2), "none": None, "rows": others}
        # a list is no array of the reference: there its stack stands for it
        xs = xs if isinstance(loops, Ours) else xs | {"slots": xs["slots"].stack()}
        return loops.scan(lambda c, x: (rotate(c) * x["rows"], c * x["slots"]), torch.ones(2).double(), xs)

    compare(program, randn(5, 2), randn(5, 2, seed=1), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_dim_of_xs_and_ys(dim: int, checkpoints: Any) -> None:
    def program(loops: Any, xs: Tensor, w: Tensor) -> Any:
        def body(carry: Tensor, x: Tensor) -> Any:
            carry = carry.sin() + x * w
            ys = (carry * 2, carry.sum(0), carry.sum())  # down to lower ranks than dim has room in
            return carry, ys if dim >= 0 else ys[: 3 + dim + 1]

        return loops.scan(body, torch.zeros(2, 2, dtype=torch.float64), xs, dim=dim, reverse=dim == 1)

    shape = [2, 2]
    shape.insert(dim if dim >= 0 else dim + 3, 5)
    compare(program, randn(*shape), randn(2), checkpoints=checkpoints)


def test_steps_come_last_where_y_has_fewer_dims_than_dim() -> None:
    xs = torch.zeros(2, 3, 7)
    ys: Any = tl.map(lambda x: (x, x[0], x[0, 0], 1), xs, dim=2)
    assert [tuple(y.shape) for y in ys] == [(2, 3, 7), (3, 7), (7,), (7,)]
    ys = tl.map(lambda x: (x, x[:, 0], x[0, 0]), torch.zeros(2, 7, 3), dim=-2)
    assert [tuple(y.shape) for y in ys] == [(2, 7, 3), (7, 2), (7,)]


@pytest.mark.parametrize("seed", range(6))
def test_random_rank_and_dim_over_strided_xs(seed: int) -> None:
    choose = random.Random(seed)
    rank = choose.randint(1, 4)
    dim = choose.randrange(-rank, rank)
    shape = [choose.randint(1, 3) for _ in range(rank)]
    shape[dim] = choose.randint(1, 4)
    order = list(range(rank))
    choose.shuffle(order)
    wide = randn(*[2 * n for n in shape])

    def program(loops: Any, wide: Tensor) -> Any:
        xs = wide[tuple(slice(None, None, 2) for _ in shape)].permute(order)
        return loops.scan(lambda c, x: (c + x.sum().cos(), x * c), torch.ones((), dtype=torch.float64), xs, dim=dim)

    compare(program, wide, checkpoints=choose.choice([None, 1, 2]))


@with_and_without_checkpoints
@pytest.mark.parametrize("y", DTYPES, ids=str)
@pytest.mark.parametrize("carry", DTYPES, ids=str)
def test_dtypes_of_carry_and_y_are_kept(carry: torch.dtype, y: torch.dtype, checkpoints: Any) -> None:
    init, out = torch.ones(2).to(carry), torch.tensor([1, 0]).to(y)
    last, ys = tl.scan(lambda c, x: (torch.logical_not(c).to(carry), out), init, counts(3), checkpoints=checkpoints)
    assert (last.dtype, ys.dtype) == (carry, y)
    assert torch.equal(last, torch.zeros(2).to(carry))
    assert torch.equal(ys, out.expand(3, 2))
    assert (last.device, ys.device) == (init.device, out.device)


# -- no steps at all


@with_and_without_checkpoints
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_length_zero(dim: int, checkpoints: Any) -> None:
    init = randn(4)
    xs = torch.zeros((0, 3) if dim == 0 else (3, 0), dtype=torch.float32)

    def body(carry: Tensor, x: Tensor) -> Any:
        return carry, {"a": (x @ x.new_zeros(3, 2, 5).transpose(0, 1)).int(), "n": 1.5, "no": None}

    carry, ys = tl.scan(body, init, xs, dim=dim, checkpoints=checkpoints)
    assert torch.equal(carry, init)
    assert tuple(ys["a"].shape) == {0: (0, 2, 5), 1: (2, 0, 5), -1: (2, 5, 0)}[dim]
    assert (ys["a"].dtype, ys["n"].dtype, tuple(ys["n"].shape)) == (torch.int32, torch.float32, (0,))
    assert ys["no"] is None
    assert torch.equal(torch.autograd.grad(carry.sum(), init)[0], torch.ones(4))


@with_and_without_checkpoints
def test_length_zero_with_arrays(checkpoints: Any) -> None:
    array = tl.TensorArray.unstack(torch.ones(2, 3))

    def body(carry: Any, x: Tensor) -> Any:
        return carry.append(x), carry.stack().sum(0)

    carry, ys = tl.scan(body, array, torch.zeros(0, 3), checkpoints=checkpoints)
    assert (len(carry), len(array), tuple(ys.shape)) == (2, 2, (0, 3))
    assert carry is not array


def test_an_empty_array_in_xs_gives_its_element_shape() -> None:
    xs = tl.TensorArray(element_shape=(3,), dtype=torch.float64)
    carry, ys = tl.scan(lambda c, x: (c, x[:2]), (), xs)
    assert (carry, tuple(ys.shape), ys.dtype) == ((), (0, 2), torch.float64)


def test_map_of_no_elements() -> None:
    ys = tl.map(lambda x: (x.sum(), x.new_ones(2, dtype=torch.bool)), torch.zeros(0, 3))
    assert [(tuple(y.shape), y.dtype) for y in ys] == [((0,), torch.float32), ((0, 2), torch.bool)]


def test_a_step_on_fake_tensors_changes_nothing() -> None:
    total, state = torch.zeros(3), torch.get_rng_state()
    tl.scan(lambda c, x: (c, total.add_(x) + torch.rand(3)), (), torch.zeros(0, 3))
    assert torch.equal(total, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)


# -- how often, how far


@with_and_without_checkpoints
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_body_runs_once_a_step(n: int, grad: bool, checkpoints: Any) -> None:
    body = Counter(lambda c, x: (rotate(c) + x, c))
    with torch.set_grad_enabled(grad):
        tl.scan(body, randn(2), randn(n, 2), checkpoints=checkpoints)
        assert body.calls == n
        tl.map(each := Counter(lambda x: x * 2), randn(n, 2), checkpoints=checkpoints)
        assert each.calls == n
        tl.fori_loop(0, n, step := Counter(lambda i, c: rotate(c)), randn(2), checkpoints=checkpoints)
        assert step.calls == n


@with_and_without_checkpoints
@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (-2, 3), (5, 8), (3, 3), (4, 3), (-1, -5)])
def test_fori_loop(lower: int, upper: int, checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor) -> Any:
        return loops.fori_loop(lower, upper, lambda i, c: rotate(c, i + 0.5) * (1 + c.cos() * i), init)

    compare(program, randn(2), checkpoints=checkpoints)


def test_fori_loop_bounds_mix_widths_and_the_index_is_an_int() -> None:
    seen = tl.fori_loop(
        torch.tensor(2, dtype=torch.int32), torch.tensor(5, dtype=torch.uint8), lambda i, c: (*c[1:], i), (0, 0)
    )
    assert seen == (3, 4)
    assert all(type(i) is int for i in seen)
    assert tl.fori_loop(0, torch.tensor(2), lambda i, c: c + i, 10) == 11


@with_and_without_checkpoints
def test_while_loop(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def body(carry: Any) -> Any:
            x, total = carry
            return rotate(x) * w, total + x.abs().sum()

        return loops.while_loop(lambda carry: carry[1] < 12.5, body, (init, torch.zeros((), dtype=torch.float64)))

    compare(program, randn(4), torch.ones(4, dtype=torch.float64, requires_grad=True), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("init", [(), {}, 3, torch.ones(2)], ids=["()", "{}", "int", "tensor"])
def test_a_while_loop_that_never_starts(init: Any, checkpoints: Any) -> None:
    def fails(carry: Any) -> Any:
        raise AssertionError("the body ran")

    for condition in (False, torch.tensor(False)):
        out, steps = tl.while_loop(lambda c: condition, fails, init, return_steps=True, checkpoints=checkpoints)  # noqa: B023
        assert steps == 0
        assert torch.equal(out, init) if isinstance(init, Tensor) else out == init


@with_and_without_checkpoints
@pytest.mark.parametrize(("limit", "steps"), [(0, 0), (1, 1), (4, 4), (6, 6), (7, 6), (100, 6), (None, 6)])
def test_max_steps_truncates(limit: int | None, steps: int, checkpoints: Any) -> None:
    def program(loops: Any, x: Tensor) -> Any:
        return loops.while_loop(lambda c: c[1] < 6, lambda c: (rotate(c[0]), c[1] + 1), (x, 0), max_steps=limit)

    compare(program, randn(2), checkpoints=checkpoints)
    done = tl.while_loop(lambda c: c < 6, lambda c: c + 1, 0, max_steps=limit, return_steps=True)
    assert done == (steps, steps)
    assert type(done[1]) is int


@with_and_without_checkpoints
def test_nested_whiles_copy_a_lower_triangle(checkpoints: Any) -> None:
    def program(loops: Any, matrix: Tensor) -> Any:
        n = len(matrix)

        def row(i: int, array: Any) -> Any:
            def element(carry: Any) -> Any:
                array, j = carry
                return array.append(matrix[i, j]), j + 1

            return loops.while_loop(lambda carry: carry[1] <= i, element, (array, 0))[0]

        return loops.fori_loop(0, n, row, loops.array())

    matrix = randn(4, 4)
    compare(program, matrix, checkpoints=checkpoints)
    low = program(Ours(checkpoints), matrix).stack()
    assert torch.equal(low, matrix[tuple(torch.tril_indices(4, 4))])


# -- until


@with_and_without_checkpoints
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [0.0, 2.5, 1e9])
def test_until_stops_after_the_step_that_meets_it(limit: float, reverse: bool, checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(carry: Tensor, x: Tensor) -> Any:
            return rotate(carry) + x, (x * carry, carry)

        return loops.scan(body, init, xs, reverse=reverse, until=lambda c: c.abs().sum() > limit)

    compare(program, randn(2) * 0.01, randn(6, 2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_until_alone_or_with_length(checkpoints: Any) -> None:
    def until(carry: Any) -> bool:
        return carry[1] == 4

    def program(loops: Any, init: Tensor) -> Any:
        def body(carry: Any, x: None) -> Any:
            assert x is None
            return (rotate(carry[0]), carry[1] + 1), carry[0].sin()

        whole = loops.scan(body, (init, 0), until=until)
        return (
            whole,
            loops.scan(body, (init, 0), None, 9, until=until),
            loops.scan(body, (init, 0), length=2, until=until),
        )

    compare(program, randn(2), checkpoints=checkpoints)
    lengths = [len(ys) for _, ys in program(Ours(checkpoints), randn(2))]
    assert lengths == [4, 4, 2]


@with_and_without_checkpoints
def test_context_is_the_last_argument(checkpoints: Any) -> None:
    w = randn(2)
    context = {"w": w, "n": 3, "none": None}

    def until(carry: Any, given: Any) -> bool:
        assert given.keys() == context.keys()
        return carry[1] == given["n"]

    def body(carry: Any, x: Any, given: Any) -> Any:
        return (rotate(carry[0]) * given["w"], carry[1] + 1), None

    init = (torch.ones(2, dtype=torch.float64), 0)
    first = tl.scan(body, init, until=until, context=context, checkpoints=checkpoints)[0][0]
    second = tl.while_loop(
        lambda c, given: not until(c, given),
        lambda c, given: body(c, None, given)[0],
        init,
        context=context,
        checkpoints=checkpoints,
    )[0]
    v = w.detach().requires_grad_()
    true = init[0]
    for _ in range(3):
        true = rotate(true) * v
    (dv,) = torch.autograd.grad(true.sum(), v)
    for out in (first, second):
        torch.testing.assert_close(out, true)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), w)[0], dv)


# -- map, composition, ordinary Python


@with_and_without_checkpoints
def test_map_over_trees(checkpoints: Any) -> None:
    def program(loops: Any, a: Tensor, b: Tensor, w: Tensor) -> Any:
        return loops.map(lambda x: [x["a"] @ w, (x["b"] * x["a"].sum(), None)], {"a": a, "b": b}, dim=1)

    compare(program, randn(3, 5), randn(2, 5), randn(3, 3), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_scan_in_a_scan_over_the_other_dim_in_the_other_direction(checkpoints: Any) -> None:
    def program(loops: Any, xs: Tensor, w: Tensor) -> Any:
        def outer(carry: Tensor, row: Tensor) -> Any:
            def inner(c: Tensor, x: Tensor) -> Any:
                return rotate(c) + x * w, c.sum() * x.sum()

            c, ys = loops.scan(inner, carry, row, dim=1, reverse=True)
            return c, ys

        return loops.scan(outer, torch.ones(2, dtype=torch.float64), xs, dim=1)

    compare(program, randn(2, 3, 4), randn(2), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_bodies_branch_on_data_append_to_lists_and_carry_anything(checkpoints: Any) -> None:
    seen: list[int] = []

    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        seen.clear()

        def body(carry: Any, x: Tensor) -> Any:
            state, size, word, nothing = carry
            seen.append(size)
            state = rotate(state) * x if x.sum() > 0 else state.flip(0) - x[:1]
            return (state, size + 1, word + "a", nothing), state[: size % 2 + 1].sum()

        carry, ys = loops.scan(body, (init, 1, "", None), xs)
        assert carry[1:] == (7, "aaaaaa", None)
        return carry[0], ys

    compare(program, randn(2), randn(6, 2), checkpoints=checkpoints)
    program(Ours(checkpoints), randn(2), randn(6, 2))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_python_numbers_in_the_carry_keep_their_type() -> None:
    init = {"i": 1, "b": True, "f": 0.5, "c": 1j}
    last = tl.fori_loop(0, 3, lambda i, c: {"i": c["i"] * 2, "b": not c["b"], "f": c["f"] + 1, "c": c["c"] * 1j}, init)
    assert last == {"i": 8, "b": False, "f": 3.5, "c": 1 + 0j}
    assert [type(x) for x in last.values()] == [int, bool, float, complex]
    assert torch.zeros(last["i"]).shape == (8,)


def test_progress_changes_nothing_and_shows_steps(capsys: pytest.CaptureFixture[str]) -> None:
    carry, _ = tl.scan(lambda c, x: (c + x, None), torch.tensor(0), counts(5), progress=True)
    assert carry.item() == 10
    shown = capsys.readouterr().err
    assert "scan" in shown
    assert "5/5" in shown
