"""One query of each row on a device: values, gradients, second order, and how few operations that is."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tensorloop.attention import one_query
from tensorloop.kernels.scores import whole
from tensorloop.kernels.sight import Sight


def given(*size: int) -> Tensor:
    return torch.randn(
        *size, dtype=torch.float64, generator=torch.Generator("cpu").manual_seed(sum(size)), device="cpu"
    )


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_output_and_gradients_are_those_of_the_formula(heads: tuple[int, int], rows: int) -> None:
    q, k, v = given(rows, 1, heads[0], 4), given(5, rows, heads[1], 4), given(5, rows, heads[1], 3)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = whole(inputs[0], inputs[1], inputs[2], Sight(0.7))
    grad = given(*out.shape)
    expected = torch.autograd.grad(out, inputs, grad)
    of_k, of_v = torch.ones_like(k), torch.ones_like(v)
    with torch.no_grad():
        torch.testing.assert_close(one_query.forward(q, k, v, 0.7), out)
        of_q = one_query.backward(grad, q, k, v, 0.7, of_k, of_v)
    torch.testing.assert_close((of_q, of_k - 1, of_v - 1), expected)


class Launches(TorchDispatchMode):
    """How many operations make or change tensors."""

    VIEWS = frozenset({"view", "transpose", "expand", "_unsafe_view", "new_empty", "reshape", "_reshape_alias"})

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_ten_operations() -> None:
    q, k, v = given(3, 1, 4, 4), given(5, 3, 2, 4), given(5, 3, 2, 3)
    of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
    with torch.no_grad(), Launches() as launched:
        out = one_query.forward(q, k, v, 0.5)
        one_query.backward(out, q, k, v, 0.5, of_k, of_v)
    assert len(launched.names) == 10, launched.names


def test_who_it_is_for() -> None:
    """Not the CPU, which has kernels; nor where some slots are hidden, or scores are changed."""
    q = torch.empty(2, 1, 4, 8, device="meta")
    assert one_query.fits(q, 5, Sight(1.0))
    assert one_query.fits(q, 5, Sight(1.0, window=5))
    assert not one_query.fits(q, 6, Sight(1.0, window=5))
    for other in (q.half(), q.expand(2, 3, 4, 8), torch.empty(2, 1, 4, 8, device="cpu")):
        assert not one_query.fits(other, 5, Sight(1.0))
    for rules in ({"softcap": 1.0}, {"dropout": 0.5}, {"bias": q}, {"first": q}, {"sinks": q}):
        assert not one_query.fits(q, 5, Sight(1.0, **rules))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 2])
def test_a_loop_over_arrays_twice_differentiated(window: int | None) -> None:
    """On a device it is this code that runs, on the CPU what it must agree with."""
    results = []
    for device in (None, "cpu"):
        x, w = (given(*size).to(device or torch.get_default_device()).requires_grad_() for size in ((2, 2, 4), (4, 4)))
        keys, values, h = tl.TensorArray(), tl.TensorArray(), x
        for _ in range(4):
            keys.append(h)
            values.append(h @ w)
            h = tl.attention(h, keys, values, window=window) + x
        first = torch.autograd.grad(h.square().sum(), (x, w), create_graph=True)
        second = torch.autograd.grad([g.square().sum() for g in first], (x, w))
        results.append([y.detach().cpu() for y in (h, *first, *second)])
    torch.testing.assert_close(*results)
