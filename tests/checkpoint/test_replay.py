"""Checkpointed loops: which steps are run again and in which order, how often, and what may be done with the result."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import schedule
from tensorloop.loop.checkpoint.captures import Captures, Met
from tensorloop.schedule import Advance, Backward, Drop, Restore, Schedule, Snapshot

D = torch.float64


class Rotation:
    """A body that turns its carry, and keeps a list of the steps it was called for."""

    def __init__(self) -> None:
        angle = torch.tensor(0.7, dtype=D)
        turn = [[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]]
        self.w = torch.tensor(turn, dtype=D).requires_grad_()
        self.x = torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=D).requires_grad_()
        self.steps: list[int] = []

    def __call__(self, i: int, x: Tensor) -> Tensor:
        self.steps.append(i)
        return x @ self.w + 0.1 * x.sin()

    def run(self, n: int, checkpoints: Any = None) -> Tensor:
        return tl.fori_loop(0, n, self, self.x, checkpoints=checkpoints)

    def while_run(self, n: int, checkpoints: Any = None) -> Tensor:
        limit = torch.tensor(n)
        return tl.while_loop(
            lambda c: c[0] < limit, lambda c: (c[0] + 1, self(c[0], c[1])), (0, self.x), checkpoints=checkpoints
        )[1]

    def grads(self, out: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out**2 * torch.tensor([1.0, -2.0], dtype=D)).sum(), [self.w, self.x], **options)


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("known", [True, False])
def test_gradients_are_those_of_the_plain_loop_for_every_number_of_snapshots(n: int, known: bool):
    body = Rotation()
    expected = body.grads(body.run(n))
    for k in range(1, n + 3):
        out = body.run(n, k) if known else body.while_run(n, k)
        assert_equal(body.grads(out), expected)


def test_the_order_of_the_steps_of_a_known_length():
    body = Rotation()
    out = body.run(5, 2)
    assert body.steps == [0, 1, 2, 3, 4]
    body.steps.clear()
    body.grads(out)
    replay = []
    for action in schedule.Binomial(2).reverse(5, held_after(schedule.Binomial(2), 5)):
        if isinstance(action, Advance):
            replay += range(action.start, action.stop)
        elif isinstance(action, Backward):
            replay.append(action.step)
    assert body.steps == replay
    assert body.steps == [3, 4, 3, 0, 1, 2, 1, 0]


def test_the_order_of_the_steps_with_one_snapshot():
    body = Rotation()
    out = body.run(4, 1)
    body.steps.clear()
    body.grads(out)
    assert body.steps == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]


def held_after(plan: Schedule, n: int) -> list[int]:
    held = set[int]()
    for action in plan.sweep(n):
        if isinstance(action, Snapshot):
            held.add(action.step)
        elif isinstance(action, Drop):
            held.remove(action.step)
    return sorted(held)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (9, 3), (30, 4), (100, 8), (100, 32)])
@pytest.mark.parametrize("known", [True, False])
def test_calls_are_as_many_as_the_schedule_counts(n: int, k: int, known: bool):
    body = Rotation()
    out = body.run(n, k) if known else body.while_run(n, k)
    assert len(body.steps) == n
    body.grads(out)
    plan = schedule.of(k, n if known else None)
    assert len(body.steps) == n + schedule.advances(plan, n, known=known)


def test_a_hundred_steps_and_eight_snapshots_take_248_more():
    body = Rotation()
    body.grads(body.run(100, 8))
    assert len(body.steps) == 100 + 248


def test_a_schedule_of_the_users_own():
    class Middle(Schedule):
        """Keeps the start and the middle, and replays from the nearer one."""

        k = 2

        def sweep(self, length):
            assert length is not None
            yield Snapshot(0)
            yield Advance(0, length // 2)
            yield Snapshot(length // 2)
            yield Advance(length // 2, length)

        def reverse(self, length, held):
            for step in reversed(range(length)):
                start = step // (length // 2) * (length // 2)
                yield Restore(start)
                if start < step:
                    yield Advance(start, step)
                yield Backward(step)
            for step in held:
                yield Drop(step)

    body = Rotation()
    expected = body.grads(body.run(6))
    body.steps.clear()
    assert_equal(body.grads(body.run(6, Middle())), expected)
    assert body.steps == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 3, 0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    "plan", [schedule.Periodic(3), schedule.StoreAll(), schedule.Online(3)], ids=lambda p: type(p).__name__
)
def test_every_schedule_gives_the_same_gradients(plan: Schedule):
    body = Rotation()
    expected = body.grads(body.run(10))
    assert_equal(body.grads(body.run(10, plan)), expected)
    assert_equal(body.grads(body.while_run(10, plan)), expected)


def test_without_gradient_it_is_a_plain_loop():
    body = Rotation()
    with torch.no_grad():
        assert not body.run(5, 2).requires_grad
    assert body.steps == [0, 1, 2, 3, 4]


def test_backward_of_a_loss_that_does_not_use_the_loop_runs_nothing():
    body = Rotation()
    out = body.run(5, 2)
    body.steps.clear()
    (out.detach().sum() + body.w.sum() + 0 * body.x.sum()).backward()
    assert body.steps == []


def test_backward_again_with_retain_graph():
    body = Rotation()
    out = body.run(8, 2)
    first = body.grads(out, retain_graph=True)
    calls = len(body.steps)
    assert_equal(body.grads(out, retain_graph=True), first)
    assert len(body.steps) > calls
    assert_equal(body.grads(out), first)


def test_backward_again_without_retain_graph_is_refused():
    body = Rotation()
    out = body.run(8, 2)
    body.grads(out)
    with pytest.raises(RuntimeError, match="a second time, but what it kept was freed"):
        body.grads(out)


def test_disjoint_gradients_of_two_outputs():
    body = Rotation()

    def both(checkpoints: int | None) -> tuple[Tensor, Tensor]:
        return tl.scan(
            lambda h, x: (body(0, h) + x, h.cos()), body.x, torch.ones(6, 1, dtype=D), checkpoints=checkpoints
        )

    grads = []
    for k in (None, 2):
        h, ys = both(k)
        grads.append([*torch.autograd.grad(h.sum(), [body.w, body.x], retain_graph=True)])
        grads[-1] += torch.autograd.grad((ys**3).sum(), [body.w, body.x])
    assert_equal(tuple(grads[0]), tuple(grads[1]))


@pytest.mark.parametrize("known", [True, False])
def test_second_derivatives(known: bool):
    body = Rotation()

    def run(w: Tensor, x: Tensor) -> Tensor:
        body.w, body.x = w, x
        return body.run(4, 2) if known else body.while_run(4, 2)

    inputs = (body.w, body.x)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_third_derivatives():
    body = Rotation()
    found = []
    for k in (None, 2):
        (g,) = torch.autograd.grad((body.run(3, k) ** 2).sum(), [body.w], create_graph=True)
        (h,) = torch.autograd.grad((g**2).sum(), [body.w], create_graph=True)
        found.append(torch.autograd.grad((h**2).sum(), [body.w, body.x]))
    assert_equal(found[1], found[0])
    assert not any(x.requires_grad for x in found[1])  # nobody asked for their graph


def test_a_capture_that_leads_to_another_counts_once():
    body = Rotation()
    found = []
    for k in (None, 2):
        v = (body.w * 2).sin()
        out = tl.fori_loop(
            0, 5, lambda i, x, v=v: x @ body.w + x @ torch.stack([v, v]).sum(0).cos(), body.x, checkpoints=k
        )
        found.append(body.grads(out, create_graph=True))
        found[-1] += torch.autograd.grad(torch.stack([(g**2).sum() for g in found[-1]]).sum(), [body.w, body.x])
    assert_equal(found[1], found[0])


def test_a_tensor_with_the_id_of_a_closed_over_one_that_is_gone_is_another():
    captures, x = Captures("fori_loop", 0), torch.zeros(2)
    captures.met[id(x)] = Met(lambda: None, 0)
    with captures:
        x.add_(1)
        x[:1].mul_(2)
    assert not captures.writes.changed


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_an_error_in_a_third_derivative_names_the_loop() -> None:
    x, factor = torch.ones(2, requires_grad=True), 0.5
    out = tl.fori_loop(0, 3, lambda i, c: (c * factor).sin(), x, checkpoints=1)
    for _ in range(2):
        (out,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
    factor = 2.0
    with pytest.raises(RuntimeError, match=r"^fori_loop: the variable factor, which the body uses, was 0\.5"):
        torch.autograd.grad(out.sum(), [x])


class Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        out = x.new_zeros(4)
        out[:2].copy_(x)
        out[2:].copy_(w)
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad[:2], grad[2:]


def test_a_custom_function_fills_what_it_returns_by_its_views():
    w = torch.tensor([0.5, -1.0], dtype=D, requires_grad=True)
    found = []
    for k in (None, 2):
        made = w.sin()
        out = tl.fori_loop(0, 3, lambda i, c, v=made: Placed.apply(c, v)[1:3].sin() + c, w, checkpoints=k)
        found.append(torch.autograd.grad(out.sum(), w))
    assert_equal(found[1], found[0])


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return grad * w, grad * x


# x: the carry; w: a leaf; v, u: made from w, and from v
BODIES = {
    "the later one": lambda x, w, v, u: Product.apply(x, v) + x @ w,
    "the earlier one": lambda x, w, v, u: Product.apply(x, w) + x @ v,
    "both, each alone": lambda x, w, v, u: Product.apply(Product.apply(x, v), w),
    "both at once": lambda x, w, v, u: x @ Product.apply(v, w),
    "both, the earlier one without the carry": lambda x, w, v, u: (
        Product.apply(x, v) + Product.apply(w, w.new_tensor(2.0))
    ),
    "three in a row": lambda x, w, v, u: Product.apply(x, u) + Product.apply(Product.apply(v, w), u).sin(),
    "one twice": lambda x, w, v, u: Product.apply(v, v) * x + x @ w,
    "in an array": lambda x, w, v, u: tl.TensorArray.unstack(v)[0] + x @ w,
    "in arrays": lambda x, w, v, u: x * tl.TensorArray().append(v).append(u).stack().sum(0) + w,
}


@pytest.mark.parametrize("how", BODIES)
def test_entangled_captures_in_custom_functions(how: str):
    """Their gradients count once, and replays touch nothing of the graph that made them."""
    found = []
    for k in (None, 1, 3):
        w = torch.tensor([[1.0, 0.5], [-0.5, 1.0]], dtype=D, requires_grad=True)
        x = torch.tensor([[1.0, -0.3], [0.2, 0.8]], dtype=D, requires_grad=True)
        calls: list[Tensor] = []
        v = Product.apply(w, w.sin())
        u = v.cos()
        v.register_hook(calls.append)
        u.register_hook(calls.append)
        out = tl.fori_loop(0, 4, lambda i, c, w=w, v=v, u=u: BODIES[how](c, w, v, u).sin(), x, checkpoints=k)
        grads = torch.autograd.grad(out.cos().sum(), [w, x, v, u], create_graph=True, allow_unused=True)
        squares = torch.stack([(g**2).sum() for g in grads if g is not None])
        second = torch.autograd.grad(squares.sum(), [w, x], retain_graph=True)
        calls.clear()
        again = torch.autograd.grad(out.cos().sum(), [w, x])
        found.append([*grads, *second, *again, *calls])
    for others in found[1:]:
        assert [g is None for g in others] == [g is None for g in found[0]]
        assert_equal(tuple(g for g in others if g is not None), tuple(g for g in found[0] if g is not None))


def test_nothing_is_kept_under_transforms_but_the_plain_loop():
    body = Rotation()
    expected = body.grads(body.run(5))[1]

    def loss(x: Tensor) -> Tensor:
        body.steps.clear()
        return (tl.fori_loop(0, 5, body, x, checkpoints=2) ** 2 * torch.tensor([1.0, -2.0], dtype=D)).sum()

    torch.testing.assert_close(torch.func.grad(loss)(body.x.detach()), expected)
    assert body.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("checkpoints", "error", "message"),
    [
        (0, ValueError, "checkpoints must be at least 1 .* got 0"),
        (-3, ValueError, "at least 1"),
        (True, TypeError, "must be None, an int, .auto., a Schedule or a Checkpoints, got bool True"),
        (2.0, TypeError, "got float 2.0"),
        ("2", TypeError, "got str '2'"),
    ],
)
def test_a_bad_number_of_checkpoints_is_refused_before_the_body_runs(checkpoints, error, message):
    body = Rotation()
    with pytest.raises(error, match=message):
        body.run(3, checkpoints)
    assert body.steps == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of k and budget"),
        ({"k": 2, "budget": 100}, ValueError, "exactly one of k and budget"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"k": 1.5}, TypeError, "k must be an int"),
        ({"k": 2, "offload": "no_such_folder"}, ValueError, "which is no folder"),
        ({"k": 2, "offload": 3}, TypeError, 'offload must be "cpu" or a folder'),
    ],
)
def test_bad_checkpoints(arguments, error, message):
    with pytest.raises(error, match=message):
        tl.Checkpoints(**arguments)


def test_two_thousand_steps_do_not_nest():
    body = Rotation()
    body.grads(body.run(2000, 30))
    assert max(body.steps) == 1999


@pytest.mark.parametrize("k", [None, 1, 2, 5])
def test_a_copy_made_in_a_step_does_not_see_what_is_written_after(k: int | None):
    body = Rotation()

    def step(i: int, carry: tuple[tl.TensorArray, Tensor]) -> tuple[tl.TensorArray, Tensor]:
        array, x = carry
        array[i % 2] = x  # an overwrite, so that runs are read as copies from here on
        before = copy.copy(array)
        array[1 - i % 2] = 3 * x.cos()
        return array, body(i, x) + (before.stack() * array.stack()).sum(0)

    array, x = tl.fori_loop(0, 5, step, (tl.TensorArray.unstack(torch.stack([body.x, -body.x])), body.x), checkpoints=k)
    rows, expected = [body.x, -body.x], body.x
    for i in range(5):
        rows[i % 2] = expected
        before = list(rows)
        rows[1 - i % 2] = 3 * expected.cos()
        expected = body(i, expected) + sum(a * b for a, b in zip(before, rows, strict=True))
    assert_equal((x, array.stack()), (expected, torch.stack(rows)))
    assert_equal(body.grads(x + array.stack().sum(0)), body.grads(expected + sum(rows)))


def test_a_body_that_writes_to_its_slice_finds_it_as_it_was_whenever_its_step_is_run_again() -> None:
    xs, h0 = torch.arange(20.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64, requires_grad=True)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            x += 1
        return torch.sin(h * x), x

    found = [tl.scan(body, h0, xs.clone(), checkpoints=k) for k in (None, 2, 20)]
    grads = [torch.autograd.grad(h.sum(), h0)[0] for h, _ in found]
    assert torch.equal(found[1][1], xs + 1)
    for (h, ys), g in zip(found, grads, strict=True):
        torch.testing.assert_close((h, ys, g), (*found[0], grads[0]))
