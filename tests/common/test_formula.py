"""Gradients by formula: a node for what a kernel computes, and a way for backward passes that are differentiated."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tensorloop._torch.formula import Formula, differentiate, evaluate, is_differentiated


def times(x: Tensor, y: Tensor) -> Tensor:
    """x * y, computed where autograd does not see it."""
    formula = Formula(
        lambda x, y: torch.from_numpy(x.detach().numpy() * y.detach().numpy()),
        lambda grad, x, y: (times(grad, y), times(grad, x)),
        lambda along, x, y: torch.stack([times(t, z) for t, z in zip(along, (y, x), strict=True) if t is not None]).sum(
            0
        ),
        keeps=(0, 1),
    )
    return evaluate(formula, x, y)


def exponential(x: Tensor) -> Tensor:
    """exp(x), which keeps its output."""
    formula = Formula(torch.exp, lambda grad, out: (grad * out,), lambda along, out: along[0] * out, keeps=(1,))
    return evaluate(formula, x)


def test_a_formula_is_differentiated_as_often_as_its_derivatives() -> None:
    x, y = (torch.randn(3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for function, inputs in ((times, (x, y)), (exponential, (x,))):
        assert gradcheck(function, inputs, check_forward_ad=True)
        assert gradgradcheck(function, inputs)


def test_a_formula_is_batched() -> None:
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(times, (0, None))(x, y), x * y)
    torch.testing.assert_close(torch.vmap(times, (1, None), 1)(x.T, y), (x * y).T)
    hessian = torch.func.hessian(lambda x: times(x, exponential(x)).sum())(y)
    torch.testing.assert_close(hessian, torch.diag(y.exp() * (y + 2)))


def test_a_formula_without_derivatives_gives_numbers() -> None:
    x = torch.randn(5, requires_grad=True)
    assert int(evaluate(Formula(torch.argmax), x)) == int(x.argmax())


class Product(torch.autograd.Function):
    """x * y, whose gradient is by formula in every backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert is_differentiated(grad) == torch.is_grad_enabled()
        *found, nothing = differentiate(lambda x, y, _: x * y, (*ctx.saved_tensors, None), grad)
        assert nothing is None
        return tuple(found)


def test_inputs_that_depend_on_each_other_do_not_count_twice() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    out = Product.apply(x, 2 * x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    torch.testing.assert_close(first, 4 * x)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], torch.full_like(x, 4))
    assert gradgradcheck(lambda x: Product.apply(x, x.sin()), x)
