"""Views, cat, flip, padding, writes of slices, and constants."""

from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.lower.lowering import Call
from tensorloop.compiler.emitter.lower.pointwise import handles
from tensorloop.compiler.operations import OPERATIONS, aten
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import Unsupported


@handles(*(name for name, row in OPERATIONS.items() if row.kind == "view"), "unfold")
def view(call: Call, x: Array, *args: Any, **kwargs: Any) -> Any:
    """A view: other sizes and strides of the memory that there is."""
    target: Any = call.node.target
    if target is aten.view.dtype:
        raise Unsupported("bits read as another dtype")
    if target is aten.view.default:
        return call.low.reshape(x, call.shape)
    return call.low.view(x, target, *args, **kwargs)


@handles("cat")
def cat(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Writes each tensor into its part of the result."""
    low, out, piece, start = call.low, call.low.new(call.shape, call.dtype), object(), 0
    dim %= max(1, len(call.shape))
    for one in tensors:
        if len(one.shape) == 1 and one.numel == 0:
            continue
        length = one.shape[dim]
        part = out.view(torch.narrow, dim, start, length)
        assert isinstance(part, Array)
        low.copy(one, part, piece)
        start += length
    return out


@handles("flip")
def flip(call: Call, x: Array, dims: Sequence[int]) -> Array:
    """A view from the other end: strides are negative."""
    return x.flip([dim % len(x.shape) for dim in dims])


def framed(low: Any, out: Array, inner: Sequence[tuple[int, int]], fill: Any, piece: object) -> Array:
    """Fills (or copies, where `fill` is an array of out's shape) around a box; gives the box's view of `out`."""
    for dim, (start, stop) in enumerate(inner):
        size = out.shape[dim]
        for first, last in ((0, start), (stop, size)):
            if last > first:
                slab = box(out, dim, first, last)
                low.copy(box(fill, dim, first, last), slab, piece)
        out, fill = box(out, dim, start, stop), box(fill, dim, start, stop)
    return out


def box(x: Array, dim: int, start: int, stop: int) -> Array:
    """A slice along one dim, as a view."""
    shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    return Array(x.buffer, shape, x.strides, x.offset + start * x.strides[dim])


@handles("constant_pad_nd")
def constant_pad(call: Call, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """Puts a frame of one number around a tensor; a negative width cuts it."""
    low, rank, inner = call.low, len(x.shape), []
    for dim in range(rank):
        n = rank - 1 - dim
        before, after = (pad[2 * n], pad[2 * n + 1]) if 2 * n < len(pad) else (0, 0)
        x = box(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
        inner.append((max(0, before), max(0, before) + x.shape[dim]))
    out, piece = low.new(call.shape, call.dtype), object()
    inside = framed(low, out, inner, low.number(value, call.dtype).expand(out.shape), piece)
    low.copy(x, inside, piece)
    return out


_VIEWS = {
    "slice_scatter": aten.slice.Tensor,
    "select_scatter": aten.select.int,
    "diagonal_scatter": aten.diagonal.default,
}


@handles(*_VIEWS)
def slice_scatter(call: Call, x: Array, source: Array, *args: Any, **kwargs: Any) -> Array:
    """Copies a tensor with one of its slices replaced."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    part = out.view(_VIEWS[call.name], *args, **kwargs)
    assert isinstance(part, Array)
    _around(low, x, out, part, source)
    return out


def _around(low: Any, x: Array, out: Array, part: Array, source: Array) -> None:
    """out = x but for `part`; where that is a box the two never meet, else one is written after the other."""
    if not (out.numel and part.numel):
        low.copy(x, out)
        return
    strides, shape = part.strides, part.shape
    if len(shape) == len(out.shape) and strides == out.strides:
        inner, offset = [], part.offset
        for dim in range(len(shape)):
            first = offset // out.strides[dim] if out.strides[dim] else 0
            offset -= first * out.strides[dim]
            inner.append((first, first + shape[dim]))
        piece = object()
        low.copy(source, framed(low, out, inner, x, piece), piece)
    else:
        low.copy(x, out)
        low.copy(source.expand(shape), part)


@handles("full")
def full(call: Call, size: Sequence[int], value: Any, **kwargs: Any) -> Array:
    """A number as a tensor of any size, without memory."""
    return call.low.number(value, call.dtype).expand(call.shape)


@handles("arange", "tril_indices", "triu_indices")
def known(call: Call, *args: Any, **kwargs: Any) -> Array:
    """A constant, made by torch while the step is lowered."""
    kwargs["device"] = HOST
    return call.low.constant(call.node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]
