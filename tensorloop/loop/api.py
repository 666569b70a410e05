"""Loops with the gradients of a Python loop: `scan`, `while_loop`, and `explain`. `fori_loop`, `map`: `counted`.

Each function here checks its arguments, says what its functions are (`Called`), and has a `Loop` run (`run`). Long by
its overloads and docstrings.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue, facts_of, named
from tensorloop._torch.dynamo import stands_in_graphs
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.loop import first_step
from tensorloop.loop.called import Called, check_body, check_callable, pair_of
from tensorloop.loop.compiled.explain import Explanation
from tensorloop.loop.compiled.front import Compile
from tensorloop.loop.compiled.in_graphs import in_graph
from tensorloop.loop.first_step import FirstOnly
from tensorloop.loop.loop import Loop
from tensorloop.loop.options import (
    Body,
    Condition,
    Dims,
    PackedScanOptions,
    Plan,
    TensorScanOptions,
    WhileOptions,
)
from tensorloop.loop.rows_loop import ConditionalLoop
from tensorloop.loop.rows_scan import UntilLoop
from tensorloop.loop.run import run_loop
from tensorloop.loop.scan_slices import slices_of
from tensorloop.loop.slices import Slices, checked_dim
from tensorloop.packed.rows.dim import Dim
from tensorloop.tensor_array.array import TensorArray

if TYPE_CHECKING:  # it loads fifty modules, which loops over tensors do without
    from tensorloop.packed import PackedTensor

__all__ = ["explain", "scan", "while_loop"]

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
Context = TypeVar("Context")


# Where none fits, pyright explains the one that comes nearest. Those of packed xs, ranges and arrays say what x is, so
# that a body without a y fits none of them: where x were Any, it could not tell, and would blame xs. A body with a
# context has an overload of its own: a union of both forms makes pyright try a lambda many times, seconds for a call.
@overload
def scan(
    body_fn: Callable[[C, Tensor], tuple[C, Any]],
    init: C,
    xs: "PackedTensor",
    length: int | None = None,
    *,
    until: None = None,
    context: None = None,
    **options: Unpack[PackedScanOptions],
) -> tuple[C, Any]: ...
@overload
def scan(
    body_fn: Callable[[C, int], tuple[C, Y]],
    init: C,
    xs: range,
    length: int | None = None,
    *,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    **options: Unpack[TensorScanOptions],
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Callable[[C, Tensor], tuple[C, Y]],
    init: C,
    xs: TensorArray,
    length: int | None = None,
    *,
    until: Callable[..., Condition] | None = None,
    context: None = None,
    **options: Unpack[TensorScanOptions],
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Callable[[C, Tensor, Context], tuple[C, Any]],
    init: C,
    xs: "PackedTensor | TensorArray",
    length: int | None = None,
    *,
    until: Callable[..., Condition] | None = None,
    context: Context,
    compact: bool = False,
    **options: Unpack[PackedScanOptions],
) -> tuple[C, Any]: ...
@overload
def scan(
    body_fn: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X = None,
    length: int | None = None,
    *,
    until: Callable[[C], Condition] | None = None,
    context: None = None,
    **options: Unpack[TensorScanOptions],
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Callable[[C, X, Context], tuple[C, Y]],
    init: C,
    xs: X = None,
    length: int | None = None,
    *,
    until: Callable[[C, Context], Condition] | None = None,
    context: Context,
    **options: Unpack[TensorScanOptions],
) -> tuple[C, Y]: ...
@stands_in_graphs(in_graph.scan)
@called_eagerly
@in_graph.exports(in_graph.scan)
@named("scan")
def scan(
    body_fn: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: Dims | Dim = 0,
    reverse: bool = False,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = None,
    progress: bool = False,
) -> tuple[Any, Any]:
    """Runs body_fn on one slice of xs after another, with a carry from step to step, and stacks the outputs.

        carry, ys = tl.scan(body_fn, init, xs)  # body_fn(carry, x) -> (carry, y)
        carry, ys = tl.scan(body_fn, init, length=100)  # no inputs: x is None
        carry, ys = tl.scan(body_fn, init, xs, until=done)  # stops after the first step where done(carry)

    Values and gradients are those of this loop:

        ys = []
        for t in reversed(range(length)) if reverse else range(length):
            init, y = body_fn(init, xs.select(dim, t))  # of a copy of init
            ys.append(y.clone())
            if until is not None and until(init): break
        return init, torch.stack(ys, dim)  # in index order

    Args:
        body_fn: one step: `body_fn(carry, x)`, or `body_fn(carry, x, context)` with `context`. It returns (carry, y); y
            is a tree of tensors and numbers, or None where there is no output.
        init: the first carry: a tree (nested tuples, lists, dicts, dataclasses) of tensors, TensorArrays, numbers and
            None. It is copied, never changed. Every step must return the same structure, shapes, dtypes and Python
            types; where the first step alone makes another carry out of init, write `tl.first_only(init)`.
        xs: what steps get: a tree of tensors with one length T along `dim`; body_fn sees them without that dim. A
            TensorArray gives its slots, a range its numbers. Packed tensors: see below. None (default): x is None.
        length: int, the number of steps where xs is None. With xs it is only compared with T.
        dim: int, the dim of xs to run over; default 0. Or a tree like xs of ints, one for each tensor; ys then have T
            first. Packed xs run over their ragged dim.
        reverse: bool, default False. True begins with the last slice; ys are still in the order of xs.
        until: `until(carry)`, or `until(carry, context)`, asked after each step: a `tl.loop.Condition`, True to stop.
            No gradient goes through it. None (default) runs all steps.
        context: a tree that body_fn and until get as last argument; None (default): they get none. Where rows leave the
            batch, its tensors, arrays and packed tensors have B leading rows, and lose the same ones.
        compact: bool, default False. True takes rows that have stopped out of the batch, to save their work; needs
            `until`.
        checkpoints: a `tl.loop.Plan`. None (default) keeps what every step saves for backward. K keeps at most K
            carries and runs the steps between them again in backward.
        compile: a `tl.loop.Compile`. True compiles the loop: to machine code on the CPU, to CUDA graphs on a GPU.
            Results are the same up to rounding, and `tl.explain` says what became of it. None (default) runs eagerly,
            unless `tl.set_default_compile` says otherwise.
        progress: bool, default False. True shows a bar of steps; needs tqdm.

    Returns:
        carry: the last one, a tree like init.
        ys: a tree like y, in which a tensor (*F) is (T, *F) with T at `dim`, or last where it has fewer dims. A number
            becomes (T,), but stays a number to type checkers, unless `torch.as_tensor(n)` is returned. None stays
            None. With `until`, T is the number of steps taken.

    Rows that stop: where `until` gives a (B,) bool tensor, each row stops on its own, as in `tl.while_loop`. ys are
    then packed: row b has the steps that it took. Carry and slices of xs have B leading rows, or are 0-d and shared.

    Packed xs, all of one `tl.Dim`: step t gets the n rows that have an entry t. The carry has B leading rows; in
    body_fn x, carry, context and y have n. ys are packed. With `reverse` every row begins at its own end.

    Gradient: as the Python loop's, to init, xs, context and whatever tensors body_fn closes over.
    Cost: T calls of body_fn; with checkpoints T + `tl.schedule.advances(schedule, T)`, backward included, and a
    TensorArray in the carry takes O(1) for each carry kept. No device sync of its own; one a step with `until` on a
    device.

    Raises:
        TypeError: a step changes the carry or the kind of y, or returns no (carry, y); a leaf of xs or y of another
            type.
        ValueError: nothing says when to stop; lengths that differ; arguments that exclude each other.
        RuntimeError: a tensor that backward needs was changed in place; a write to an array made outside; what
            `compile="strict"` cannot compile.

    Source: the interface is that of jax.lax.scan.

    Example:
        >>> tl.scan(lambda c, x: (c + x, c * x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 2, 9]))
    """
    make, slices = _scan_of(body_fn, xs, length, dim, reverse, until, context, compact)
    if isinstance(init, FirstOnly):
        return first_step.scan(make, init, slices, checkpoints, progress, compile)
    return first_step.scan_whole(make, init, slices, checkpoints, progress, compile)


def _scan_of(
    body_fn: Any, xs: Any, length: Any, dim: Any, reverse: bool, until: Any, context: Any, compact: bool
) -> tuple[first_step.MakeScan, Slices]:
    """Checks a scan's arguments; returns what makes it of a kind of loop, an init and slices, and the slices of xs."""
    check_callable(body_fn=body_fn, **({} if until is None else {"until": until}))
    check_body(body_fn)
    dim = dim if isinstance(dim, Dim) else checked_dim(dim)
    length = None if length is None else arguments.as_int(length, "length")
    slices = slices_of(xs, length, dim, reverse, until)
    if arguments.as_bool(compact, "compact") and until is None:
        raise WrongValue("compact=True is for rows that stop on their own; give until=")

    def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        return pair_of(body_fn(carry, slices.tree.unflatten(row), *context))

    more = () if context is None else ("context",)
    functions = Called("body_fn", body_fn, ("carry", "x", *more)), Called("until", until, ("carry", *more))

    def make(kind: type[Loop], init: Any, slices: Slices) -> Loop:
        kind = UntilLoop if kind is Loop and until is not None else kind
        options: Any = {"slices": slices, "until": until, "compact": compact, "functions": functions}
        return kind("scan", body, init, slices.length, context, **options)

    return make, slices


@overload
def while_loop(
    cond_fn: Callable[[C], Condition],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    return_steps: Literal[False] = False,
    **options: Unpack[WhileOptions],
) -> C: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Condition],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    return_steps: Literal[False] = False,
    **options: Unpack[WhileOptions],
) -> C: ...
@overload
def while_loop(
    cond_fn: Callable[[C], Tensor],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    return_steps: Literal[True],
    **options: Unpack[WhileOptions],
) -> tuple[C, Tensor | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Tensor],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    return_steps: Literal[True],
    **options: Unpack[WhileOptions],
) -> tuple[C, Tensor | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C], Condition],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    return_steps: Literal[True],
    **options: Unpack[WhileOptions],
) -> tuple[C, int | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Condition],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    return_steps: Literal[True],
    **options: Unpack[WhileOptions],
) -> tuple[C, int | Any]: ...
@called_eagerly
@named("while_loop")
def while_loop(
    cond_fn: Callable[..., Condition],
    body_fn: Callable[..., Any],
    init: Any,
    *,
    context: Any = None,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: bool = False,
    checkpoints: Plan = None,
    compile: Compile = None,
    progress: bool = False,
) -> Any:
    """Repeats body_fn while cond_fn is true; the number of steps need not be known or bounded.

        carry = tl.while_loop(cond_fn, body_fn, init)  # body_fn(carry) -> carry
        carry = tl.while_loop(cond_fn, body_fn, init, checkpoints=8)  # trains in the memory of 8 carries
        carry, steps = tl.while_loop(cond_fn, body_fn, init, max_steps=50, return_steps=True)

    Values and gradients are those of this loop:

        while cond_fn(init):
            init = body_fn(init)
        return init

    Args:
        cond_fn: asked before each step: `cond_fn(carry)`, or `cond_fn(carry, context)` with `context`. It returns a
            `tl.loop.Condition`, True to go on: one bool for all, or a (B,) bool tensor, where each row stops on its
            own.
        body_fn: one step: `body_fn(carry)`, or `body_fn(carry, context)`. It returns the next carry.
        init: the first carry, a tree as in `tl.scan`. With a (B,) condition its tensors have B leading rows, or are 0-d
            and shared, as numbers are; arrays have elements (B, ...).
        context: a tree that both functions get as last argument; None (default): they get none. With `compact` it has B
            leading rows, and loses those that stop.
        max_steps: int; the loop ends after so many steps, whatever cond_fn says. None (default) sets no bound.
        compact: bool, default False. True takes rows that have stopped out of the batch whenever they are a quarter of
            it, to save their work; the carry returned has all rows again.
        return_steps: bool, default False. True returns (carry, steps).
        checkpoints: a `tl.loop.Plan`. None (default) keeps what every step saves for backward; K keeps at most K
            carries, however many steps there are.
        compile: a `tl.loop.Compile`. True compiles the loop: to machine code on the CPU, to CUDA graphs on a GPU.
            None (default) runs eagerly, unless `tl.set_default_compile` says otherwise.
        progress: bool, default False. True shows a bar of steps; needs tqdm.

    Returns:
        carry: the last one, a tree like init.
        steps: with `return_steps`, the number of steps: an int, or (B,) int64 with a (B,) condition.

    Rows that stop: the carry of a stopped row is frozen exactly; a new slot of an array is 0 there. What body_fn goes
    on computing for it is thrown away. Where body_fn mixes rows, running rows see the last real input of stopped ones;
    with `compact` these are gone. Under `torch.func.vmap` a condition of one bool stops each element on its own.

    Gradient: as the Python loop's, also to closed-over tensors; none to what only cond_fn uses. What body_fn computes
    for a stopped row gets none, and NaN there reaches no other row.
    Cost: as `tl.scan`; one sync a step on a device, to ask the condition. A (B,) condition keeps B bools a step.

    Raises:
        TypeError: cond_fn returns no bool; a step changes the carry's structure, shapes or dtypes.
        ValueError: a leaf of the carry has not B rows; max_steps below 0.
        RuntimeError: as `tl.scan`.

    Source: the interface is that of jax.lax.while_loop; Equinox has checkpoints in loops of unknown length.

    Example:
        >>> tl.while_loop(lambda c: c < 100, lambda c: c * 2, torch.tensor(1))
        tensor(128)
        >>> tl.while_loop(lambda c: c < 100, lambda c: c * 2, torch.tensor([1, 60]), return_steps=True)
        (tensor([128, 120]), tensor([7, 1]))
    """
    check_callable(cond_fn=cond_fn, body_fn=body_fn)
    arguments.as_bool(compact, "compact")
    arguments.as_bool(return_steps, "return_steps")
    if max_steps is not None and (max_steps := arguments.as_int(max_steps, "max_steps")) < 0:
        raise WrongValue(f"max_steps must be at least 0, got {max_steps}")

    def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        return body_fn(carry, *context), None

    given = ("carry",) if context is None else ("carry", "context")
    functions = Called("cond_fn", cond_fn, given), Called("body_fn", body_fn, given)

    def make(kind: type[Loop] | None, init: Any, most: int | None) -> Loop:
        kind = kind or ConditionalLoop
        return kind("while_loop", body, init, most, context, cond=cond_fn, compact=compact, functions=functions)

    if isinstance(init, FirstOnly):
        carry, steps = first_step.while_loop(make, init, max_steps, checkpoints, progress, compile)
        return (carry, steps) if return_steps else carry
    ended, carry = run_loop(make(None, init, max_steps), checkpoints, progress, compile)
    return (carry, ended.steps()) if return_steps else carry


@called_eagerly
@named("explain", {"compile": "it says what compile=True would do"})
def explain(
    body_fn: Body[C, Any, Any],
    init: C,
    xs: Any = None,
    length: int | None = None,
    *,
    dim: Dims | Dim = 0,
    reverse: bool = False,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    compact: bool = False,
    checkpoints: Plan = None,
    progress: bool = False,
    device: str | torch.device | None = None,
) -> Explanation:
    """Says what `tl.scan(..., compile=True)` would do with a loop, as text; it runs only one step or two.

        print(tl.explain(body_fn, init, xs))
        print(tl.explain(body_fn, init, xs, device="cuda"))  # of a GPU, which need not be there

    The text begins with a table of the body's lines: operations of a step forward and backward, those outside of the
    loop, bytes kept; on a GPU launches. It goes on with what would make the loop better, then with what runs once, for
    all steps at once and step by step, how long the last run took, and what is kept for backward. Where the loop is not
    compiled, it says why, by which line, and what to write instead. With `checkpoints` it also says what these do with
    the eager loop: extra steps, the bytes at peak, and those of a step; `.forecast.plot()` draws it.

    Args:
        body_fn, init, xs, length, dim, reverse, until, context, compact, checkpoints: as in `tl.scan`.
        progress: as in `tl.scan`; no bar is shown.
        device: "cuda" or a torch.device: where the loop is to run, if not where the tensors are. The text then has
            counts of what it asks of that device: launches, waits, bytes.

    Returns:
        A `tl.loop.Explanation`. Print it; `.compiled` is a bool, `.forecast` a `tl.schedule.Forecast` or None.

    Cost: the first step, and the time to compile, which the loop itself then need not take again; with `checkpoints`
    two more steps at most, whose writes and random numbers are undone.

    Raises:
        TypeError: `compile` was given; otherwise as `tl.scan`.
        ValueError: a budget that is too small, with the least that works; `device` is of a kind on which no loops are
            compiled; otherwise as `tl.scan`.

    Example:
        >>> tl.explain(lambda h, x: (h * float(x), h), torch.ones(2), torch.ones(3)).compiled
        False
    """
    make, slices = _scan_of(body_fn, xs, length, dim, reverse, until, context, compact)
    if isinstance(init, FirstOnly):
        return first_step.explain(make, init, slices, checkpoints, progress, device)
    return first_step.explain_whole(make, init, slices, checkpoints, progress, device)


# For functions that run these loops, and name what is wrong after themselves.
facts_of_scan = called_eagerly(facts_of(scan))
facts_of_while_loop = called_eagerly(facts_of(while_loop))
