"""TensorArray against the reference, over random programs: values, gradients, second order, transforms."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tests.support.array_programs import ArrayMachine, B, F, Program, ReferenceMachine, loss, programs, run


def source(n: int = 4) -> Tensor:
    values = torch.linspace(-1.3, 2.1, n * B * F, dtype=torch.float64).view(n, B, F)
    return values.requires_grad_()


def on_array(program: Program, x: Tensor) -> Tensor:
    return loss(run(ArrayMachine(), program, x))


def on_reference(program: Program, x: Tensor) -> Tensor:
    return loss(run(ReferenceMachine(), program, x))


def gradient(f, program: Program, x: Tensor, **kwargs) -> Tensor:
    out = f(program, x)
    if not out.requires_grad:
        return torch.zeros_like(x)
    (grad,) = torch.autograd.grad(out, x, allow_unused=True, **kwargs)
    return torch.zeros_like(x) if grad is None else grad


@settings(max_examples=300)
@given(programs)
def test_values_and_gradients_are_the_reference_s(program: Program) -> None:
    x = source()
    ours, theirs = run(ArrayMachine(), program, x), run(ReferenceMachine(), program, x)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(
        gradient(on_array, program, x), gradient(on_reference, program, x), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=100)
@given(programs)
def test_what_was_read_stays_what_it_was(program: Program) -> None:
    machine = ArrayMachine()
    reads = run(machine, program, source())
    copies = [r.detach().clone() for r in reads]
    for i in range(len(machine)):
        machine.overwrite(i, torch.full((B, F), 7.0, dtype=torch.float64))
    machine.append(torch.zeros(B, F, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(reads, copies, strict=True))


@settings(max_examples=60)
@given(programs)
def test_second_derivatives_are_the_reference_s(program: Program) -> None:
    def double(f) -> Tensor:
        x = source()
        first = gradient(f, program, x, create_graph=True)
        return gradient(lambda _, x: (first * torch.cos(x)).sum(), program, x)

    torch.testing.assert_close(double(on_array), double(on_reference), rtol=1e-11, atol=1e-11)


@settings(max_examples=40)
@given(programs)
def test_backward_twice_and_batched(program: Program) -> None:
    x = source()
    out, expected = on_array(program, x), gradient(on_reference, program, x)
    if not out.requires_grad:
        return
    for _ in range(2):
        (grad,) = torch.autograd.grad(out, x, retain_graph=True)
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (grads,) = torch.autograd.grad(out, x, weights, is_grads_batched=True)
    torch.testing.assert_close(grads, weights.view(3, 1, 1, 1) * expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=30)
@given(programs)
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "vmap_grad", "jvp", "grad_vmap"])
def test_transforms_give_the_reference_s(transform: str, program: Program) -> None:
    x = source().detach()

    def of(f) -> Tensor:
        def one(v: Tensor) -> Tensor:
            return f(program, v)

        if transform == "vmap_grad":
            return torch.func.vmap(torch.func.grad(one))(torch.stack([x, x + 1]))
        if transform == "grad_vmap":
            return torch.func.grad(lambda v: torch.func.vmap(one)(v).sin().sum())(torch.stack([x, x + 1]))
        if transform == "jvp":
            return torch.func.jvp(one, (x,), (torch.cos(x),))[1]
        return getattr(torch.func, transform)(one)(x)

    torch.testing.assert_close(of(on_array), of(on_reference), rtol=1e-11, atol=1e-11)


@settings(max_examples=15)
@given(programs)
def test_hessian_is_the_reference_s(program: Program) -> None:
    x = source(2).detach()
    ours = torch.func.hessian(lambda v: on_array(program, v))(x)
    torch.testing.assert_close(ours, torch.func.hessian(lambda v: on_reference(program, v))(x), rtol=1e-10, atol=1e-10)
