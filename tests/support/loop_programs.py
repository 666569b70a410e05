"""Random loops, run by tensorloop and as plain Python loops, for the tests of values and gradients.

A program says which loop it is, which of its inputs want a gradient or are the same tensor, and lists the operations of
its body as (name, number, number). One function carries out an operation for both: on TensorArrays and our inner loops,
or on lists and plain ones: so the file is long, and one. No operation contracts, so early steps count as much as late
ones.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tests.support.devices import HERE
from tests.support.loop_cases import Plain, Slots, rotate

F = 4  # features
Operation = tuple[str, int, int]


class Square(torch.autograd.Function):
    """A custom function: sin(x) w, with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return grad * x.cos() * w, grad * x.sin()


class Lists(Slots):
    """A list with the other methods of a TensorArray; rows are those of a batch of one."""

    def extend(self, xs: Tensor) -> "Lists":  # pyright: ignore[reportIncompatibleMethodOverride]
        for x in xs:
            self.append(x)
        return self

    def scatter(self, indices: Sequence[int], xs: Tensor) -> "Lists":
        for i, x in zip(indices, xs, strict=True):
            self.write(i, x)
        return self

    def gather(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self[i] for i in indices])

    def write_rows(self, pos: Tensor, x: Tensor, where: Tensor) -> "Lists":
        if bool(where):
            self.write(int(pos), x)
        return self


class Truth(Plain):
    """Python loops and lists."""

    array = Lists

    def scan(self, body: Any, init: Any, xs: Any, *, reverse: bool, until: Any, context: Any) -> Any:
        carry, ys, extra = own(init), [], () if context is None else (context,)
        for t in reversed(range(len(xs))) if reverse else range(len(xs)):
            carry, y = body(carry, xs[t], *extra)
            ys.append(y)
            if until is not None and until(carry, *extra):
                break
        columns = zip(*(ys[::-1] if reverse else ys), strict=True)
        return carry, tuple(None if c[0] is None else torch.stack([torch.as_tensor(y) for y in c]) for c in columns)

    def while_loop(self, cond: Any, body: Any, init: Any, *, context: Any) -> Any:
        carry, extra = own(init), () if context is None else (context,)
        while cond(carry, *extra):
            carry = body(carry, *extra)
        return carry

    def map(self, fn: Any, xs: Any, **options: Any) -> Any:
        columns = zip(*(fn(x) for x in xs), strict=True)
        return tuple(None if c[0] is None else torch.stack([torch.as_tensor(y) for y in c]) for c in columns)

    def inner(self, n: int, body: Any, init: Any) -> Any:
        return self.fori_loop(0, n, body, init)

    def inner_rows(self, cond: Any, body: Any, init: Any) -> Any:
        while bool(cond(init)):
            init = body(init)
        return init


class Ours:
    """The loops of tensorloop; those inside a body have checkpoints of their own."""

    array = tl.TensorArray

    def __init__(self, checkpoints: Any, inner: int | None = None) -> None:
        self.options: dict[str, Any] = {"checkpoints": checkpoints}
        self.inside: dict[str, Any] = {"checkpoints": inner}

    def scan(self, *args: Any, **options: Any) -> Any:
        return tl.scan(*args, **options, **self.options)

    def while_loop(self, *args: Any, **options: Any) -> Any:
        return tl.while_loop(*args, **options, **self.options)

    def fori_loop(self, *args: Any) -> Any:
        return tl.fori_loop(*args, **self.options)

    def map(self, *args: Any) -> Any:
        return tl.map(*args, **self.options)

    def inner(self, n: int, body: Any, init: Any) -> Any:
        return tl.fori_loop(0, n, body, init, **self.inside)

    def inner_rows(self, cond: Any, body: Any, init: Any) -> Any:
        return tl.while_loop(cond, body, init, **self.inside)


def own(init: Any) -> Any:
    """A carry whose lists the loop may write to."""
    return tuple(copy.copy(x) if isinstance(x, Lists) else x for x in init)


# -- what a body does

TENSORS = (
    "rotate", "rotate", "leaf", "leaf", "made", "made", "late", "swap", "same", "view", "returns_leaf", "returns_made",
    "detach", "no_grad", "in_place", "function", "inner", "inner", "inner_carry", "checkpoint", "dropout", "generator",
    "number", "every_other", "derivative",
)  # fmt: skip
ARRAYS = (
    "append", "append", "append_constant", "append_both", "extend", "overwrite", "overwrite", "scatter", "read", "read",
    "slice", "slice", "stack", "gather", "iterate", "swap_arrays", "copy", "rebuild", "inner_append", "inner_read",
    "captured_read", "captured_slice", "captured_gather",
)  # fmt: skip


@dataclass
class Registers:
    """What the operations of one step work on. h, g (*, F); a, b arrays of such; t how many steps were done."""

    loops: Any
    t: int
    h: Tensor
    g: Tensor
    a: Any
    b: Any
    w: Tensor  # closed over, or of the context
    made: Tensor  # computed from w before the loop
    late: Tensor
    array: Any  # closed over, or of the context
    generator: torch.Generator


def operate(r: Registers, operation: Operation) -> None:
    """Carries out one operation of a body."""
    name, p, q = operation
    if name in TENSORS:
        _on_tensors(r, name, p, q)
    elif name.startswith("captured"):
        r.h = rotate(r.h) + _read(r.array, name.removeprefix("captured_"), p, q).sin()
    elif name in ("read", "slice", "stack", "gather", "iterate"):
        if len(r.a):
            r.h = rotate(r.h) + _read(r.a, name, p, q).sin()
    else:
        _write(r, name, p, q)


def _on_tensors(r: Registers, name: str, p: int, q: int) -> None:
    h, g, w = r.h, r.g, r.w
    if name == "rotate":
        r.h = rotate(h, 0.3 + p)
    elif name == "leaf":
        r.h = rotate(h) + (h * w).sin()
    elif name == "made":
        r.h = rotate(h) + (h * r.made).cos()
    elif name == "late":
        r.h = h + r.late.sin() if r.t >= p else h
    elif name == "swap":
        r.h, r.g = g, h
    elif name == "same":
        r.g = h
    elif name == "view":
        r.g = h.view_as(h)
    elif name == "returns_leaf":
        r.g = w if w.shape == g.shape else g
    elif name == "returns_made":
        r.g = r.made if r.made.shape == g.shape else g
    elif name == "detach":
        r.g = g.detach()
    elif name == "number":
        r.h = h + r.t
    elif name == "every_other":
        r.h = h * w.cos() + h.sin() if r.t % 2 else rotate(h)
    elif name == "no_grad":
        with torch.no_grad():
            r.g = rotate(h) * w.cos()
    elif name == "in_place":
        r.h = rotate(h)
        r.h += g.sin()
    elif name in ("dropout", "generator"):
        r.h = h + g.sin() * (torch.rand(F, generator=r.generator if name == "generator" else None).to(h.dtype) < 0.7)
    else:
        _with_helpers(r, name, q)


def _with_helpers(r: Registers, name: str, q: int) -> None:
    h, g, w = r.h, r.g, r.w
    if name == "function":
        r.h = rotate(h) + Square.apply(h, g)  # pyright: ignore[reportOperatorIssue]
    elif name == "inner":
        r.h = r.loops.inner(q % 4, lambda i, x: rotate(x) + (x * w).sin() + g.cos(), h)
    elif name == "inner_carry":
        r.h, r.g = r.loops.inner(q % 4, lambda i, c: (rotate(c[1]) + r.made.sin(), c[0]), (h, g))
    elif name == "checkpoint":
        r.h = h + checkpoint(lambda x: (x * w).sin(), g, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
    elif name == "derivative":
        x = h.detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad((x * x.sin()).sum(), x)
        r.g = rotate(g) + grad * w


def _read(array: Any, how: str, p: int, q: int) -> Tensor:
    n = len(array)
    if how == "read":
        return array[q % n]
    if how == "slice":
        start = min(p, q) % n
        return array[start : max(p % n, start) + 1].mean(0)
    if how == "stack":
        return array.stack().sin().mean(0)
    if how == "gather":
        return array.gather([p % n, q % n, p % n]).mean(0)
    return sum(x.sin() * (i + 1) for i, x in enumerate(array)) / n**2  # pyright: ignore[reportReturnType]


def _write(r: Registers, name: str, p: int, q: int) -> None:
    x, n = rotate(r.h, 0.1 + p), len(r.a)
    if name == "append":
        r.a = r.a.append(x)
    elif name == "append_constant":
        r.a = r.a.append(x.detach())
    elif name == "append_both":
        r.a, r.b = r.a.append(x), r.b.append(x)
    elif name == "extend":
        r.a = r.a.extend(torch.stack([x, r.g, x.detach()])[: 1 + q % 3])
    elif name == "overwrite":
        r.a = r.a.write(q % (n + 1), x if p % 3 else x.detach())
    elif name == "scatter" and n:
        r.a = r.a.scatter([p % n, q % n], torch.stack([x, x.cos()]))
    elif name == "inner_append":
        r.a, r.h = r.loops.inner(q % 3, lambda i, c: (c[0].append(c[1]), rotate(c[1]) * r.w.cos()), (r.a, r.h))
    elif name == "inner_read" and n:
        array = r.a
        r.h = r.loops.inner(
            1 + q % 3, lambda i, x: rotate(x) + array[(i + p) % n].sin() + array[: p % n + 1].sum(0), r.h
        )
    elif name == "swap_arrays" and len(r.b) == n:
        r.a, r.b = r.b, r.a
    elif name == "copy" and len(r.b) <= n:
        r.b = copy.copy(r.a)
    elif name == "rebuild" and n:
        r.a = r.loops.array.unstack(r.a.stack() * r.w.cos())


# -- loops that stop for all at once


@dataclass
class Program:
    """A loop of `steps` steps (or fewer, by `until`) and what its body does."""

    kind: str
    steps: int
    operations: list[Operation]
    ys: list[str]
    grads: list[bool]  # of h, g, xs, the first slots, w, late, the slots of the captured array
    alias: str  # whether two inputs are the same tensor, or one a view of the other
    slots: int  # of the first array at the start
    reverse: bool
    until: int | None
    context: bool

    def inputs(self) -> list[Tensor]:
        """h, g, xs (T, F), slots (n, F), w, late, captured (3, F)"""
        generator = torch.Generator(HERE).manual_seed(3)
        shapes = [(F,), (F,), (self.steps, F), (self.slots, F), (F,), (F,), (3, F)]
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [x.requires_grad_(grad) for x, grad in zip(values, self.grads, strict=True)]


def small(kinds: Sequence[str], most: int = 5) -> st.SearchStrategy[list[Operation]]:
    """The operations of a body."""
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=most)


programs = st.builds(
    Program,
    kind=st.sampled_from(["scan", "scan", "while", "fori", "map"]),
    steps=st.integers(0, 9),
    operations=small(TENSORS + ARRAYS),
    ys=st.lists(st.sampled_from(["h", "g", "product", "number", "none", "w", "made", "x", "detached"]), max_size=3),
    grads=st.lists(st.booleans(), min_size=7, max_size=7),
    alias=st.sampled_from(["", "", "", "same", "view", "expanded", "xs", "made"]),
    slots=st.integers(0, 3),
    reverse=st.booleans(),
    until=st.one_of(st.none(), st.integers(1, 9)),
    context=st.booleans(),
)


def run(program: Program, loops: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the loop of a program gives: carry, arrays stacked, ys."""
    h, g, xs, slots, w, late, captured = inputs
    torch.manual_seed(5)
    made = (w * 1.3).sin()
    generator = torch.Generator(HERE).manual_seed(7)
    alias = program.alias
    h = {"same": g, "view": w.view_as(w), "expanded": w[:1].expand(F), "made": made}.get(alias, h)
    outside = loops.array.unstack(xs if alias == "xs" and program.steps else captured)
    first = loops.array.unstack(slots) if program.slots else loops.array()

    def registers(carry: Any, context: Any) -> Registers:
        given_w, given_array = context or (w, outside)
        h, g, a, b, n = carry
        return Registers(loops, n, h, g, a, b, given_w, made, late, given_array, generator)

    def body(carry: Any, x: Tensor | None = None, context: Any = None) -> Any:
        r = registers(carry, context)
        if x is not None:
            r.h = rotate(r.h) + x.sin()
        for operation in program.operations:
            operate(r, operation)
        return (r.h, r.g, r.a, r.b, r.t + 1), tuple(_output(r, y, x) for y in program.ys)

    context = (w, outside) if program.context else None
    init = (h, g, first, loops.array(), 0)
    ys: Any = ()
    if program.kind == "scan":
        stop = program.until
        until = None if stop is None else lambda carry, *_: carry[4] >= stop
        carry, ys = loops.scan(body, init, xs, reverse=program.reverse, until=until, context=context)
    elif program.kind == "while":
        carry = loops.while_loop(
            lambda c, *_: c[4] < program.steps, lambda c, *rest: body(c, None, *rest)[0], init, context=context
        )
    elif program.kind == "fori":
        carry = loops.fori_loop(0, program.steps, lambda i, c: body(c)[0], init)
    else:
        carry = ()
        ys = loops.map(lambda x: body((x, g, loops.array(), loops.array(), 1), x)[1], xs)
    return _flat(carry) + (_flat(ys) if program.steps else [])


def _output(r: Registers, y: str, x: Tensor | None) -> Any:
    if y == "x":
        return r.g if x is None else x
    products = {"h": r.h, "g": r.g, "w": r.w, "made": r.made, "number": r.t, "none": None}
    return r.h * r.g if y == "product" else r.h.detach() if y == "detached" else products[y]


def _flat(tree: Sequence[Any]) -> list[Tensor]:
    out = []
    for x in tree:
        if isinstance(x, Lists | tl.TensorArray):
            out += [torch.tensor(float(len(x))), *([x.stack()] if len(x) else [])]
        elif x is not None:
            out.append(torch.as_tensor(x))
    return out


# -- rows that stop on their own

ROWS_TENSORS = ("rotate", "leaf", "made", "late", "swap", "same", "view", "detach", "no_grad", "in_place", "inner",
                "checkpoint", "every_other", "context", "function", "inner_rows")  # fmt: skip
ROWS_ARRAYS = (
    "append", "append", "append_late", "append_late", "append_both", "extend", "overwrite", "overwrite", "scatter",
    "write_rows", "write_rows", "read", "read", "slice", "stack", "gather", "swap_arrays", "copy", "rebuild",
    "inner_append", "inner_read", "context_read", "context_slice",
)  # fmt: skip


@dataclass
class RowProgram:
    """A while_loop with a (B,) condition; row b takes limits[b] steps."""

    limits: list[int]
    operations: list[Operation]
    grads: list[bool]  # of h, g, the first slots, w, late, context, the slots of the context's array
    slots: int
    context: bool
    max_steps: int | None

    def inputs(self) -> list[Tensor]:
        """h (B, F), g (B, F), slots (n, B, F), w (F,), late (F,), context (B, F), array (2, B, F)"""
        generator = torch.Generator(HERE).manual_seed(4)
        n = len(self.limits)
        shapes = [(n, F), (n, F), (self.slots, n, F), (F,), (F,), (n, F), (2, n, F)]
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [x.requires_grad_(grad) for x, grad in zip(values, self.grads, strict=True)]


row_programs = st.builds(
    RowProgram,
    limits=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    operations=small(ROWS_TENSORS + ROWS_ARRAYS, 6),
    grads=st.lists(st.booleans(), min_size=7, max_size=7),
    slots=st.integers(0, 3),
    context=st.booleans(),
    max_steps=st.one_of(st.none(), st.none(), st.integers(0, 4)),
)


def run_rows(program: RowProgram, loops: Any, loop: Callable[..., Any], inputs: Sequence[Tensor], rows: Any) -> Any:
    """The carry of these rows: h, g, a, b."""
    h, g, slots, w, late, beside, array = inputs
    first = loops.array.unstack(slots[:, rows]) if program.slots else loops.array()
    context = (beside[rows], loops.array.unstack(array[:, rows]))
    limits = torch.tensor(program.limits)[rows]
    made = (w * 1.3).sin()

    def body(carry: Any, context: Any = None) -> Any:
        h, g, a, b, limit, row, n = carry
        r = Registers(loops, int(n.max()), h, g, a, b, w, made, late, None, torch.Generator(HERE))
        for operation in program.operations:
            _operate_on_rows(r, operation, row, n, context)
        return r.h, r.g, r.a, r.b, limit, row, n + 1

    ids = torch.arange(len(program.limits))[rows]
    init = (h[rows], g[rows], first, loops.array(), limits, ids, torch.zeros_like(limits))
    options = {"context": context} if program.context else {}
    return loop(lambda c, *_: c[6] < c[4], body, init, max_steps=program.max_steps, **options)[:4]


def _operate_on_rows(r: Registers, operation: Operation, row: Tensor, n: Tensor, context: Any) -> None:
    name, p, q = operation
    slots = len(r.a)
    if name.startswith("context"):
        if context is not None:
            found = context[0] if name == "context" else _read(context[1], name.removeprefix("context_"), p, q)
            r.h = rotate(r.h) + (r.h * found).sin()
    elif name == "append_late":
        if r.t >= p:
            r.b = r.b.append(r.h.cos())
    elif name == "write_rows":
        if slots:
            r.a = r.a.write_rows((row + n + p) % slots, r.h.cos(), (row + n + q) % 3 != 0)
    elif name == "inner_rows":
        r.h, _ = r.loops.inner_rows(
            lambda c: c[1] < (row + p) % 3, lambda c: (rotate(c[0]) + (c[0] * r.w).sin(), c[1] + 1), (r.h, row * 0)
        )
    else:
        operate(r, operation)
