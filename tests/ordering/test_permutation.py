"""Permutations applied and undone, with their gradients."""

import pytest
import torch

from tensorloop.ordering import Permutation

ORDER = torch.tensor([3, 0, 4, 1, 2])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_values_gradients_and_second_order(dim: int):
    p = Permutation(ORDER)
    x = torch.randn(5, 5, 5, dtype=torch.float64).transpose(0, 2).requires_grad_()
    y = p.apply(x, dim)
    assert torch.equal(y, x.index_select(dim, ORDER))
    assert torch.equal(p.undo(y, dim), x)
    torch.autograd.gradcheck(lambda x: p.apply(x, dim), x)
    torch.autograd.gradgradcheck(lambda x: p.undo(x, dim) ** 3, x)


def test_the_gradient_is_a_gather():
    x = torch.randn(2, 5, requires_grad=True)
    y = Permutation(ORDER).apply(x)
    assert y.grad_fn is not None
    weights = torch.randn(2, 5)
    with torch.profiler.profile(acc_events=True) as profile:
        (grad,) = torch.autograd.grad(y, x, weights)
    names = {event.name for event in profile.events() or ()}
    assert "aten::index_select" in names
    assert not {name for name in names if "scatter" in name or "index_add" in name or "index_put" in name}
    assert torch.equal(grad[:, ORDER], weights)


def test_transforms():
    p = Permutation(ORDER)
    x, tangent = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(torch.vmap(lambda row: p.apply(row, 0))(x), x[:, ORDER])
    assert torch.equal(torch.func.jvp(p.apply, (x,), (tangent,))[1], tangent[:, ORDER])
    weights = torch.randn(3, 5)
    grad = torch.func.grad(lambda x: (p.apply(x) * weights).sum())(x)
    assert torch.equal(grad[:, ORDER], weights)
    eye = torch.eye(5, dtype=torch.float64)
    assert torch.equal(torch.func.jacrev(lambda row: p.apply(row, 0))(torch.randn(5, dtype=torch.float64)), eye[ORDER])


def test_sizes_and_identity():
    empty = Permutation([])
    assert empty.apply(torch.randn(2, 0, 3)).shape == (2, 0, 3)
    assert empty.is_identity
    assert Permutation([0, 1]).is_identity
    assert repr(Permutation([1, 0])) == "Permutation(2 positions)"
    assert len(Permutation(ORDER)) == 5


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Permutation([0, 2]), ValueError, "must have each number from 0 to 1 once; permutation[1] is 2"),
        (lambda: Permutation([0, 0]), ValueError, "permutation[1] is 0, again"),
        (lambda: Permutation([-1, 0]), ValueError, "permutation[0] is -1"),
        (lambda: Permutation(torch.zeros(2, 2, dtype=torch.int64)), ValueError, "must be (N,), got (2, 2)"),
        (lambda: Permutation(torch.tensor([0.0])), TypeError, "must be integers"),
        (lambda: Permutation([0, 1]).apply(torch.ones(2, 3)), ValueError, "has 3 positions, the ordering has 2"),
        (lambda: Permutation([0, 1]).undo(torch.ones(2), 1), IndexError, "undo: dim is 1, x has 1 dims"),
        (lambda: Permutation([0, 1]).apply([1, 2]), TypeError, "apply: x must be a tensor"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_refused(call, error: type[Exception], text: str):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
