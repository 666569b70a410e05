"""Bodies of checkpointed loops that ask autograd for something: the answer is the plain loop's, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl

D = torch.float64
W = torch.tensor(0.3, dtype=D, requires_grad=True)
V = torch.tensor(0.8, dtype=D, requires_grad=True)
XS = torch.arange(1.0, 6, dtype=D)
Body = Callable[[Any, Tensor], Any]


def start(n: int) -> Any:
    found = tuple(torch.tensor(0.5 - 0.1 * k, dtype=D, requires_grad=True) for k in range(n))
    return found if n > 1 else found[0]


def plain(body: Body, carry: Any, xs: Tensor) -> Any:
    ys = []
    for x in xs:
        carry, y = body(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def outcome(run: Callable[[Any], Any], n: int) -> Any:
    carry, ys = run(start(n))
    leaves = carry if isinstance(carry, tuple) else (carry,)
    loss = torch.stack([x.sum() for x in leaves]).sum() + ys.sin().sum()
    return carry, ys, grad(loss, (W, V), allow_unused=True)


def leaf_inside(h: Tensor, x: Tensor) -> Any:
    z = h.detach().requires_grad_()
    return torch.sin(W * h), grad((z**3 * V).sum(), z, create_graph=True)[0]


def energy(h: Tensor, x: Tensor) -> Any:
    force = grad((h**3 * W).sum(), h, create_graph=True)[0]
    return h - 0.1 * force, force


def hamiltonian(c: Any, x: Tensor) -> Any:
    q, p = c
    dq, dp = grad((p**2 / 2 * W + q.cos() * V) * (1 + 0.1 * q * p), (q, p), create_graph=True)
    return (q + 0.1 * dp, p - 0.1 * dq), dq


def of_another_parameter(h: Tensor, x: Tensor) -> Any:
    return torch.sin(V * h), grad(h * W * x, W, create_graph=True)[0] + h


def parameter_inside(h: Tensor, x: Tensor) -> Any:
    p, q = nn.Parameter(h.detach().clone()), nn.Parameter(h.detach().clone())
    (p**2 * V.detach()).backward()
    found = grad(q**2 * V * h, q, create_graph=True)[0]
    assert p.grad is not None
    return torch.sin(W * h) + found * 0.1, found + p.grad


def transforms(h: Tensor, x: Tensor) -> Any:
    return torch.sin(W * h), torch.func.grad(lambda q: q**3 * h)(h) + torch.func.grad(lambda w: w * h)(W)


@pytest.mark.parametrize("body", [leaf_inside, energy, hamiltonian, of_another_parameter, parameter_inside, transforms])
def test_what_one_step_knows_is_right(body: Body):
    n = 2 if body is hamiltonian else 1
    expected = outcome(lambda init: plain(body, init, XS), n)
    torch.testing.assert_close(outcome(lambda init: tl.scan(body, init, XS, checkpoints=2), n), expected)


def through_earlier_steps(h: Tensor, x: Tensor) -> Any:
    h = torch.sin(W * h + 1)
    return h, grad(h, W, retain_graph=True)[0]


def by_two_steps(c: Any, x: Tensor) -> Any:
    a, b, d = c
    return (d, b, b * 2), grad(a * b, b, create_graph=True)[0]


def caught(h: Tensor, x: Tensor) -> Any:
    try:
        return through_earlier_steps(h, x)
    except RuntimeError:
        return torch.sin(W * h + 1), h


def later(h: Tensor, x: Tensor) -> Any:
    return torch.sin(W * h + 1), grad(h * W, W, retain_graph=True)[0] if x > 2 else h * 0


def in_a_loop_inside(h: Tensor, x: Tensor) -> Any:
    last, ys = tl.scan(through_earlier_steps, h, XS[:2])
    return last, ys.sum()


def backward_pass(h: Tensor, x: Tensor) -> Any:
    h = torch.sin(W * h + 1)
    (h**2).backward(retain_graph=True)
    return h, x


def backward_to_a_parameter(h: Tensor, x: Tensor) -> Any:
    z = h.detach().requires_grad_()
    torch.autograd.backward(z**3 * V)
    return torch.sin(W * h), z.grad


def is_leaf(h: Tensor, x: Tensor) -> Any:
    return torch.sin(W * h) * (1.0 if h.is_leaf else 0.5), x


def grad_fn(h: Tensor, x: Tensor) -> Any:
    return torch.sin(W * h) * (1.0 if h.grad_fn is None else 0.5), x


TAKES = "takes a gradient for a tensor to which earlier steps may lead"
REFUSED = [(body, TAKES) for body in (through_earlier_steps, by_two_steps, caught, later, in_a_loop_inside)]
REFUSED += [(body, "runs a backward pass") for body in (backward_pass, backward_to_a_parameter)]
REFUSED += [(body, "asks of an argument whether it is a leaf") for body in (is_leaf, grad_fn)]


@pytest.mark.parametrize(("body", "said"), REFUSED, ids=[body.__name__ for body, _ in REFUSED])
def test_what_one_step_does_not_know_is_an_error(body: Body, said: str):
    with pytest.raises(RuntimeError, match=f"scan: the body, in step ., {said}.*; detach.. the carry in the body"):
        tl.scan(body, start(3 if body is by_two_steps else 1), XS, checkpoints=2)


def test_in_loops_of_other_kinds():
    def body(h: Tensor) -> Tensor:
        return torch.sin(W * h + 1) + through_earlier_steps(h, h)[1]

    with pytest.raises(RuntimeError, match=TAKES):
        tl.while_loop(lambda h: h < 9, body, start(1), max_steps=4, checkpoints=2)
    with pytest.raises(RuntimeError, match=TAKES):
        tl.fori_loop(0, 4, lambda i, h: body(h), start(1), checkpoints=2)


@pytest.mark.eager_only("a compiled loop gives the gradient")
@pytest.mark.parametrize("both", [True, False])
def test_through_what_was_computed_before_the_loop(both: bool):
    """A replay has it as a leaf."""
    x = XS.clone().requires_grad_()
    f = torch.exp(torch.sin(x))
    found = tl.map(
        lambda e: grad(f * x if both else f, x, e, create_graph=True)[0] + f, torch.eye(5, dtype=D), checkpoints=2
    )
    with pytest.raises(RuntimeError, match=r"through what was computed before the loop.*compute that in the body"):
        grad(found.sum(), x)
