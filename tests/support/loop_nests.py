"""Random loops in loops in loops, run by tensorloop and as plain Python loops.

A `Nest` is a loop whose body does the operations of `loop_programs` and further nests. A nest's loop begins with what
its outer body has at hand, closes over tensors and arrays of that body or of further out, and has checkpoints of its
own. With `limits` all loops are of a batch: "rows" then stop each on its own, and are compared with each row alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop import schedule
from tests.support import loop_programs
from tests.support.devices import HERE
from tests.support.loop_cases import rotate
from tests.support.loop_programs import ARRAYS, TENSORS, F, Operation, Ours, Registers, Truth, own

PLANS: dict[str, Any] = {
    "all": None,
    "K=1": 1,
    "K=2": 2,
    "K=3": 3,
    "budget": tl.Checkpoints(budget=100_000),
    "blocks": tl.Checkpoints(k=2, residuals=2),
    "on the CPU": tl.Checkpoints(k=2, offload="cpu"),
    "periodic": schedule.Periodic(2),
}
# What does not go with rows that stop: random numbers, and what needs tensors of one shape.
_NOT_OF_ROWS = {"dropout", "generator", "checkpoint"}
_GROWS = {"append", "append_constant", "append_both", "extend", "scatter", "copy", "inner_append"}


@dataclass
class Nest:
    """A loop. Its kind is a method of `Loops`; `rows` is a while loop whose rows stop on their own."""

    kind: str  # scan, while, fori, rows
    plan: str
    steps: int
    operations: "list[Operation | Nest]"
    xs: str  # of a scan: given, made (of the outer carry), stack, array
    ys: str  # of a scan
    arrays: str  # what the carry begins with: same, new, swapped
    weight: str  # what the body has as its weight: same, carry, made, fresh
    made: str  # and beside it: same, fresh, entangled (computed from the weight)
    read: str  # the array that it closes over: same, a, b
    until: int | None
    max_steps: int | None
    options: tuple[bool, bool, bool]  # reverse, context, compact


@dataclass
class NestProgram:
    """The outermost loop, and which inputs want a gradient."""

    nest: Nest
    grads: list[bool]  # of h, g, xs, the first slots, w, late, the slots of the captured array
    slots: int
    limits: list[int] | None

    def inputs(self) -> list[Tensor]:
        """h, g (*B, F), xs (4, F), slots (n, *B, F), w, late (F,), captured (3, *B, F)"""
        generator = torch.Generator(HERE).manual_seed(3)
        batch = () if self.limits is None else (len(self.limits),)
        shapes = [(*batch, F), (*batch, F), (4, F), (self.slots, *batch, F), (F,), (F,), (3, *batch, F)]
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [x.requires_grad_(grad) for x, grad in zip(values, self.grads, strict=True)]


def _operations(depth: int, kinds: Sequence[str]) -> st.SearchStrategy[Any]:
    plain = st.tuples(st.sampled_from(kinds), st.integers(0, 5), st.integers(0, 5))
    if not depth:
        return st.lists(plain, min_size=1, max_size=4)
    return st.tuples(st.lists(plain, max_size=2), nests(depth - 1), st.lists(plain, max_size=2)).map(
        lambda parts: [*parts[0], parts[1], *parts[2]]
    )


def nests(depth: int) -> st.SearchStrategy[Nest]:
    """Loops with so many levels below them."""
    kinds = TENSORS + ARRAYS + ("captured_read", "captured_last", "captured_slice", "read_last", "function_made")
    return st.builds(
        Nest,
        kind=st.sampled_from(["scan", "scan", "while", "fori", "rows"]),
        plan=st.sampled_from(["K=1", "K=2", "K=2", *PLANS]),
        steps=st.integers(0, 4),
        operations=_operations(depth, kinds),
        xs=st.sampled_from(["given", "made", "stack", "array"]),
        ys=st.sampled_from(["h", "g", "product", "number", "w", "made", "x", "detached"]),
        arrays=st.sampled_from(["same", "same", "new", "swapped"]),
        weight=st.sampled_from(["same", "carry", "made", "fresh"]),
        made=st.sampled_from(["same", "fresh", "entangled"]),
        read=st.sampled_from(["same", "a", "b"]),
        until=st.one_of(st.none(), st.integers(1, 5)),
        max_steps=st.one_of(st.none(), st.none(), st.integers(0, 4)),
        options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    )


def programs(depth: int, rows: bool) -> st.SearchStrategy[NestProgram]:
    """Programs of so many levels below the outermost."""
    return st.builds(
        NestProgram,
        nest=nests(depth),
        grads=st.lists(st.booleans(), min_size=7, max_size=7),
        slots=st.integers(0, 3),
        limits=st.lists(st.integers(0, 4), min_size=1, max_size=4) if rows else st.none(),
    )


class NestOurs(Ours):
    """The loops of tensorloop, each with its own plan."""

    def __init__(self, plans: bool = True) -> None:
        super().__init__(None)
        self.plans = plans

    def of(self, nest: Nest) -> "Ours":
        """The loops with the plan of a nest."""
        return Ours(PLANS[nest.plan] if self.plans else None)


class NestTruth(Truth):
    """Python loops."""

    def of(self, nest: Nest) -> "NestTruth":
        """The same whatever the plan."""
        return self

    def while_loop(self, cond: Any, body: Any, init: Any, *, context: Any, max_steps: Any = None, **_: Any) -> Any:
        carry, extra, taken = own(init), () if context is None else (context,), 0
        while (max_steps is None or taken < max_steps) and bool(cond(carry, *extra)):
            carry, taken = body(carry, *extra), taken + 1
        return carry


@dataclass
class State(Registers):
    """What one step of a nest works on, beside the registers."""

    xs: Tensor  # (4, F)
    row: Tensor | None  # which rows of the batch these are
    limits: Tensor | None
    fixed: bool  # whether a and b must keep their lengths: rows inside have taken different numbers of steps


def run(program: NestProgram, loops: Any, inputs: Sequence[Tensor], rows: Any = None) -> Any:
    """(h, g, a, b) of these rows after the outermost loop."""
    h, g, xs, slots, w, late, captured = inputs
    torch.manual_seed(5)
    row = limits = None
    if program.limits is not None:
        row, limits = torch.arange(len(program.limits))[rows], torch.tensor(program.limits)
        h, g, slots, captured = h[row], g[row], slots[:, row], captured[:, row]
    first = loops.array.unstack(slots) if program.slots else loops.array()
    outside = loops.array.unstack(captured)
    generator = torch.Generator(HERE).manual_seed(7)
    made = (w * 1.3).sin()
    s = State(loops, 0, h, g, first, loops.array(), w, made, late, outside, generator, xs, row, limits, False)
    _run(s, program.nest, True)
    return s.h, s.g, s.a, s.b


def _run(s: State, nest: Nest, outermost: bool = False) -> None:
    """Carries out a nest: its loop begins with the registers of the outer body and leaves its results there."""
    by_row = nest.kind == "rows" and s.row is not None
    fixed = nest.arrays != "new" and (s.fixed or (by_row and not outermost))
    weight, beside, read, context = _closed_over(s, nest, by_row and nest.options[2])
    outer, late, generator, xs, limits, salt = s.loops, s.late, s.generator, s.xs, s.limits, s.t

    def step(carry: Any, x: Any, context: Any = None) -> tuple[Any, Any]:
        h, g, a, b, t, row = carry
        w, array = context or (weight, read)
        r = State(outer, t, h, g, a, b, w, beside, late, array, generator, xs, row, limits, fixed)
        if x is not None:
            r.h = rotate(r.h) + x.sin()
        for operation in nest.operations:
            if isinstance(operation, Nest):
                _run(r, operation)
            else:
                _operate(r, operation)
        return (r.h, r.g, r.a, r.b, t + 1, row), _output(r, nest.ys, x)

    def goes_on(carry: Any, *_: Any) -> Any:
        return carry[4] < nest.steps if limits is None or not by_row else carry[4] < (limits[carry[5]] + salt) % 5

    loops = s.loops.of(nest)
    init = (s.h, s.g, *_first_arrays(s, nest, loops), 0, s.row)
    if nest.kind == "scan" and len(given := _xs(s, nest)):
        until = None if nest.until is None else lambda carry, *_: carry[4] >= nest.until
        carry, (y,) = loops.scan(step, init, given, reverse=nest.options[0], until=until, context=context)
        if y.shape[1:] == s.h.shape:
            s.g = s.g + y.sum(0).cos()
        elif y.dim() == 1:
            s.g = s.g + y.sum()
    elif nest.kind == "fori":
        carry = loops.fori_loop(0, nest.steps, lambda i, c: step(c, None)[0], init)
    else:
        options = {"max_steps": nest.max_steps, "compact": by_row and nest.options[2]}
        carry = loops.while_loop(goes_on, lambda c, *rest: step(c, None, *rest)[0], init, context=context, **options)
    s.h, s.g = carry[0], carry[1]
    if nest.arrays != "new":
        s.a, s.b = carry[2], carry[3]
    elif len(carry[2]):
        s.h = s.h + carry[2].stack().sum(0).sin()


def _closed_over(s: State, nest: Nest, compact: bool) -> tuple[Tensor, Tensor, Any, Any]:
    """(weight, a tensor beside it, array, context) of a nest's body."""
    weight = {"carry": s.h, "made": s.made, "fresh": (s.w * s.h.cos()).sin()}.get(nest.weight, s.w)
    beside = {"fresh": s.made.cos(), "entangled": (weight * 1.3).sin()}.get(nest.made, s.made)
    read = {"a": s.a, "b": s.b}.get(nest.read, s.array)
    read = read if len(read) else s.array  # nothing notes that an array was empty, and it may be filled before backward
    if compact:  # what has rows must be in the context, and there nothing else may be
        weight, beside = weight.expand_as(s.h), s.late
    return weight, beside, read, (weight, read) if compact or nest.options[1] else None


def _first_arrays(s: State, nest: Nest, loops: Any) -> tuple[Any, Any]:
    if nest.arrays == "new":
        return loops.array(), loops.array()
    # In rows that stop, an array takes the place of one of its length.
    swapped = nest.arrays == "swapped" and (s.row is None or len(s.a) == len(s.b))
    return (s.b, s.a) if swapped else (s.a, s.b)


def _xs(s: State, nest: Nest) -> Any:
    if nest.xs == "given":
        return s.xs[: nest.steps]
    if nest.xs == "made":
        return s.xs[: nest.steps].view(-1, *[1] * (s.h.dim() - 1), F) * s.h
    if not len(s.a) or len(s.a) > 8:
        return s.xs[: nest.steps]
    return s.a.stack() if nest.xs == "stack" else s.a


def _output(r: State, y: str, x: Tensor | None) -> tuple[Any]:
    if y == "x":
        return (r.g if x is None else x,)
    some = {"g": r.g, "product": r.h * r.g, "number": r.t, "w": r.w, "made": r.made, "detached": r.h.detach()}
    return (some.get(y, r.h),)


def _operate(r: State, operation: Operation) -> None:
    name, _, q = operation
    if r.limits is not None and name in _NOT_OF_ROWS:
        return
    if len(r.a) > 24 and (name in _GROWS or name == "overwrite"):
        return
    if r.fixed and (name in _GROWS or name == "overwrite"):
        if name in ("overwrite", "append") and len(r.a):
            r.a = r.a.write(q % len(r.a), rotate(r.h))
    elif name == "function_made":
        if r.made.shape == r.h.shape:
            r.h = rotate(r.h) + loop_programs.Square.apply(r.h, r.made)  # pyright: ignore[reportOperatorIssue]
    elif name in ("read_last", "captured_last"):
        array = r.a if name == "read_last" else r.array
        if len(array):
            r.h = rotate(r.h) + array[-1 - q % len(array)].sin()
    elif not name.startswith("captured") or len(r.array):
        loop_programs.operate(r, operation)
