"""Operations that move elements: views, concatenation, padding, indexing."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tensorloop.loop.compiled.emitter.arrays import Array, dense
from tensorloop.loop.compiled.emitter.kernels import Running, Scatter
from tensorloop.loop.compiled.emitter.lowering import Call
from tensorloop.loop.compiled.emitter.pointwise import HANDLERS, handles
from tensorloop.loop.compiled.emitter.vector_math import Math
from tensorloop.loop.compiled.recurrence import Unsupported

aten = torch.ops.aten
VIEWS = (
    "view", "_unsafe_view", "permute", "t", "transpose", "expand", "unsqueeze", "squeeze", "slice", "select",
    "split", "split_with_sizes", "unbind", "diagonal", "unfold", "movedim", "swapaxes", "chunk", "narrow", "numpy_T",
    "unsafe_split", "unsafe_split_with_sizes", "view_as", "expand_as", "mT", "matrix_H", "mH", "adjoint",
)  # fmt: skip
COPIED_VIEWS = {f"{name}_copy" for name in VIEWS}


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


@handles("as_strided")
def as_strided(call: Call, x: Array, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Array:
    """Of a tensor that lies here as it does in torch."""
    base = call.node.args[0].meta["val"]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    if base.storage_offset() or tuple(base.stride()) != dense(base.shape, base.stride()):
        raise Unsupported("of a view")
    whole = call.low.dense(x)
    return Array(whole.buffer, tuple(size), tuple(stride), whole.offset + (offset or 0))


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


def _frame(low: Any, out: Array, inner: Sequence[tuple[int, int]], fill: Any, piece: object) -> Array:
    """Fills (or copies, where `fill` is an array of out's shape) around a box; gives the box's view of `out`."""
    for dim, (start, stop) in enumerate(inner):
        size = out.shape[dim]
        for first, last in ((0, start), (stop, size)):
            if last > first:
                slab = _box(out, dim, first, last)
                low.copy(_box(fill, dim, first, last), slab, piece)
        out, fill = _box(out, dim, start, stop), _box(fill, dim, start, stop)
    return out


def _box(x: Array, dim: int, start: int, stop: int) -> Array:
    shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
    return Array(x.buffer, shape, x.strides, x.offset + start * x.strides[dim])


@handles("constant_pad_nd")
def constant_pad(call: Call, x: Array, pad: Sequence[int], value: Any = 0) -> Array:
    """A frame of one number; a negative width cuts."""
    low, rank, inner = call.low, len(x.shape), []
    for dim in range(rank):
        n = rank - 1 - dim
        before, after = (pad[2 * n], pad[2 * n + 1]) if 2 * n < len(pad) else (0, 0)
        x = _box(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
        inner.append((max(0, before), max(0, before) + x.shape[dim]))
    out, piece = low.new(call.shape, call.dtype), object()
    box = _frame(low, out, inner, low.number(value, call.dtype).expand(out.shape), piece)
    low.copy(x, box, piece)
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
        low.copy(source, _frame(low, out, inner, x, piece), piece)
    else:
        low.copy(x, out)
        low.copy(source.expand(shape), part)


@handles("select_backward")
def select_backward(call: Call, grad: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    """Zero but for one slice."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    dim, index = dim % len(sizes), index % sizes[dim]
    box = _box(out, dim, index, index + 1)
    shape = (*grad.shape[:dim], 1, *grad.shape[dim:])
    source = Array(grad.buffer, shape, (*grad.strides[:dim], 0, *grad.strides[dim:]), grad.offset)
    _around(low, low.number(0, call.dtype).expand(out.shape), out, box, source)
    return out


@handles("slice_backward")
def slice_backward(call: Call, grad: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    """Zero but for some slices."""
    low, out = call.low, call.low.new(call.shape, call.dtype)
    part = out.view(aten.slice.Tensor, dim, start, end, step)
    assert isinstance(part, Array)
    _around(low, low.number(0, call.dtype).expand(out.shape), out, part, grad)
    return out


@handles("full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "scalar_tensor")
def full(call: Call, *args: Any, **kwargs: Any) -> Array:
    """One number everywhere, without memory."""
    name = str(call.node.target)[5:].split(".")[0]
    numbers = [a for a in (*args, kwargs.get("fill_value")) if isinstance(a, int | float | bool)]
    value = 0 if "zeros" in name else 1 if "ones" in name else numbers[-1]
    return call.low.number(value, call.dtype).expand(call.shape)


@handles("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
def empty(call: Call, *args: Any, **kwargs: Any) -> Array:
    """What nobody wrote: zero."""
    return call.low.number(0, call.dtype).expand(call.shape)


@handles("fill")
def fill(call: Call, x: Array, value: Any) -> Array:
    """A number, or a tensor of one element, everywhere."""
    return call.low.cast(value.expand(()) if isinstance(value, Array) else call.low.number(value, call.dtype), call.dtype).expand(call.shape)


@handles("copy", "expand_copy")
def copy(call: Call, x: Array, source: Array, *args: Any) -> Array:
    """The source in x's shape and dtype."""
    return call.low.cast(source, call.dtype).expand(call.shape)


@handles("arange", "eye", "linspace", "tril_indices", "triu_indices")
def known(call: Call, *args: Any, **kwargs: Any) -> Array:
    """Made once, by torch."""
    kwargs["device"] = "cpu"
    return call.low.constant(call.node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]


@handles("index_select", "embedding")
def index_select(call: Call, x: Array, *args: Any) -> Array:
    """Slices chosen by a vector of indices, or rows by any tensor of them."""
    if "embedding" in str(call.node.target):
        dim, index = 0, args[0]
    else:
        dim, index = args[0] % max(1, len(x.shape)), args[1]
    return _index(call, x, {dim: index}, index.shape, dim)


def _index(call: Call, x: Array, chosen: dict[int, Array], shape: Sequence[int], at: int) -> Array:
    """x[chosen dims]: the dims of the indices, broadcast to `shape`, stand at `at` in the result."""
    rest = [dim for dim in range(len(x.shape)) if dim not in chosen]
    before, after = [d for d in rest if d < at], [d for d in rest if d >= at]
    full = (*(x.shape[d] for d in before), *shape, *(x.shape[d] for d in after))
    strides = (*(x.strides[d] for d in before), *((0,) * len(shape)), *(x.strides[d] for d in after))
    free = Array(x.buffer, full, strides, x.offset)
    indices = []
    for index in chosen.values():
        wide = index.expand(shape)
        ones = (0,) * len(before), (0,) * len(after)
        indices.append(Array(wide.buffer, full, (*ones[0], *wide.strides, *ones[1]), wide.offset))
    return call.low.gather(x, list(chosen), indices, full, free)


@handles("index", "_unsafe_index")
def index(call: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    """x[i, :, j]: tensors of integers, together."""
    chosen = {dim: one for dim, one in enumerate(indices) if one is not None}
    if any(one.dtype in (torch.bool, torch.uint8) for one in chosen.values()):
        raise Unsupported("with a mask: how many there are is not known before")
    dims = list(chosen)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    shape = torch.broadcast_shapes(*(one.shape for one in chosen.values()))
    return _index(call, x, chosen, shape, dims[0] if adjacent else 0)


@handles("gather")
def gather(call: Call, x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    """out[i, j] = x[i, index[i, j]]."""
    if not x.shape:
        return x
    dim %= len(x.shape)
    strides = tuple(0 if n == dim else stride for n, stride in enumerate(x.strides))
    return call.low.gather(x, [dim], [index], index.shape, Array(x.buffer, index.shape, strides, x.offset))


@handles("scatter", "scatter_add", "index_add", "index_copy")
def scatter(call: Call, x: Array, dim: int, index: Array, source: Any, reduce: str | None = None, alpha: Any = 1) -> Array:
    """A copy of x, then element after element."""
    name = str(call.node.target)
    if reduce not in (None, "add") or alpha != 1 or not x.shape:
        raise Unsupported(f"reduce={reduce}, alpha={alpha}, of {len(x.shape)} dims")
    low, dim = call.low, dim % len(x.shape)
    out = low.copy(x, low.new(x.shape, x.dtype))
    if isinstance(source, Array) and "index_" in name:
        strides = tuple(index.strides[0] if n == dim and index.shape else 0 for n in range(len(x.shape)))
        index = Array(index.buffer, source.shape, strides, index.offset)
    shape = index.shape
    source = low.cast(low.array(source, x.dtype), x.dtype)
    taken = Array(source.buffer, shape, source.strides if source.shape else (0,) * len(shape), source.offset)
    if out.numel and index.numel:
        low.kernels.append(Scatter(index, taken, out, dim, "add" in name or reduce == "add"))
    return out


@handles("index_put", "_unsafe_index_put")
def index_put(call: Call, x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """x[:, i] = values with one tensor of integers."""
    chosen = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if len(chosen) != 1 or chosen[0][1].dtype == torch.bool:
        raise Unsupported("with more than one tensor of indices, or a mask")
    low, (dim, index) = call.low, chosen[0]
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    flat = (*x.shape[:dim], index.numel, *x.shape[dim + 1 :])
    source = low.reshape(low.cast(values, x.dtype).expand(shape), flat)
    one = low.reshape(index, (index.numel,))
    wide = Array(one.buffer, flat, tuple(one.strides[0] if n == dim else 0 for n in range(len(flat))), one.offset)
    out = low.copy(x, low.new(x.shape, x.dtype))
    if out.numel and wide.numel:
        low.kernels.append(Scatter(wide, source, out, dim, accumulate))
    return out


@handles("cumsum", "cumprod")
def running(call: Call, x: Array, dim: int, dtype: Any = None) -> Array:
    """Sums or products of all elements so far."""
    low = call.low
    x = low.cast(x, call.dtype)
    if not x.shape:
        return x
    out = low.new(call.shape, call.dtype)
    if call.dtype in (torch.bfloat16, torch.float16):
        raise Unsupported(f"of {call.dtype}")
    if out.numel:
        name = "sum" if "cumsum" in str(call.node.target) else "prod"
        low.kernels.append(Running(name, x, dim % len(x.shape), out))
    return out


@handles("convolution")
def convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """What the kernel sees at every place, as rows of a matrix, times the kernel."""
    if transposed or groups != 1:
        raise Unsupported("transposed, or in groups")
    low, rank = call.low, len(stride)
    wide = [each for size in reversed(padding) for each in (size, size)]
    shape = (*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], padding, strict=True)))
    if any(padding):
        out, piece = low.new(shape, x.dtype), object()
        inner = [(0, n) for n in x.shape[:2]] + [(p, p + n) for n, p in zip(x.shape[2:], padding, strict=True)]
        assert len(wide) == 2 * rank
        low.copy(x, _frame(low, out, inner, low.number(0, x.dtype).expand(shape), piece), piece)
        x = out
    steps = x.strides[2:]
    seen = Array(
        x.buffer,
        (x.shape[0], *call.shape[2:], x.shape[1], *weight.shape[2:]),
        (
            x.strides[0],
            *(s * each for s, each in zip(steps, stride, strict=True)),
            x.strides[1],
            *(s * each for s, each in zip(steps, dilation, strict=True)),
        ),
        x.offset,
    )
    places, depth = math.prod(call.shape[2:]), weight.numel // max(1, weight.shape[0])
    rows = low.reshape(low.copy(seen, low.new(seen.shape, x.dtype)), (x.shape[0] * places, depth))
    flat = low.reshape(weight, (weight.shape[0], depth)).view(torch.t)
    assert isinstance(flat, Array)
    made = low.matmul(rows, flat)
    if bias is not None:
        made = low.compute("add", Math.add, (made, bias), call.dtype)
    made = low.reshape(made, (x.shape[0], places, weight.shape[0])).view(torch.transpose, 1, 2)
    assert isinstance(made, Array)
    return low.reshape(made, call.shape)
