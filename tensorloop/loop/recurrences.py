"""Linear recurrences as one node of the graph, with the gradient that algebra gives: what `linear_recurrence` runs.

With g the gradient of h, that of b is the recurrence run backwards, from each step with the factor of the one after it,

    db[t] = g[t] + conj(a[t + 1]) db[t + 1],    da[t] = db[t] conj(h[t - 1]),    dinit = conj(a[0]) db[0],

so `a` and `h` are all that is kept. Both are differentiable operations again, and any order follows. Of matrices the
conjugate is transposed too, and da[t] is an outer product, added up where a matrix is the same. Where h begins anew,
`starts` say so: h is b alone there, so that nothing of a, of h before and of their gradients is looked at.
"""

import functools

import torch
from torch import Tensor

from tensorloop import kernels
from tensorloop._torch import transforms
from tensorloop._torch.formula import Formula, evaluate
from tensorloop.kernels.eager.recurrence import by_vectors
from tensorloop.loop.associative import associative_scan


def run(a: Tensor, b: Tensor, begin: Tensor, dim: int, reverse: bool, at: int | None) -> Tensor:
    """All h, of b's shape.

    `begin` is h before the first step, 1 long along `dim`; or bools of b's length there, which say where h is b alone.
    `at` is the dim of b with the vectors on which matrices work, whose dims in a are `at` and the one after it; None
    for factors. All have the rank of b, or one more, and sizes of its own or of 1.
    """
    if not b.shape[dim]:
        return b + times(a, torch.zeros_like(b) if begin.dtype == torch.bool else begin, at)
    if torch.compiler.is_compiling():
        return _traced(a, b, begin, dim, reverse, at)
    # Under a transform nothing tells whether `a` has a gradient.
    constant = not a.requires_grad and transforms.maybe_level() is None and not transforms.forward_mode()
    return evaluate(formula_of(dim, reverse, at, begin.dtype == torch.bool, constant), a, b, begin)


def times(a: Tensor, x: Tensor, at: int | None) -> Tensor:
    """Factors by numbers, or matrices by the vectors along dim `at`."""
    if at is None:
        return a * x
    return by_vectors(a.movedim((at, at + 1), (-2, -1)), x.movedim(at, -1)).movedim(-1, at)


@functools.cache
def formula_of(dim: int, reverse: bool, at: int | None, anew: bool, constant: bool) -> Formula:
    """The gradient formula of a recurrence; `anew`: `begin` are starts. With a `constant` factor h is not kept."""

    def run_kernel(a: Tensor, b: Tensor, begin: Tensor) -> Tensor:
        operation, last = "linear_recurrence", at is None or at == b.dim() - 1
        if at is not None:
            operation = "matrix_recurrence"
            a, b, begin = a.movedim((at, at + 1), (-2, -1)), b.movedim(at, -1), begin.movedim(at, -1)
        more = (None, dim, reverse, begin) if anew else (begin, dim, reverse)
        h = kernels.find(operation, b, a, begin)(a, b, *more)
        return h if last else h.movedim(-1, at)

    def later(x: Tensor, last: Tensor) -> Tensor:
        """Gives each step what the one after it has; the last one `last`."""
        if x.shape[dim] == 1:  # one factor for all; or one step
            return last if x.dtype == torch.bool else x
        parts = [x.narrow(dim, 1 - reverse, x.shape[dim] - 1), last]
        return torch.cat(parts[::-1] if reverse else parts, dim)

    def of_b(grad: Tensor, a: Tensor, *starts: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(the gradient of b, that of init); `after`: more that is asked of the last h, with a factor for each step."""
        a = a.conj() if at is None else a.conj().transpose(at, at + 1)
        last = torch.zeros_like(a.narrow(dim, 0, 1))
        if after is not None:
            last = last + (1 if at is None else torch.eye(a.shape[at], dtype=a.dtype, device=a.device))
        shifted = later(a, last)
        zero = torch.zeros_like(grad.narrow(dim, 0, 1)) if after is None else after
        begin = later(starts[0], torch.ones_like(starts[0].narrow(dim, 0, 1))) if starts else zero
        found = run(shifted, grad, begin, dim, not reverse, at)
        if anew:
            return found, None
        first = [x.narrow(dim, x.shape[dim] - 1 if reverse else 0, 1) for x in (a, found)]
        return found, times(first[0], first[1], at)

    def before(begin: Tensor, h: Tensor) -> Tensor:
        """h of the step before each; 0 at starts."""
        parts = [
            torch.zeros_like(h.narrow(dim, 0, 1)) if anew else begin,
            h.narrow(dim, int(reverse), h.shape[dim] - 1),
        ]
        h = torch.cat(parts[::-1] if reverse else parts, dim)
        return torch.where(begin, torch.zeros_like(h), h) if anew else h

    def of_a(found: Tensor, before: Tensor, shape: torch.Size) -> Tensor:
        if at is None:
            return (found * before.conj()).sum_to_size(shape)
        if transforms.is_legacy_batched(found) or transforms.is_legacy_batched(before):
            return (found.unsqueeze(at + 1) * before.conj().unsqueeze(at)).sum_to_size(shape)
        n, dims = found.dim(), [*range(found.dim())]
        kept = [d for d in dims if d != at and shape[d + (d > at)] != 1]
        columns = [n if d == at else d for d in dims]
        out = torch.einsum(found, dims, before.conj(), columns, [*kept, at, n])
        return out.movedim((-2, -1), (k := sum(d < at for d in kept), k + 1)).reshape(shape)

    def vjp(
        grad: Tensor, a: Tensor, begin: Tensor, h: Tensor, after: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        found, of_init = of_b(grad, a, *([begin] if anew else []), after=after)
        return of_a(found, before(begin, h), a.shape), found, of_init

    def vjp_of_constant(
        grad: Tensor, a: Tensor, *starts: Tensor, after: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        return None, *of_b(grad, a, *starts, after=after)

    def jvp(tangents: tuple[Tensor | None, ...], a: Tensor, begin: Tensor, h: Tensor) -> Tensor:
        along_a, along_b, along_init = tangents
        b = torch.zeros_like(h) if along_b is None else along_b
        if along_a is not None:
            b = b + times(along_a, before(begin, h), at)
        zero = begin if anew else torch.zeros_like(begin)
        return run(a, b, zero if along_init is None else along_init, dim, reverse, at)

    if constant:
        return Formula(run_kernel, vjp_of_constant, keeps=(0, 2) if anew else (0,))
    return Formula(run_kernel, vjp, jvp, keeps=(0, 2, 3))


def _traced(a: Tensor, b: Tensor, begin: Tensor, dim: int, reverse: bool, at: int | None) -> Tensor:
    """Runs the recurrence in operations that torch.compile follows."""
    if at is not None:
        a, b, begin = a.movedim((at, at + 1), (-2, -1)), b.movedim(at, -1), begin.movedim(at, -1)
    last = None if at is None else b.dim() - 1
    a, b, begin = (x.movedim(dim, 0) for x in (a, b, begin))
    if reverse:
        a, b, begin = a.flip(0), b.flip(0), begin.flip(0)
    a = a.expand(len(b), *a.shape[1:])
    if anew := begin.dtype == torch.bool:
        steps = a, b, begin
    else:
        steps = a, torch.cat([times(a[:1], begin, last) + b[:1], b[1:]])

    def then(p: tuple[Tensor, ...], q: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        product = q[0] * p[0] if at is None else q[0] @ p[0]
        h = times(q[0], p[1], last) + q[1]
        return (product, torch.where(q[2], q[1], h), p[2] | q[2]) if anew else (product, h)

    h = associative_scan(then, steps)[1]
    h = (h.flip(0) if reverse else h).movedim(0, dim)
    return h if at is None else h.movedim(-1, at)
