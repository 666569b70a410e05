"""Arrays in loops whose rows stop on their own: a stopped row's slots stay what they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import compare, cotangents, randn, rotate, with_and_without_checkpoints

compact_or_not = pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
LIMITS = torch.tensor([3, 0, 5, 1, 5, 2])


@with_and_without_checkpoints
@compact_or_not
def test_writes_touch_running_rows_only(compact: bool, checkpoints: Any) -> None:
    """append, write, write_rows, scatter, extend: of a new slot the other rows are 0, of an old one as they were."""
    init, start = randn(6, 2), randn(2, 6, 2, seed=1)

    def body(carry: Any) -> Any:
        grown, fixed, x, limit, n = carry
        x = rotate(x) + fixed[0].sin()
        grown = grown.append(x * 2) if int(n.max()) % 2 == 0 else grown.extend(torch.stack([x, x.cos()]))
        fixed = fixed.write(0, x + fixed[1])
        rows = torch.ones(len(x), dtype=torch.int64)
        fixed = fixed.write_rows(rows, x.cos()).scatter([1], (fixed[1] * x)[None])
        return grown, fixed, x, limit, n + 1

    def run(rows: list[int], loop: Callable[..., Any], arrays: Any) -> Any:
        grown, fixed = arrays(), arrays.unstack(start[:, rows])
        zero = torch.zeros(len(rows), dtype=torch.int64)
        return loop(lambda c: c[-1] < c[-2], body, (grown, fixed, init[rows], LIMITS[rows], zero))

    grown, fixed, x, *_ = run(
        list(range(6)), lambda *args: tl.while_loop(*args, compact=compact, checkpoints=checkpoints), tl.TensorArray
    )
    true = [run([i], lambda *args: tl.while_loop(*args), tl.TensorArray) for i in range(6)]
    stack, outs, true_outs = grown.stack(), [x, fixed.stack()], []
    true_outs.append(torch.cat([row[2] for row in true]))
    true_outs.append(torch.cat([row[1].stack() for row in true], 1))
    longest = len(stack)
    padded = []
    for row in true:
        values = row[0].stack() if len(row[0]) else torch.zeros(0, 1, 2, dtype=torch.float64)
        padded.append(torch.cat([values, values.new_zeros(longest - len(values), 1, 2)]))
    outs.append(stack)
    true_outs.append(torch.cat(padded, 1))
    torch.testing.assert_close(outs, true_outs)
    torch.testing.assert_close(
        grad(outs, (init, start), cotangents(outs)), grad(true_outs, (init, start), cotangents(outs))
    )


@with_and_without_checkpoints
@compact_or_not
def test_arrays_that_the_body_swaps_or_makes_anew_freeze_too(compact: bool, checkpoints: Any) -> None:
    """A stopped row keeps what was in each place of the carry, whichever array the body puts there."""
    limits = torch.tensor([1, 2, 4])

    def body(carry: Any) -> Any:
        a, b, limit, n = carry
        return b, tl.TensorArray.unstack(a.stack() * 2), limit, n + 1

    zero = torch.zeros(3, dtype=torch.int64)
    init = (
        tl.TensorArray.unstack(torch.full((1, 3), 3.0)),
        tl.TensorArray.unstack(torch.full((1, 3), 5.0)),
        limits,
        zero,
    )
    a, b, *_ = tl.while_loop(lambda c: c[3] < c[2], body, init, compact=compact, checkpoints=checkpoints)
    assert a.stack().tolist() == [[5, 6, 12]]
    assert b.stack().tolist() == [[6, 10, 20]]


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("late", [0, 1, 2, 3, 4])
def test_arrays_that_trade_places_late(late: int, compact: bool, checkpoints: Any) -> None:
    """Arrays first written, and swapped, after rows have left: each row is as if alone; new slots are 0 elsewhere."""
    init, start = randn(6, 2), randn(2, 6, 2, seed=1)

    def body(carry: Any) -> Any:
        a, b, new, x, limit, n = carry
        x = rotate(x) + a[0].sin()
        a = a.write(1, x + b[1])
        if int(n.max()) >= late:
            new, a, b = new.append(x * 3), b, a
        return a, b, new, x, limit, n + 1

    def run(rows: list[int], **options: Any) -> list[Tensor]:
        a, b = tl.TensorArray.unstack(start[:, rows]), tl.TensorArray.unstack(start[:, rows].cos())
        zero = torch.zeros(len(rows), dtype=torch.int64)
        carry = (a, b, tl.TensorArray(), init[rows], LIMITS[rows], zero)
        a, b, new, x, *_ = tl.while_loop(lambda c: c[-1] < c[-2], body, carry, **options)
        slots = new.stack() if len(new) else x.new_zeros(0, len(rows), 2)
        return [a.stack(), b.stack(), torch.cat([slots, slots.new_zeros(5 - len(slots), len(rows), 2)]), x[None]]

    outs = run(list(range(6)), compact=compact, checkpoints=checkpoints)
    true = [torch.cat(columns, 1) for columns in zip(*(run([i]) for i in range(6)), strict=True)]
    torch.testing.assert_close(outs, true)
    wanted, given = (init, start), cotangents(outs)
    torch.testing.assert_close(grad(outs, wanted, given), grad(true, wanted, given))


@with_and_without_checkpoints
@compact_or_not
def test_an_array_that_gets_shorter_while_rows_have_stopped(compact: bool, checkpoints: Any) -> None:
    def body(carry: Any) -> Any:
        a, limit, n = carry
        return (tl.TensorArray.unstack(a[:1]) if int(n.max()) == 1 else a), limit, n + 1

    carry = tl.TensorArray.unstack(torch.ones(2, 9, 2)), torch.tensor([1] + [3] * 8), torch.zeros(9, dtype=torch.int64)

    def run() -> Any:
        return tl.while_loop(lambda c: c[2] < c[1], body, carry, compact=compact, checkpoints=checkpoints)

    with pytest.raises(ValueError, match="1 slots in the place of one of 2, while rows have stopped"):
        run()


def test_an_array_is_not_cut_short_for_rows_that_have_stopped() -> None:
    def body(state: tuple[tl.TensorArray, Tensor]) -> tuple[tl.TensorArray, Tensor]:
        a, h = state
        return a.append(h).append(2 * h).truncate(len(a) - 1), h + 1

    with pytest.raises(
        RuntimeError, match=r"TensorArray.truncate: rows of the loop have stopped, .* write slots by row"
    ):
        tl.while_loop(lambda state: state[1] < torch.tensor([2.0, 4.0]), body, (tl.TensorArray(), torch.zeros(2)))


@with_and_without_checkpoints
@compact_or_not
def test_an_inner_loop_writes_running_rows_only(compact: bool, checkpoints: Any) -> None:
    def body(carry: Any) -> Any:
        array, x, limit, n = carry
        array, x = tl.fori_loop(0, 2, lambda i, c: (c[0].append(c[1]), c[1] + 1), (array, x), checkpoints=checkpoints)
        return array, x, limit, n + 1

    init = tl.TensorArray(), torch.ones(2), torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    array, x, *_ = tl.while_loop(lambda c: c[3] < c[2], body, init, compact=compact, checkpoints=checkpoints)
    assert array.stack().tolist() == [[1, 1], [2, 2], [0, 3], [0, 4]]
    assert x.tolist() == [3, 5]


@with_and_without_checkpoints
def test_the_history_of_a_loop_of_no_steps_is_empty(checkpoints: Any) -> None:
    array, x = tl.while_loop(
        lambda c: c[1] < 0,
        lambda c: (c[0].append(c[1]), c[1]),
        (tl.TensorArray(), torch.ones(3)),
        checkpoints=checkpoints,
    )
    assert len(array) == 0
    assert torch.equal(x, torch.ones(3))


@with_and_without_checkpoints
@pytest.mark.parametrize("limit", [0, 2, 4, 9])
def test_a_condition_on_state_and_array_bounds(limit: int, checkpoints: Any) -> None:
    def program(loops: Any, xs: Tensor, init: Tensor) -> Any:
        array = loops.array.unstack(xs)
        out, i = loops.while_loop(
            lambda c: c[1] < limit and c[1] < len(array), lambda c: (rotate(c[0]) * array[c[1]], c[1] + 1), (init, 0)
        )
        assert i == min(limit, 4)
        return out

    compare(program, randn(4, 2), randn(2), checkpoints=checkpoints)


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("how", ["closed over", "context"])
def test_a_body_returns_an_array_that_is_not_its_own(how: str, compact: bool, checkpoints: Any) -> None:
    """In rows that run it takes the carried array's place; the others keep theirs."""
    values, first = randn(2, 6, 2), randn(2, 6, 2, seed=1)

    def run(k: Any) -> Any:
        array = tl.TensorArray.unstack(values.sin())
        init = tl.TensorArray.unstack(first.cos()), LIMITS, torch.zeros(6, dtype=torch.int64)
        options: dict[str, Any] = {"compact": compact, "context": array} if how == "context" else {}
        out = tl.while_loop(
            lambda c, *_: c[2] < c[1],
            lambda c, *context: (context[0] if context else array, c[1], c[2] + 1),
            init,
            **options,
            checkpoints=k,
        )[0].stack()
        return out.detach(), *grad((out.sin() * cotangents([out])[0]).sum(), (values, first))

    found, d_values, d_first = run(checkpoints)
    runs = (LIMITS > 0).view(1, 6, 1)
    torch.testing.assert_close(found, torch.where(runs, values.sin(), first.cos()).detach())
    given = found.cos() * cotangents([found])[0]
    torch.testing.assert_close(d_values, (given * values.cos() * runs).detach())
    torch.testing.assert_close(d_first, (given * -first.sin() * ~runs).detach())


@pytest.mark.parametrize("inner", [None, 1, 2])
@with_and_without_checkpoints
def test_rows_leave_an_array_of_the_context_in_a_step_of_another_loop(inner: int | None, checkpoints: Any) -> None:
    values, init = randn(3, 6, 2), randn(6, 2, seed=1)

    def run(plans: tuple[Any, Any]) -> Any:
        array = tl.TensorArray.unstack(values.sin())

        def body(carry: Any, context: Any) -> Any:
            x, limit, n = carry
            return rotate(x) + context[0] * context[-1] + context[:2].sum(0).sin(), limit, n + 1

        def outer(i: int, x: Tensor) -> Tensor:
            begin = x, LIMITS, torch.zeros(6, dtype=torch.int64)
            return (
                tl.while_loop(lambda c, _: c[2] < c[1], body, begin, context=array, compact=True, checkpoints=plans[1])[
                    0
                ]
                + array[1]
            )

        x = tl.fori_loop(0, 3, outer, init, checkpoints=plans[0])
        return x, *grad((x.sin() * cotangents([x])[0]).sum(), (values, init))

    torch.testing.assert_close(run((checkpoints, inner)), run((None, None)))


@pytest.mark.parametrize("lens", [[0, 3, 2], [0, 0, 1], [0, 0, 0]])
def test_an_empty_array_that_knows_its_elements_loses_rows_too(lens: list[int]):
    """Rows that never start leave before anything is written."""

    def step(carry: tuple[Tensor, tl.TensorArray], lens: Tensor) -> tuple[Tensor, tl.TensorArray]:
        n, array = carry
        return n + 1, array.append(n * 10)

    known = tl.TensorArray(element_shape=(3,), dtype=torch.int64)
    n, array = tl.while_loop(
        lambda carry, lens: carry[0] < lens,
        step,
        (torch.zeros(3, dtype=torch.int64), known),
        context=torch.tensor(lens),
        compact=True,
    )
    assert n.tolist() == lens
    assert array.element_shape == (3,)
    assert array.append(n).stack().T.tolist() == [
        [10 * t if t < m else 0 for t in range(max(lens))] + [m] for m in lens
    ]


def test_an_array_that_no_row_has_written_to_keeps_what_it_knows():
    def step(carry: tuple[Tensor, tl.TensorArray], lens: Tensor) -> tuple[Tensor, tl.TensorArray]:
        n, array = carry
        return n + 1, array.write_rows(torch.zeros_like(n), n, where=n < 0)

    array = tl.TensorArray(element_shape=(3,), dtype=torch.int64)
    init, lens = (torch.zeros(3, dtype=torch.int64), array), torch.tensor([1, 2, 4])
    _, found = tl.while_loop(lambda carry, lens: carry[0] < lens, step, init, context=lens, compact=True)
    assert found.stack().shape == (0, 3)
    assert found.stack().dtype is torch.int64
