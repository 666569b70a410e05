"""Steps that are reversed together: `Checkpoints(residuals=)`, `schedule.Blocks`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop import schedule
from tensorloop.schedule import Binomial, Blocks, Online, Periodic, StoreAll
from tests.support.loop_cases import randn, rotate
from tests.support.schedule_checks import bytes_of_a_step, run

B, F, T = 3, 2, 11
PLANS = {
    "K=1, 3 at once": tl.Checkpoints(k=1, residuals=3),
    "K=2, 4 at once": tl.Checkpoints(k=2, residuals=4),
    "K=T, all at once": tl.Checkpoints(k=T, residuals=T),
    "on the CPU": tl.Checkpoints(k=3, residuals=4, offload="cpu"),
    "checked": tl.Checkpoints(k=2, residuals=4, check=True),
    "a schedule": Blocks(Periodic(2), 3),
    "unknown length": Blocks(Online(2), 2),
}


@pytest.mark.parametrize("of", [Binomial(1), Binomial(3), Online(3), Periodic(2), StoreAll()], ids=str)
@pytest.mark.parametrize("known", [True, False])
def test_blocks_follow_the_rules(of: schedule.Schedule, known: bool) -> None:
    if not known and isinstance(of, Binomial):
        return
    for steps in (1, 2, 5):
        for length in (1, 2, 5, 17, 30):
            run(Blocks(of, steps), length, known)


def test_a_block_costs_no_further_steps() -> None:
    assert schedule.advances(Blocks(Binomial(16), 16), 256) == 256
    assert schedule.advances(Binomial(16), 256) == 600


def test_what_blocks_refuse() -> None:
    with pytest.raises(TypeError, match="Blocks: of must be a Schedule, got int 3"):
        Blocks(3, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Blocks: steps must be at least 1, got 0"):
        Blocks(Binomial(2), 0)
    with pytest.raises(ValueError, match=r"held must be the starts of blocks of 4 steps; got \[0, 3\]"):
        list(Blocks(Binomial(2), 4).reverse(8, [0, 3]))
    with pytest.raises(ValueError, match="Checkpoints: residuals must be at least 1, got 0"):
        tl.Checkpoints(k=2, residuals=0)
    with pytest.raises(TypeError, match="residuals must be an int"):
        tl.Checkpoints(k=2, residuals=1.5)  # pyright: ignore[reportArgumentType]


class Loops:
    """Loops of all kinds: each gives tensors, of which gradients are taken."""

    def __init__(self) -> None:
        self.w, self.init, self.xs = randn(F, F), randn(B, F, seed=1), randn(T, B, F, seed=2)
        self.given = [self.w, self.init, self.xs]

    def scan(self, **options: Any) -> Any:
        return tl.scan(lambda h, x: ((n := rotate(h) + x @ self.w), n.sin()), self.init, self.xs, **options)

    def backwards(self, **options: Any) -> Any:
        return self.scan(reverse=True, **options)

    def until(self, **options: Any) -> Any:
        steps = iter(range(T))
        return self.scan(until=lambda h: next(steps) == T - 3, **options)

    def arrays(self, **options: Any) -> Any:
        def body(i: int, carry: Any) -> Any:
            h, a, b = carry
            h = rotate(h) + self.xs[i] @ self.w
            a.append(h)
            b.write(i % 3, h.cos())
            return h + a[i // 2] * 0.1, a, b

        h, a, b = tl.fori_loop(0, T, body, (self.init, tl.TensorArray(), tl.TensorArray()), **options)
        return h, a.stack(), b.stack()

    def reads(self, **options: Any) -> Any:
        outside = tl.TensorArray.unstack(self.xs)
        return tl.fori_loop(0, T, lambda i, h: rotate(h) + outside[i] @ self.w, self.init, **options)

    def rows(self, **options: Any) -> Any:
        limits = torch.tensor([T, 2, 5])

        def body(carry: Any) -> Any:
            n, h = carry
            return n - 1, rotate(h) + h.sin() @ self.w

        return tl.while_loop(lambda c: c[0] > 0, body, (limits, self.init), **options)[1]

    def compact(self, **options: Any) -> Any:
        return self.rows(compact=True, **options)

    def packed(self, **options: Any) -> Any:
        xs = tl.pack_padded(self.xs.transpose(0, 1), torch.tensor([T, 3, 7]))
        h, ys = tl.scan(lambda h, x: ((n := rotate(h) + x @ self.w), n.cos()), self.init, xs, **options)
        return h, ys.values

    def dropout(self, **options: Any) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            h = rotate(h) + nn.functional.dropout(x @ self.w)
            return h, h

        torch.manual_seed(3)
        return tl.scan(body, self.init, self.xs, **options)

    def statistics(self, **options: Any) -> Any:
        norm = nn.BatchNorm1d(F).double()
        h, ys = tl.scan(lambda h, x: ((n := rotate(h) + norm(x @ self.w)), n), self.init, self.xs, **options)
        return h, ys, norm.running_mean

    def in_place(self, **options: Any) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            h += x @ self.w
            return h, h * 2

        return tl.scan(body, self.init, self.xs, **options)

    def a_y_that_changes_later(self, **options: Any) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            h *= 1.5
            return h, h

        if options["checkpoints"] is None:  # which is refused
            hs = [self.init * 1.5]
            for _ in range(T - 1):
                hs.append(hs[-1] * 1.5)
            return hs[-1], torch.stack(hs)
        return tl.scan(body, self.init, self.xs, **options)

    def inner(self, **options: Any) -> Any:
        def body(i: int, h: Tensor) -> Tensor:
            return tl.fori_loop(0, 2, lambda j, g: rotate(g) + self.xs[i] @ self.w, h, checkpoints=1)

        return tl.fori_loop(0, T, body, self.init, **options)

    def gradients(self, **options: Any) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            z = h.detach().requires_grad_()
            (g,) = torch.autograd.grad((z @ self.w).sin().sum(), z, create_graph=True)
            return rotate(h) + x * g, g

        return tl.scan(body, self.init, self.xs, **options)

    def functions(self, **options: Any) -> Any:
        return tl.scan(lambda h, x: ((n := Twice.apply(rotate(h) / 2) + x @ self.w), n), self.init, self.xs, **options)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2


KINDS = [name for name in vars(Loops) if not name.startswith("_")]


@pytest.mark.filterwarnings("ignore::tensorloop.loop.HeldTensorWarning")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, plan: Any) -> None:
    def found(checkpoints: Any) -> Any:
        loops = Loops()
        out = getattr(loops, kind)(checkpoints=checkpoints)
        out = [out] if isinstance(out, Tensor) else [*out]
        loss = torch.stack([(x.sin() * x).sum() for x in out if x.requires_grad]).sum()
        return out, torch.autograd.grad(loss, loops.given, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(found(plan), found(None))


@pytest.mark.parametrize(("k", "residuals"), [(1, 1), (1, 4), (2, 3), (4, 3), (11, 11)])
def test_how_often_a_body_is_called(k: int, residuals: int) -> None:
    calls: list[int] = []

    def body(i: int, h: Tensor) -> Tensor:
        calls.append(i)
        return rotate(h)

    h = tl.fori_loop(0, T, body, randn(B, F), checkpoints=tl.Checkpoints(k=k, residuals=residuals))
    h.sum().backward()
    assert len(calls) == T + schedule.advances(Blocks(Binomial(k), residuals), T)


def test_a_budget_that_has_room_runs_no_step_more_than_twice() -> None:
    """The carry has 48 bytes here, and a step keeps some hundred."""
    calls: list[int] = []

    def body(i: int, h: Tensor) -> Tensor:
        calls.append(i)
        return rotate(h).sin()

    def loop(plan: Any) -> Tensor:
        return tl.fori_loop(0, 100, body, randn(B, F), checkpoints=plan)

    least = bytes_of_a_step(loop)[0]
    for budget, most in ((10_000, 2 * 100), (least, 2 * 100 + 98 * 99 // 2)):
        calls.clear()
        loop(tl.Checkpoints(budget=budget)).sum().backward()
        assert len(calls) == most
