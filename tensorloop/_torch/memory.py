"""Tensors whose memory does not hold their numbers as they are.

Private name of torch, tried with 2.11 to 2.15: `Tensor._is_zerotensor`. A zero tensor, which forward-mode autograd and
some backward formulas make, has no memory at all: its address is 0.
"""

from torch import Tensor


def is_symbolic(x: Tensor) -> bool:
    """Whether what is in memory is not what the tensor says: of zeros without memory, of conj and neg views."""
    return x._is_zerotensor() or x.is_neg() or x.is_conj()


def in_memory(x: Tensor) -> Tensor:
    """The tensor itself, or a copy whose memory holds its numbers: of a zero tensor, a conj or a neg view."""
    if not (x._is_zerotensor() or x.is_neg() or x.is_conj()):  # asked of each tensor of a compiled loop, at every call
        return x
    return x.clone() if x._is_zerotensor() else x.resolve_conj().resolve_neg()
