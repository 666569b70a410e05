"""What functions that differentiate a step do in Python: custom Functions, hooks, TorchScript."""

import random
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import tensorloop as tl

XS, INIT = torch.linspace(-1, 1, 36).view(12, 3), torch.linspace(0.2, 0.7, 3)
PLANS = [3, 12, tl.Checkpoints(4, residuals=2)]


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def counted(x: Tensor, counter: Tensor) -> Tensor:  # pyright: ignore[reportRedeclaration]
        counter.add_(1.0)
        return x * counter.clone()


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


@pytest.mark.parametrize("way", [by_function, by_hook])
def test_what_steps_append_backward_may_not_take(way: Any) -> None:
    queue = list[float]()

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        queue.append(float(x.detach().sum()))
        c = way(torch.tanh(c + x), queue.pop)
        return c, c

    with pytest.raises(RuntimeError, match="reads a list to which an earlier step has written"):
        gradients(body, 3)


MEASURED = [tl.Checkpoints(budget=10**6), tl.Checkpoints(budget=20_000), "auto"]


def drawing() -> float:
    return float(torch.rand(()))


def test_a_budget_runs_no_backward_of_the_users_twice() -> None:
    """Random numbers, tensors and `.grad` are what they are without checkpoints; the forward pass, too."""
    seen, w = torch.zeros(()), torch.ones(3, requires_grad=True)

    def does() -> float:
        seen.add_(1)
        with torch.enable_grad():
            (w * 2).sum().backward()
        return drawing()

    def outcome(plan: Any, way: Any) -> list[Any]:
        torch.manual_seed(0)
        seen.zero_()
        w.grad = None
        h = tl.fori_loop(
            0,
            6,
            lambda i, h: torch.dropout(torch.sin(way(h, does)), 0.3, True),
            INIT.requires_grad_(),
            checkpoints=plan,
        )
        before = seen.item(), w.grad
        (grad,) = torch.autograd.grad(h.sum(), INIT)
        assert w.grad is not None
        return [h.tolist(), before, grad.tolist(), seen.item(), w.grad.tolist()]

    for way in by_function, by_hook:
        expected = outcome(None, way)
        assert expected[1] == (0, None)
        for plan in MEASURED:
            assert outcome(plan, way) == expected


@pytest.mark.parametrize("plan", MEASURED, ids=str)
def test_a_backward_that_never_runs_is_not_run_for_a_budget(plan: Any) -> None:
    def fails() -> float:
        raise NotImplementedError("a metric")

    def body(c: Any, x: Tensor) -> Any:
        h = torch.tanh(c[0] + x)
        return (h, by_function(h, fails)), None

    xs = XS.clone().requires_grad_()
    (h, _), _ = tl.scan(body, (INIT, INIT), xs, checkpoints=plan)
    (plain, _), _ = tl.scan(body, (INIT, INIT), xs)
    torch.testing.assert_close(torch.autograd.grad(h.sum(), xs), torch.autograd.grad(plain.sum(), xs))


@pytest.mark.parametrize("plan", MEASURED, ids=str)
def test_what_a_checkpoint_of_torchs_saves_is_not_unpacked_for_a_budget(plan: Any) -> None:
    calls = list[int]()

    def inner(h: Tensor) -> Tensor:
        calls.append(1)
        return torch.sin(torch.cos(h))

    w = INIT.clone().requires_grad_()
    h = tl.fori_loop(
        0, 8, lambda i, h: torch.utils.checkpoint.checkpoint(inner, h, use_reentrant=False), w, checkpoints=plan
    )
    assert len(calls) <= 10
    h.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("plan", MEASURED, ids=str)
def test_scripts_and_sparse_weights_under_a_budget(plan: Any) -> None:
    scripted: Any = torch.jit.script(nn.Linear(3, 3))
    matrix = torch.eye(3).to_sparse().requires_grad_()

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return c + 0.3 * torch.sin(matrix @ scripted(c)[:, None])[:, 0] + x, None

    found, expected = (tl.scan(body, INIT, XS, checkpoints=how)[0].sum() for how in (plan, None))
    wanted = [*scripted.parameters(), matrix]
    for x, y in zip(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted), strict=True):
        torch.testing.assert_close(x.to_dense(), y.to_dense())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_script_that_changes_an_outer_tensor_is_refused() -> None:
    counter = torch.zeros(3)

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return c + torch.sin(counted(c, counter)) * x, None

    with pytest.raises(RuntimeError, match=r"calls TorchScript, which changes a tensor of shape \(3,\)"):
        tl.scan(body, INIT.clone().requires_grad_(), XS, checkpoints=3)


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

    with pytest.raises(RuntimeError, match=f"calls TorchScript, which changes its buffer {name}"):
        tl.scan(body, torch.zeros(4, 3), xs, checkpoints=2)
    norm.eval()
    carry, _ = tl.scan(body, torch.zeros(4, 3), xs, checkpoints=2)
    plain, _ = tl.scan(body, torch.zeros(4, 3), xs)
    found, expected = (torch.autograd.grad(x.square().sum(), xs) for x in (carry, plain))
    torch.testing.assert_close(found, expected)
