"""A search under torch.func, forward mode and torch.compile; and what it refuses there."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.support.beam_cases import Table

LOGITS = Table.random(3, 4, seed=5).logits


def total(logits: Tensor) -> Tensor:
    return Table(logits).search(3).scores.square().sum()


def by_autograd() -> tuple[Tensor, Tensor]:
    """The gradient, and its derivative along LOGITS."""
    x = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(x), x, create_graph=True)
    (second,) = torch.autograd.grad((grad * LOGITS).sum(), x)
    return grad.detach(), second


def test_grad_vjp_jvp_and_forward_mode():
    grad, _ = by_autograd()
    torch.testing.assert_close(torch.func.grad(total)(LOGITS), grad)
    value, pull, *_ = torch.func.vjp(total, LOGITS)
    torch.testing.assert_close(pull(torch.ones_like(value))[0], grad)
    along = (grad * LOGITS).sum()
    torch.testing.assert_close(torch.func.jvp(total, (LOGITS,), (LOGITS,))[1], along)
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(total(forward_ad.make_dual(LOGITS, LOGITS)))
        torch.testing.assert_close(out.tangent, along)


def test_second_derivatives_by_transforms():
    _, second = by_autograd()
    along = torch.func.jvp(torch.func.grad(total), (LOGITS,), (LOGITS,))[1]
    torch.testing.assert_close(along, second)
    jacobian = torch.func.jacrev(lambda x: Table(x).search(3).scores)(LOGITS)
    x = LOGITS.clone().requires_grad_()
    expected = torch.autograd.functional.jacobian(lambda x: Table(x).search(3).scores, x)
    torch.testing.assert_close(jacobian, expected)


def test_vmap_is_refused():
    with pytest.raises(RuntimeError, match="vmap hides what decisions need to see; put its dim into the batch"):
        torch.func.vmap(total)(torch.stack([LOGITS, LOGITS]))


def test_inside_compile_the_search_runs_as_it_is():
    torch.testing.assert_close(torch.compile(total, backend="eager")(LOGITS), total(LOGITS))
