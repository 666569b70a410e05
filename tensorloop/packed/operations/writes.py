"""p[key] = value: the entries that `p[key]` gives are changed in place. The rows stay as they are."""

from typing import Any

import torch
from torch import Tensor

from tensorloop.packed.operations.index import find_mask, getitem
from tensorloop.packed.table.aliases import changed, is_same, put
from tensorloop.packed.table.base import Packed, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import align, check_partner
from tensorloop.packed.table.untaken import WHY, WRITTEN
from tensorloop.packed.views.parts import is_whole


def setitem(p: Packed, key: Any, value: Any) -> None:
    """Writes a number, a packed tensor of the same rows, or what broadcasts to `p[key]`, into the values."""
    if is_same(value, p, key):
        return
    if (mask := find_mask(p, key)) is not None:
        if is_packed(value):
            raise refusal("a packed tensor where a mask is true", "use torch.where(mask, value, p)")
        p.values[mask] = value
    elif any(k is None for k in (key[:2] if isinstance(key, tuple) else (key,))):
        raise refusal("None before the ragged dim", "leave it out, and write value without that dim")
    elif _gives_view(p, key):
        there = getitem(p, key)
        target = there.values if is_packed(there) else there
        target[...] = _find_beside(value, there)
    else:
        # The place of each number among the values, and of those the ones that the key takes.
        numbers = torch.arange(p.values.numel(), device=p.values.device).view(p.values.shape)
        there = getitem(p._with(numbers), key)
        places = there.values if is_packed(there) else there
        put(p.values, places, torch.as_tensor(_find_beside(value, there), dtype=p.values.dtype, device=p.values.device))
    changed(p.values)


@handles
def _write(func: Any, input: Any, key: Any, value: Any) -> None:
    """p[key] = value; an ordinary tensor is not written to at packed places."""
    if not is_packed(input):
        raise refusal(WHY, WRITTEN)
    setitem(input, key, value)


def _gives_view(p: Packed, key: Any) -> bool:
    """Whether `p[key]` shares its memory with p: one row, or all rows and steps, and no lists of features."""
    keys = key if isinstance(key, tuple) else (key,)
    if not all(k is None or k is Ellipsis or type(k) is int or isinstance(k, slice) for k in keys):
        return False
    if keys[0] is Ellipsis:
        return len(keys) == 2 and p.ndim > 2  # the last feature; of two dims it is the step
    whole = [is_whole(k) for k in keys[:2]]
    return type(keys[0]) is int or (len(whole) == 2 and all(whole))


def _find_beside(value: Any, there: Any) -> Any:
    """Returns what is written, as it goes beside what is there."""
    if is_packed(value):
        if not is_packed(there):
            raise refusal("a packed tensor in the place of an ordinary one", "index it the same way")
        return check_partner(there, value).values
    return align(value, there) if isinstance(value, Tensor) and value.dim() and is_packed(there) else value
