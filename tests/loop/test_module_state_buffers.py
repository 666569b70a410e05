"""Buffers that steps write into without that a version counts it, as batch norm does: graphs from before stay whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import randn

pytestmark = pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")
STEPS = 5
Loop = Callable[[nn.Module, Tensor], Tensor]
LOOPS: dict[str, Loop] = {
    "plain": lambda module, xs: tl.carrying(module).map(module, xs),
    "checkpoints": lambda module, xs: tl.carrying(module).map(module, xs, checkpoints=2),
    "compiled": lambda module, xs: tl.carrying(module).map(module, xs, compile=True),
    "scan": lambda module, xs: tl.carrying(module).scan(lambda c, x: (c + 1, module(x)), 0.0, xs)[1],
}
in_every_loop = pytest.mark.parametrize("how", LOOPS)


def in_python(module: nn.Module, xs: Tensor) -> Tensor:
    return torch.stack([module(x) for x in xs])


class Normed(nn.Module):
    """Batch norm beside a mask and a counter, which it reads and writes."""

    mask: Tensor
    count: Tensor

    def __init__(self, track: bool, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum, track_running_stats=track, dtype=torch.float64)
        self.register_buffer("mask", torch.tensor([1.0, 0, 1], dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(x) * self.mask + self.count.clone()


def outcome(loop: Loop, make: Callable[[], nn.Module], modes: tuple[bool, bool] = (True, True)) -> list[Any]:
    """Gradients of calls before, in and after a loop, and the buffers, as their holder sees them."""
    module, x0, xs = make(), randn(4, 3), randn(STEPS, 4, 3, seed=1)
    held = dict(module.named_buffers())
    before = module.train(modes[0])(x0)
    inside = loop(module.train(modes[1]), xs)
    after = module(x0)
    loss = before.square().sum() + inside.sin().sum() + (after * before).cos().sum()
    grads = grad(loss, [x0, xs, *module.parameters()])
    now = dict(module.named_buffers())
    assert all(now[name] is x for name, x in held.items())
    return [*grads, *held.values()]


@in_every_loop
@pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning")  # without momentum a number is read
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", ["norm", "normed", "untracked"])
def test_a_norm_that_was_called_before_the_loop(kind: str, momentum: float | None, how: str) -> None:
    make: dict[str, Callable[[], nn.Module]] = {
        "norm": lambda: nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64),
        "normed": lambda: Normed(True, momentum),
        "untracked": lambda: Normed(False, momentum),
    }
    torch.testing.assert_close(outcome(LOOPS[how], make[kind]), outcome(in_python, make[kind]))


@in_every_loop
def test_a_norm_that_was_in_the_other_mode_before_the_loop(how: str) -> None:
    """A call in evaluation needs the statistics in backward: torch counts no write, and a Python loop says nothing."""
    make: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(3, dtype=torch.float64)  # noqa: E731
    for modes in ((False, True), (True, False)):
        torch.testing.assert_close(outcome(LOOPS[how], make, modes), outcome(in_python, make, modes))


class Late(nn.Module):
    """Beside a counter, a buffer that the third step alone sets: `how` in place or anew."""

    count: Tensor
    scale: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3 and self.how == "anew":
            self.scale = self.scale * 2
        elif self.count == 3:
            self.scale.mul_(2)
        return (x * self.scale.clone()).sin()


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_what_a_later_step_sets_anew_leaves_the_old_buffer_alone(checkpoints: Any) -> None:
    def run(loop: Loop) -> list[Tensor]:
        module, w, xs = Late("anew"), randn(3), randn(STEPS, 3, seed=1)
        held = module.scale
        before = (w * held).square()
        loss = before.sum() + loop(module, xs).sum()
        assert module.scale is not held
        return [*grad(loss, [w, xs]), held, module.scale]

    mine = run(lambda module, xs: tl.carrying(module).map(module, xs, checkpoints=checkpoints))
    torch.testing.assert_close(mine, run(in_python))


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_what_a_later_step_writes_counts(checkpoints: Any) -> None:
    """torch's error, as after the Python loop: the old numbers are gone."""
    for loop in (in_python, lambda module, xs: tl.carrying(module).map(module, xs, checkpoints=checkpoints)):
        module, w = Late("in place"), randn(3)
        before = (w * module.scale).square()
        loop(module, randn(STEPS, 3, seed=1))
        assert module.scale.eq(2).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(before.sum(), w)
