"""x[key] = value for what is seen in any order, and for scores: the numbers of `x[key]` say where the value goes."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.table.aliases import changed, is_same, put
from tensorloop.packed.table.base import Packed, PackedView, refusal

_PACKED = Packed, PackedView


def assign(x: Any, key: Any, value: Any) -> None:
    """Writes a number, or what broadcasts to `x[key]`, into the values of x, in place."""
    if is_same(value, x, key):
        return
    if isinstance(key, _PACKED) and key._memory.dtype is torch.bool:
        if isinstance(value, _PACKED) or getattr(value, "ndim", 0):
            raise refusal("several numbers where a mask is true", "use torch.where(mask, value, x)")
        x.masked_fill_(key, value)
        return
    with torch.no_grad():
        there = x._with(torch.arange(x._memory.numel(), device=x.device).view(x._memory.shape))[key]
    if isinstance(there, Tensor):
        if isinstance(value, _PACKED):
            raise refusal("a packed tensor in the place of an ordinary one", "index it the same way")
        places = there
    else:
        places = there._memory
        if isinstance(value, (Tensor, *_PACKED)):
            given: Any = torch.where(there >= 0, value, 0)  # pyright: ignore[reportCallIssue, reportArgumentType]
            if type(given) is not type(there) or given._memory.shape != places.shape:
                raise WrongValue(f"what is written is {tuple(value.shape)}, its place {there.shape}")
            value = given._memory
    put(x._memory, places, torch.as_tensor(value, dtype=x.dtype, device=x.device))
    changed(x._memory)
