"""What functions that differentiate a step do in Python: custom Functions, hooks, TorchScript."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl

XS, INIT = torch.linspace(-1, 1, 36).view(12, 3), torch.linspace(0.2, 0.7, 3)
PLANS = [3, 12, tl.Checkpoints(4, residuals=2)]


class State:
    """Python state of the bodies below."""

    k = 1.0
    n = 0
    last: Any = None


class Doubles(torch.autograd.Function):
    """2 x; `does` is called in backward, and gives a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, does: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.does = does
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 2 * ctx.does(), None


def by_function(x: Tensor, does: Any) -> Tensor:
    return Doubles.apply(x, does)  # pyright: ignore[reportReturnType]


def by_hook(x: Tensor, does: Any) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * does())
    return y


def counts() -> float:
    State.k += 1.0
    return 1.0


def reads() -> float:
    return State.last


def of_its_own() -> float:
    random.random()
    State.n += 1
    return 1.0 + State.n / 8


def gradients(body: Any, plan: Any) -> tuple[Tensor, ...]:
    State.k, State.n, State.last = 1.0, 0, None
    xs, init = XS.clone().requires_grad_(), INIT.clone().requires_grad_()
    carry, ys = tl.scan(body, init, xs, checkpoints=plan)
    return torch.autograd.grad(carry.sum() + (ys * ys).sum(), (xs, init))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("way", [by_function, by_hook])
def test_backward_that_changes_what_steps_read_is_refused(way: Any, plan: Any) -> None:
    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = way(torch.tanh(c * State.k + x), counts)
        return c, c

    with pytest.raises(RuntimeError, match=r"attribute State\.k.* was 1\.0 in the forward pass and is 13\.0"):
        gradients(body, plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("way", [by_function, by_hook])
def test_backward_that_reads_what_steps_have_written_is_refused(way: Any, plan: Any) -> None:
    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        State.last = float(c.detach().sum())
        c = way(torch.tanh(c + x), reads)
        return c, c

    with pytest.raises(RuntimeError, match="reads the attribute last to which an earlier step has written"):
        gradients(body, plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("way", [by_function, by_hook])
@pytest.mark.parametrize("writes", [False, True])
def test_backward_has_state_of_its_own(way: Any, plan: Any, writes: bool) -> None:
    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if writes:
            State.last = c.detach()
        c = way(torch.tanh(c + x), of_its_own)
        return c, c

    expected = gradients(body, None)
    assert State.n == 12
    torch.testing.assert_close(gradients(body, plan), expected)
    assert State.n == 12


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("inside", [False, True])
def test_scripted_modules_that_change_a_buffer_are_refused(inside: bool) -> None:
    norm: Any = torch.jit.script(nn.BatchNorm1d(3))
    module = nn.Sequential(nn.Tanh(), norm) if inside else norm
    name = "1.running_mean" if inside else "running_mean"
    xs = torch.randn(6, 4, 3, requires_grad=True)

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = module(c + x)
        return c, c

    with pytest.raises(RuntimeError, match=f"scripted module, which changes its buffer {name}"):
        tl.scan(body, torch.zeros(4, 3), xs, checkpoints=2)
    norm.eval()
    carry, _ = tl.scan(body, torch.zeros(4, 3), xs, checkpoints=2)
    plain, _ = tl.scan(body, torch.zeros(4, 3), xs)
    found, expected = (torch.autograd.grad(x.square().sum(), xs) for x in (carry, plain))
    torch.testing.assert_close(found, expected)
