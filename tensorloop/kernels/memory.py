"""Tensors as memory: the one place where kernels learn the address of numbers.

torch has tensors whose numbers do not stand in memory as they are read: those whose negative or conjugate is meant (a
bit says so), and its zero tensor, which has no memory at all; that one comes out of the backward of `sgn`, so out of a
second derivative of any L1 loss. `settle` makes ordinary ones of them.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tensorloop._torch.storage import PLAIN, has_storage

_LOW = 1 << 40  # the address of what is no memory is 0, or how far a view is from its start


def settle(x: Tensor) -> Tensor:
    """`x`, or a copy where its numbers do not stand in memory as they are read."""
    return x.clone() if x._is_zerotensor() or x.is_neg() or x.is_conj() else x


def lay_out(x: Tensor) -> Tensor:
    """`x`, or a copy where its numbers do not stand in memory as they are read, one after the other."""
    return settle(x).contiguous()


def lay_all(given: Iterable[Tensor]) -> list[Tensor]:
    """`lay_out` of each."""
    plain = []
    for x in given:
        fine = x.is_contiguous() and not (x.is_neg() or x.is_conj() or x._is_zerotensor())
        plain.append(x if fine else lay_out(x))
    return plain


def is_laid(x: Tensor) -> bool:
    """Whether `lay_out` gives `x` itself, so that what is written there is written into `x`."""
    return x.is_contiguous() and settle(x) is x


def address(x: Tensor) -> int:
    """Where the first number of a settled tensor stands; it must be kept alive. An empty one may stand nowhere."""
    at = x.data_ptr() if type(x) in PLAIN and has_storage(x) else 0
    if at < _LOW and x.numel() and (not at or x._is_zerotensor()):
        raise TypeError(
            f"kernels read numbers in memory, and a {type(x).__name__} on {x.device} of layout {x.layout} has none "
            "here: it is a zero tensor, a fake one, one of a transform of torch.func, or not dense. "
            "kernels.find gives the torch operations that take it"
        )
    return at


def addresses(given: Iterable[Tensor]) -> list[int]:
    """The `address` of each."""
    found = []
    for x in given:
        at = x.data_ptr() if type(x) in PLAIN and has_storage(x) else 0
        found.append(at if at >= _LOW else address(x))
    return found


def array(x: Tensor) -> Any:
    """The numbers of a tensor as a numpy array, contiguous: of its own memory where it `is_laid`."""
    if x.requires_grad or not has_storage(x):  # detached, a wrapper of a transform that is over is off
        x = x.detach()
    x = lay_out(x)
    address(x)
    return x.numpy()


def arrays(given: Iterable[Tensor]) -> list[Any]:
    """The `array` of each."""
    return [array(x) for x in given]
