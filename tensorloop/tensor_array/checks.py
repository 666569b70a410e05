"""Checks of what is written to an array: facts, to which the array's methods add their names."""

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongType, WrongValue


def refuse_skipping(written: set[int], length: int, capacity: int | None) -> None:
    """Raises if writing these slots would leave holes beyond the end that no `capacity` permits."""
    needed = max(written, default=-1) + 1
    beyond = {i for i in written if i >= length}
    if needed - length > len(beyond) and needed > (capacity or 0):
        first = next(i for i in range(length, needed) if i not in beyond)
        raise WrongIndex(f"slot {first} would be skipped; write it too, or give capacity=")


def check_rows(x: Tensor, mask: Tensor, lead: int = 0) -> None:
    """Raises unless the elements in x (with `lead` dims before them) have the rows of the mask, (B,) or 0-d."""
    if x.shape[lead : lead + mask.dim()] != mask.shape:
        raise WrongValue(
            f"elements of shape {tuple(x.shape[lead:])} in a loop whose {len(mask)} rows stop on their own; "
            f"elements must be ({len(mask)}, ...)"
        )


def check_row_writes(pos: Tensor, x: Tensor, where: Tensor | None) -> None:
    """Checks that `pos` (B,), `x` (B, *F) and `where` (B,) bool belong together."""
    n = x.shape[0] if x.dim() else None
    if pos.dim() != 1 or len(pos) != n:
        raise WrongValue(f"pos must be (B,) for x (B, *F), got {tuple(pos.shape)} and {tuple(x.shape)}")
    if where is None:
        return
    if not isinstance(where, Tensor) or where.dtype is not torch.bool:
        raise WrongType(f"where must be a bool tensor, got {arguments.describe(where)}")
    if where.shape != pos.shape:
        raise WrongValue(f"where must be ({n},) like pos, got {tuple(where.shape)}")


def read_sizes(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """The sizes of an element as given, None for those not yet known."""
    if isinstance(shape, int):
        raise WrongType(f"element_shape must be a sequence of sizes, got the int {shape}; write ({shape},)")
    shape = tuple(arguments.items(shape, "element_shape"))
    sizes = tuple(None if n is None else arguments.as_int(n, "element_shape") for n in shape)
    if any(n is not None and n < 0 for n in sizes):
        raise WrongValue(f"element_shape has a negative size: {sizes}")
    return sizes


def check_fits(
    shape: torch.Size,
    x: Tensor,
    element_shape: tuple[int | None, ...] | None,
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> None:
    """Raises unless an element of this shape, dtype and device of `x` is what the array holds, as far as known."""
    if dtype is not None and x.dtype is not dtype:
        raise WrongType(f"dtype {x.dtype}, but the array holds {dtype}; convert with .to({dtype})")
    if device is not None and not _same_device(x.device, device):
        raise WrongValue(f"the value is on {x.device}, but the array is on {device}; move it with .to()")
    if element_shape is not None and (
        len(shape) != len(element_shape)
        or any(b is not None and a != b for a, b in zip(shape, element_shape, strict=True))
    ):
        raise WrongValue(f"element shape {tuple(shape)}, but the array holds elements of shape {element_shape}")


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index == b.index or b.index is None)


def find_slot(i: SupportsIndex, length: int) -> int:
    """`i` as a slot of an array of `length`, negative counted from the end."""
    slot = arguments.as_int(i)
    if not -length <= slot < length:
        raise WrongIndex(f"slot {slot} is out of range for an array of {arguments.slots(length)}")
    return slot + length if slot < 0 else slot


def find_place(i: int, length: int, capacity: int | None) -> int:
    """The slot `i` that is to be written: one that there is, or one that may be skipped to."""
    slot = i + length if i < 0 else i
    if slot < 0 or (slot > length and slot >= (capacity or 0)):
        more = "" if slot < 0 else "; write the slots before it first, or give capacity= to leave holes"
        raise WrongIndex(f"slot {i} is out of range for an array of {arguments.slots(length)}{more}")
    return slot
