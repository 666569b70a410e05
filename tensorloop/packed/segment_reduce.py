"""Differentiable reductions over ragged rows that are not linear: softmax, logsumexp, the largest and the smallest.

Each has a node of its own. Its backward is one kernel, which is a node again, with a backward in plain operations: the
first order is fast, and any further one is right. Arguments are those of `segments`, and as there checked by the
caller.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.eager_only import runs_kernels
from tensorloop.kernels import find
from tensorloop.packed.segments import last, run_kernel, spread, sum


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return run_kernel("segment_softmax", x, 1, offsets)

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
        return last(softmax(x.movedim(in_dims[0], -1), offsets))


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
        y, dy = _batched_last(in_dims, (y, dy))
        return last(_softmax_grad(y, dy, offsets))


def _slope(y: Tensor, dy: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of y in y * (dy - sum(y * dy))."""
    return grad * (dy - _weighted(y, dy, offsets)) - dy * _weighted(y, grad, offsets)


def _weighted(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """sum(a * b) over each row, for each entry of the row."""
    return spread(sum(a * b, offsets), offsets, len(a))


@runs_kernels
def _softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    return _SoftmaxGrad.apply(y, dy, offsets)  # pyright: ignore[reportReturnType]


@runs_kernels
def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), over each row."""
    return _Softmax.apply(values, offsets)  # pyright: ignore[reportReturnType]


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return run_kernel("segment_logsumexp", x, 1, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.offsets = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out = ctx.saved_tensors
        return _logsumexp_grad(x, out, grad, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out = ctx.saved_tensors
        return sum(tangent * _weights(x, out, ctx.offsets), ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, offsets: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return last(logsumexp(x.movedim(in_dims[0], -1), offsets))


class _LogSumExpGrad(torch.autograd.Function):
    """exp(x - out) * grad, in one kernel."""

    @staticmethod
    def forward(x: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _spread_kernel("segment_logsumexp_grad", x, out, grad, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, out, grad, ctx.offsets = inputs
        ctx.save_for_backward(x, out, grad)
        ctx.save_for_forward(x, out, grad)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out, grad = ctx.saved_tensors
        back = tangent * _weights(x, out, ctx.offsets)
        through = back * spread(grad, ctx.offsets, len(x))
        return through, -sum(through, ctx.offsets), sum(back, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent_x: Any, tangent_out: Any, tangent_grad: Any, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out, grad = ctx.saved_tensors
        change = torch.zeros_like(x) if tangent_x is None else tangent_x
        if tangent_out is not None:
            change = change - spread(tangent_out, ctx.offsets, len(x))
        result = change * _logsumexp_grad(x, out, grad, ctx.offsets)
        return result if tangent_grad is None else result + _logsumexp_grad(x, out, tangent_grad, ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, out, grad = _batched_last(in_dims, args[:-1])
        return last(_logsumexp_grad(x, out, grad, args[-1]))


@runs_kernels
def _logsumexp_grad(x: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return _LogSumExpGrad.apply(x, out, grad, offsets)  # pyright: ignore[reportReturnType]


def _spread_kernel(operation: str, x: Tensor, reduced: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Runs a kernel (N, F), (B, F), (B, F) -> (N, F)."""
    flat = [y.reshape(len(y), prod(x.shape[1:])).contiguous() for y in (x, reduced, grad)]
    return find(operation, *flat)(*flat, offsets).view(x.shape)


def _batched_last(in_dims: tuple[Any, ...], args: Any) -> list[Tensor]:
    """Under vmap: the batch dim of each, last; what has none gets one by expansion."""
    size = next(x.shape[d] for x, d in zip(args, in_dims, strict=False) if d is not None)
    dims = zip(args, in_dims, strict=False)
    return [x.unsqueeze(-1).expand(*x.shape, size) if d is None else x.movedim(d, -1) for x, d in dims]


def _weights(x: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """exp(x - out): 0, not NaN, where a row is -inf throughout."""
    return (x - spread(out.masked_fill(out == -torch.inf, 0), offsets, len(x))).exp()


@runs_kernels
def logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); -inf for an empty row."""
    return _LogSumExp.apply(values, offsets)  # pyright: ignore[reportReturnType]


@runs_kernels
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


@runs_kernels
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
        return _amax_grad(x, best, grad, ctx.offsets), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best = ctx.saved_tensors
        return _shared_sum(x, best, tangent, ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return last(_Amax.apply(x.movedim(in_dims[0], -1), *args))  # pyright: ignore[reportArgumentType]


class _AmaxGrad(torch.autograd.Function):
    """The gradient in equal shares to the entries that are the extreme of their row: linear in it, flat in the rest."""

    @staticmethod
    def forward(x: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _spread_kernel("segment_extreme_grad", x, best, grad, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, best, _, ctx.offsets = inputs
        ctx.save_for_backward(x, best)
        ctx.save_for_forward(x, best)

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best = ctx.saved_tensors
        return None, None, _shared_sum(x, best, tangent, ctx.offsets), None

    @staticmethod
    def jvp(ctx: Any, tangent_x: Any, tangent_best: Any, tangent_grad: Any, _: None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best = ctx.saved_tensors
        return torch.zeros_like(x) if tangent_grad is None else _amax_grad(x, best, tangent_grad, ctx.offsets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, best, grad = _batched_last(in_dims, args[:-1])
        return last(_amax_grad(x, best, grad, args[-1]))


@runs_kernels
def _amax_grad(x: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return _AmaxGrad.apply(x.detach(), best.detach(), grad, offsets)  # pyright: ignore[reportReturnType]


def _shared_sum(x: Tensor, best: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """The adjoint of `_amax_grad`: the mean of values (N, *F) over the entries that are the extreme of their row."""
    equal = x.detach() == spread(best.detach(), offsets, len(x))
    kept = torch.where(equal, values, 0)  # 0 * inf would be NaN
    return sum(kept, offsets) / sum(equal.to(x.dtype), offsets).clamp_min(1)


@runs_kernels
def amax(values: Tensor, offsets: Tensor, which: str = "max", fill: float = 0) -> Tensor:
    """(N, *F) -> (B, *F); `fill` for an empty row. As in `torch.amax`, equal entries share the gradient equally."""
    return _Amax.apply(values, offsets, fill, which)  # pyright: ignore[reportReturnType]
