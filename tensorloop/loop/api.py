"""Loops with the gradients of a Python loop: `scan`, `while_loop`, `fori_loop`, `map`, and `explain`.

Each function here checks its arguments, says what its functions are (`Called`), and has a `Loop` run (`run`). Long by
its overloads and docstrings: the face of loops is one file.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, Unpack, overload

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, facts_of, named
from tensorloop._torch.dynamo import stands_in_graphs
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.loop import first_step
from tensorloop.loop.associative import associative_scan
from tensorloop.loop.called import Called, check_body, check_callable, pair_of
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.chunked_map import map_in_chunks
from tensorloop.loop.compiled import in_graph
from tensorloop.loop.compiled.explain import Explanation, asked
from tensorloop.loop.compiled.front import Compile
from tensorloop.loop.first_step import FirstOnly, FirstStep
from tensorloop.loop.loop import Loop
from tensorloop.loop.options import Body, Condition, ExplainOptions, Plan
from tensorloop.loop.rows_loop import ConditionalLoop
from tensorloop.loop.rows_scan import UntilLoop
from tensorloop.loop.run import run_loop, run_scan
from tensorloop.loop.scan_slices import slices_of
from tensorloop.loop.slices import Slices
from tensorloop.packed.base import any_packed
from tensorloop.packed.dim import Dim
from tensorloop.packed.tensor import PackedTensor
from tensorloop.tensor_array.array import TensorArray

__all__ = ["Checkpoints", "associative_scan", "explain", "fori_loop", "map", "scan", "while_loop"]

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")
Context = TypeVar("Context")


# Where none fits, pyright explains the one that comes nearest. The first three say what x is, so that a body without a
# y fits none of them: where x were Any, it could not tell, and would blame xs.
@overload
def scan(
    body_fn: Body[C, Tensor, Any],
    init: C,
    xs: PackedTensor,
    length: int | None = None,
    *,
    dim: int | Dim = 0,
    reverse: bool = False,
    until: None = None,
    context: Any = None,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Any]: ...
@overload
def scan(
    body_fn: Body[C, int, Y],
    init: C,
    xs: range,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Body[C, Tensor, Y],
    init: C,
    xs: TensorArray,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Callable[[C, X], tuple[C, Y]],
    init: C,
    xs: X = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[[C], Condition] | None = None,
    context: None = None,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Y]: ...
@overload
def scan(
    body_fn: Callable[[C, X, Context], tuple[C, Y]],
    init: C,
    xs: X = None,
    length: int | None = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[[C, Context], Condition] | None = None,
    context: Context,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
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
    dim: int | Dim = 0,
    reverse: bool = False,
    until: Callable[..., Condition] | None = None,
    context: Any = None,
    compact: bool = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[Any, Any]:
    """A fold over slices that also stacks an output of each step: (carry, ys).

        ys = []
        for t in reversed(range(length)) if reverse else range(length):
            init, y = body_fn(init, xs.select(dim, t))  # of a copy of init
            ys.append(y.clone())
            if until is not None and until(init): break
        return init, torch.stack(ys, dim)  # in index order

    Shapes: xs leaves have one length T along `dim` (a TensorArray gives its slots, a range its numbers, None stays
    None); without xs, x is None and `length` or `until` says when to stop. The carry keeps structure, shapes, dtypes
    and Python types (`first_only`: from the first step on). A y leaf (*F) becomes (T, *F) with T at `dim`, or last
    where y has fewer dims; numbers become (T,); None stays None. With `until`, ys have the steps taken. With `context`,
    body_fn and until take it as last argument.
    Where `until` gives a (B,) bool tensor, each row stops on its own after the first step that meets it, as in
    `while_loop`, and ys are packed: of y (B, *F) row b has the steps that it took. The carry, slices of xs, and with
    `compact` the context, have B leading rows or are 0-d and shared; `compact` drops rows that have stopped.
    Over packed xs (all of one `Dim`) the carry has B leading rows; step t gets the n rows that have an entry t: x is
    (n, *F), and carry, context and y have n rows. ys are packed; under `reverse` every row begins at its own end.
    Gradient: as the Python loop's, to init, xs, context and whatever tensors body_fn closes over.
    Cost: `checkpoints=None` keeps what body_fn's operations save for each step. `checkpoints=K` keeps at most K carries
    and recomputes the steps between them in backward (`tensorloop.schedule` has the counts); TensorArrays in the carry
    take O(1) for each. No device sync of its own, one a step with `until` on a device.
    `compile=True` looks at one step and runs the loop as native code, with the same results up to rounding; what cannot
    be compiled runs as without it, with one warning, or raises under `compile="strict"` (`tl.explain`, and the page on
    compiled loops).
    Raises: TypeError (structure, dtype, what a y or xs leaf is), ValueError (lengths, shapes of xs), RuntimeError (a
    tensor changed in place that the loop still needs, a write to an array made outside).
    Source: jax.lax.scan for the surface.

    Example:
        >>> tl.scan(lambda c, x: (c + x, c * x), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 2, 9]))
    """
    check_callable(body_fn=body_fn, **({} if until is None else {"until": until}))
    check_body(body_fn)
    dim = dim if isinstance(dim, Dim) else arguments.as_int(dim, "dim")
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

    if isinstance(init, FirstOnly):
        return first_step.scan(make, init, slices, checkpoints, progress, compile)
    return run_scan(make(Loop, init, slices), checkpoints, progress, compile)


@overload
def while_loop(
    cond_fn: Callable[[C], Condition],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[False] = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> C: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Condition],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[False] = False,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> C: ...
@overload
def while_loop(
    cond_fn: Callable[[C], Tensor],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[True],
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Tensor | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Tensor],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[True],
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, Tensor | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C], Condition],
    body_fn: Callable[[C], C],
    init: C,
    *,
    context: None = None,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[True],
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> tuple[C, int | Any]: ...
@overload
def while_loop(
    cond_fn: Callable[[C, Context], Condition],
    body_fn: Callable[[C, Context], C],
    init: C,
    *,
    context: Context,
    max_steps: int | None = None,
    compact: bool = False,
    return_steps: Literal[True],
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
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
    compile: Compile = False,
    progress: bool = False,
) -> Any:
    """Repeats body_fn while cond_fn says so; no bound on the number of steps is needed.

        while cond_fn(init):
            init = body_fn(init)
        return init

    cond_fn gives a bool, a bool tensor of one element, or a (B,) bool tensor: then each row stops on its own and stays
    stopped.
    Shapes: with a (B,) condition every tensor of the carry has B leading rows, or is 0-d and shared (as numbers are);
    arrays have elements (B, ...). A stopped row's carry is frozen exactly; a new slot of an array is 0 there. With
    `context`, cond_fn and body_fn take it as last argument. `max_steps` truncates. `compact` drops rows that have
    stopped from the batch, and from `context` (leading B) with it, whenever they are a quarter of it; the carry
    returned has all rows again. `return_steps` gives (carry, steps): (B,) int64, or an int. Under `torch.func.vmap`
    a condition of one bool stops each element on its own. What the body computes from several rows at once sees those
    that have stopped as their last real input; with `compact` they are gone.
    Gradient: as the Python loop's, also to closed-over tensors; none to what only cond_fn uses. What the body computes
    for a stopped row gets none, and NaN there reaches no other row.
    Cost: as `scan`; one sync a step on a device, to ask the condition. A (B,) condition keeps B bools a step.
    Raises: TypeError (what cond_fn or body_fn returned), ValueError (a leaf without B rows), as `scan` for the rest.
    Source: jax.lax.while_loop for the surface; Equinox for checkpoints in a loop of unknown length.

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


@stands_in_graphs(in_graph.fori_loop)
@called_eagerly
@in_graph.exports(in_graph.fori_loop)
@named("fori_loop")
def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fn: Callable[[int, C], C],
    init: C,
    *,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> C:
    """`for i in range(lower, upper): init = body_fn(i, init)`; i is a Python int.

    Bounds are ints or 0-d integer tensors; with upper <= lower init is returned.
    Gradient, cost, errors: as `scan`.

    Example:
        >>> tl.fori_loop(0, 5, lambda i, c: c + i, torch.tensor(0))
        tensor(10)
    """
    check_callable(body_fn=body_fn)
    first, last = arguments.as_int(lower, "lower"), arguments.as_int(upper, "upper")

    functions = (Called("body_fn", body_fn, ("i", "carry")),)

    def make(kind: type[Loop], init: Any, first: int) -> Loop:
        def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
            return body_fn(first + t, carry), None

        length = 1 if kind is FirstStep else max(last - first, 0)
        loop = kind("fori_loop", body, init, length, functions=functions)
        loop.lower, loop.numbered = first, body_fn
        return loop

    if isinstance(init, FirstOnly):
        if last > first:
            return first_step.fori_loop(make, init, first, checkpoints, progress, compile)
        init = init.carry
    return run_loop(make(Loop, init, first), checkpoints, progress, compile)[1]


@overload
def map(
    fn: Callable[[int], Y],
    xs: range,
    *,
    dim: int = 0,
    batch_size: None = None,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> Y: ...
@overload
def map(
    fn: Callable[[X], Y],
    xs: X,
    *,
    dim: int = 0,
    batch_size: int | None = None,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> Y: ...
@stands_in_graphs(in_graph.map)
@called_eagerly
@in_graph.exports(in_graph.map)
@named("map")
def map(
    fn: Callable[[Any], Any],
    xs: Any,
    *,
    dim: int = 0,
    batch_size: int | None = None,
    checkpoints: Plan = None,
    compile: Compile = False,
    progress: bool = False,
) -> Any:
    """fn of each slice of xs along `dim`, stacked: ys.

    Shapes: as `scan` without a carry. With `batch_size=n` fn runs under `torch.func.vmap` over n slices at a time; it
    still sees one.
    Gradient, cost, errors: as `scan`. With `batch_size` there are T/n calls of fn, whose residuals are kept
    (`checkpoints` is then refused).

    Example:
        >>> tl.map(lambda row: row.sum(), torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    check_callable(fn=fn)
    dim = arguments.as_int(dim, "dim")
    if batch_size is not None:
        if checkpoints is not None:
            raise WrongValue("checkpoints and batch_size do not go together; leave one out")
        return map_in_chunks(fn, xs, dim, arguments.as_int(batch_size, "batch_size"))
    if any_packed(xs):
        raise WrongType("xs is packed; call fn on the packed tensor, or map over its .values")
    slices = Slices(xs, None, dim, False)
    if slices.length is None:
        raise WrongValue("xs has no tensor to run over")

    def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        return (), fn(slices.tree.unflatten(row))

    loop = Loop("map", body, (), slices.length, slices=slices, functions=(Called("fn", fn, ("x",)),))
    return run_scan(loop, checkpoints, progress, compile)[1]


@named("explain")
def explain(
    body_fn: Body[C, Any, Any], init: C, xs: Any = None, length: int | None = None, **options: Unpack[ExplainOptions]
) -> Explanation:
    """What `scan(body_fn, init, xs, length, compile=True, **options)` would do, as text; nothing runs but one step.

    It says what runs once, for all steps at once and step by step, forward and backward, what is kept for backward,
    and where a loop is not compiled, why and by which line. `.compiled` is a bool.
    Cost: the first step, and a plan, which the loop itself then finds ready. Raises: as `scan`.

    Example:
        >>> tl.explain(lambda h, x: (h * float(x), h), torch.ones(2), torch.ones(3)).compiled
        False
    """
    if "compile" in options:
        raise WrongType("there is no argument compile=; it says what compile=True would do")
    return asked(lambda ask: facts_of_scan(body_fn, init, xs, length, compile=ask, **options))


# For functions that run these loops, and name what is wrong after themselves.
facts_of_scan = called_eagerly(facts_of(scan))
facts_of_while_loop = called_eagerly(facts_of(while_loop))
facts_of_fori_loop = called_eagerly(facts_of(fori_loop))
