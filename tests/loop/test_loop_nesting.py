"""Gradients of loops over arrays, of loops in loops, and of loops beside torch.utils.checkpoint."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.loop.checkpoint import node
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.memory import collector_off
from tests.support.loop_cases import (
    Ours,
    Plain,
    cell,
    compare,
    cotangents,
    inputs,
    randn,
    recurrent,
    rotate,
    tensors,
    with_and_without_checkpoints,
)

# -- arrays


@with_and_without_checkpoints
@pytest.mark.parametrize("given", [False, True], ids=["growing", "fixed"])
def test_an_array_in_a_while_has_the_closed_form(given: bool, checkpoints: Any) -> None:
    """Slot t is init * w**t + x: derivatives by hand."""
    init, x, w = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.5, 0.25, 1.1))
    array = tl.TensorArray.unstack(torch.zeros(5, dtype=torch.float64)) if given else tl.TensorArray()

    def body(carry: Any) -> Any:
        array, c, t = carry
        return array.write(t, c + x), c * w, t + 1

    stack = tl.while_loop(lambda c: c[2] < 5, body, (array, init, 0), checkpoints=checkpoints)[0].stack()
    t = torch.arange(5, dtype=torch.float64)
    torch.testing.assert_close(stack, 1.5 * 1.1**t + 0.25)
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0], dtype=torch.float64)
    grads = grad((stack * weights).sum(), (init, x, w))
    true = (weights * 1.1**t).sum(), weights.sum(), (weights * 1.5 * t * 1.1 ** (t - 1)).sum()
    torch.testing.assert_close(grads, true)


@with_and_without_checkpoints
def test_initial_slots_get_zero_where_overwritten_and_all_else_where_not(checkpoints: Any) -> None:
    start, xs = randn(4, 2), randn(3, 2)

    def body(i: int, array: Any) -> Any:
        array = array.write(1, xs[i])  # three times the same slot: the last write counts
        return array.write(2, array[0] * xs[i])

    array = tl.fori_loop(0, 3, body, tl.TensorArray.unstack(start), checkpoints=checkpoints)
    ds, dx = grad(array.stack().sum(), (start, xs))
    torch.testing.assert_close(ds, torch.stack([1 + xs[2], ds.new_zeros(2), ds.new_zeros(2), ds.new_ones(2)]).detach())
    torch.testing.assert_close(dx, torch.stack([ds.new_zeros(2), ds.new_zeros(2), 1 + start[0]]).detach())


@with_and_without_checkpoints
def test_reads_of_one_slot_stack_and_prefix_add_up(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            array, c = carry
            array = array.append(rotate(c) * x)
            y = array[0] * 2 + array[0] ** 2 + array.stack().sum(0) + array[:2].sum(0) + array[-1]
            return (array, array[len(array) // 2]), y

        (array, c), ys = loops.scan(body, (loops.array().append(init), init), xs)
        return array.stack(), array[0], array[:2], torch.cat([array.stack(), array[1:3]]), c, ys

    compare(program, randn(2), randn(5, 2), checkpoints=checkpoints, flags=False)


@with_and_without_checkpoints
def test_second_order_of_a_loop_with_arrays_and_unknown_length(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor) -> Any:
        def body(carry: Any) -> Any:
            array, x, i = carry
            x = rotate(x) * w + array[: i + 1].sum(0).sin() + xs[i]
            array = array.append(x)
            return array.write(0, x * 0.5) if i == 2 else array, x, i + 1

        array, x, _ = loops.while_loop(lambda c: c[2] < 4, body, (loops.array().append(init), init, 0))
        return array.stack(), x

    def second(loops: Any) -> list[Tensor]:
        given = randn(2), randn(4, 2), randn(2, seed=1)
        stack, x = program(loops, *given)
        first = grad(stack.square().sum() + x.sum(), given, create_graph=True)
        return [*first, *grad(sum((g.cos().sum() for g in first), torch.zeros(())), given)]

    compare(program, randn(2), randn(4, 2), randn(2, seed=1), checkpoints=checkpoints)
    torch.testing.assert_close(second(Ours(checkpoints)), second(Plain()))


# -- loops among loops


@with_and_without_checkpoints
@pytest.mark.parametrize("inner", [None, 2])
def test_a_loop_in_a_loop(inner: int | None, checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor, w: Tensor, v: Tensor) -> Any:
        below = loops if isinstance(loops, Plain) else Ours(inner)

        def outer(carry: Tensor, x: Tensor) -> Any:
            factor = carry.sin() * v  # a local of the outer body, which the inner one closes over

            def body(c: Tensor, z: Tensor) -> Any:
                return rotate(c) * w + factor * z, c * factor

            c, ys = below.scan(body, carry, x)
            return c, (ys.sum(0), x.sum())

        return loops.scan(outer, init, xs)

    compare(program, randn(2), randn(3, 4, 2), randn(2, seed=1), randn(2, seed=2), checkpoints=checkpoints)
    compare(
        program,
        randn(2, grad=False),
        randn(3, 4, 2, grad=False),
        randn(2, seed=1),
        randn(2, seed=2),
        checkpoints=checkpoints,
    )
    compare(
        program,
        randn(2, grad=False),
        randn(3, 4, 2, grad=False),
        randn(2, grad=False),
        randn(2, seed=2),
        checkpoints=checkpoints,
    )


@with_and_without_checkpoints
def test_an_inner_loop_reads_one_array_of_the_outer_and_writes_another(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        def outer(i: int, carry: Any) -> Any:
            read, written, x = carry
            written = written.write(0, x * 2)
            new = loops.array().append(read[0] * w).append(x)

            def inner(j: int, c: Any) -> Any:
                return c[0].write(j, c[1]), rotate(c[1]) * new[j].cos()

            written, x = loops.fori_loop(0, 2, inner, (written, x))
            return new, written, rotate(x)

        start = loops.array().append(init * 1.0), loops.array.unstack(torch.stack([init, w])), init
        return loops.fori_loop(0, 3, outer, start)

    compare(program, randn(2), randn(2, seed=1), checkpoints=checkpoints)


READS: dict[str, Callable[[Any, int], Tensor]] = {
    "slot": lambda a, j: a[j],
    "negative slot": lambda a, j: a[-1 - j],
    "slice": lambda a, j: a[: j + 1].sum(0),
    "stack": lambda a, j: a.stack().sin().sum(0),
    "gather": lambda a, j: a.gather(torch.tensor([j, 0])).sum(0),
    "copy": lambda a, j: copy.copy(a)[: j + 1].sum(0),
}


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("plans", [(2, 1), (2, None, 1), (1, 3, 2)])
@pytest.mark.parametrize("reads", [(), (0,)], ids=["innermost", "and outer"])
@pytest.mark.few
def test_an_array_closed_over_by_loops_in_loops(reads: tuple[int, ...], plans: tuple[Any, ...], how: str) -> None:
    """Each level has its own plan; the innermost reads the array, and so do the levels `reads`."""

    def program(plans: tuple[Any, ...], values: Tensor, w: Tensor) -> Tensor:
        array = tl.TensorArray.unstack(values.sin()).append(w * 2).append(w.cos())

        def level(n: int) -> Callable[[int, Tensor], Tensor]:
            def body(j: int, c: Tensor) -> Tensor:
                c = rotate(c)
                if n == len(plans) - 1:
                    return c + READS[how](array, j) * w
                if n in reads:
                    c = c + array[1] * array[:2].sum(0)
                return tl.fori_loop(0, 2, level(n + 1), c, checkpoints=plans[n + 1]) + c.cos()

            return body

        return tl.fori_loop(0, 3, level(0), values[0], checkpoints=plans[0])

    def run(plans: tuple[Any, ...]) -> list[Tensor]:
        given = randn(2, 2), randn(2, seed=1)
        out = program(plans, *given)
        first = grad(out.sin().sum(), given, create_graph=True)
        again = grad(program(plans, *given).sin().sum(), given)
        return [out, *first, *again, *grad(torch.stack([x.sin().sum() for x in first]).sum(), given)]

    torch.testing.assert_close(run(plans), run((None,) * len(plans)))


class Looped(torch.autograd.Function):
    """A loop in a node: its backward runs the loop and differentiates it."""

    @staticmethod
    def forward(ctx: Any, function: Any, *given: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function = function
        ctx.save_for_backward(*given)
        with torch.no_grad():
            return function(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*given)
        return None, *grad(out, given, g)


@with_and_without_checkpoints
@pytest.mark.parametrize("inner", [None, 1, 2])
@pytest.mark.parametrize("node", ["function", "checkpoint"])
def test_loops_inside_other_nodes_read_a_closed_over_array(node: str, inner: Any, checkpoints: Any) -> None:
    def run(checkpoints: Any, inner: Any, wrapped: bool) -> list[Tensor]:
        values, init = randn(3, 2), randn(2, seed=1)
        array = tl.TensorArray.unstack(values.sin())

        def loop(c: Tensor, w: Tensor) -> Tensor:
            read = tl.TensorArray.unstack(w) if node == "function" else array
            return tl.fori_loop(
                0, 2, lambda j, c: tl.fori_loop(0, 2, lambda k, c: rotate(c) + read[k], c, checkpoints=inner), c,
                checkpoints=inner,
            )  # fmt: skip

        def body(i: int, c: Tensor) -> Tensor:
            c = rotate(c) + (array[1] if i else 0)
            if not wrapped:
                return loop(c, values)
            if node == "function":
                return Looped.apply(loop, c, values)  # pyright: ignore[reportReturnType]
            return checkpoint(loop, c, values, use_reentrant=False)  # pyright: ignore[reportReturnType]

        out = tl.fori_loop(0, 3, body, init, checkpoints=checkpoints)
        return [out, *grad(out.sin().sum(), (values, init))]

    torch.testing.assert_close(run(checkpoints, inner, True), run(None, None, False))


@pytest.mark.parametrize("used", ["not at all", "without gradient"])
@pytest.mark.parametrize("plans", [(2, 1), (9, 2), (1, 2, 1)])
def test_a_name_that_an_inner_body_uses_is_bound_to_what_its_loop_gave(plans: tuple[int, ...], used: str) -> None:
    """A cycle of references, which only the collector takes apart, where no gradient reaches the inner loop."""

    def program(loops: Any, init: Tensor, w: Tensor) -> Any:
        below = (lambda n: loops) if isinstance(loops, Plain) else (lambda n: Ours(plans[n]))

        def inner(c: Tensor, w: Tensor) -> Tensor:
            read = loops.array.unstack(torch.stack([c, w]))[:2].sum(0)
            h = c
            h = below(len(plans) - 1).fori_loop(0, 2, lambda j, z: rotate(z) + read + (h * 0).detach(), h)
            return rotate(c) + read + (h.detach() if used == "without gradient" else 0)

        def outer(i: int, c: Tensor) -> Tensor:
            if len(plans) == 2:
                return inner(c, w)
            return below(1).fori_loop(0, 2, lambda j, z: inner(z, w), c)

        return below(0).fori_loop(0, 4, outer, init)

    compare(program, randn(2), randn(2, seed=1), checkpoints=1)


@pytest.mark.parametrize("plan", [1, 2, tl.Checkpoints(budget=20_000)], ids=["1", "2", "budget"])
def test_nothing_of_a_loop_inside_a_step_outlives_the_step(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body closes over an array that its result goes to: a cycle through torch's own nodes."""
    replays: list[weakref.ref[Any]] = []
    begin = node.Replay.__init__

    def watched(self: Any, *args: Any) -> None:
        begin(self, *args)
        replays.append(weakref.ref(self))

    monkeypatch.setattr(node.Replay, "__init__", watched)
    w = randn(2)

    def body(i: int, carry: Any) -> Any:
        array, h = carry
        h = tl.fori_loop(0, 2, lambda j, z: rotate(z) + array[0], h, checkpoints=1).sin()
        return array.append(h), h.cos() * w

    with collector_off():
        array, h = tl.fori_loop(0, 6, body, (tl.TensorArray().append(w * 1), w), checkpoints=plan)
        assert sum(replay() is not None for replay in replays) == 1
        grad(array.stack().sum() + h.sum(), w)
        assert len(replays) > 12
        assert not any(replay() is not None for replay in replays)


@with_and_without_checkpoints
def test_two_loops_in_series_share_an_array(checkpoints: Any) -> None:
    def program(loops: Any, init: Tensor, xs: Tensor) -> Any:
        def first(carry: Any, x: Tensor) -> Any:
            return carry.append(rotate(carry[-1]) * x), carry[-1].sum()

        def second(carry: Tensor, x: Tensor) -> Any:
            return rotate(carry) + x * array.stack().sum(0), carry * array[0]

        array, ys = loops.scan(first, loops.array().append(init), xs)
        return loops.scan(second, init, array.stack()), ys, array

    compare(program, randn(2), randn(4, 2), checkpoints=checkpoints)


@with_and_without_checkpoints
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_torch_checkpoint(use_reentrant: bool, checkpoints: Any) -> None:
    init, xs, w = inputs()
    function: Callable[..., Any] = lambda *given: recurrent(Ours(checkpoints), *given)  # noqa: E731
    outputs = checkpoint(function, init, xs, w, use_reentrant=use_reentrant)
    true = recurrent(Plain(), init, xs, w)
    torch.testing.assert_close(outputs, true)
    torch.testing.assert_close(
        grad_by_backward(outputs, (init, xs, w)), grad(tensors(true), (init, xs, w), cotangents(tensors(true)))
    )


def grad_by_backward(outputs: Any, wanted: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    torch.autograd.backward(tensors(outputs), cotangents(tensors(outputs)))
    return tuple(x.grad for x in wanted)


@with_and_without_checkpoints
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_in_the_body(use_reentrant: bool, checkpoints: Any) -> None:
    init, xs, w = inputs()

    def program(body: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        for x in (init, xs, w):
            x.grad = None
        return grad_by_backward(tl.scan(body, init, xs, checkpoints=checkpoints), (init, xs, w))

    def body(c: Tensor, x: Tensor) -> Any:
        return checkpoint(cell(w), c, x, use_reentrant=use_reentrant)

    if use_reentrant and checkpoints:  # torch refuses that kind wherever autograd.grad is called, as a replay does
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            program(body)
    else:
        torch.testing.assert_close(program(body), program(cell(w)))


@pytest.mark.eager_only("a compiled loop has no recorder")
def test_the_outer_loop_records_what_the_inner_body_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the inner loop asks of its own carry at each step is nothing to a recorder, and dear under one."""
    calls: list[Any] = []
    of_torch = Captures.__torch_function__

    def counted(self: Captures, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.judge is None:  # else it comes back here at once, when nobody follows
            calls.append(func)
        return of_torch(self, func, types, args, kwargs)

    monkeypatch.setattr(Captures, "__torch_function__", counted)

    def calls_of(steps: int) -> int:
        calls.clear()
        inner = lambda i, c: (torch.sin(c[0]), c[1])  # noqa: E731
        body = lambda c, x: (tl.fori_loop(0, steps, inner, (c, x))[0], None)  # noqa: E731
        tl.scan(body, torch.ones(3), torch.ones(1, 3), checkpoints=1)
        return len(calls)

    assert calls_of(30) - calls_of(10) == 20
