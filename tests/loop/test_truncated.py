"""Truncated backpropagation, as docs/loops.md has it, against the same written by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tests.support.loop_cases import randn, rotate, with_and_without_checkpoints


def step(h: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return rotate(h) + torch.sin(x * weight) * h.cos()


def by_hand(xs: Tensor, weight: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(the last carry, the gradient of the sum of squares of all carries), each stretch differentiated alone."""
    h, total = torch.zeros(4, dtype=torch.float64), torch.zeros_like(weight)
    for start in range(0, len(xs), n):
        h, loss = h.detach(), torch.zeros((), dtype=torch.float64)
        for x in xs[start : start + n]:
            h = step(h, x, weight)
            loss = loss + h.square().sum()
        total += grad(loss, weight)[0]
    return h.detach(), total


@with_and_without_checkpoints
@pytest.mark.parametrize("n", [1, 3, 4, 20])
def test_a_carry_that_is_detached_every_n_steps(n: int, checkpoints: Any) -> None:
    xs, weight = randn(10, 4, grad=False), randn(4)

    def body(h: Tensor, x: Any) -> Any:
        h = step(h.detach() if x["t"] % n == 0 else h, x["x"], weight)
        return h, h

    h, ys = tl.scan(
        body, torch.zeros(4, dtype=torch.float64), {"x": xs, "t": range(10)}, checkpoints=checkpoints, compile=False
    )
    torch.testing.assert_close((h, grad(ys.square().sum(), weight)[0]), by_hand(xs, weight, n))


@with_and_without_checkpoints
@pytest.mark.parametrize("compiled", [False, "strict"])
@pytest.mark.parametrize("n", [1, 3, 4, 20])
def test_a_loop_for_each_stretch(n: int, compiled: Any, checkpoints: Any) -> None:
    xs, weight = randn(10, 4, grad=False), randn(4)
    h = torch.zeros(4, dtype=torch.float64)
    for part in xs.split(n):
        h, ys = tl.scan(
            lambda h, x: (h := step(h, x, weight), h), h.detach(), part, checkpoints=checkpoints, compile=compiled
        )
        ys.square().sum().backward()
    torch.testing.assert_close((h.detach(), weight.grad), by_hand(xs, weight, n))


@with_and_without_checkpoints
def test_an_array_that_is_detached_every_n_steps(checkpoints: Any) -> None:
    xs, weight = randn(9, 4, grad=False), randn(4)

    def body(carry: Any, x: Any) -> Any:
        past, h = carry
        if x[1] % 3 == 0:
            past, h = past.detach(), h.detach()
        h = step(h + (past[:].mean(0) if len(past) else 0), x[0], weight)
        return (past.append(h), h), h

    init = tl.TensorArray(), torch.zeros(4, dtype=torch.float64)
    ys = tl.scan(body, init, (xs, range(9)), checkpoints=checkpoints)[1]
    h, past, out = init[1], [], []
    for t, x in enumerate(xs):
        if t % 3 == 0:
            h, past = h.detach(), [y.detach() for y in past]
        h = step(h + (torch.stack(past).mean(0) if past else 0), x, weight)
        past.append(h)
        out.append(h)
    torch.testing.assert_close(ys, torch.stack(out))
    torch.testing.assert_close(grad(ys.square().sum(), weight), grad(torch.stack(out).square().sum(), weight))
