"""Infinite and missing numbers in the gradients of segments: kernels and torch operations give the same."""

import pytest
import torch
from torch import Tensor

from tensorloop import kernels
from tensorloop.kernels.cpu import segment_reductions
from tensorloop.kernels.eager import segment_reductions as eager
from tensorloop.packed import PackedTensor
from tests.support.cuda_cases import REDUCED, offsets_of

INF, NAN = torch.inf, torch.nan
LENS = [3, 1, 4, 2]
# Differences of more than 87 are left out: what is subnormal in torch is 0 in the kernels, and 0 * inf is NaN.
SPECIAL = torch.tensor([0.0, 1.0, -1.0, INF, -INF, NAN, 2.0, -40.0, 40.0, -3.0])


def drawn(*shape: int) -> Tensor:
    return SPECIAL[torch.randint(0, len(SPECIAL), shape)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operation", REDUCED)
def test_kernels_agree_with_torch_operations(operation: str, dtype: torch.dtype) -> None:
    dtypes = kernels.TABLE[operation].cpu
    if dtypes is not None and dtype not in dtypes:
        dtype = torch.float32
    torch.manual_seed(0)
    offsets = offsets_of(LENS)
    for _ in range(100):
        values, upstream, reduced = (drawn(n, 4).to(dtype) for n in (10, 10, 4))
        args = {
            "segment_max": (values, offsets, 0),
            "segment_min": (values, offsets, 0),
            "segment_softmax_grad": (eager.segment_softmax(values, offsets), upstream, offsets),
            "segment_logsumexp_grad": (values, eager.segment_logsumexp(values, offsets), reduced, offsets),
            "segment_extreme_grad": (values, eager.segment_max(values, offsets, 0)[0], reduced, offsets),
        }.get(operation, (values, offsets))
        found, expected = (getattr(module, operation)(*args) for module in (segment_reductions, eager))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])  # float16 is for torch operations
@pytest.mark.parametrize("which", ["amax", "amin"])
@pytest.mark.parametrize("upstream", [INF, -INF, NAN])
def test_an_infinite_gradient_of_an_extreme_is_its_own(upstream: float, which: str, dtype: torch.dtype) -> None:
    sign = 1 if which == "amax" else -1
    values = (sign * torch.tensor([1.0, 3.0, 3.0, 2.0, 0.0], dtype=dtype)).requires_grad_()
    out = getattr(PackedTensor(values, [3, 2]), which)(1)
    (grad,) = torch.autograd.grad(out, values, torch.tensor([upstream, 1.0], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([0.0, upstream, upstream, 1.0, 0.0], dtype=dtype), equal_nan=True)


@pytest.mark.parametrize("special", [INF, -INF, NAN])
def test_its_second_derivative_meets_no_number_of_the_others(special: float) -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    upstream = torch.ones(2, dtype=torch.float64, requires_grad=True)
    out = PackedTensor(values, [3, 2]).amax(1)
    (grad,) = torch.autograd.grad(out, values, upstream, create_graph=True)
    weights = torch.tensor([special, 1.0, 3.0, 5.0, special], dtype=torch.float64)
    (back,) = torch.autograd.grad(grad, upstream, weights)
    assert back.tolist() == [2.0, 5.0]
