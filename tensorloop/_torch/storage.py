"""Whether a tensor has memory, and its numbers stand there. A private name of torch, tried with 2.11 to 2.15."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

has_storage = torch._C._has_storage  # pyright: ignore[reportAttributeAccessIssue]
# Classes of tensors whose numbers are in that memory; another subclass may have them anywhere. Entries of packed rows
# add theirs.
PLAIN: set[type] = {Tensor, nn.Parameter, nn.Buffer}


def freed(tensors: Iterable[Tensor]) -> Tensor | None:
    """The first tensor whose storage ends before its last number: somebody freed it, or made it smaller."""
    return next((x for x in tensors if _lacks_memory(x)), None)


def _lacks_memory(x: Tensor) -> bool:
    if x.layout is not torch.strided or not has_storage(x) or x._has_symbolic_sizes_strides:
        return False
    there = x.untyped_storage().nbytes()
    if there >= x.nbytes and x.is_contiguous() and not x.storage_offset():
        return False
    last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.numel() > 0 and not x._is_zerotensor() and there < (last + 1) * x.itemsize
