"""What all kinds of queries, keys and values have to be, and how autocast makes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.autocast import autocasts

PARTS = ("q", "k", "v")


class Facts(NamedTuple):
    """Holds shape, dtype and device of a tensor, or of the elements of an array."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def check_parts(given: Sequence[Facts]) -> None:
    """Dtypes, devices, heads and widths of q, k and v."""
    q, k, v = given
    for x, part in zip(given, PARTS, strict=True):
        if not x.dtype.is_floating_point:
            raise WrongType(f"{part} must be of a real floating dtype, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise WrongType(f"dtypes of q, k and v differ: {q.dtype}, {k.dtype} and {v.dtype}; convert with .to({q.dtype})")
    if not q.device == k.device == v.device:
        raise WrongValue(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them with .to()")
    (heads, width), (key_heads, key_width), (value_heads, _) = (x.shape[-2:] for x in given)
    if key_width != width:
        raise WrongValue(f"q has elements of {width} numbers, k of {key_width}; their product needs as many")
    if key_heads != value_heads:
        raise WrongValue(f"k has {key_heads} heads, v has {value_heads}; each key head needs a value head")
    if heads % key_heads if key_heads else heads:
        raise WrongValue(f"{heads} query heads cannot share {key_heads} key heads; make it a multiple of them")


def number(x: Any, what: str, hint: str = "") -> float:
    """A plain number as a float."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise WrongType(f"{what} must be a number or None, got {arguments.describe(x)}{hint}")
    return float(x)


def autocast(x: Tensor) -> Tensor:
    """`x` as autocast makes it where it is on: in the dtype of matrix products; float64 stays."""
    if not autocasts(x) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
