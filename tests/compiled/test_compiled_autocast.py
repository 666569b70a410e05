"""Floats of two bytes in compiled loops: under autocast, and in carries, xs and captures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import Plan, plans
from tests.support.devices import HERE

B, F, H, T = 3, 5, 8, 6
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=["bf16", "half"])


def rotation() -> nn.Parameter:
    return nn.Parameter(torch.linalg.qr(torch.randn(H, H))[0].contiguous())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.linear, self.norm = nn.LSTMCell(F, H), nn.Linear(F, H), nn.LayerNorm(H)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.turn = rotation()

    def lstm(self, state: Any, x: Tensor) -> Any:
        h, c = self.cell(x, state)
        return (h, c), h

    def mixed(self, h: Tensor, x: Tensor) -> Any:
        y = self.norm(self.linear(x) + h @ self.turn)
        return y.float(), torch.softmax(y @ self.turn, -1).sum(-1)

    def low(self, h: Tensor, x: Tensor) -> Any:
        return h @ self.turn + self.linear(x), h.cumsum(-1)

    def convolved(self, h: Tensor, x: Tensor) -> Any:
        return torch.sin(h + self.conv(h[:, None]).squeeze(1)).float(), self.linear(x)


def outcome(net: Net, body: Callable[..., Any], init: Any, dtype: torch.dtype, compile: Any) -> list[Any]:
    torch.manual_seed(1)
    init = tree_map(lambda x: (x + torch.randn(x.shape).to(x.dtype)).requires_grad_(), init)
    xs = torch.randn(T, B, F, requires_grad=True)
    with torch.autocast(HERE.type, dtype):
        outputs = tree_leaves(tl.scan(body, init, xs, compile=compile))
        terms = [(y.float() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape)).sum() for y in outputs]
    leaves = [xs, *tree_leaves(init), *net.parameters()]
    return [*outputs, *torch.autograd.grad(torch.stack(terms).sum(), leaves, allow_unused=True)]


def check_near(found: list[Any], expected: list[Any], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype is y.dtype
            assert (x - y).abs().max() <= tolerance * y.abs().max()


@DTYPES
@pytest.mark.parametrize("name", ["lstm", "mixed", "low", "convolved"])
def test_loops_under_autocast(name: str, dtype: torch.dtype):
    net, zeros = Net(), torch.zeros(B, H)
    init = {"lstm": (zeros, zeros), "low": zeros.to(dtype)}.get(name, zeros)
    expected = outcome(net, getattr(net, name), init, dtype, False)
    found = outcome(net, getattr(net, name), init, dtype, "strict")
    check_near(found, expected, 8 * ROUNDING[dtype])


@DTYPES
def test_every_operation_rounds_as_torch_does(dtype: torch.dtype):
    def body(h: Tensor, x: Tensor) -> Any:
        y = h * 1.1 - x * h
        return torch.where(y > 3, y - 4, y), (y.sum(-1), y.amax(-1), h.square() / 3)

    torch.manual_seed(0)
    h, xs = torch.randn(B, H).to(dtype), torch.randn(T, B, H).to(dtype)
    found, expected = (tree_leaves(tl.scan(body, h, xs, compile=c)) for c in ("strict", False))
    for k, (x, y) in enumerate(zip(found, expected, strict=True)):
        tolerance = 4 * ROUNDING[dtype] if k == 1 else 0  # a sum is taken in another order
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def test_a_kept_cast_is_no_capture_and_autocast_is_part_of_the_key():
    net, zeros, xs = Net(), torch.zeros(B, H), torch.randn(T, B, F)
    plans.clear()
    with torch.autocast(HERE.type, torch.bfloat16):
        net.cell(xs[0])
        tl.scan(net.lstm, (zeros, zeros), xs, compile="strict")
        out, _ = tl.scan(net.lstm, (zeros, zeros), xs, compile="strict")
    (grad,) = torch.autograd.grad(out[0].float().sum(), net.cell.weight_hh)
    assert grad.dtype is torch.float32
    assert grad.abs().max() > 0
    tl.scan(net.lstm, (zeros, zeros), xs, compile="strict")
    assert len([p for p in plans._plans.values() if isinstance(p, Plan)]) == 2


def test_gradients_asked_for_under_autocast_are_not_cast_again():
    net, zeros = Net(), torch.zeros(B, H, requires_grad=True)
    xs = torch.randn(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        with torch.autocast(HERE.type, enabled=False):
            return h @ net.turn + net.linear(x), h

    def grads(create: bool) -> Any:
        last, ys = tl.scan(body, zeros, xs, compile="strict")
        with torch.autocast(HERE.type, torch.bfloat16):
            return torch.autograd.grad(last.sum() + ys.square().sum(), [zeros, net.turn], create_graph=create)

    last, ys = tl.scan(body, zeros, xs)
    expected = torch.autograd.grad(last.sum() + ys.square().sum(), [zeros, net.turn])
    for create in (False, True):
        for x, y in zip(grads(create), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_checkpoints_under_autocast():
    net, zeros, xs = Net(), torch.zeros(B, H), torch.randn(T, B, F)

    def grads(checkpoints: int | None) -> Any:
        with torch.autocast(HERE.type, torch.bfloat16):
            last, _ = tl.scan(net.lstm, (zeros, zeros), xs, compile="strict", checkpoints=checkpoints)
        return torch.autograd.grad(last[0].float().sum(), [*net.cell.parameters()])

    check_near(list(grads(2)), list(grads(None)), 4 * ROUNDING[torch.bfloat16])
