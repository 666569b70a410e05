"""Arguments for kernels: on the CPU, and for those of CUDA in the simulator, for the compiler, and on a device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop import kernels, reference
from tensorloop.kernels.moves import Move, Moves
from tensorloop.reference import offsets_of

MOVED = ["pack_rows", "pad_rows", "spread_rows", "gather_rows"]
GRADIENTS = ("softmax_grad", "logsumexp_grad", "extreme_grad")
REDUCED = [f"segment_{name}" for name in ("sum", "max", "min", "logsumexp", "softmax", "cumsum", *GRADIENTS)]
OPERATIONS = [*MOVED, *REDUCED]  # regroup has tests of its own, and so has what works in place


def kernel(backend: str, operation: str) -> Callable[..., Any]:
    """An operation by numba ("cpu") or in torch operations ("eager")."""
    return kernels._load(backend, kernels.TABLE[operation].module, operation)


def arguments(operation: str, lens: list[int], features: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Random arguments for one operation over segments of these lengths."""
    offsets, n = offsets_of(lens), sum(lens)
    steps = max(lens, default=0)

    def numbers(*shape: int) -> Tensor:
        return (torch.randn(shape) * 3).to(dtype)

    values, reduced = numbers(n, features), numbers(len(lens), features)
    return {
        "pack_rows": lambda: (numbers(len(lens), steps, features), offsets, n),
        "pad_rows": lambda: (values, offsets, steps + 1, 2),
        "spread_rows": lambda: (numbers(len(lens), features), offsets, n),
        "gather_rows": lambda: (values, torch.randint(0, max(n, 1), (2 * n,))),
        "segment_max": lambda: (values, offsets, -7),
        "segment_min": lambda: (values, offsets, 7),
        "segment_softmax_grad": lambda: (values, numbers(n, features), offsets),
        "segment_logsumexp_grad": lambda: (values, reference.segment_logsumexp(values, lens), reduced, offsets),
        "segment_extreme_grad": lambda: (values.round(), reference.segment_max(values.round(), lens), reduced, offsets),
    }.get(operation, lambda: (values, offsets))()


def some_moves() -> Moves:
    """Two sources, three targets (one of them empty): a key copied twice, once within a target, columns left out."""
    table = [Move(0, 0, 1, 2, 2), Move(1, 0, 0, 0, 2), Move(0, 1, 1, 0, 2), Move(0, 1, 1, 5, 2), Move(1, 1, 3, 2, 3)]
    return Moves((4, 6), (5, 7, 0), table)


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
