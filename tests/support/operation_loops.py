"""Loops whose body is one operation, in several places, compiled and not: whether both give the same."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tests.support.operation_samples import STEPS, Sample, seeded

PLACEMENTS = ("carry", "xs", "closed", "mixed")
_TOLERANCE = {
    **{torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 3e-4, torch.complex64: 3e-4},
    **{torch.bfloat16: 1e-1, torch.float16: 1e-2, torch.complex32: 1e-2},
}
_WIDE = {
    **{torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64},
    torch.complex64: torch.complex128,
}
_SMALL = 1e-3  # what is less may be left by numbers that cancel; of halves, all of them
_LARGE = 1e4  # what is more does not go into the next carry
Outcome = dict[str, list[Any]]


class Verdict(NamedTuple):
    """What became of a sample in a placement."""

    kind: str  # "equal", "not compiled", "no eager result", "different", "left out"
    why: str = ""


class Placed(NamedTuple):
    """Where the tensors of a sample are: at these places in the carry, in xs, outside of the body."""

    carry: list[int]
    xs: list[int]
    closed: list[int]


def placed(count: int, placement: str) -> Placed | None:
    """So many tensors; None where this is another placement, too."""
    every = list(range(count))
    if placement == "closed":
        return Placed([], [], every)
    if not count or (placement == "mixed" and count < 2):
        return None
    if placement == "carry":
        return Placed(every, [], [])
    return Placed([], every, []) if placement == "xs" else Placed([0], every[1::2], every[2::2])


def judged(sample: Sample, placement: str, grad: bool = True, second: bool = False) -> Verdict:
    """Runs a sample in a placement, compiled and not."""
    where = placed(len(sample.grads), placement)
    if where is None:
        return Verdict("left out")
    try:
        expected = outcome(sample, where, False, grad, second)
    except Exception as error:
        return Verdict("no eager result", _said(error))
    try:
        found = outcome(sample, where, "strict", grad, second)
    except Exception as error:
        if "not compiled:" in str(error):
            return Verdict("not compiled", _said(error))
        return Verdict("different", f"raises {type(error).__name__}: {_said(error)}")
    why = disagreement(sample, where, found, expected, grad, second)
    return Verdict("different", why) if why else Verdict("equal")


def _said(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


# -- loops


def outcome(sample: Sample, where: Placed, compile: Any, grad: bool, second: bool) -> Outcome:
    """What a loop gives: its carry and ys, its gradients, those of their squares."""
    given = [sample.stacked(i) if i in where.xs else sample.one(i) for i in range(len(sample.grads))]
    given = [x.detach().requires_grad_(g and grad) for x, g in zip(given, sample.grads, strict=True)]
    base = torch.ones(3, dtype=torch.float64, requires_grad=grad)
    seeded(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = _run(sample, where, given, base, compile)
        found: Outcome = {"values": outputs}
        inputs = [x for x in [*given, base] if x.requires_grad]
        if not inputs:
            return found
        loss = _weighted([y for y in outputs if y.requires_grad])
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, create_graph=second)
        found["gradients"] = list(grads)
        further = [g for g in grads if g is not None and g.requires_grad]
        if second and further:
            loss = _weighted([g * g.conj() for g in further])
            found["second derivatives"] = list(torch.autograd.grad(loss, inputs, allow_unused=True))
    return found


def loop_of(sample: Sample, where: Placed, given: Sequence[Tensor], base: Tensor) -> tuple[Any, Any, Any]:
    """(body, init, xs) of a scan over these tensors, of which those in xs are stacked."""

    def body(carry: Any, x: Any) -> Any:
        states, h = carry
        tensors = list(given)
        for i, value in [*zip(where.carry, states, strict=True), *zip(where.xs, x[1:], strict=True)]:
            tensors[i] = value
        outs = [y for y in tree_leaves(sample.function(*tensors)) if isinstance(y, Tensor)]
        return ([_next(tensors[i], outs) for i in where.carry], torch.sin(h) * 0.9 + x[0] + _total(outs)), outs

    init = ([given[i] for i in where.carry], base)
    return body, init, (torch.arange(STEPS, dtype=torch.float64) * 0.1, *(given[i] for i in where.xs))


def _run(sample: Sample, where: Placed, given: Sequence[Tensor], base: Tensor, compile: Any) -> list[Tensor]:
    found = tl.scan(*loop_of(sample, where, given, base), compile=compile)
    return [y for y in tree_leaves(found) if isinstance(y, Tensor)]


def _next(h: Tensor, outs: Sequence[Tensor]) -> Tensor:
    """The next carry in the place of h: it depends on the results, and stays finite where they are not."""
    same = [y for y in outs if y.shape == h.shape and y.dtype == h.dtype]
    if h.dtype is torch.bool:
        return h ^ same[0] if same else h | h
    if not (h.is_floating_point() or h.is_complex()):
        return h * 1  # another number may be no index
    if not same:
        return h + (0.01 * _total(outs)).to(h.dtype)
    return h * 0.5 + 0.3 * (same[0] if h.is_complex() else _bounded(same[0]))


def _bounded(y: Tensor) -> Tensor:
    return torch.where(y.abs() < _LARGE, y, 0.1)


def _total(outs: Sequence[Tensor]) -> Tensor:
    """Of all floats, what is not large."""
    found = torch.zeros((), dtype=torch.float64)
    for y in map(_real, outs):
        if y.is_floating_point() and y.numel():
            found = found + _bounded(y.double()).mean()
    return found


def _weighted(tensors: Sequence[Tensor]) -> Tensor:
    """A sum in which no two elements are alike."""
    found = torch.zeros((), dtype=torch.float64)
    for y in map(_real, tensors):
        weights = torch.arange(1, y.numel() + 1, dtype=torch.float64).view(y.shape).cos()
        found = found + (y.double() * weights).sum()
    return found


def _real(y: Tensor) -> Tensor:
    return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y


# -- comparisons


def disagreement(
    sample: Sample, where: Placed, found: Outcome, expected: Outcome, grad: bool, second: bool = False
) -> str:
    """The first difference that no rounding explains, or nothing."""
    why = _difference(sample, where, found, expected)
    return "" if why and _as_near(sample, where, found, expected, grad, second) else why


def _difference(sample: Sample, where: Placed, found: Outcome, expected: Outcome) -> str:
    """The first difference that is more than rounding, or nothing."""
    tolerance = max(_TOLERANCE.get(x.dtype, 0.0) for x in (*sample.steps[0], *expected["values"]))
    tolerance = max(tolerance, sample.tolerance)
    for name in expected:
        # gradients of what is closed over are summed before they are multiplied: infinite ones, or NaN
        loose = sample.edge and name != "values" and bool(where.closed)
        for i, (x, y) in enumerate(zip(found[name], expected[name], strict=True)):
            if why := _unlike(x, y) or _apart(x, y, tolerance, sample.edge, loose):
                return f"{name} {i}: {why}"
    return ""


def _unlike(x: Tensor | None, y: Tensor | None) -> str:
    if x is None or y is None:
        there = any(z is not None and bool((z != 0).any()) for z in (x, y))
        return f"{'None' if x is None else 'there'}, not {'None' if y is None else 'there'}" if there else ""
    for kind in ("shape", "dtype", "requires_grad"):
        if getattr(x, kind) != getattr(y, kind):
            return f"{kind} {getattr(x, kind)}, not {getattr(y, kind)}"
    return ""


def _apart(x: Tensor | None, y: Tensor | None, tolerance: float, edge: bool, loose: bool) -> str:
    """Where numbers differ by more than rounding, relative to the largest; at edges each for itself."""
    if x is None or y is None or not y.numel():
        return ""
    loose = loose or y.is_complex()  # infinite ones are NaN in other products
    x, y = _real(x.detach()), _real(y.detach())
    if not y.is_floating_point():
        return "" if torch.equal(x, y) else _at(x, y, x != y)
    x, y = x.double(), y.double()
    finite = y.isfinite()
    largest = max(_SMALL if tolerance < 1e-3 else 1.0, float(y[finite].abs().max()) if bool(finite.any()) else 1.0)
    scale = min(largest, 1.0) if edge else largest
    near = x.isfinite() & finite & ((x - y).abs() <= tolerance * (y.abs() + scale))
    same = (x == y) | (x.isnan() & y.isnan()) | near
    same = same | (~x.isfinite() & ~finite) if loose else same
    return "" if bool(same.all()) else _at(x, y, ~same)


def _at(x: Tensor, y: Tensor, wrong: Tensor) -> str:
    index = tuple(int(i) for i in wrong.nonzero()[0])
    a, b = x[index].item(), y[index].item()
    off = f", off {abs(a - b):.1e}" if all(isinstance(v, float) and math.isfinite(v) for v in (a, b)) else ""
    return f"{a!r}, not {b!r}{off} (at {index}, {int(wrong.sum())} of {x.numel()})"


def _as_near(sample: Sample, where: Placed, found: Outcome, expected: Outcome, grad: bool, second: bool) -> bool:
    """Whether the compiled loop is as near to one of 64-bit floats as eager ones: both are rounded.

    There are two eager ones, of which one has other last bits in what it begins with: where little makes much, the
    loop may be off by as much. An eager loop of 64-bit floats is its own measure.
    """
    slack = 1e-4 if any(x.dtype in _WIDE for x in sample.steps[0]) else 0.0

    def other(change: Callable[[Tensor], Tensor]) -> Outcome:
        return outcome(
            replace(sample, steps=[[change(x) for x in step] for step in sample.steps]), where, False, grad, second
        )

    try:
        exact, shaken = other(lambda x: x.to(_WIDE.get(x.dtype, x.dtype))), other(_shaken)
    except Exception:
        return False
    each = [t for name in expected for t in zip(*(o[name] for o in (found, expected, exact, shaken)), strict=True)]
    return all(_nearer(x, y, e, s, slack) for x, y, e, s in each if all(z is not None for z in (x, y, e, s)))


def _shaken(x: Tensor) -> Tensor:
    """The numbers next to those of x, up and down in turn."""
    if not (x.is_floating_point() or x.is_complex()):
        return x
    signs = torch.ones(x.numel(), dtype=x.dtype)
    signs[::2] = -1
    return x * (1 + torch.finfo(x.dtype).eps * signs.reshape(x.shape))


def _nearer(x: Tensor, y: Tensor, exact: Tensor, shaken: Tensor, slack: float) -> bool:
    if _unlike(x, y) or x.shape != exact.shape:
        return False
    # of a complex number that is infinite the other part is NaN or not, as it is multiplied
    odd = torch.stack([~torch.isfinite(y)] * 2, -1) if y.is_complex() else torch.tensor(False)
    x, y, exact, shaken = (_real(z.detach()) for z in (x, y, exact, shaken))
    if not y.is_floating_point() or not y.numel():
        return torch.equal(x, y)
    limit = torch.finfo(y.dtype).max
    there = exact.isfinite() & (exact.abs() <= limit)  # torch's own may be infinite before
    x, y, exact, shaken = (z.double() for z in (x, y, exact, shaken))
    beyond = odd | (exact.abs() > limit)
    if bool(((x.isfinite() != y.isfinite()) & (x.isfinite() != there) & ~beyond).any()):
        return False
    finite = x.isfinite() & y.isfinite() & exact.isfinite() & shaken.isfinite() & ~beyond
    off, eager, turned, size = (
        float(torch.cat([z[finite], x.new_zeros(1)]).abs().max()) for z in (x - exact, y - exact, shaken - y, exact)
    )
    return off <= 3 * (eager + turned) + slack * size
