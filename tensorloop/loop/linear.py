"""`linear_recurrence`: h = a h + b over all steps as one node of the graph, with the gradient that algebra gives.

With g the gradient of h, that of b is the recurrence run backwards, from each step with the factor of the one after it,

    db[t] = g[t] + conj(a[t + 1]) db[t + 1],    da[t] = db[t] conj(h[t - 1]),    dinit = conj(a[0]) db[0],

so `a` and `h` are all that is kept. Both are differentiable operations again, and any order follows.
"""

import functools
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tensorloop import kernels
from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._torch import transforms
from tensorloop._torch.formula import Formula, evaluate
from tensorloop.loop.associative import associative_scan
from tensorloop.loop.compiled import around
from tensorloop.packed.table.base import any_packed


@named("linear_recurrence")
def linear_recurrence(
    a: Tensor | complex, b: Tensor, init: Tensor | complex | None = None, *, dim: int = 0, reverse: bool = False
) -> Tensor:
    """Computes h[t] = a[t] * h[t - 1] + b[t], element by element, for all t in one operation.

        h = tl.linear_recurrence(a, b)  # a and b: (T, ...)
        returns = tl.linear_recurrence(0.99, rewards, reverse=True)  # discounted returns

    Discounted returns, moving averages, filters, diagonal state-space models and linear attention are such loops.
    Values and gradients are those of this one:

        h = []
        for t in reversed(range(T)) if reverse else range(T):
            init = a.select(dim, t) * init + b.select(dim, t)
            h.append(init)
        return torch.stack(h, dim)  # in index order

    Args:
        a: the factors: a number, or a tensor that broadcasts to b. A length of 1, along `dim` or another, is one factor
            for all.
        b: tensor with T steps along `dim`, of the shape of the result.
        init: h before the first step: a number, or a tensor that broadcasts to b without `dim`. None (default) is 0.
        dim: int, the dim of b to run over; default 0.
        reverse: bool, default False. True begins with the last step.

    Returns:
        All h, a tensor of b's shape, in index order.

    Dtypes: any; a, b and init are promoted to one.
    Gradient: by formula to a, b and init, complex ones too; any order, forward mode, `torch.func`.
    Cost: O(T) operations: one pass of a kernel on the CPU in float32 and float64, else 2 log2(T) rounds of operations
    on whole slabs, with a working memory of some 3 T elements. Kept for backward: a in its own shape and h, that is the
    result itself; a alone where it needs no gradient; nothing where it is a number. The rounds add in another order
    than a loop, so results differ by rounding. Inside `torch.compile` it is traced as an associative scan.

    Raises:
        TypeError: an argument that is no tensor or number; packed b.
        ValueError: no such dim; shapes that do not broadcast to b.

    Source: Blelloch, Prefix sums and their applications, CMU-CS-90-190, 1990; the gradient as in Martin and Cundy,
    Parallelizing linear recurrent neural nets over sequence length, ICLR 2018.

    Example:
        >>> tl.linear_recurrence(0.5, torch.tensor([8.0, 0.0, 4.0]), reverse=True)  # discounted returns
        tensor([9., 2., 4.])
    """
    dim = arguments.as_int(dim, "dim")
    arguments.as_bool(reverse, "reverse")
    if any_packed((a, b, init)):
        raise WrongType("b is packed, and would go on from row to row; give b.pad(), with dim=1")
    try:
        arguments.dense_tensor(b, "b")
    except TypeError as error:
        raise WrongType(str(error)) from None
    if not -b.dim() <= dim < b.dim():
        raise WrongValue(f"b has no dim {dim} to run over: its shape is {tuple(b.shape)}")
    dim %= b.dim()
    shape = [*b.shape]
    a = _broadcast(a, "a", b, shape)
    init = _broadcast(0 if init is None else init, "init", b, shape[:dim] + shape[dim + 1 :])
    init = init.expand(shape[:dim] + shape[dim + 1 :]).unsqueeze(dim)
    around.check_whole("linear_recurrence")
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (a, b, init)))
    return _run(a.to(dtype), b.to(dtype), init.to(dtype), dim, reverse)


def _broadcast(x: Any, what: str, b: Tensor, shape: list[int]) -> Tensor:
    """`x` with as many dims as `shape`, to which it broadcasts."""
    if isinstance(x, Number) and not isinstance(x, bool):
        x = b.new_ones(()) * x  # pyright: ignore[reportOperatorIssue]  # torch's own rules for the dtype
    try:
        arguments.dense_tensor(x, what)
    except TypeError as error:
        raise WrongType(str(error)) from None
    if x.device != b.device and x.dim():
        raise WrongValue(f"{what} is on {x.device}, b on {b.device}; move one of them with .to()")
    given = tuple(x.shape)
    x = x.reshape((1,) * (len(shape) - x.dim()) + given)
    if x.dim() > len(shape) or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
        steps = "" if what == "a" else " without its steps"
        raise WrongValue(f"{what} must broadcast to b{steps}, {tuple(shape)}, got shape {given}")
    return x


def _run(a: Tensor, b: Tensor, init: Tensor, dim: int, reverse: bool) -> Tensor:
    """All of one dtype and rank; `init` is as long as b but 1 along `dim`."""
    if not b.shape[dim]:
        return a * init + b
    if torch.compiler.is_compiling():
        return _traced(a, b, init, dim, reverse)
    # Under a transform nothing tells whether `a` has a gradient.
    constant = not a.requires_grad and transforms.maybe_level() is None and not transforms.forward_mode()
    return evaluate(_formula(dim, reverse, constant), a, b, init)


@functools.cache
def _formula(dim: int, reverse: bool, constant: bool) -> Formula:
    """The gradient formula of a recurrence; with a `constant` factor h is not kept."""

    def run(a: Tensor, b: Tensor, init: Tensor) -> Tensor:
        return kernels.find("linear_recurrence", b, a, init)(a, b, init, dim, reverse)

    def of_b(grad: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """(the gradient of b, that of init)"""
        a = shifted = a.conj()
        if (n := a.shape[dim]) > 1:  # each step gets the factor of the one after it, the last one 0
            parts = [a.narrow(dim, 1 - reverse, n - 1), torch.zeros_like(a.narrow(dim, 0, 1))]
            shifted = torch.cat(parts[::-1] if reverse else parts, dim)
        found = _run(shifted, grad, torch.zeros_like(grad.narrow(dim, 0, 1)), dim, not reverse)
        first = [x.narrow(dim, x.shape[dim] - 1 if reverse else 0, 1) for x in (a, found)]
        return found, first[0] * first[1]

    def before(init: Tensor, h: Tensor) -> Tensor:
        """h of the step before each."""
        parts = [init, h.narrow(dim, int(reverse), h.shape[dim] - 1)]
        return torch.cat(parts[::-1] if reverse else parts, dim)

    def vjp(grad: Tensor, a: Tensor, init: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        found, of_init = of_b(grad, a)
        return (found * before(init, h).conj()).sum_to_size(a.shape), found, of_init

    def vjp_of_constant(grad: Tensor, a: Tensor) -> tuple[Tensor | None, ...]:
        return None, *of_b(grad, a)

    def jvp(tangents: tuple[Tensor | None, ...], a: Tensor, init: Tensor, h: Tensor) -> Tensor:
        of_a, of_b, of_init = tangents
        b = torch.zeros_like(h) if of_b is None else of_b
        if of_a is not None:
            b = b + of_a * before(init, h)
        return _run(a, b, torch.zeros_like(init) if of_init is None else of_init, dim, reverse)

    if constant:
        return Formula(run, vjp_of_constant, keeps=(0,))
    return Formula(run, vjp, jvp, keeps=(0, 2, 3))


def _traced(a: Tensor, b: Tensor, init: Tensor, dim: int, reverse: bool) -> Tensor:
    """Runs the recurrence in operations that torch.compile follows."""
    a, b, init = (x.movedim(dim, 0) for x in (a, b, init))
    if reverse:
        a, b = a.flip(0), b.flip(0)
    a = a.expand(len(b), *a.shape[1:])
    b = torch.cat([a[:1] * init + b[:1], b[1:]])
    h = associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, b))[1]
    return (h.flip(0) if reverse else h).movedim(0, dim)
