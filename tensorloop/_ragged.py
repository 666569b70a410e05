"""Differentiable operations on ragged rows: plain tensors values (N, *F) cut into B rows by offsets (B+1,) int64.

Most of them are linear, and a linear map's gradient is another map of the same kind: pack and pad, sum and spread, a
permutation and its inverse, a cumulative sum and the one from the other end. Such a pair is a `_Pair` of kernels, and
one autograd node (`_Linear`) runs either side of it: twice differentiable, forward mode and vmap included, and no
gradient is a scatter-add. What is not linear has a node of its own, whose backward is written in these operations.

Arguments are checked by the caller: offsets[0] = 0, offsets[-1] = N, not decreasing, on the device of the values.
Under vmap only values may be batched. A map works on any trailing dims, so that a batch dim becomes one more of them.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop import _modes
from tensorloop.kernels import find


class _Pair(NamedTuple):
    """A linear map on plain tensors, and its adjoint."""

    run: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, pair: _Pair) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return pair.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.pair = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _linear(grad, _Pair(ctx.pair.adjoint, ctx.pair.run)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _linear(tangent, ctx.pair)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, pair: _Pair) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _last(_linear(x.movedim(in_dims[0], -1), pair))


def _linear(x: Tensor, pair: _Pair) -> Tensor:
    return _Linear.apply(x, pair)  # pyright: ignore[reportReturnType]


def _last(out: Tensor) -> tuple[Tensor, int]:
    return out, out.dim() - 1


def _kernel(operation: str, x: Tensor, lead: int, *args: Any) -> Tensor:
    """Runs a kernel on x with all dims after the first `lead` as one."""
    features = x.shape[lead:]
    flat = x.reshape(*x.shape[:lead], prod(features)).contiguous()
    out = find(operation, flat)(flat, *args)
    return out.view(*out.shape[:-1], *features)


def pack(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, *F) -> (n, *F)"""
    return _linear(padded, _pack_pair(offsets, n, padded.shape[1]))


def pad(values: Tensor, offsets: Tensor, steps: int, fill: float = 0) -> Tensor:
    """(N, *F) -> (B, steps, *F), `fill` behind the end of each row; no row is longer than `steps`."""
    if fill == 0:
        to_packed, to_padded = _pack_pair(offsets, len(values), steps)
        return _linear(values, _Pair(to_padded, to_packed))
    return _Pad.apply(values, offsets, steps, fill)  # pyright: ignore[reportReturnType]


def _pack_pair(offsets: Tensor, n: int, steps: int) -> _Pair:
    return _Pair(
        lambda x: _kernel("pack_rows", x, 2, offsets, n),
        lambda x: _kernel("pad_rows", x, 1, offsets, steps, 0),
    )


class _Pad(torch.autograd.Function):
    """Padding with something other than 0: affine, so that its derivative is that of padding with 0."""

    @staticmethod
    def forward(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _kernel("pad_rows", values, 1, offsets, steps, fill)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values, ctx.offsets, ctx.steps, _ = inputs
        ctx.n = len(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return pack(grad, ctx.offsets, ctx.n), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return pad(tangent, ctx.offsets, ctx.steps)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _last(_Pad.apply(x.movedim(in_dims[0], -1), *args))  # pyright: ignore[reportArgumentType]


def spread(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, *F) -> (n, *F): row b as often as it is long."""
    to_rows, to_values = _sum_pair(offsets, n)
    return _linear(rows, _Pair(to_values, to_rows))


def sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); 0 for an empty row."""
    return _linear(values, _sum_pair(offsets, len(values)))


def _sum_pair(offsets: Tensor, n: int) -> _Pair:
    return _Pair(
        lambda x: _kernel("segment_sum", x, 1, offsets),
        lambda x: _kernel("spread_rows", x, 1, offsets, n),
    )


def counts(offsets: Tensor, like: Tensor) -> Tensor:
    """The length of each row, (B, 1, ..) in the dtype of `like` (·, *F)."""
    return offsets.diff().to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def mean(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); NaN for an empty row."""
    return sum(values, offsets) / counts(offsets, values)


def gather(values: Tensor, index: Tensor, in_order: bool = False) -> Tensor:
    """(N, *F), (M,) -> (M, *F) for any index, with repeats or without; its gradient is a gather and a segment sum.

    `in_order`: the index does not decrease, so that its gradient is a segment sum alone.
    """
    n, index = len(values), _plain(index)

    def adjoint(x: Tensor) -> Tensor:
        order = None if in_order else torch.argsort(index, stable=True)
        sorted_index = index if order is None else index.index_select(0, order)
        numbers = torch.arange(n + 1, device=index.device)
        ends = torch.searchsorted(sorted_index, numbers)  # ends[i]: how many entries of the index are below i
        return _sum_pair(ends, len(index)).run(x if order is None else _take(order)(x))

    return _linear(values, _Pair(_take(index), adjoint))


def permute(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """(N, *F) -> (N, *F): values[index] for a permutation; its gradient is the gather by `inverse`."""
    return _linear(values, _Pair(_take(index), _take(inverse)))


def _plain(index: Tensor) -> Tensor:
    """An index without the wrappers of transforms: kernels see it, not autograd."""
    if _modes.is_batched(index):
        raise TypeError("ragged gather: the index is batched by vmap; it must be the same for every call")
    return _modes.numbers(index)


def _take(index: Tensor) -> Callable[[Tensor], Tensor]:
    index = _plain(index)
    return lambda x: _kernel("gather_rows", x, 1, index)


def mirror(offsets: Tensor, n: int) -> Tensor:
    """(n,): for each entry the one as far from the other end of its row; a permutation that is its own inverse."""
    with _modes.outside_transforms():
        ends = (offsets[:-1] + offsets[1:] - 1).unsqueeze(1)
        return find("spread_rows", ends)(ends, offsets, n).squeeze(1) - torch.arange(n, device=offsets.device)


def flip(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), each row from its end to its start."""
    index = mirror(offsets, len(values))
    return permute(values, index, index)


def cumsum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), each row's sums from its start."""

    def forwards(x: Tensor) -> Tensor:
        return _kernel("segment_cumsum", x, 1, offsets)

    turn = _take(mirror(offsets, len(values)))
    return _linear(values, _Pair(forwards, lambda x: turn(forwards(turn(x)))))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _kernel("segment_softmax", x, 1, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.offsets = inputs[1]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _softmax_grad(ctx.saved_tensors[0], grad, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _softmax_grad(ctx.saved_tensors[0], tangent, ctx.offsets)  # the Jacobian is symmetric

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, offsets: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _last(softmax(x.movedim(in_dims[0], -1), offsets))


class _SoftmaxGrad(torch.autograd.Function):
    """y * (dy - sum(y * dy)), in one kernel."""

    @staticmethod
    def forward(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        flat = (len(y), prod(y.shape[1:]))
        return find("segment_softmax_grad", y, dy)(
            y.reshape(flat).contiguous(), dy.reshape(flat).contiguous(), offsets
        ).view(y.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        y, dy, ctx.offsets = inputs
        ctx.save_for_backward(y, dy)
        ctx.save_for_forward(y, dy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, dy = ctx.saved_tensors
        return _slope(y, dy, grad, ctx.offsets), _softmax_grad(y, grad, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent_y: Any, tangent_dy: Any, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, dy = ctx.saved_tensors
        out = torch.zeros_like(y)
        if tangent_y is not None:
            inner = _weighted(tangent_y, dy, ctx.offsets)
            out = out + tangent_y * (dy - _weighted(y, dy, ctx.offsets)) - y * inner
        return out if tangent_dy is None else out + _softmax_grad(y, tangent_dy, ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], y: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dims = zip((y, dy), in_dims, strict=False)
        y, dy = torch.broadcast_tensors(*(x.unsqueeze(-1) if d is None else x.movedim(d, -1) for x, d in dims))
        return _last(_softmax_grad(y, dy, offsets))


def _slope(y: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of y in y * (dy - sum(y * dy))."""
    return grad * (dy - _weighted(y, dy, offsets)) - dy * _weighted(y, grad, offsets)


def _weighted(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """sum(a * b) over each row, for each entry of the row."""
    return spread(sum(a * b, offsets), offsets, len(a))


def _softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    return _SoftmaxGrad.apply(y, dy, offsets)  # pyright: ignore[reportReturnType]


def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), over each row."""
    return _Softmax.apply(values, offsets)  # pyright: ignore[reportReturnType]


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _kernel("segment_logsumexp", x, 1, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.offsets = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out = ctx.saved_tensors
        return spread(grad, ctx.offsets, len(x)) * _weights(x, out, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out = ctx.saved_tensors
        return sum(tangent * _weights(x, out, ctx.offsets), ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, offsets: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _last(logsumexp(x.movedim(in_dims[0], -1), offsets))


def _weights(x: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """exp(x - out): 0, not NaN, where a row is -inf throughout."""
    return (x - spread(out.masked_fill(out == -torch.inf, 0), offsets, len(x))).exp()


def logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); -inf for an empty row."""
    return _LogSumExp.apply(values, offsets)  # pyright: ignore[reportReturnType]


def log_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), over each row."""
    # Taking the maximum off first keeps the digits of large scores; it has no influence on the gradient.
    top, _ = _Extreme.apply(values.detach(), offsets, 0.0, "max")  # pyright: ignore[reportGeneralTypeIssues]
    values = values - spread(top, offsets, len(values))
    return values - spread(logsumexp(values, offsets), offsets, len(values))


class _Extreme(torch.autograd.Function):
    """The largest or smallest entry of each row, and where it is first: without gradient."""

    @staticmethod
    def forward(x: Tensor, offsets: Tensor, fill: float, which: str) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        features = x.shape[1:]
        flat = x.reshape(len(x), prod(features)).contiguous()
        best, where = find(f"segment_{which}", flat)(flat, offsets, fill)
        return best.view(len(best), *features), where.view(len(best), *features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None,) * 4

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        best, where = _Extreme.apply(x.movedim(in_dims[0], -1), *args)  # pyright: ignore[reportGeneralTypeIssues]
        return (best, where), (best.dim() - 1, where.dim() - 1)


def extreme(values: Tensor, offsets: Tensor, which: str, fill: float = 0) -> tuple[Tensor, Tensor]:
    """(N, *F) -> (B, *F) and the entry of values (B, *F) int64 each is; `fill` and -1 for an empty row.

    `which` is "max" or "min". As in `torch.max(x, dim)`, the gradient goes to the first of equal entries.
    """
    _, where = _Extreme.apply(values.detach(), offsets, fill, which)  # pyright: ignore[reportGeneralTypeIssues]
    if len(values) == 0:
        return sum(values, offsets) + fill, where
    picked = values.gather(0, where.clamp_min(0))
    return picked.masked_fill(where < 0, fill), where


class _Amax(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, offsets: Tensor, fill: float, which: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Extreme.forward(x, offsets, fill, which)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.offsets, _, _ = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best = ctx.saved_tensors
        equal, number = _shares(x, best, ctx.offsets)
        return spread(grad / number, ctx.offsets, len(x)) * equal, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best = ctx.saved_tensors
        equal, number = _shares(x, best, ctx.offsets)
        return sum(tangent * equal, ctx.offsets) / number

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _last(_Amax.apply(x.movedim(in_dims[0], -1), *args))  # pyright: ignore[reportArgumentType]


def _shares(x: Tensor, best: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are the extreme of their row (as 1 and 0), and how many those are, at least 1."""
    equal = (x.detach() == spread(best.detach(), offsets, len(x))).to(x.dtype)
    return equal, sum(equal, offsets).clamp_min(1)


def amax(values: Tensor, offsets: Tensor, which: str = "max", fill: float = 0) -> Tensor:
    """(N, *F) -> (B, *F); `fill` for an empty row. As in `torch.amax`, equal entries share the gradient equally."""
    return _Amax.apply(values, offsets, fill, which)  # pyright: ignore[reportReturnType]
