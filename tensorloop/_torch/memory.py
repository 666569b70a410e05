"""Tensors whose memory does not hold their numbers as they are.

Private name of torch, tried with 2.11 to 2.15: `Tensor._is_zerotensor`. A zero tensor, which forward-mode autograd and
some backward formulas make, has no memory at all: its address is 0.
"""

from collections.abc import Iterable

from torch import Tensor


def symbolic(tensors: Iterable[Tensor]) -> Tensor | None:
    """The first of which memory does not hold what the tensor says: zeros without memory, a conj or a neg view."""
    return next((x for x in tensors if x._is_zerotensor() or x.is_neg() or x.is_conj()), None)


def in_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors themselves, or copies whose memory holds their numbers: of zero tensors, conj and neg views."""
    found: list[Tensor] = []
    for x in tensors:
        if x._is_zerotensor():
            found.append(x.clone())
        else:
            found.append(x.resolve_conj().resolve_neg() if x.is_neg() or x.is_conj() else x)
    return found
