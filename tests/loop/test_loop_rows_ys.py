"""ys of rows that stop on their own: a scan whose `until` gives a bool for each row is each row's own Python loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tensorloop.memory import saved
from tensorloop.packed import PackedTensor
from tests.support.loop_cases import Counter, cotangents, randn, rotate, tensors, with_and_without_checkpoints

compact_or_not = pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
LIMITS = torch.tensor([3, 1, 5, 1, 5, 2])
F = 4
Step = Callable[..., tuple[Any, Any]]


def cell(w: Tensor) -> Step:
    """Carry (h, limits, n): a row counts to its own limit. y: two tensors, a number and None."""

    def body(carry: Any, x: Any, *context: Tensor) -> Any:
        h, limit, n = carry
        h = rotate(h) * w + h.sin() + (0 if x is None else x) + sum(context)
        return (h, limit, n + 1), {"h": h * 2, "sum": h.square().sum(-1), "n": 7, "none": None}

    return body


def met(carry: Any, *context: Tensor) -> Tensor:
    return carry[2] >= carry[1]


def start(limits: Tensor, seed: int = 0) -> Any:
    return randn(len(limits), F, seed=seed), limits, torch.zeros_like(limits)


def alone(
    body: Step, until: Any, init: Any, xs: Tensor | None, length: int | None, context: tuple[Tensor, ...], reverse: bool
) -> tuple[Any, list[list[Any]]]:
    """The oracle: a Python loop for each row. (carry, for each leaf of ys its entries, rows one after another)"""
    carries, columns = [], None
    most = (len(xs) if xs is not None else length) or 1000
    for b in range(len(init[0])):
        carry, ys = tuple(x[b : b + 1] for x in init), []
        given = tuple(x[b : b + 1] for x in context)
        for t in reversed(range(most)) if reverse else range(most):
            carry, y = body(carry, None if xs is None else xs[t, b : b + 1], *given)
            ys.append((y["h"], y["sum"]))
            if bool(until(carry, *given)):
                break
        carries.append(carry)
        column = [torch.cat(leaf) for leaf in zip(*(ys[::-1] if reverse else ys), strict=True)]
        columns = [[x] for x in column] if columns is None else [[*c, x] for c, x in zip(columns, column, strict=True)]
    assert columns is not None
    return tuple(torch.cat(x) for x in zip(*carries, strict=True)), columns


def rows_of(*args: Any, **options: Any) -> Any:
    """`tl.scan`, whose ys are typed as what a step gives."""
    return tl.scan(*args, **options)


def agree(
    limits: Tensor,
    *,
    xs: Tensor | None = None,
    length: int | None = None,
    context: Tensor | None = None,
    reverse: bool = False,
    **options: Any,
) -> None:
    """Values, lens and all gradients are those of the Python loops."""
    init, w = start(limits), randn(F, seed=2)
    more = () if context is None else (context,)
    carry, ys = tl.scan(cell(w), init, xs, length, until=met, context=context, reverse=reverse, **options)  # pyright: ignore[reportCallIssue]
    true, columns = alone(cell(w), met, init, xs, length, more, reverse)
    steps = torch.tensor([len(x) for x in columns[0]])
    assert all(type(y) is PackedTensor and torch.equal(y.lens, steps) for y in (ys["h"], ys["sum"]))
    assert ys["none"] is None
    assert ys["n"].tolist() == [7] * int(steps.max())
    found, expected = [carry[0], ys["h"].values, ys["sum"].values], [true[0], *map(torch.cat, columns)]
    torch.testing.assert_close((found, carry[1:]), (expected, true[1:]))
    wanted = [x for x in (init[0], w, xs, context) if x is not None]
    outs = cotangents(found)
    torch.testing.assert_close(grad(found, wanted, outs), grad(expected, wanted, outs))


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bound", [1, 3, 5, 9])
def test_each_row_is_as_if_alone(bound: int, reverse: bool, compact: bool, checkpoints: Any) -> None:
    xs, context = randn(bound, 6, F, seed=1), randn(6, F, seed=3)
    agree(LIMITS, xs=xs, context=context, reverse=reverse, compact=compact, checkpoints=checkpoints)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=7),
    st.one_of(st.none(), st.integers(1, 8)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 2, 4, tl.Checkpoints(budget=20_000)]),
)
def test_any_numbers_of_steps(limits: list[int], bound: int | None, given_xs: bool, compact: bool, plan: Any) -> None:
    xs = randn(bound, len(limits), F, seed=1) if bound and given_xs else None
    length = bound if xs is None else None
    agree(torch.tensor(limits), xs=xs, length=length, compact=compact, checkpoints=plan, reverse=bool(bound))


@with_and_without_checkpoints
@compact_or_not
def test_the_loop_dim_of_xs_may_be_another(compact: bool, checkpoints: Any) -> None:
    xs, init, w = randn(6, 5, F), start(LIMITS), randn(F, seed=2)
    options: Any = {"until": met, "compact": compact, "checkpoints": checkpoints}
    first = tl.scan(cell(w), init, xs, dim=1, **options)
    second = tl.scan(cell(w), init, xs.transpose(0, 1).detach().clone(), **options)
    torch.testing.assert_close(tensors((first[0], first[1]["h"].values)), tensors((second[0], second[1]["h"].values)))


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.extended("whole-K=3", "compact-K=1")
def test_gradients_of_both_orders(compact: bool, checkpoints: Any) -> None:
    limits = torch.tensor([2, 1, 3])

    def run(h: Tensor, w: Tensor, xs: Tensor) -> Any:
        carry, ys = tl.scan(cell(w), (h, limits, limits * 0), xs, until=met, compact=compact, checkpoints=checkpoints)
        return carry[0], ys["h"].values

    inputs = randn(3, 2), randn(2, seed=1), randn(4, 3, 2, seed=2)
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


# -- what stopped rows are given


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("reverse", [False, True])
def test_nan_after_a_rows_end_reaches_nothing(reverse: bool, compact: bool, checkpoints: Any) -> None:
    """Row b's slices are NaN after its own steps, and its depth would fall below zero."""
    lens = torch.tensor([2, 4, 1, 3])
    real = (torch.arange(4)[:, None] < lens).double()
    real = real.flip(0) if reverse else real
    xs = torch.where(real > 0, 1.0, torch.nan).requires_grad_()
    depth, w = lens.double().requires_grad_(), randn()

    def body(h: Tensor, x: Tensor) -> Any:
        return h - x * (1 + w * x.log()), h.sqrt()

    end, ys = rows_of(
        body, depth, xs, until=lambda h: h <= 0.5, reverse=reverse, compact=compact, checkpoints=checkpoints
    )
    assert torch.equal(ys.lens, lens)
    found = grad(end.sum() + ys.values.sum(), [depth, xs, w])
    assert all(bool(x.isfinite().all()) for x in (end, ys.values, *found))
    assert torch.equal(found[1] != 0, real > 0)


@with_and_without_checkpoints
@compact_or_not
def test_a_frozen_row_is_exact_and_its_length_its_own(compact: bool, checkpoints: Any) -> None:
    body = Counter(lambda c, _: (c + 2, c))
    c, ys = rows_of(body, torch.arange(4), until=lambda c: c > 5, compact=compact, checkpoints=checkpoints)
    assert c.tolist() == [6, 7, 6, 7]
    assert [x.tolist() for x in ys.unbind()] == [[0, 2, 4], [1, 3, 5], [2, 4], [3, 5]]
    assert body.calls == 3


@with_and_without_checkpoints
@compact_or_not
def test_arrays_and_shared_leaves_in_the_carry(compact: bool, checkpoints: Any) -> None:
    h, w = randn(6, F), randn(F, seed=1)

    def body(carry: Any, _: Any) -> Any:
        h, array, shared, n, limit = carry
        h = rotate(h) * w
        array = array.append(h)
        return (h, array, shared + 1, n + 1, limit), (array[0] * h, shared)

    init = h, tl.TensorArray(), 0, torch.zeros(6, dtype=torch.int64), LIMITS
    (_, array, shared, n, _), (y, numbers) = tl.scan(
        body, init, until=lambda c: c[3] >= c[4], compact=compact, checkpoints=checkpoints
    )
    assert (shared, n.tolist(), numbers.tolist()) == (5, LIMITS.tolist(), [0, 1, 2, 3, 4])
    rows = []
    for b, limit in enumerate(LIMITS.tolist()):
        steps = [h[b]]
        for _ in range(limit):
            steps.append(rotate(steps[-1]) * w)
        rows.append(torch.stack(steps[1:]))
        torch.testing.assert_close(array.stack()[:limit, b], rows[-1])
    true = torch.cat([row[:1] * row for row in rows])
    torch.testing.assert_close(y.values, true)
    torch.testing.assert_close(grad(y.values.sin().sum(), [h, w]), grad(true.sin().sum(), [h, w]))


@with_and_without_checkpoints
@compact_or_not
def test_a_body_gives_its_context_as_it_is(compact: bool, checkpoints: Any) -> None:
    given, limits = randn(3, 2).sin(), torch.tensor([1, 3, 2])
    (n,), ys = rows_of(
        lambda c, _, context: ((c[0] + 1,), context[0]),
        (limits * 0,),
        until=lambda c, context: c[0] >= context[1],
        context=(given, limits),
        checkpoints=checkpoints,
        compact=compact,
    )
    assert torch.equal(n, limits)
    assert torch.equal(ys.values, given.repeat_interleave(limits, 0))
    assert torch.equal(grad(ys.values.sum(), given)[0], limits[:, None].expand(3, 2).double())


# -- ends of the scale


@with_and_without_checkpoints
@compact_or_not
def test_a_batch_of_no_rows_and_of_one(compact: bool, checkpoints: Any) -> None:
    for rows in (0, 1):
        c, ys = rows_of(
            lambda c, _: (c + 1, c[:, None] * torch.ones(2)),
            torch.zeros(rows, requires_grad=True),
            until=lambda c: c >= 3,
            compact=compact,
            checkpoints=checkpoints,
        )
        assert (type(ys), ys.lens.tolist()) == (PackedTensor, [3] * rows)
        assert (tuple(c.shape), tuple(ys.values.shape)) == ((rows,), (3 * rows, 2))
        ys.values.sum().backward()


@with_and_without_checkpoints
def test_no_steps_give_empty_rows(checkpoints: Any) -> None:
    body = cell(randn(F))
    carry, ys = tl.scan(body, start(LIMITS), None, 0, until=met, checkpoints=checkpoints)
    assert ys["h"].lens.tolist() == ys["sum"].lens.tolist() == [0] * 6
    assert tuple(ys["h"].values.shape) == (0, F)
    assert torch.equal(carry[1], LIMITS)
    # One that looks at numbers can give no more than one bool.
    _, ys = tl.scan(body, start(LIMITS), None, 0, until=lambda c: bool(met(c).all()), checkpoints=checkpoints)
    assert tuple(ys["h"].shape) == (0, 6, F)


def test_one_bool_in_a_row_of_a_carry_without_rows_is_one_bool() -> None:
    _, ys = tl.scan(lambda c, _: (c + 1, c), torch.zeros(2), until=lambda c: c[:1] >= 3)
    assert tuple(ys.shape) == (3, 2)


def test_ys_take_what_the_rows_own_steps_put_out() -> None:
    """One row of 64 goes on: N = 64 + 99, where B x T = 6400."""
    limits = torch.ones(64, dtype=torch.int64)
    limits[17] = 100

    def run(compact: bool) -> Any:
        h = torch.ones(64, 8, requires_grad=True)
        step = lambda c, _: ((c[0], c[1] + 1), c[0].sin())  # noqa: E731
        return tl.scan(step, (h, limits * 0), until=lambda c: c[1] >= (limits if len(c[1]) > 1 else 100))[1].values

    entries = int(limits.sum())
    assert len(run(False)) == entries
    with torch.no_grad():
        assert run(False).untyped_storage().nbytes() == entries * 8 * 4


@with_and_without_checkpoints
def test_saved_bytes_follow_the_sum_of_lengths(checkpoints: Any) -> None:
    def bytes_of(long: int) -> int:
        limits = torch.ones(64, dtype=torch.int64)
        limits[17] = long

        def run() -> Any:
            h = torch.ones(64, 32, requires_grad=True)
            step = lambda c, _: ((c[0] * 1.0, c[1], c[2] + 1), c[0].sin())  # noqa: E731
            return tl.scan(step, (h, limits, limits * 0), until=met, compact=True, checkpoints=checkpoints)[1].values

        return saved(run).bytes

    row, few, many = 32 * 4, bytes_of(20), bytes_of(220)
    assert many - few <= 200 * 4 * row  # a B x T carry alone would be 200 * 64 * row


# -- transforms, errors


def test_under_grad_of_torch_func() -> None:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        return tl.scan(cell(w), (h, LIMITS, LIMITS * 0), until=met)[1]["h"].values.sin().sum()

    h, w = randn(6, F), randn(F, seed=2)
    true = grad(loss(h, w), [h, w])
    torch.testing.assert_close(torch.func.grad(loss, (0, 1))(h.detach(), w.detach()), true)
    hessian = torch.func.hessian(loss, 1)(h.detach(), w.detach())
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda w: loss(h.detach(), w), w.detach()))


@with_and_without_checkpoints
def test_what_does_not_fit(checkpoints: Any) -> None:
    h = randn(6, F)

    def run(body: Any = None, init: Any = None, xs: Any = None, until: Any = None, **options: Any) -> Any:
        body = body or (lambda c, x: ((c[0], c[1] + 1), c[0]))
        init = init or (h, LIMITS * 0)
        return tl.scan(body, init, xs, until=until or (lambda c: c[1] >= LIMITS), checkpoints=checkpoints, **options)

    with pytest.raises(ValueError, match=r"scan: until gave a bool for each of 6 rows, but c\[2\] .* Tensor \(5,\)"):
        run(lambda c, x: ((*c[:1], c[1] + 1, c[2]), c[0]), (h, LIMITS * 0, torch.zeros(5)))
    with pytest.raises(ValueError, match=r"a bool for each of 6 rows, but a slice of xs\['a'\] has shape \(3,"):
        run(xs={"a": torch.zeros(9, 3)})
    with pytest.raises(ValueError, match=r"y\['y'\] of step 0 is Tensor \(\) .*where rows stop on their own"):
        run(lambda c, x: ((c[0], c[1] + 1), {"y": c[0].sum()}))
    late = lambda c, x: ((c[0], c[1] + 1), c[0] if c[1].sum() < 4 else c[0].sum())  # noqa: E731
    with pytest.raises(ValueError, match=r"a y of Tensor \(\) .* at step 1; .*the rows of the batch, here 6"):
        run(late)
    many, one = torch.ones(6) > 2, False
    with pytest.raises(TypeError, match=r"until must return a bool tensor of shape \(6,\) again, got bool False"):
        run(until=lambda c: many if c[1].max() < 2 else one)
    with pytest.raises(ValueError, match=r"for each of 6 rows, but context is Tensor \(5,\)"):
        run(
            lambda c, x, k: ((c[0], c[1] + 1), c[0]),
            until=lambda c, k: c[1] >= LIMITS,
            context=torch.zeros(5),
            compact=True,
        )
    with pytest.raises(ValueError, match="compact=True is for rows that stop on their own; give until="):
        tl.scan(lambda c, x: (c, c), h, None, 3, compact=True, checkpoints=checkpoints)


@pytest.mark.eager_only("its condition is asked as one bool, and the error says what that may be")
@with_and_without_checkpoints
def test_one_bool_and_then_one_for_each_row(checkpoints: Any) -> None:
    def until(c: Tensor) -> Any:
        return False if c.max() < 2 else torch.ones(6) > 2

    with pytest.raises(TypeError, match="until gave one bool before, and at step 1 a tensor of shape"):
        tl.scan(lambda c, _: (c + 1, c), torch.zeros(6), until=until, checkpoints=checkpoints)
