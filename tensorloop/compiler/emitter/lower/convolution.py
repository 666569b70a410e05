"""Convolutions as products of matrices."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tensorloop.compiler.emitter.ir.strided_arrays import Array
from tensorloop.compiler.emitter.ir.vector_math import Math
from tensorloop.compiler.emitter.lower.lowering import Call, Lowering
from tensorloop.compiler.emitter.lower.movement import box, framed
from tensorloop.compiler.emitter.lower.pointwise import handles
from tensorloop.compiler.step import Unsupported


class _Windows(NamedTuple):
    """The windows of a convolution: its sizes, and where a kernel sees the padded input."""

    groups: int
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    places: tuple[int, ...]
    kernel: tuple[int, ...]

    def over(self, x: Array) -> Array:
        """(groups, N, *places, channels of a group, *kernel) of a padded (N, C, *sizes)."""
        channels, steps = x.shape[1] // self.groups, x.strides[2:]
        shape = (self.groups, x.shape[0], *self.places, channels, *self.kernel)
        strides = (
            channels * x.strides[1],
            x.strides[0],
            *(s * each for s, each in zip(steps, self.stride, strict=True)),
            x.strides[1],
            *(s * each for s, each in zip(steps, self.dilation, strict=True)),
        )
        return Array(x.buffer, shape, strides, x.offset)

    def padded(self, low: Lowering, x: Array) -> Array:
        """Returns the input with zeros around it."""
        if not any(self.padding):
            return low.dense(x)
        shape = (*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], self.padding, strict=True)))
        out, piece = low.new(shape, x.dtype), object()
        inner = [(0, n) for n in x.shape[:2]] + [(p, p + n) for n, p in zip(x.shape[2:], self.padding, strict=True)]
        low.copy(x, framed(low, out, inner, low.number(0, x.dtype).expand(shape), piece), piece)
        return out

    def rows(self, low: Lowering, x: Array) -> Array:
        """(groups, N * places, what a window holds)."""
        seen = self.over(self.padded(low, x))
        made = low.copy(seen, low.new(seen.shape, x.dtype))
        depth = seen.shape[2 + len(self.places)] * math.prod(self.kernel)
        return low.reshape(made, (self.groups, x.shape[0] * math.prod(self.places), depth))


def _windows(options: Sequence[Any], weight: Array, places: Sequence[int]) -> _Windows:
    stride, padding, dilation, transposed, _, groups = options
    if transposed:
        raise Unsupported("transposed")
    rank = len(weight.shape) - 2
    stride, padding, dilation = (tuple(one) * (rank if len(one) == 1 else 1) for one in (stride, padding, dilation))
    return _Windows(groups, stride, padding, dilation, tuple(places), weight.shape[2:])


def _turned(low: Lowering, x: Array, *dims: int) -> Array:
    made = low.view(x, torch.permute, dims)
    assert isinstance(made, Array)
    return made


@handles("convolution")
def convolution(call: Call, x: Array, weight: Array, bias: Array | None, *options: Any) -> Array:
    """Multiplies by the kernel a matrix whose rows are what the kernel sees at each place."""
    low, windows = call.low, _windows(options, weight, call.shape[2:])
    groups, rows = windows.groups, windows.rows(low, x)
    flat = low.reshape(weight, (groups, weight.shape[0] // groups, rows.shape[-1]))
    made = low.matmul(rows, _turned(low, flat, 0, 2, 1))  # (groups, N * places, channels of a group)
    count = math.prod(windows.places)
    made = _turned(low, low.reshape(made, (groups, x.shape[0], count, flat.shape[1])), 1, 0, 3, 2)
    made = low.reshape(made, call.shape)
    if bias is None:
        return made
    column = Array(
        bias.buffer,
        (bias.shape[0], *(1 for _ in windows.places)),
        (bias.strides[0], *(0 for _ in windows.places)),
        bias.offset,
    )
    return low.compute("add", Math.add, (made, column), call.dtype)


@handles("convolution_backward")
def convolution_backward(call: Call, grad: Array, x: Array, weight: Array, bias: Any, *options: Any) -> Any:
    """Gradients of the input and the kernel, as far as asked for; a bias has its own as a sum before."""
    low, windows = call.low, _windows(options[:-1], weight, grad.shape[2:])
    groups, count, wanted = windows.groups, math.prod(windows.places), options[-1]
    split = low.reshape(grad, (x.shape[0], groups, weight.shape[0] // groups, count))
    flat = low.reshape(_turned(low, split, 1, 0, 3, 2), (groups, x.shape[0] * count, weight.shape[0] // groups))
    made: list[Array | None] = [None, None, None]
    if wanted[0]:
        kernel = low.reshape(weight, (groups, flat.shape[-1], weight.numel // weight.shape[0]))
        made[0] = _put_back(low, low.matmul(flat, kernel), x, windows)
    if wanted[1]:
        made[1] = low.reshape(low.matmul(_turned(low, flat, 0, 2, 1), windows.rows(low, x)), weight.shape)
    return made


def _put_back(low: Lowering, columns: Array, x: Array, windows: _Windows) -> Array:
    """Every window's gradient added where it was read, one place of the kernel after another."""
    shape = (*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], windows.padding, strict=True)))
    total = low.copy(low.number(0, x.dtype), low.new(shape, x.dtype))
    seen, rank = windows.over(total), len(windows.places)
    parts = low.reshape(columns, seen.shape)
    for place in itertools.product(*map(range, windows.kernel)):
        target, source = (_at(one, place, len(seen.shape) - rank) for one in (seen, parts))
        low.point("total", Math.add, [target, source], x.dtype, out=target)
    for dim, pad in enumerate(windows.padding, 2):
        total = box(total, dim, pad, pad + x.shape[dim])
    return total


def _at(x: Array, place: Sequence[int], kept: int) -> Array:
    offset = x.offset + sum(n * s for n, s in zip(place, x.strides[kept:], strict=True))
    return Array(x.buffer, x.shape[:kept], x.strides[:kept], offset)
