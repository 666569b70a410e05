"""Arrays of the carry: written in place, and walked as far as they are filled.

A step's graph makes a new array with every write; here the new one is the old one's memory, and what would see the
difference is `Unsupported`. Whatever is as long as an array has that dim first in memory, so that no stride depends on
it, and products are sums over walks, whose bounds may be known when they run.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tensorloop.compiler.emitter.ir.code import Code, Index
from tensorloop.compiler.emitter.ir.kernels import (
    CallOut,
    Gather,
    Kernel,
    Matmul,
    Matrix,
    Point,
    Reduce,
    Running,
    Scatter,
)
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, broadcast, dense
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.lengths import Length, Size, grows, versions
from tensorloop.compiler.operations import aten, is_view
from tensorloop.compiler.step import Step, Unsupported

ARRAYS = ("array", "prefix")
LINE = 64


@dataclasses.dataclass(frozen=True)
class Pending:
    """Zeros of an array's size and what is added to them: values, from a slot on, at indices, or (None) to all."""

    parts: tuple[tuple[int | Array | None, Array], ...]
    shape: tuple[int, ...]


# -- where such values lie


def scratch(shape: Sequence[Size], dtype: torch.dtype) -> Array:
    """Memory whose growing dim comes first."""
    check_elements(dtype)
    first = _growing_dim(shape)
    order = [first, *(d for d in range(len(shape)) if d != first)]  # so no stride is a multiple of its size
    numel = math.prod(shape)  # Unsupported where two dims follow lengths
    inner = dense([shape[d] for d in order])
    strides: list[Size] = [0] * len(shape)
    for d, stride in zip(order, inner, strict=True):
        strides[d] = stride
    return Array(Region("scratch", 0, numel, dtype), tuple(shape), tuple(strides))


def check_elements(dtype: torch.dtype) -> None:
    """Raises for elements of which walks of unknown length were not tried on every width of vectors."""
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        raise Unsupported(f"an array of {dtype}")


def _growing_dim(shape: Sequence[Size]) -> int:
    return next(d for d, size in enumerate(shape) if isinstance(size, Length))


def ordered(kernel: Kernel) -> Kernel:
    """A walk with the growing dim outermost, so that those of one size share a nest."""
    if not any(grows(array.shape) for array in (*kernel.reads(), *kernel.writes())):
        return kernel
    if isinstance(kernel, Running | Scatter):  # they go line by line, whatever is outermost
        return kernel
    if isinstance(kernel, Matmul | CallOut | Matrix):
        raise Unsupported(f"{type(kernel).__name__} over a size that changes from step to step")
    if not grows(kernel.space):
        return kernel
    first = _growing_dim(kernel.space)
    order = [first, *(d for d in range(len(kernel.space)) if d != first)]

    def turned(array: Array) -> Array:
        shape, strides = (tuple(x[d] for d in order) for x in (array.shape, array.strides))
        return Array(array.buffer, shape, strides, array.offset)

    if isinstance(kernel, Point):
        return Point(kernel.name, kernel.function, tuple(map(turned, kernel.ins)), turned(kernel.out), kernel.piece)
    if isinstance(kernel, Gather):
        chosen = tuple(map(turned, kernel.indices))
        return Gather(
            turned(kernel.source), chosen, kernel.steps, kernel.sizes, turned(kernel.out), kernel.piece, kernel.wraps
        )
    over = tuple(sorted(order.index(d) for d in kernel.over))
    return Reduce(kernel.how, turned(kernel.array), over, turned(kernel.out))


# -- lengths when the loop runs


def at_start(code: Code, place: int, count: int) -> list[str]:
    """Reads from the table the lengths before the first step (named %start) and the greatest ones, which it gives."""

    def read(k: int, name: str) -> str:
        code.line(f"{name}.p = getelementptr i8, ptr %table, i64 {8 * (place + k)}")
        code.line(f"{name} = load i64, ptr {name}.p, align 8")
        return name

    for k in range(count):
        read(k, f"%start.{k}")
    return [read(count + k, f"%most.{k}") for k in range(count)]


def at_step(code: Code, growth: Sequence[int]) -> None:
    """The lengths at this step."""
    code.lengths = []
    # The step's number and not the turn before's length: with it every turn is the same code, forward and backward.
    for k, more in enumerate(growth):
        name = f"%start.{k}"
        if more:
            name = code.op(f"add i64 {name}, {code.times('%turn', more)}", "i64").text
        code.lengths.append(name)


def line(code: Code, most: Sequence[str], buffer: Region) -> Index:
    """The bytes of a buffer where arrays are as long as they get, in whole lines."""
    code.lengths = list(most)
    padded = code.add(code.sized(buffer.bytes), LINE - 1)
    return code.op(f"and i64 {padded}, {-LINE}", "i64").text


# -- operations


def lower(call: Any, handlers: Any, args: Any, kwargs: Any) -> Any:
    """The value of a node that is of such a size, or is made from what is."""
    own = _OWN.get(call.name)
    made = None if own is None else own(call, *args, **kwargs)
    if made is not None:
        return made
    args = [_whole(call.low, x) if isinstance(x, Pending) else x for x in args]
    if call.name not in handlers:
        raise Unsupported("not known for sizes that change from step to step")
    return handlers[call.name](call, *args, **kwargs)


def apart(low: Any, value: Any) -> Any:
    """A slot of an array as a copy: the array may be written to before somebody looks."""
    if isinstance(value, Array) and value.buffer.kind in ARRAYS and not grows(value.shape):
        return low.copy(value, low.new(value.shape, value.dtype))
    return value


def following(value: Any, array: Array, node: fx.Node) -> Array:
    """The array after the step: the same memory."""
    if not _is_version(value) or value.buffer is not array.buffer:
        raise Unsupported("an array in the carry that is replaced by another value", node)
    return value


def _is_version(x: Any) -> bool:
    """Whether a value is an array of the carry, from its first slot on."""
    return (
        isinstance(x, Array) and x.buffer.kind == "array" and x.offset == 0 and x.strides == dense(x.shape, x.strides)
    )


def written(step: Step) -> set[fx.Node]:
    """The nodes that an array of the carry goes through in a step, up to the next carry: all are one memory."""
    pairs = zip(step.carry, step.next_carry, strict=True)
    return {n for array, last in pairs if grows(array) for n in versions(array, last)}


def scheduled(step: Step) -> list[fx.Node]:
    """The nodes in an order in which all that sees an array as it was comes before what writes to its slots."""
    nodes = list(step.graph.nodes)
    order, arrays = {n: i for i, n in enumerate(nodes)}, written(step)
    waits = {n: set(n.all_input_nodes) for n in nodes}
    # All versions of an array are one memory: a version is made when nobody will look at the one before any more.
    for n in arrays:
        if n.op == "call_function" and n.target is not aten.cat.default:  # slots behind the end disturb nobody
            for old in arrays.intersection(n.all_input_nodes):
                waits[n] |= _seeing(old, n)
    followers: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for n, before in waits.items():
        for one in before:
            followers[one].append(n)
    ready = [order[n] for n in nodes if not waits[n]]
    found: list[fx.Node] = []
    while ready:
        n = nodes[heapq.heappop(ready)]
        found.append(n)
        for other in followers[n]:
            waits[other].discard(n)
            if not waits[other]:
                heapq.heappush(ready, order[other])
    if len(found) < len(nodes):  # a circle: who looks at the old version is needed for what is written over it
        raise Unsupported("an array that is read, as it was before, by what is written to it later")
    return found


def _seeing(old: fx.Node, writer: fx.Node) -> set[fx.Node]:
    """The nodes that read an array as it was before `writer` writes to it; a slot is copied, a longer part is not."""
    found, left = set[fx.Node](), [old]
    while left:
        for user in left.pop().users:
            if user is writer or user in found or user.op == "output":
                continue
            found.add(user)
            if is_view(user) and grows(user):
                left.append(user)
    return found


def _cat(call: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    """An append: what follows is written into slots behind the array."""
    first, low = tensors[0], call.low
    if call.node not in low.written or not _is_version(first):
        return None
    if any(grows(x.shape) for x in tensors[1:]):
        raise Unsupported("an array appended to another")
    out = Array(first.buffer, call.shape, first.strides)
    at = first.shape[0]
    for x in tensors[1:]:
        low.copy(x, _slots(out, at, x.shape[0]))
        at += x.shape[0]
    return out


def _slots(array: Array, start: int, count: int) -> Array:
    shape = (count, *array.shape[1:])
    return Array(array.buffer, shape, array.strides, array.offset + start * array.strides[0])


def _add(call: Any, a: Any, b: Any, alpha: Any = 1) -> Any:
    """Adds to an array's gradient in place; a tensor of zeros with values in some slots is never made for it."""
    low = call.low
    if alpha != 1 or not all(isinstance(x, (Array, Pending)) for x in (a, b)):
        return None
    # A version of the array takes the other operand in place: part by part, as zeros elsewhere change nothing.
    for x, y, node in ((a, b, call.node.args[0]), (b, a, call.node.args[1])):
        if call.node in low.written and node in low.written and _is_version(x):
            return _with_parts(low, x, y.parts if isinstance(y, Pending) else ((None, y),))
    if not any(isinstance(x, Pending) for x in (a, b)):
        return None
    sides = [x.parts if isinstance(x, Pending) else ((None, x),) for x in (a, b)]
    return Pending((*sides[0], *sides[1]), call.shape)


def _with_parts(low: Any, x: Array, parts: Sequence[tuple[int | Array | None, Array]]) -> Array:
    """Adds parts to x in place."""
    for start, value in parts:
        if isinstance(start, Array):
            indexed(low, x, start, value, True)
            continue
        place = x if start is None else _slots(x, start, value.shape[0])
        low.compute("more", Math.add, [place, low.cast(value, x.dtype)], x.dtype, out=place)
    return x


def _whole(low: Any, x: Pending) -> Array:
    """Zeros of an array's size with what is added to them, for who needs the tensor."""
    dtype = x.parts[0][1].dtype
    return _with_parts(low, low.copy(low.number(0, dtype).expand(x.shape), low.new(x.shape, dtype)), x.parts)


def _pad(call: Any, x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Puts zeros around some slots."""
    if value != 0 or not isinstance(x, Array) or any(pad[: 2 * (len(x.shape) - 1)]) or len(pad) < 2 * len(x.shape):
        return None
    before, after = pad[-2:]
    return Pending(((before, x),), call.shape) if grows(call.shape) and before >= 0 and after >= 0 else None


def _put(call: Any, x: Any, value: Any, dim: int = 0, index: int = 0) -> Any:
    """Writes one slot in place."""
    if dim or call.node not in call.low.written or not _is_version(x):
        return None
    place = _slots(x, index + x.shape[0] if index < 0 else index, 1)
    call.low.copy(value, Array(place.buffer, place.shape[1:], place.strides[1:], place.offset))
    return x


def _put_at(call: Any, x: Any, indices: Sequence[Any], value: Any, accumulate: bool = False) -> Any:
    """Slots written in place at indices; values added to zeros are left to who adds those to an array."""
    if len(indices) != 1 or not isinstance(x, Array) or not isinstance(value, Array):
        return None
    if call.node in call.low.written and _is_version(x):  # `scheduled` has put all who see the old slots before this
        indexed(call.low, x, indices[0], value, accumulate)
        return x
    zeros = x.buffer.value == 0 and grows(call.shape)
    return Pending(((indices[0], value),), call.shape) if zeros and accumulate else None


def _of_embedding(call: Any, grad: Array, index: Array, rows: int, padding: int, by_frequency: bool) -> Array | None:
    """The gradient of a table whose rows were taken at so many places."""
    if padding >= 0 or by_frequency:
        return None
    out = call.low.copy(call.low.number(0, grad.dtype).expand(call.shape), call.low.new(call.shape, grad.dtype))
    indexed(call.low, out, index, grad, True)
    return out


def indexed(low: Any, out: Array, index: Array, value: Array, add: bool) -> None:
    """Writes slots, or adds to them, in place."""
    if not index.numel or not value.numel:
        return
    value = low.cast(value, out.dtype).expand((*index.shape, *out.shape[1:]))
    source, one = low.reshape(low.copy(value, low.new(value.shape, value.dtype)), (index.numel, *out.shape[1:])), index
    one = low.reshape(low.dense(one), (index.numel,))
    strides = (one.strides[0], *[0] * (len(out.shape) - 1))
    low.kernels.append(
        Scatter(Array(one.buffer, source.shape, strides, one.offset), source, out, 0, "sum" if add else "", True)
    )


def _arange(call: Any, *ends: Any, **kwargs: Any) -> Array:
    """Numbers as many as an array has slots: each is its own place."""
    start, step = ends[0] if len(ends) > 1 else 0, ends[2] if len(ends) > 2 else 1
    if not all(isinstance(x, int) or (isinstance(x, Length) and not x.real) for x in (start, step)):
        raise Unsupported("floats as many as an array has slots")
    return call.low.cast(Array(Region("value", 0, 1, torch.int64), call.shape, (step,), start), call.dtype)


_OWN = {
    "arange": _arange,
    "index_put": _put_at,
    "embedding_dense_backward": _of_embedding,
    "cat": _cat,
    "add": _add,
    "constant_pad_nd": _pad,
    "select_scatter": _put,
}


def product(low: Any, a: Array, b: Array) -> Array:
    """Multiplies (*batch, M, K) by (*batch, K, N), as the sum of one walk."""
    turned = Array(
        b.buffer, (*b.shape[:-2], b.shape[-1], b.shape[-2]), (*b.strides[:-2], b.strides[-1], b.strides[-2]), b.offset
    )
    left = Array(a.buffer, (*a.shape[:-1], 1, a.shape[-1]), (*a.strides[:-1], 0, a.strides[-1]), a.offset)
    right = Array(
        turned.buffer,
        (*turned.shape[:-2], 1, *turned.shape[-2:]),
        (*turned.strides[:-2], 0, *turned.strides[-2:]),
        turned.offset,
    )
    shape = broadcast(left.shape, right.shape)
    made = low.compute("mul", Math.mul, [left, right], a.dtype, shape)
    return low.reduce("sum", made, [len(shape) - 1], False)
