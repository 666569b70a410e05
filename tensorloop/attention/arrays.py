"""Attention of the last tokens to TensorArrays: what users ask for is checked, and turned into what kernels know."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop._torch.autocast import autocasts
from tensorloop.attention.checks import Facts, autocast, check_parts
from tensorloop.attention.past import attend_past
from tensorloop.attention.reading import read_slots
from tensorloop.kernels.sight import Sight
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import length_of, store_of


def attend(q: Tensor, k: TensorArray, v: TensorArray, sight: Sight) -> Any:
    """The output for q (*batch, heads, D) or (*batch, t, heads, D); NotImplemented for a step without rules, or slots.

    `sight`: numbers checked, `first`, bias and sinks as they came.
    """
    store = store_of(k)
    plain = sight.plain
    if plain and store is not None:
        out = store.attend(q, k, v, sight)  # maybe without a copy of what is seen
        if out is not NotImplemented:
            return out
    batch, new = _check(q, k, v)
    chunk = q.dim() == len(batch) + 3
    if sight.causal and not chunk:
        raise WrongValue("causal=True with TensorArrays: one step sees all slots; slice them to see fewer")
    shape = (*batch, q.shape[-2], new, length_of(k)) if chunk else (*batch, q.shape[-2], length_of(k))
    sight = read_slots(sight, batch, shape, q)
    if not chunk and ((plain and not _few_launches(q)) or not length_of(k)):
        return NotImplemented
    if store is not None and not chunk:
        out = store.attend(q, k, v, sight)
        if out is not NotImplemented:
            return out
    start = sight.start(length_of(k), new)
    queries = autocast(q).reshape(batch.numel(), new, *q.shape[-2:])
    out = attend_past(queries, k, v, _as_rows(sight, batch, start), start)
    return out.reshape(*q.shape[:-1], out.shape[-1])


def _as_rows(sight: Sight, batch: torch.Size, start: int) -> Sight:
    """The sight of slots from `start` on, with the dims of the batch flattened to rows."""
    first, bias, dims = sight.first, sight.bias, len(batch)
    if first is not None:
        sight = sight._replace(first=first.expand(batch).reshape(batch.numel()) - start)
    if bias is None:
        return sight
    alike = all(n == 1 for n in bias.shape[:dims])
    bias = bias if alike else bias.expand(*batch, *bias.shape[dims:])
    bias = bias.reshape(1 if alike else batch.numel(), *bias.shape[dims:])[..., start:]
    return sight._replace(bias=bias.unsqueeze(2) if bias.dim() == 3 else bias)


def _few_launches(q: Tensor) -> bool:
    """Whether a step without rules is best computed where arrays are read and written, in few launches."""
    return autocast(q).dtype in (torch.float32, torch.float64) and q.device.type != "cpu"


def _check(q: Tensor, k: TensorArray, v: TensorArray) -> tuple[torch.Size, int]:
    """The batch dims and the number of queries of each."""
    if length_of(k) != length_of(v):
        raise WrongValue(f"k has {arguments.slots(length_of(k))}, v has {length_of(v)}; each key needs a value")
    if q.dim() < 2:
        raise WrongValue(f"q must be (*batch, heads, D) or (*batch, t, heads, D), got {tuple(q.shape)}")
    shapes = [x.element_shape for x in (k, v)]
    if None in shapes or any(None in (shape or ()) for shape in shapes):
        raise WrongValue(f"the array is empty and its element shape is {shapes[0]}; write to it first")
    chunk = q.dim() == len(shapes[0] or ()) + 1
    batch = q.shape[: -3 if chunk else -2]
    for shape, part in zip(shapes, "kv", strict=True):
        if len(shape or ()) < 2 or (shape or ())[:-2] != batch:
            raise WrongValue(
                f"the elements of {part} must be (*batch, heads, D) with the batch dims of q, got {tuple(shape or ())} "
                f"for q {tuple(q.shape)}"
            )
    new = q.shape[-3] if chunk else 1
    if chunk and new > length_of(k):
        raise WrongValue(f"q has {new} tokens, whose own slots are the last, but k has {arguments.slots(length_of(k))}")
    check_parts([_facts(x, q, shape) for x, shape in zip((q, k, v), (q.shape, *shapes), strict=True)])
    return batch, new


def _facts(x: Any, q: Tensor, shape: Any) -> Facts:
    """Returns shape, dtype and device of q, k or v as `attention` sees it, after autocast."""
    dtype = x.dtype or q.dtype
    if dtype is not torch.float64 and dtype.is_floating_point and autocasts(q):
        dtype = torch.get_autocast_dtype(q.device.type)
    return Facts(shape, dtype, x.device or q.device)
