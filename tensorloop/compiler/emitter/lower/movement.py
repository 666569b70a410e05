"""Operations that move elements: views, concatenation, padding, indexing."""

from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.compiler.emitter.ir.arrays import Array
from tensorloop.compiler.emitter.lower.lowering import Call
from tensorloop.compiler.emitter.lower.pointwise import HANDLERS, handles
from tensorloop.compiler.lengths import Length
from tensorloop.compiler.step import Unsupported

aten = torch.ops.aten
VIEWS = (
    "view", "_unsafe_view", "permute", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "unbind", "diagonal", "unfold", "movedim", "swapaxes", "chunk", "narrow",
    "unsafe_split", "unsafe_split_with_sizes", "view_as", "expand_as", "mT", "matrix_H", "mH", "adjoint",
)  # fmt: skip


def _view(call: Call, x: Array, *args: Any, **kwargs: Any) -> Any:
    args = tuple(torch.empty(a.shape, device="meta") if isinstance(a, Array) else a for a in args)
    target = call.node.target
    name = target._schema.name.split("::")[1]  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    if name in ("view", "_unsafe_view"):
        if any(isinstance(a, torch.dtype) for a in args):
            raise Unsupported("bits read as another dtype")
        return call.low.reshape(x, call.shape)
    made = call.low.view(x, target, *args, **kwargs)  # pyright: ignore[reportArgumentType]
    return made


HANDLERS.update(dict.fromkeys(VIEWS, _view))


@handles("reshape", "flatten", "unflatten", "_reshape_alias", "ravel", "reshape_as")
def reshape(call: Call, x: Array, *args: Any, **kwargs: Any) -> Array:
    """The same elements in the result's shape."""
    return call.low.reshape(x, call.shape)


@handles("getitem")
def getitem(call: Call, values: Sequence[Any], index: int) -> Any:
    """One of a tuple."""
    return values[index]


@handles("cat", "concat", "concatenate")
def cat(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Each written into its part."""
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


@handles("stack")
def stack(call: Call, tensors: Sequence[Array], dim: int = 0) -> Array:
    """Each written into its slice."""
    low, out, piece = call.low, call.low.new(call.shape, call.dtype), object()
    for n, one in enumerate(tensors):
        part = out.view(torch.select, dim, n)
        assert isinstance(part, Array)
        low.copy(one, part, piece)
    return out


@handles("flip")
def flip(call: Call, x: Array, dims: Sequence[int]) -> Array:
    """Read from the other end: strides are negative."""
    return x.flip([dim % len(x.shape) for dim in dims])


@handles("repeat")
def repeat(call: Call, x: Array, repeats: Sequence[int]) -> Array:
    """The same elements again and again."""
    low, missing = call.low, len(repeats) - len(x.shape)
    shape, strides = (1,) * missing + x.shape, (0,) * missing + x.strides
    pairs = [(times, size) for times, size in zip(repeats, shape, strict=True)]
    wide = Array(
        x.buffer,
        tuple(one for pair in pairs for one in pair),
        tuple(one for stride in strides for one in (0, stride)),
        x.offset,
    )
    return low.reshape(low.copy(wide, low.new(wide.shape, x.dtype)), call.shape)


@handles("roll")
def roll(call: Call, x: Array, shifts: Any, dims: Any = ()) -> Array:
    """Two parts change places, dim after dim."""
    shifts, dims = [[v] if isinstance(v, int) else list(v) for v in (shifts, dims)]
    low, made = call.low, x if dims else call.low.reshape(x, (x.numel,))
    for shift, dim in zip(shifts, dims or [0], strict=True):
        dim, size = dim % max(1, len(made.shape)), made.shape[dim]
        cut = shift % size if size else 0
        if cut:
            out, piece = low.new(made.shape, made.dtype), object()
            for source, start, length in ((0, cut, size - cut), (size - cut, 0, cut)):
                _part(low, made, dim, source, length, out, start, piece)
            made = out
    return made if tuple(made.shape) == call.shape else low.reshape(made, call.shape)


def _part(low: Any, x: Array, dim: int, at: int, length: int, out: Array, start: int, piece: object) -> None:
    if length:
        strides = x.strides
        source = Array(x.buffer, (*x.shape[:dim], length, *x.shape[dim + 1 :]), strides, x.offset + at * strides[dim])
        shape = (*out.shape[:dim], length, *out.shape[dim + 1 :])
        low.copy(source, Array(out.buffer, shape, out.strides, out.offset + start * out.strides[dim]), piece)


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
    """A part along one dim."""
    shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    return Array(x.buffer, shape, x.strides, x.offset + start * x.strides[dim])


@handles("constant_pad_nd")
def constant_pad(call: Call, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """A frame of one number; a negative width cuts."""
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


@handles("slice_scatter", "select_scatter", "diagonal_scatter")
def slice_scatter(call: Call, x: Array, source: Array, *args: Any, **kwargs: Any) -> Array:
    """A copy with a slice replaced."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    name = str(call.node.target)
    views = {"slice": aten.slice.Tensor, "select": aten.select.int, "diagonal": aten.diagonal.default}
    view = views[name[5:].split("_scatter")[0]]
    part = out.view(view, *args, **kwargs)
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


@handles("select_backward")
def select_backward(call: Call, grad: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    """Zero but for one slice."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    dim, index = dim % len(sizes), index % sizes[dim]
    slot = box(out, dim, index, index + 1)
    shape = (*grad.shape[:dim], 1, *grad.shape[dim:])
    source = Array(grad.buffer, shape, (*grad.strides[:dim], 0, *grad.strides[dim:]), grad.offset)
    _around(low, low.number(0, call.dtype).expand(out.shape), out, slot, source)
    return out


@handles("slice_backward")
def slice_backward(call: Call, grad: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    """Zero but for some slices."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    part = out.view(aten.slice.Tensor, dim, start, end, step)
    assert isinstance(part, Array)
    _around(low, low.number(0, call.dtype).expand(out.shape), out, part, grad)
    return out


@handles(
    "full",
    "full_like",
    "new_full",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "scalar_tensor",
)
def full(call: Call, *args: Any, **kwargs: Any) -> Array:
    """One number everywhere, without memory."""
    name = str(call.node.target)[5:].split(".")[0]
    numbers = [a for a in (*args, kwargs.get("fill_value")) if isinstance(a, int | float | Length)]
    value = 0 if "zeros" in name else 1 if "ones" in name else numbers[-1]
    return call.low.number(value, call.dtype).expand(call.shape)


@handles("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
def empty(call: Call, *args: Any, **kwargs: Any) -> Array:
    """What nobody wrote: zero."""
    return call.low.number(0, call.dtype).expand(call.shape)


@handles("fill")
def fill(call: Call, x: Array, value: Any) -> Array:
    """A number, or a tensor of one element, everywhere."""
    return call.low.cast(
        value.expand(()) if isinstance(value, Array) else call.low.number(value, call.dtype), call.dtype
    ).expand(call.shape)


@handles("copy")
def copy(call: Call, x: Array, source: Array, *args: Any) -> Array:
    """The source in x's shape and dtype."""
    return call.low.cast(source, call.dtype).expand(call.shape)


@handles("arange", "eye", "linspace", "tril_indices", "triu_indices")
def known(call: Call, *args: Any, **kwargs: Any) -> Array:
    """Made once, by torch."""
    kwargs["device"] = "cpu"
    return call.low.constant(call.node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]
