"""Operations that take elements together: sums, the largest and the smallest, products of matrices."""

from typing import Any

import torch

from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.lower.lowering import Call, computed_in
from tensorloop.compiler.emitter.lower.pointwise import handles


def _dims(x: Array, dim: Any) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(len(x.shape)))
    return [dim] if isinstance(dim, int) else list(dim)


@handles("sum", "amax", "amin", "prod", "any", "all")
def reduce(call: Call, x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """Takes the elements along dims together, halves in float32."""
    low, how = call.low, call.name
    if how in ("any", "all"):
        x = low.cast(x, torch.bool)
    elif how in ("sum", "prod"):
        x = low.cast(x, computed_in(call.dtype))
    made = low.reduce(how, x, _dims(x, dim), keepdim, computed_in(call.dtype))
    return low.cast(made, call.dtype)


@handles("argmax", "argmin")
def argmax(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The first place of the largest or smallest, or of the first NaN."""
    low, x = call.low, call.low.cast(x, computed_in(x.dtype))
    if dim is not None:
        return low.reduce(call.name, x, [dim], keepdim)
    place = low.reduce(call.name, low.reshape(x, (x.numel,)), [0], False)
    return low.reshape(place, call.shape)


@handles("mm", "bmm")
def matmul(call: Call, a: Array, b: Array) -> Array:
    """A product of matrices, or of batches of them."""
    return call.low.matmul(a, b)
