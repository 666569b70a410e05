"""Differentiable reductions over ragged rows that are not linear: softmax, logsumexp, the largest and the smallest.

Each is a `Formula`. Its gradient is one kernel, which is a formula again, with derivatives in plain operations: the
first order is fast, and any further one is right. Arguments are those of `segments`, and as there checked by the
caller.
"""

from math import prod

import torch
from torch import Tensor

from tensorloop._torch.eager_only import runs_kernels
from tensorloop._torch.formula import Formula, evaluate
from tensorloop.kernels import find
from tensorloop.packed.rows.segments import run_kernel, spread, sum

# In a formula, `grad` is the gradient of its output, and `along` has the tangents of its inputs, None for none.
_Tangents = tuple[Tensor | None, ...]


def _run_flat(operation: str, offsets: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    """Runs a kernel (N, F), (N or B, F), ... -> (N, F) on these, all feature dims as one."""
    flat = [y.reshape(len(y), prod(x.shape[1:])).contiguous() for y in (x, *others)]
    return find(operation, *flat)(*flat, offsets).view(x.shape)


@runs_kernels
def softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), over each row."""
    formula = Formula(
        lambda x: run_kernel("segment_softmax", x, 1, offsets),
        lambda grad, y: (_softmax_grad(y, grad, offsets),),
        lambda along, y: _softmax_grad(y, along[0], offsets),  # the Jacobian is symmetric
        keeps=(1,),
    )
    return evaluate(formula, values)


@runs_kernels
def _softmax_grad(y: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    """y * (dy - sum(y * dy)), in one kernel."""

    def weigh(a: Tensor, b: Tensor) -> Tensor:
        """sum(a * b) over each row, for each entry of the row."""
        return spread(sum(a * b, offsets), offsets, len(a))

    def vjp(grad: Tensor, y: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return grad * (dy - weigh(y, dy)) - dy * weigh(y, grad), _softmax_grad(y, grad, offsets)

    def jvp(along: _Tangents, y: Tensor, dy: Tensor) -> Tensor:
        of_y, of_dy = along
        out = torch.zeros_like(y) if of_y is None else of_y * (dy - weigh(y, dy)) - y * weigh(of_y, dy)
        return out if of_dy is None else out + _softmax_grad(y, of_dy, offsets)

    return evaluate(Formula(lambda *x: _run_flat("segment_softmax_grad", offsets, *x), vjp, jvp, keeps=(0, 1)), y, dy)


@runs_kernels
def logsumexp(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); -inf for an empty row."""
    formula = Formula(
        lambda x: run_kernel("segment_logsumexp", x, 1, offsets),
        lambda grad, x, out: (_logsumexp_grad(x, out, grad, offsets),),
        lambda along, x, out: sum(along[0] * _weights(x, out, offsets), offsets),
        keeps=(0, 1),
    )
    return evaluate(formula, values)


@runs_kernels
def _logsumexp_grad(x: Tensor, out: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """exp(x - out) * grad, in one kernel."""

    def vjp(back: Tensor, x: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        back = back * _weights(x, out, offsets)
        through = back * spread(grad, offsets, len(x))
        return through, -sum(through, offsets), sum(back, offsets)

    def jvp(along: _Tangents, x: Tensor, out: Tensor, grad: Tensor) -> Tensor:
        of_x, of_out, of_grad = along
        change = torch.zeros_like(x) if of_x is None else of_x
        if of_out is not None:
            change = change - spread(of_out, offsets, len(x))
        result = change * _logsumexp_grad(x, out, grad, offsets)
        return result if of_grad is None else result + _logsumexp_grad(x, out, of_grad, offsets)

    formula = Formula(lambda *x: _run_flat("segment_logsumexp_grad", offsets, *x), vjp, jvp, keeps=(0, 1, 2))
    return evaluate(formula, x, out, grad)


def _weights(x: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """exp(x - out): 0, not NaN, where a row is -inf throughout."""
    return (x - spread(out.masked_fill(out == -torch.inf, 0), offsets, len(x))).exp()


@runs_kernels
def log_softmax(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), over each row."""
    # Taking the maximum off first keeps the digits of large scores; it has no influence on the gradient.
    values = values - spread(amax(values.detach(), offsets), offsets, len(values))
    return values - spread(logsumexp(values, offsets), offsets, len(values))


def _find_extreme(x: Tensor, offsets: Tensor, which: str, fill: float) -> tuple[Tensor, Tensor]:
    """The largest or smallest entry of each row, and where it is first: of plain tensors."""
    features = x.shape[1:]
    flat = x.reshape(len(x), prod(features)).contiguous()
    best, where = find(f"segment_{which}", flat)(flat, offsets, fill)
    return best.view(len(best), *features), where.view(len(best), *features)


@runs_kernels
def extreme(values: Tensor, offsets: Tensor, which: str, fill: float = 0) -> tuple[Tensor, Tensor]:
    """(N, *F) -> (B, *F) and the entry of values (B, *F) int64 each is; `fill` and -1 for an empty row.

    `which` is "max" or "min". As in `torch.max(x, dim)`, the gradient goes to the first of equal entries.
    """
    where = evaluate(Formula(lambda x: _find_extreme(x, offsets, which, fill)[1]), values.detach())
    if len(values) == 0:
        return sum(values, offsets) + fill, where
    picked = values.gather(0, where.clamp_min(0))
    return picked.masked_fill(where < 0, fill), where


@runs_kernels
def amax(values: Tensor, offsets: Tensor, which: str = "max", fill: float = 0) -> Tensor:
    """(N, *F) -> (B, *F); `fill` for an empty row. As in `torch.amax`, equal entries share the gradient equally."""
    formula = Formula(
        lambda x: _find_extreme(x, offsets, which, fill)[0],
        lambda grad, x, best: (_amax_grad(x, best, grad, offsets),),
        lambda along, x, best: _share(x, best, along[0], offsets),
        keeps=(0, 1),
    )
    return evaluate(formula, values)


@runs_kernels
def _amax_grad(x: Tensor, best: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """The gradient in equal shares to the entries that are the extreme of their row: linear in it, flat in the rest."""
    x, best = x.detach(), best.detach()
    formula = Formula(
        lambda *x: _run_flat("segment_extreme_grad", offsets, *x),
        lambda back, x, best: (None, None, _share(x, best, back, offsets)),
        lambda along, x, best: _amax_grad(x, best, along[2], offsets),  # x and best have no tangent
        keeps=(0, 1),
    )
    return evaluate(formula, x, best, grad)


def _share(x: Tensor, best: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """The adjoint of `_amax_grad`: the mean of values (N, *F) over the entries that are the extreme of their row."""
    equal = x.detach() == spread(best.detach(), offsets, len(x))
    kept = torch.where(equal, values, 0)  # 0 * inf would be NaN
    return sum(kept, offsets) / sum(equal.to(x.dtype), offsets).clamp_min(1)
