"""Arguments for kernels: on the CPU, and for those of CUDA in the simulator, for the compiler, and on a device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop import kernels
from tensorloop.kernels import cases
from tensorloop.kernels.cases import many_moves, offsets_of, some_moves

__all__ = ["DISGUISES", "arguments", "kernel", "many_moves", "offsets_of", "some_moves"]

MOVED = ["pack_rows", "pad_rows", "spread_rows", "gather_rows"]
GRADIENTS = ("softmax_grad", "logsumexp_grad", "extreme_grad")
REDUCED = [f"segment_{name}" for name in ("sum", "max", "min", "logsumexp", "softmax", "cumsum", *GRADIENTS)]
OPERATIONS = [*MOVED, *REDUCED]  # regroup has tests of its own, and so has what works in place


def kernel(backend: str, operation: str) -> Callable[..., Any]:
    """An operation by numba ("cpu") or in torch operations ("eager")."""
    return kernels._load(backend, kernels.TABLE[operation].module, operation)


def arguments(operation: str, lens: list[int], features: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Random arguments for one operation over segments of these lengths."""
    return cases.arguments(operation, lens, features, lambda *shape: (torch.randn(shape) * 3).to(dtype))


# ---- the disguises of a tensor: what reads the same, and stands otherwise in memory, or nowhere


def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(x.shape, dtype=x.dtype)  # pyright: ignore[reportPrivateImportUsage]


def zero_further_on(x: Tensor) -> Tensor:
    """A view of a zero tensor: its address is how far it is from the start."""
    return torch._efficientzerotensor((2, *x.shape), dtype=x.dtype)[1]  # pyright: ignore[reportPrivateImportUsage]


def negated(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bool else torch._neg_view(-x)  # pyright: ignore[reportPrivateImportUsage]


def conjugated(x: Tensor) -> Tensor:
    return x.conj().clone().conj() if x.is_complex() else x


def turned(x: Tensor) -> Tensor:
    order = range(x.dim() - 1, -1, -1)
    return x.permute(*order).contiguous().permute(*order)


def apart(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 1]


def further_on(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x]).narrow(0, min(len(x), 1), len(x))


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape) if len(x) else x


DISGUISES = [zero, zero_further_on, negated, conjugated, turned, apart, further_on, expanded]
