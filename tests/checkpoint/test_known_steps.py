"""Steps of which nothing is left to see run unwatched: what they cost in calls of Python, and which are watched."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.checkpoint.captures import Captures
from tests.support.loop_cases import randn, rotate

B, F = 3, 4
pytestmark = pytest.mark.eager_only("no step of a compiled loop is run by Python")


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions of Python begin in this thread while it works."""
    found = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def lstm(T: int, checkpoints: Any) -> Tensor:
    torch.manual_seed(0)
    cell, start, xs = nn.LSTMCell(F, F), (torch.zeros(B, F), torch.zeros(B, F)), torch.randn(T, B, F)

    def body(state: Any, x: Tensor) -> Any:
        h, c = cell(x, state)
        return (h, c), h

    return tl.scan(body, start, xs, checkpoints=checkpoints)[1].sum()


def calls_a_step(checkpoints: Any, more: Callable[[int], Any] = lambda _: None) -> tuple[float, float]:
    """Forward and backward, beyond those of the first and last steps."""
    found = []
    for T in (64, 128):
        plan = T if checkpoints == "K=T" else checkpoints
        lstm(T, plan).backward()
        losses = list[Tensor]()
        forward = calls_of(lambda T=T, plan=plan, losses=losses: losses.append(lstm(T, plan)))
        found.append((forward, calls_of(losses[0].backward)))
    (f, b), (g, c) = found
    return (g - f) / 64, (c - b) / 64


@pytest.mark.parametrize(
    ("checkpoints", "forward", "backward"),
    [(None, 35, 0), (16, 28, 139), ("K=T", 67, 80), (tl.Checkpoints(k=16, residuals=16), 31, 32)],
    ids=["plain", "K=16", "K=T", "blocks of 16"],
)
def test_calls_of_python_a_step(checkpoints: Any, forward: float, backward: float) -> None:
    """Bounds that only go down. Watched at every call of torch, a step took 107 and 101 (K=T), 78 and 160 (K=16)."""
    found = calls_a_step(checkpoints)
    assert found[0] <= forward
    assert found[1] <= backward


def watched(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> list[int]:
    """The steps that captures watch, in order."""
    found = list[int]()
    begin = Captures.begin_step

    def noted(self: Captures, step: int, *args: Any) -> Any:
        found.append(step)
        return begin(self, step, *args)

    monkeypatch.setattr(Captures, "begin_step", noted)
    work()
    return found


T = 8
BODIES: dict[str, Any] = {}  # (weights, the tensor that is not to be changed) -> a body


def body(make: Any) -> Any:
    BODIES[make.__name__] = make
    return make


@body
def asks_whether_gradients_are_recorded(w: Tensor, _: Tensor) -> Any:
    return lambda h, x: (rotate(h) * (1.0 if torch.is_grad_enabled() else 2.0) + w * x, h * w)


@body
def asks_for_a_gradient(w: Tensor, _: Tensor) -> Any:
    return lambda h, x: (rotate(h) + (w if (h * w).requires_grad else 2 * w) * x, h * w)


@body
def turns_gradients_off(w: Tensor, _: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        with torch.no_grad():
            scale = h.norm() + 1
        return rotate(h) / scale + w * x, h * w

    return step


@body
def hooks_what_it_makes(w: Tensor, _: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        z = rotate(h) * w
        z.register_hook(lambda g: g * 0.9)
        return z + x, z.sin()

    return step


@body
def changes_a_copy_by_its_memory(w: Tensor, _: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        z = x.clone()
        z.data.mul_(2)
        return rotate(h) * w + z, h * w

    return step


@body
def writes_to_memory_that_nobody_watches(w: Tensor, count: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        count.data.add_(1)
        return rotate(h) * w + x, h * w

    return step


@body
def keeps_statistics(w: Tensor, count: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        count.add_(1)
        return rotate(h) * w + x, h * w

    return step


@body
def normalises(w: Tensor, _: Tensor) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(nn.BatchNorm1d(F, dtype=w.dtype), nn.Dropout(0.2))
    return lambda h, x: (net(rotate(h) * w) + x, h * w)


@body
def normalises_as_before(w: Tensor, _: Tensor) -> Any:
    norm = nn.BatchNorm1d(F, dtype=w.dtype).eval()
    return lambda h, x: (norm(rotate(h) * w) + x, h * w)


@body
def puts_out_what_it_changes(w: Tensor, count: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        count.add_(1)
        return rotate(h) * w + x, count.view(1)

    return step


@body
def takes_gradients(w: Tensor, _: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        z = h.detach().requires_grad_()
        (g,) = torch.autograd.grad((z * w).sin().sum(), z)
        return rotate(h) * w + g + x, h * w

    return step


@body
def draws(w: Tensor, _: Tensor) -> Any:
    return lambda h, x: (nn.functional.dropout(rotate(h) * w) + x, h * w)


@body
def is_known(w: Tensor, _: Tensor) -> Any:
    return lambda h, x: (rotate(h) * w + x, h * w)


def results(make: Any, plan: Any) -> list[Tensor]:
    w, init, xs, count = randn(F), randn(B, F, seed=1), randn(T, B, F, seed=2), torch.zeros(1, dtype=torch.float64)
    torch.manual_seed(0)
    h, ys = tl.scan(make(w, count), init, xs, checkpoints=plan)
    grads = torch.autograd.grad(h.sin().sum() + ys.cos().sum(), [w, init, xs])
    return [h, ys, *grads, torch.rand(1)]


@pytest.mark.parametrize("plan", [1, 3, T, tl.Checkpoints(k=2, residuals=3)], ids=str)
@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES.keys())
def test_results_are_those_of_the_plain_loop(make: Any, plan: Any) -> None:
    for _ in range(2):
        torch.testing.assert_close(results(make, plan), results(make, None))


WATCHED = {
    "turns_gradients_off",
    "takes_gradients",
    "asks_whether_gradients_are_recorded",
    "asks_for_a_gradient",
    "hooks_what_it_makes",
}
WATCHED |= {"changes_a_copy_by_its_memory", "writes_to_memory_that_nobody_watches", "puts_out_what_it_changes"}


@pytest.mark.parametrize("name", BODIES)
def test_which_steps_are_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results(BODIES[name], T)
    found = watched(monkeypatch, lambda: results(BODIES[name], T))
    every = [*range(T), *reversed(range(T))]
    assert found == (every if name in WATCHED else [0, 1, T - 1, 0])


def test_buffers_end_as_those_of_the_plain_loop() -> None:
    """Known steps write to them, in the sweep and in backward, and the trial of a step leaves no trace."""

    def found(plan: Any) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(F, F), nn.BatchNorm1d(F), nn.Dropout(0.2), nn.Tanh()).double()
        h, _ = tl.scan(lambda h, x: (h + net(h + x), None), randn(B, F), randn(T, B, F, seed=1), checkpoints=plan)
        forward = [x.clone() for x in net.buffers()]
        grads = torch.autograd.grad(h.sin().sum(), [*net.parameters()])
        return [h, *grads, *forward, *net.buffers(), torch.rand(1)]

    blocks, large, small = (
        tl.Checkpoints(k=2, residuals=3),
        tl.Checkpoints(budget="1 MB"),
        tl.Checkpoints(budget=20_000),
    )
    for plan in (1, 3, T, blocks, large, small):
        for _ in range(2):
            torch.testing.assert_close(found(plan), found(None))


@pytest.mark.parametrize("k", [1, 3, T])
@pytest.mark.parametrize("carried", [False, True])
def test_steps_whose_gradient_reads_what_a_later_step_changes(k: int, carried: bool) -> None:
    """Each begins with the buffer as it was then. A plain loop is refused by torch; so the buffer is carried there."""
    w, init, xs = randn(F), randn(B, F, seed=1), randn(T, B, F, seed=2)

    def step(h: Tensor, mean: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(rotate(h) * w * mean) + (x * mean if carried else x)

    def expected(carry: Any, x: Tensor) -> Any:
        h, mean = carry
        mean = 0.9 * mean + 0.1 * x.detach().mean(0)
        return (step(h, mean, x), mean), None

    mean = torch.ones(F, dtype=w.dtype)

    def body(carry: Any, x: Tensor) -> Any:
        mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        h = step(carry[0] if carried else carry, mean, x)
        return ((h, mean.clone()) if carried else h), None

    begin: Any = (init, mean.clone()) if carried else init
    last_carry, _ = tl.scan(body, begin, xs, checkpoints=k)
    h = last_carry[0] if carried else last_carry
    (g, last_mean), _ = tl.scan(expected, (init, torch.ones_like(mean)), xs)
    found = torch.autograd.grad(h.sum(), [w, init, xs])
    torch.testing.assert_close([h, mean, *found], [g, last_mean, *torch.autograd.grad(g.sum(), [w, init, xs])])


def test_a_body_is_called_for_two_steps_more_and_writes_nothing_then() -> None:
    """What writes is watched, and called as often as the schedule says."""
    lines = list[int]()

    def step(h: Tensor, x: Tensor) -> Any:
        lines.append(1)
        return rotate(h) + x, None

    h, _ = tl.scan(step, randn(B, F), randn(T, B, F), checkpoints=T)
    assert len(lines) == T
    h.sum().backward()
    assert len(lines) == 2 * T


def test_what_is_printed_is_printed_once_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    def step(h: Tensor, x: Tensor) -> Any:
        print("a step")
        return rotate(h) + x, None

    for _ in range(2):
        tl.scan(step, randn(B, F), randn(T, B, F), checkpoints=2)
        assert capsys.readouterr().out == "a step\n" * T


def test_a_result_may_be_changed_in_place_where_the_body_hands_it_through() -> None:
    """Snapshots hold the states as they are."""
    w, init, kept, xs = randn(F), randn(B, F, seed=1), torch.ones(B, F, dtype=torch.float64), randn(T, B, F, seed=2)

    def step(carry: Any, x: Tensor) -> Any:
        h, a, _ = carry
        return (rotate(h) * w + a, a, x), h

    def found(checkpoints: Any) -> Any:
        (h, a, last), _ = tl.scan(step, (init, kept, xs[0].detach()), xs.detach(), checkpoints=checkpoints)
        a.add_(1)
        last.add_(1)
        return torch.autograd.grad(h.sum(), [w, init]), a, last

    for k in (1, 3, T):
        torch.testing.assert_close(found(k), found(None))
    assert (kept == 1).all()


def test_another_tensor_in_the_middle_of_backward_is_refused() -> None:
    """What a hook exchanges is seen at the last step that runs again."""
    w = {"w": randn(F)}
    given, other = w["w"], randn(F, seed=5)

    class Module(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return rotate(h) * w["w"]

    module = Module()
    seen = list[int]()

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(1)
            if len(seen) == 3:
                w["w"] = other
            return grad

    h, _ = tl.scan(lambda h, x: (Exchange.apply(module(h)) + x, None), randn(B, F), randn(T, B, F), checkpoints=T)
    with pytest.raises(RuntimeError, match="in its replay, which the forward pass did not use"):
        torch.autograd.grad(h.sum(), given)


def test_another_path_in_the_middle_of_backward_is_refused() -> None:
    """The nodes of a step that nobody watches are counted."""
    w, more, seen = randn(F), [False], list[int]()

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(1)
            more[0] = len(seen) == 3
            return grad

    def step(h: Tensor, x: Tensor) -> Any:
        h = Exchange.apply(rotate(h) * w) + x
        return h.sin() if more[0] else h, None

    h, _ = tl.scan(step, randn(B, F), randn(T, B, F), checkpoints=T)
    with pytest.raises(RuntimeError, match="did not repeat itself"):
        h.sum().backward()
