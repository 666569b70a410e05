"""Loops of unknown length, and rows that stop on their own: values, steps and gradients are those of each row alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tensorloop import reference
from tests.support.devices import HERE
from tests.support.loop_cases import (
    Counter,
    Ours,
    Slots,
    compare,
    cotangents,
    randn,
    rotate,
    tensors,
    with_and_without_checkpoints,
)

compact_or_not = pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
LIMITS = torch.tensor([3, 0, 5, 1, 5, 2])


def below(limits: Tensor) -> Callable[[Any], Tensor]:
    """Each row counts to its own limit; the count is the last leaf of the carry."""
    return lambda carry: carry[-1] < limits


def both(
    cond_fn: Callable[..., Any], body_fn: Callable[..., Any], init: Any, wanted: list[Tensor], **options: Any
) -> tuple[Any, Any]:
    """(ours, the reference's): values, steps and gradients."""
    ours = tl.while_loop(cond_fn, body_fn, init, return_steps=True, **options)
    true = reference.while_rows(cond_fn, body_fn, init, options.get("max_steps"))
    found = []
    for carry, steps in (ours, true):
        live = [x for x in tensors(carry) if x.requires_grad]
        grads = grad(live, wanted, cotangents(live), allow_unused=True, materialize_grads=True) if live else ()
        found.append((tensors(carry), steps, grads))
    return found[0], found[1]


# -- values and steps


@with_and_without_checkpoints
@compact_or_not
def test_rows_stop_at_their_own_limits(compact: bool, checkpoints: Any) -> None:
    x, steps = tl.while_loop(
        lambda x: x < 3, lambda x: x + 2, torch.arange(4), compact=compact, return_steps=True, checkpoints=checkpoints
    )
    assert x.tolist() == [4, 3, 4, 3]
    assert (steps.tolist(), steps.dtype) == ([2, 1, 1, 0], torch.int64)


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("max_steps", [None, 0, 1, 4, 5, 7])
def test_each_row_is_as_if_alone(max_steps: int | None, compact: bool, checkpoints: Any) -> None:
    init, w = randn(6, 4), randn(4, seed=1)

    def body(carry: Any) -> Any:
        x, limit, n = carry
        return rotate(x) * w + x.sin(), limit, n + 1

    ours, true = both(
        lambda c: c[2] < c[1],
        body,
        (init, LIMITS, torch.zeros(6, dtype=torch.int64)),
        [init, w],
        **{"compact": compact, "checkpoints": checkpoints, "max_steps": max_steps},
    )
    torch.testing.assert_close(ours, true)
    torch.testing.assert_close(ours[1], LIMITS if max_steps is None else LIMITS.clamp(max=max_steps))


@with_and_without_checkpoints
@compact_or_not
def test_random_lengths_of_many_rows(compact: bool, checkpoints: Any) -> None:
    init, w = randn(23, 2), randn(2, seed=1)
    limits = torch.randint(0, 12, (23,), generator=torch.Generator(HERE).manual_seed(4))

    def body(carry: Any) -> Any:
        x, sums, limit, n = carry
        x = rotate(x) * w.cos()
        return x, sums + x.square(), limit, n + 1

    start = (init, torch.zeros(23, 2, dtype=torch.float64), limits, torch.zeros(23, dtype=torch.int64))
    ours, true = both(lambda c: c[3] < c[2], body, start, [init, w], compact=compact, checkpoints=checkpoints)
    torch.testing.assert_close(ours, true)


@with_and_without_checkpoints
@compact_or_not
def test_no_row_runs_at_all(compact: bool, checkpoints: Any) -> None:
    init = randn(3, 2)
    body = Counter(rotate)
    out, steps = tl.while_loop(
        lambda x: torch.zeros(3, dtype=torch.bool),
        body,
        init,
        compact=compact,
        return_steps=True,
        checkpoints=checkpoints,
    )
    assert body.calls == 0
    assert steps.tolist() == [0, 0, 0]
    assert torch.equal(out, init)
    assert torch.equal(grad(out.sum(), init)[0], torch.ones(3, 2))


@with_and_without_checkpoints
@compact_or_not
def test_a_batch_of_no_rows(compact: bool, checkpoints: Any) -> None:
    out, steps = tl.while_loop(
        lambda x: x.sum(1) < 0, rotate, torch.zeros(0, 2), compact=compact, return_steps=True, checkpoints=checkpoints
    )
    assert (tuple(out.shape), tuple(steps.shape), steps.dtype) == ((0, 2), (0,), torch.int64)


@with_and_without_checkpoints
@compact_or_not
def test_a_stopped_row_stays_stopped(compact: bool, checkpoints: Any) -> None:
    """The condition would let a row go on again; it is not asked again for that row."""
    limits = torch.tensor([1, 4])

    def cond(carry: Any) -> Tensor:
        n = int(carry[2])
        return torch.tensor([True, True] if n != 1 else [False, True])[carry[1]] & (n < 4)

    def body(carry: Any) -> Any:
        return carry[0] + 1, carry[1], carry[2] + 1

    init = (torch.zeros(2), torch.arange(2), 0)
    out, steps = tl.while_loop(cond, body, init, compact=compact, return_steps=True, checkpoints=checkpoints)
    assert steps.tolist() == limits.tolist()
    assert out[0].tolist() == [1, 4]


@with_and_without_checkpoints
def test_0_d_tensors_and_numbers_are_shared_and_run_until_all_have_stopped(checkpoints: Any) -> None:
    def body(carry: Any) -> Any:
        x, total, n, word = carry
        return x + 1, total * 2 + x.sum(), n + 1, word

    init = (torch.tensor([0.0, 3.0]), torch.tensor(1.0), 0, "w")
    x, total, n, word = tl.while_loop(lambda c: c[0] < 5, body, init, checkpoints=checkpoints)
    assert x.tolist() == [5, 5]
    assert (n, word) == (5, "w")
    assert total.item() != 1


@with_and_without_checkpoints
def test_a_condition_over_all_rows_stops_the_whole_batch(checkpoints: Any) -> None:
    def program(loops: Any, x: Tensor) -> Any:
        return loops.while_loop(
            lambda c: c[1] < 3 and bool(c[0].max() < 100), lambda c: (rotate(c[0]) * 3, c[1] + 1), (x, 0)
        )

    compare(program, randn(4, 2), checkpoints=checkpoints)


# -- gradients of stopped rows


@with_and_without_checkpoints
@compact_or_not
def test_rows_that_would_divide_by_zero_once_they_have_stopped(compact: bool, checkpoints: Any) -> None:
    """Newton's way down: each row stops at 1, and going on would give 1 / 0, then NaN."""
    init, w = torch.tensor([3.0, 1.0, 4.0, 2.0], dtype=torch.float64, requires_grad=True), randn(1)

    def body(x: Tensor) -> Tensor:
        return x - 1 + (x * w).sin() * (x - 1).log() * 0 + (x - 1).sqrt() * 0

    ours, true = both(lambda x: x > 1.5, body, init, [init, w], compact=compact, checkpoints=checkpoints)
    torch.testing.assert_close(ours, true)
    assert all(torch.isfinite(g).all() for g in ours[2])


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("bad", ["inf", "nan", "never ran"])
def test_nan_in_a_stopped_row_reaches_no_other(bad: str, compact: bool, checkpoints: Any) -> None:
    """A row whose own steps are fine, whose last values make the next step NaN, or that never ran and holds NaN."""
    start = torch.tensor([[4.0, 1.0], [2.0, 1.0], [5.0, 1.0]], dtype=torch.float64)
    if bad == "never ran":
        start[1] = torch.nan
    init = start.requires_grad_()
    w = torch.tensor([1.0, 1.25], dtype=torch.float64, requires_grad=True)
    halt = {"inf": 1.5, "nan": 1.5, "never ran": 1.5}[bad]

    def body(x: Tensor) -> Tensor:
        count, value = x.unbind(1)
        count = count - 1
        root = count.sqrt() if bad == "nan" else 1 / count if bad == "inf" else count.log()
        return torch.stack([count, value * w[1] + root * w[0]], 1)

    out = tl.while_loop(lambda x: x[:, 0] > halt, body, init, compact=compact, checkpoints=checkpoints)
    d_init, d_w = grad(out[:, 1][out[:, 1].isfinite()].sum(), (init, w))
    assert torch.isfinite(d_w).all()
    assert torch.isfinite(d_init[[0, 2]]).all()
    rows = [0, 1, 2] if bad != "never ran" else [0, 2]
    true = reference.while_rows(lambda x: x[:, 0] > halt, body, init[rows])[0]
    torch.testing.assert_close(out[rows], true)
    true_init, true_w = grad(true[:, 1].sum(), (init, w))
    torch.testing.assert_close(d_w, true_w)
    torch.testing.assert_close(d_init[rows], true_init[rows])


@pytest.mark.parametrize("checkpoints", [None, 1, 2, 3, 4, 8])
def test_rows_that_leave_one_by_one_get_their_own_gradient(checkpoints: int | None) -> None:
    init, limits = randn(4), torch.tensor([1, 2, 3, 4])
    functions: Any = (lambda c: c[2] < c[1], lambda c: (c[0].sin() * 2, c[1], c[2] + 1))
    cond, body = functions
    ours, true = both(cond, body, (init, limits, limits * 0), [init], compact=True, checkpoints=checkpoints)
    torch.testing.assert_close(ours, true)


@with_and_without_checkpoints
def test_nan_of_a_row_that_took_no_step_stays_in_it(checkpoints: Any) -> None:
    init = torch.tensor([[1.0], [torch.nan]], dtype=torch.float64, requires_grad=True)
    out = tl.while_loop(lambda x: x[:, 0] < 3, lambda x: x * 2, init, checkpoints=checkpoints)
    assert out[0].item() == 4
    assert out[1].isnan().item()
    assert torch.equal(grad(out[0].sum(), init)[0], torch.tensor([[4.0], [0.0]], dtype=torch.float64))


@with_and_without_checkpoints
def test_nan_in_context_of_stopped_rows(checkpoints: Any) -> None:
    """With compact, rows leave the context too: what is bad in a row that never runs is never met."""
    context = torch.tensor([[2.0], [torch.nan], [torch.nan], [1.5]], dtype=torch.float64, requires_grad=True)
    init = torch.tensor([[1.0], [9.0], [9.0], [1.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    out = tl.while_loop(
        lambda x, rows: x[:, 0] < 3,
        lambda x, rows: x * rows * w,
        init,
        context=context,
        compact=True,
        checkpoints=checkpoints,
    )
    torch.testing.assert_close(out[:, 0], torch.tensor([4.0, 9.0, 9.0, 3.375], dtype=torch.float64))
    d_context, d_w = grad(out[[0, 3]].sum(), (context, w))
    torch.testing.assert_close(d_w, torch.tensor(2 * 4.0 + 3 * 3.375, dtype=torch.float64))
    torch.testing.assert_close(d_context[[0, 3], 0], torch.tensor([4.0, 3 * 1.5**2], dtype=torch.float64))


# -- compact and context


@with_and_without_checkpoints
def test_compact_shrinks_carry_context_and_arrays(checkpoints: Any) -> None:
    limits = torch.tensor([1, 2, 3, 8, 5, 1, 1, 7])
    sizes = []

    def body(carry: Any, context: Any) -> Any:
        array, x, n = carry
        sizes.append(len(x))
        assert len(context["limits"]) == len(context["w"]) == len(n) == len(x)
        assert array.element_shape[0] == len(x)
        return array.append(x * context["w"]), rotate(x), n + 1

    init = tl.TensorArray().append(torch.ones(8, 2)), torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    context = {"limits": limits, "w": torch.arange(8.0)[:, None], "name": "rows"}
    (array, x, n), steps = tl.while_loop(
        lambda c, context: c[2] < context["limits"],
        body,
        init,
        context=context,
        compact=True,
        return_steps=True,
        checkpoints=checkpoints,
    )
    assert n.tolist() == steps.tolist() == limits.tolist()
    assert sizes[:8][0] == 8
    assert sizes[:8][-1] <= 2
    assert sum(sizes[:8]) < 40  # 28 real steps, 64 without
    assert tuple(array.stack().shape) == (9, 8, 2)
    torch.testing.assert_close(x, torch.cat([rotate(torch.ones(1, 2), float(n) * 0.9) for n in limits]))


@with_and_without_checkpoints
@compact_or_not
def test_context_rows_get_gradients(compact: bool, checkpoints: Any) -> None:
    init, per_row = randn(6, 2), randn(6, 2, seed=1)

    def run(per_row: Tensor, limits: Tensor, init: Tensor) -> Any:
        zero = torch.zeros(len(init), dtype=torch.int64)
        return tl.while_loop(
            lambda c, given: c[1] < given[1],
            lambda c, given: (rotate(c[0]) * given[0] + c[0].sin(), c[1] + 1),
            (init, zero),
            context=(per_row, limits),
            compact=compact,
            checkpoints=checkpoints,
        )[0]

    out = run(per_row, LIMITS, init)
    alone = torch.cat([run(per_row[i : i + 1], LIMITS[i : i + 1], init[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(out, alone)
    torch.testing.assert_close(grad(out.cos().sum(), (init, per_row)), grad(alone.cos().sum(), (init, per_row)))


# -- cost, errors


@with_and_without_checkpoints
def test_backward_follows_the_steps_done(checkpoints: Any) -> None:
    init, body = randn(3, 2), Counter(rotate)
    out, steps = tl.while_loop(
        lambda x: torch.full((3,), body.calls < 4),
        body,
        init,
        max_steps=1000,
        return_steps=True,
        checkpoints=checkpoints,
    )
    assert (body.calls, steps.tolist()) == (4, [4, 4, 4])
    grad(out.sum(), init)
    assert body.calls <= 4 + 10  # at worst each step from the start


@with_and_without_checkpoints
def test_a_leaf_without_rows_is_named(checkpoints: Any) -> None:
    init = {"a": torch.zeros(3, 2), "b": [torch.zeros(2, 3)], "c": torch.tensor(1)}
    with pytest.raises(
        ValueError, match=r"a bool for each of 3 rows, but c\['b'\]\[0\] \(c is the carry\) is Tensor \(2, 3\)"
    ):
        tl.while_loop(lambda c: c["a"][:, 0] < 1, lambda c: c, init, checkpoints=checkpoints)
    array = tl.TensorArray.unstack(torch.zeros(3, 2))
    with pytest.raises(
        ValueError, match=r"a bool for each of 3 rows, but c\[1\] \(c is the carry\) is TensorArray of \(2,\)"
    ):
        tl.while_loop(lambda c: c[0] < 1, lambda c: c, (torch.zeros(3), array), checkpoints=checkpoints)


@with_and_without_checkpoints
def test_a_context_without_rows_is_named_where_it_must_shrink(checkpoints: Any) -> None:
    with pytest.raises(ValueError, match=r"but context\['w'\] is Tensor \(2,\)"):
        tl.while_loop(
            lambda c, _: c < 1,
            lambda c, _: c + 1,
            torch.zeros(3),
            context={"w": torch.zeros(2)},
            compact=True,
            checkpoints=checkpoints,
        )


@with_and_without_checkpoints
def test_a_condition_that_changes_its_kind_is_refused(checkpoints: Any) -> None:
    def cond(c: Any) -> Any:
        return [c[0] < 9, torch.tensor(True)][c[1]]

    with pytest.raises(TypeError, match="cond_fn must return a bool tensor of shape"):
        tl.while_loop(cond, lambda c: (c[0] + 1, c[1] + 1), (torch.zeros(2), 0), checkpoints=checkpoints)
    with pytest.raises(TypeError, match="cond_fn gave one bool before"):
        tl.while_loop(
            lambda c: cond((c[0], 1 - c[1])),
            lambda c: (c[0] + 1, c[1] + 1),
            (torch.zeros(2), 0),
            checkpoints=checkpoints,
        )


@with_and_without_checkpoints
@compact_or_not
def test_second_order_by_row(compact: bool, checkpoints: Any) -> None:
    init, w = randn(4, 2), randn(2, seed=1)
    limits = torch.tensor([2, 0, 3, 1])

    calls = list[int]()

    @tl.loop.pure
    def count() -> None:
        calls.append(1)
        assert len(calls) < 200, "endless recursion"

    def body(carry: Any) -> Any:
        count()
        return rotate(carry[0]) * w + carry[0].sin(), carry[1], carry[2] + 1

    def run(ours: bool) -> list[Tensor]:
        start = (init, limits, torch.zeros(4, dtype=torch.int64))

        def cond(carry: Any) -> Tensor:
            return carry[2] < carry[1]

        if ours:
            x = tl.while_loop(cond, body, start, compact=compact, checkpoints=checkpoints)[0]
        else:
            x = reference.while_rows(cond, body, start)[0][0]
        first = grad(x.square().sum(), (init, w), create_graph=True)
        return [*first, *grad(first[0].sin().sum() + first[1].cos().sum(), (init, w))]

    torch.testing.assert_close(run(True), run(False))


@with_and_without_checkpoints
@compact_or_not
def test_a_body_returns_what_it_was_not_given(compact: bool, checkpoints: Any) -> None:
    """Tensors that it closes over, of which one leads to another, and its context, as they are."""
    x, w = randn(6, 2), randn(2, seed=1)

    def run(k: Any) -> list[Tensor]:
        made = w.sin().expand(6, 2)
        context = (w * 2).cos().expand(6, 2)
        begin = x, x * 2, x * 3, LIMITS, torch.zeros(6, dtype=torch.int64)

        def body(carry: Any, given: Tensor) -> Any:
            _, b, _, limit, n = carry
            returned = given if compact else made  # rows leave a context, and no closed-over tensor
            return rotate(b), returned, given, limit, n + 1

        out = tl.while_loop(lambda c, _: c[4] < c[3], body, begin, context=context, compact=compact, checkpoints=k)[:3]
        return [*out, *grad([o.sin() for o in out], (x, w), cotangents(out), allow_unused=True)]

    found = run(checkpoints)
    torch.testing.assert_close(found, run(None))
    runs, given = (LIMITS > 0)[:, None], (w * 2).cos().expand(6, 2)
    torch.testing.assert_close(found[2], torch.where(runs, given, x * 3))


def test_the_reference_runs_each_row_alone() -> None:
    (x, n), steps = reference.while_rows(
        lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + 1), (torch.ones(3), torch.tensor([0, 5, 2]))
    )
    assert (x.tolist(), n.tolist(), steps.tolist()) == ([8, 1, 2], [3, 5, 3], [3, 0, 1])
    assert isinstance(Slots([x]), list)
    assert Ours(None).checkpoints is None


def test_a_condition_that_gives_one_tensor_each_time_and_changes_it_in_place() -> None:
    limits, mask = torch.tensor([2, 4, 3]), torch.ones(3, dtype=torch.bool)
    init = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    (h, _), steps = tl.while_loop(
        lambda c: mask.copy_(c[1] < limits), lambda c: (c[0] * 2, c[1] + 1), init, max_steps=9, return_steps=True
    )
    assert (h.tolist(), steps.tolist()) == ([4, 16, 8], [2, 4, 3])
