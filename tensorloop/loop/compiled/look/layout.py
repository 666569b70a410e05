"""How tensors lie in memory, as far as it may matter to what a body does: in which order, with gaps or without."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Layout = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]  # strides of the carry, of the rows of xs


def kind_of_layout(x: Tensor, dim: int) -> Any:
    """How a tensor lies in memory behind its first `dim` dims: None where it is contiguous; not how far apart."""
    return None if x.is_contiguous() else kind_of_strides(x.shape[dim:], x.stride()[dim:])


@lru_cache(1024)
def kind_of_strides(shape: Sequence[int], strides: Sequence[int]) -> Any:
    """(no gaps, the order of the dims, which of them repeat one value) of strides; None where they are contiguous."""
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    dense, step = True, 1
    for d in reversed(order):
        dense &= strides[d] == step
        step *= shape[d]
    in_order = order == sorted(order)
    return None if dense and in_order else (dense, tuple(order), tuple(strides[d] == 0 for d in order))


def laid(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Copies of tensors that lie in memory in another way; a dim of stride 0 has one value."""
    found = []
    for x, steps in zip(tensors, strides, strict=True):
        one = x
        for dim, step in enumerate(steps):
            one = one.narrow(dim, 0, 1) if step == 0 and x.shape[dim] > 1 else one
        found.append(torch.empty_strided(one.shape, steps, dtype=x.dtype).copy_(one).expand(x.shape))
    return found
