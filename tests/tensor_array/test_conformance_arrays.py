"""Arrays and loops in combinations that must hold: in-place changes, dropout, rows that leave, copies, vmap."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tests.support.devices import HERE
from tests.support.loop_cases import Ours, Plain, Slots, cotangents, randn, rotate, with_and_without_checkpoints

D = torch.float64
LIMITS = torch.tensor([3, 0, 5, 1, 5, 2])


def total(values: Iterable[Tensor]) -> Tensor:
    return torch.stack([x.sum() for x in values]).sum()


def both(checkpoints: Any, run: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    """What `run` gives is the same with our loops and arrays and with Python's loops and lists."""
    torch.testing.assert_close(run(Ours(checkpoints)), run(Plain()), rtol=tolerance, atol=tolerance)


def orders(loss: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients, second ones, and the first ones again behind them."""
    found = [*grad(loss, wanted, retain_graph=True)]
    first = grad(loss, wanted, create_graph=True)
    found += [*first, *grad(total(g.square() for g in first), wanted, retain_graph=True)]
    return [*found, *grad(loss, wanted)]


def test_arrays_where_saved_tensors_may_be_changed() -> None:
    """Under `allow_mutation_on_saved_tensors` a view that was overwritten later keeps its gradient."""

    def run(loops: Any) -> Any:
        x = randn(2)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            array = loops.array().append(x).append(x * 2)
            before = (array[:2] ** 2).sum()
            array.write(0, x * 5)
            return grad(before + (array[:2] ** 3).sum(), x)

    both(None, run)


@with_and_without_checkpoints
def test_dropout_in_place_changes_and_overwrites_in_backward_passes_of_every_order(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        torch.manual_seed(3)
        init, xs, w = randn(2), randn(5, 2), randn(2, seed=1)

        def body(carry: Any, x: Tensor) -> Any:
            array, h, i = carry
            h = rotate(h) * w + x
            array = array.append(h)
            own = array[: i + 1].clone()
            own[-1] *= 2
            own.mul_(x)
            if i >= 2:
                array = array.write(i - 2, own.sum(0).sin())
            return (array, h + F.dropout(own, 0.5).sum(0), i + 1), own.prod(0)

        (array, h, _), ys = loops.scan(body, (loops.array(), init, 0), xs)
        return orders(total([array.stack().sin(), h.cos(), ys]), (init, xs, w))

    both(checkpoints, run, 1e-7)


def alone(cond: Any, body: Any, carry: Any, context: Any) -> Any:
    while bool(cond(carry, context)):
        carry = body(carry, context)
    return carry


@with_and_without_checkpoints
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_rows_with_arrays_and_context_in_backward_passes_of_every_order(compact: bool, checkpoints: Any) -> None:
    init, given, w = randn(6, 2), randn(6, 2, seed=1), randn(2, seed=2)

    def body(carry: Any, context: Any) -> Any:
        array, h, n = carry
        h = rotate(h) * w + context[0]
        h[:, 0] *= 1.1
        array = array.append(h * 2)
        t = int(n.max())
        if t >= 1:
            array = array.write(0, array[0].sin() + h)
        return array, h + array[: t + 1].sum(0).cos(), n + 1

    def run(rows: list[int], loop: Callable[..., Any], array: Any) -> tuple[Tensor, Tensor]:
        start = array, init[rows], torch.zeros(len(rows), dtype=torch.int64)
        array, h, _ = loop(lambda c, context: c[2] < context[1], body, start, context=(given[rows], LIMITS[rows]))
        slots = array.stack() if len(array) else h.new_zeros(0, len(rows), 2)
        return torch.cat([slots, slots.new_zeros(5 - len(slots), len(rows), 2)]), h

    loop = functools.partial(tl.while_loop, compact=compact, checkpoints=checkpoints)
    ours = run(list(range(6)), loop, tl.TensorArray())
    true = [torch.cat(parts, -2) for parts in zip(*(run([b], alone, Slots()) for b in range(6)), strict=True)]
    found, expected = (orders(total([slots.sin(), h.square()]), (init, given, w)) for slots, h in (ours, true))
    torch.testing.assert_close([*ours, *found], [*true, *expected], rtol=1e-7, atol=1e-7)


@with_and_without_checkpoints
def test_an_inner_loop_that_writes_in_backward_passes_of_every_order(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        init, w, v = randn(2), randn(2, seed=1), randn(2, seed=2)

        def outer(carry: Any, x: Tensor) -> Any:
            def inner(i: int, carry: Any) -> Any:
                array, g = carry
                g = rotate(g) * w + array[0] * v
                return array.append(g).write(0, g.sin()), g

            array, h = loops.fori_loop(0, 2, inner, (carry[0], carry[1] + x))
            return (array, h), array.stack().sum(0)

        (array, h), ys = loops.scan(outer, (loops.array().append(init), init), randn(3, 2, seed=5, grad=False))
        return orders(total([ys.sin(), h, array.stack().cos()]), (init, w, v))

    both(checkpoints, run, 1e-7)


@with_and_without_checkpoints
def test_the_array_that_a_loop_gives_goes_on_before_backward(checkpoints: Any) -> None:
    """Appended to, overwritten and copied; what was read before stays."""

    def run(loops: Any) -> Any:
        init, w = randn(2), randn(2, seed=1)
        array, h = loops.fori_loop(
            0, 4, lambda i, c: (c[0].append(c[1]).write(0, c[1] * 2), rotate(c[1]) * w), (loops.array(), init)
        )
        before, twin = array.stack(), copy.copy(array)
        array.append(h * 3).write(1, h.sin())
        twin.append(h.cos()).write(2, array[1])
        outs = [before, array.stack(), twin.stack(), array[0] * twin[0]]
        first = grad(outs, (init, w), cotangents(outs), retain_graph=True)
        return [*outs, *first, *grad(outs[1:3], (init, w), cotangents(outs[1:3]))]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_copies_and_pickles_of_arrays_that_loops_give_and_bodies_read(checkpoints: Any) -> None:
    def run(loops: Any) -> Any:
        init, w = randn(2), randn(2, seed=1)

        def body(i: int, carry: Any) -> Any:
            array, x = carry
            if isinstance(array, tl.TensorArray):
                old = (copy.deepcopy if i % 2 else lambda a: pickle.loads(pickle.dumps(a)))(array.detach())
            else:
                old = Slots(x.detach().clone() for x in array)
            array = array.append(rotate(x) * w).write(0, x * 2)
            return array, x + array[0] * old.stack().sum(0)

        array, x = loops.fori_loop(0, 4, body, (loops.array().append(init), init))
        return [x, array.stack(), *grad(total([array.stack().sin(), x]), (init, w))]

    both(checkpoints, run)


@with_and_without_checkpoints
def test_inside_torch_checkpoint_with_random_numbers(checkpoints: Any) -> None:
    def run(loops: Any, again: bool) -> Any:
        torch.manual_seed(0)
        init, w = randn(2), randn(2, seed=1)

        def body(i: int, carry: Any) -> Any:
            array, h = carry
            array = array.append(F.dropout(h, 0.4))
            return array, rotate(h) * w + array.stack().sum(0)

        def function(init: Tensor) -> Any:
            array, h = loops.fori_loop(0, 4, body, (loops.array(), init))
            return array.stack(), h

        outs = checkpoint(function, init, use_reentrant=False) if again else function(init)
        return [*outs, *grad(outs, (init, w), cotangents(outs)), torch.rand(2)]

    torch.testing.assert_close(run(Ours(checkpoints), True), run(Plain(), False))


@with_and_without_checkpoints
def test_autocast_and_hooks_in_a_body_that_appends(checkpoints: Any) -> None:
    """Sums of bfloat16 gradients are ours in float32 and torch's in bfloat16: near, not equal."""
    w = randn(4, 4, dtype=torch.float32)

    def run(loops: Any) -> Any:
        init = randn(4, dtype=torch.float32)

        def body(i: int, carry: Any) -> Any:
            array, x = carry
            y = x @ w
            assert y.dtype == torch.bfloat16
            y.register_hook(lambda g: g * 0.5)
            return array.append(y), rotate(x) + y.float() + array.stack().float().sum(0)

        with torch.autocast(HERE.type, dtype=torch.bfloat16):
            array, x = loops.fori_loop(0, 4, body, (loops.array(), init))
        loss = total([array.stack().float().sin(), x])
        return [loss, *grad(loss, (init, w))]

    both(checkpoints, run, 3e-2)


@with_and_without_checkpoints
def test_rows_written_at_batched_positions_under_vmap_and_grad(checkpoints: Any) -> None:
    xs, w = randn(3, 4, 2, grad=False), randn(2, seed=1, grad=False)
    pos = torch.tensor([[0, 1, 0, 2], [2, 2, 0, 1], [1, 0, 1, 0]])

    def loss(x: Tensor, p: Tensor, w: Tensor) -> Tensor:
        def body(i: int, carry: Any) -> Any:
            array, h = carry
            h = rotate(h) * w
            array = array.write_rows((p + i) % 3, h * (i + 1), p != i)
            return array, h + array[:2].sum(0).sin()

        array = tl.TensorArray(capacity=3).extend(torch.zeros(3, 4, 2, dtype=D))
        array, h = tl.fori_loop(0, 3, body, (array, x), checkpoints=checkpoints)
        return total([array.stack().sin(), h])

    def by_hand(x: Tensor, p: list[int], w: Tensor) -> Tensor:
        slots = [[torch.zeros(2, dtype=D)] * 4 for _ in range(3)]
        for i in range(3):
            x = rotate(x) * w
            for row, at in enumerate(p):
                if at != i:
                    slots[(at + i) % 3][row] = x[row] * (i + 1)
            x = x + (torch.stack(slots[0]) + torch.stack(slots[1])).sin()
        return total([*(torch.stack(slot).sin() for slot in slots), x])

    found = torch.vmap(torch.func.grad(loss, (0, 2)), (0, 0, None))(xs, pos, w)
    for b in range(3):
        given = xs[b].clone().requires_grad_(), w.clone().requires_grad_()
        true = grad(by_hand(given[0], pos[b].tolist(), given[1]), given)
        torch.testing.assert_close((found[0][b], found[1][b]), true)


@with_and_without_checkpoints
def test_budgets_and_folders_with_rows_and_overwritten_arrays(checkpoints: Any, tmp_path: Any) -> None:
    init, w = randn(6, 2), randn(2, seed=1)

    def run(kept: Any, compact: bool) -> list[Tensor]:
        def body(carry: Any) -> Any:
            array, x, limit, n = carry
            x = rotate(x) * w + array[0].sin()
            return array.append(x).write(0, x.cos()), x, limit, n + 1

        start = tl.TensorArray().append(init), init, LIMITS, torch.zeros(6, dtype=torch.int64)
        array, x, *_ = tl.while_loop(lambda c: c[3] < c[2], body, start, compact=compact, checkpoints=kept)
        return [x, array.stack(), *grad(total([array.stack().sin(), x.square()]), (init, w))]

    true, k = run(None, False), checkpoints or 1
    for kept in (
        tl.Checkpoints(budget=20_000 * k),
        tl.Checkpoints(k=k, offload=tmp_path),
        tl.Checkpoints(k=k, offload="cpu"),
    ):
        for compact in (False, True):
            torch.testing.assert_close(run(kept, compact), true)
    assert not list(tmp_path.rglob("*.pt"))


@with_and_without_checkpoints
def test_complex_carries_that_are_conjugate_views(checkpoints: Any, tmp_path: Any) -> None:
    """A conjugate is a flag of a view; it survives snapshots in files."""
    kept = checkpoints and tl.Checkpoints(k=checkpoints, offload=tmp_path)

    def run(loops: Any) -> Any:
        x, w = randn(3), randn(3, seed=1)
        z = loops.fori_loop(0, 5, lambda i, c: (c * torch.exp(1j * w)).conj(), torch.complex(x, x.sin()).conj())
        assert z.is_conj()
        return [z.resolve_conj(), *grad(total([z.real, z.imag.cos()]), (x, w))]

    both(kept, run)
