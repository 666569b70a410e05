"""linear_log_softmax against its formula."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop import beam
from tensorloop.memory import saved
from tensorloop.testing import assert_matches_reference
from tests.support.devices import HERE


def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.log_softmax(F.linear(x, weight, bias), -1)


def inputs(*batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator(HERE).manual_seed(0)
    shapes = (*batch, 4), (7, 4), (7,)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0, 2)])
def test_it_is_the_formula(batch: tuple[int, ...]):
    x, weight, bias = inputs(*batch)
    for given in ((x, weight, bias), (x, weight)):
        ours, theirs = beam.linear_log_softmax(*given), formula(*given)
        torch.testing.assert_close(ours, theirs)
        w = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
        torch.testing.assert_close(*(torch.autograd.grad((out * w).sum(), given) for out in (ours, theirs)))


def test_it_differentiates_twice_and_under_transforms():
    x, weight, bias = inputs(2, 3)
    assert_matches_reference(beam.linear_log_softmax, formula, x, weight, bias)
    assert torch.autograd.gradgradcheck(beam.linear_log_softmax, (x, weight, bias))
    torch.testing.assert_close(
        torch.func.jacrev(beam.linear_log_softmax, argnums=(0, 1))(x, weight),
        torch.func.jacrev(formula, argnums=(0, 1))(x, weight),
    )
    grads = torch.autograd.grad(
        beam.linear_log_softmax(x, weight).flatten()[:2], x, torch.eye(2, dtype=x.dtype), is_grads_batched=True
    )
    theirs = torch.autograd.grad(
        formula(x, weight).flatten()[:2], x, torch.eye(2, dtype=x.dtype), is_grads_batched=True
    )
    torch.testing.assert_close(grads, theirs)


def test_gradients_of_those_that_want_one():
    x, weight, bias = inputs(3)
    (only,) = torch.autograd.grad(beam.linear_log_softmax(x.detach(), weight, bias.detach())[:, 2].sum(), weight)
    torch.testing.assert_close(only, torch.autograd.grad(formula(x, weight, bias)[:, 2].sum(), weight)[0])


def test_autocast_casts():
    x, weight, bias = inputs(3, dtype=torch.float32)
    with torch.autocast(HERE.type, torch.bfloat16):
        torch.testing.assert_close(beam.linear_log_softmax(x, weight, bias), formula(x, weight, bias))


def test_it_keeps_one_number_a_row():
    x, weight = torch.randn(10, 4), torch.randn(1000, 4, requires_grad=True)
    assert saved(lambda: beam.linear_log_softmax(x, weight).sum()).bytes == 10 * 4
    assert saved(lambda: formula(x, weight).sum()).bytes >= 10 * 1000 * 4


def test_what_it_refuses():
    with pytest.raises(TypeError, match="linear_log_softmax: x: expected a tensor, got list"):
        beam.linear_log_softmax([1.0], torch.zeros(2, 1))  # pyright: ignore[reportArgumentType]
