"""Fixed points: `fixed_point` finds z = fn(z) by iteration, and hands its gradient to the implicit function theorem."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, WrongValue, named
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly
from tensorloop._torch.versions import Versions
from tensorloop.loop.called import Called, check_callable
from tensorloop.loop.carry import Carry, describe
from tensorloop.loop.checkpoint import adjoint
from tensorloop.loop.checkpoint.adjoint import NotConvergedWarning, SearchLimits, distance
from tensorloop.loop.compiled import around
from tensorloop.loop.loop import Loop
from tensorloop.loop.rows_loop import ConditionalLoop
from tensorloop.loop.run import run_loop

__all__ = ["NotConvergedWarning", "fixed_point"]

Z = TypeVar("Z")
Step = Callable[[Z], Z] | Callable[[Z, Any], Z]  # the last argument is the context


@overload
def fixed_point(
    fn: Step[Z],
    init: Z,
    *,
    context: Any = None,
    tol: float | None = None,
    max_steps: int = 1000,
    rows: bool = False,
    compact: bool = False,
    strict: bool = True,
    return_steps: Literal[False] = False,
) -> Z: ...
@overload
def fixed_point(
    fn: Step[Z],
    init: Z,
    *,
    context: Any = None,
    tol: float | None = None,
    max_steps: int = 1000,
    rows: bool = False,
    compact: bool = False,
    strict: bool = True,
    return_steps: Literal[True],
) -> tuple[Z, Any]: ...
@called_eagerly
@named("fixed_point")
def fixed_point(
    fn: Callable[..., Any],
    init: Any,
    *,
    context: Any = None,
    tol: float | None = None,
    max_steps: int = 1000,
    rows: bool = False,
    compact: bool = False,
    strict: bool = True,
    return_steps: bool = False,
) -> Any:
    """Finds the z with z = fn(z) by repeating fn from init; the gradient takes the memory of one step.

        z = tl.fixed_point(fn, init)
        z = tl.fixed_point(fn, init, context=x)  # fn(z, x)
        z, steps = tl.fixed_point(fn, init, rows=True, return_steps=True)  # each row converges on its own

    The search is this one, where size is the largest entry:

        z = init
        while size(fn(z) - z) > tol * max(1, size(z)): z = fn(z)
        return fn(z)

    Args:
        fn: one step, `fn(z)`, or `fn(z, context)` with `context`; it returns a tree like z. It must come closer to the
            point with each step (contract), and be the same function at every step: no dropout.
        init: where to start: a tree of floating or complex tensors. With `rows` all have B leading rows.
        context: a tree that fn gets as last argument; gradients reach it. None (default): fn gets z alone.
        tol: float, the relative change below which the search ends. None (default) is eps ** 0.75 of the coarsest
            dtype, 6e-6 for float32.
        max_steps: int, default 1000: the most steps of the search, and of the one in backward.
        rows: bool, default False. True: each of B rows converges on its own and is then frozen; fn must take each row
            by itself.
        compact: bool, default False. True takes rows that have converged out of the batch, and out of `context`
            (leading B); needs `rows`.
        strict: bool, default True: no convergence is a RuntimeError. False warns (`tl.loop.NotConvergedWarning`) and
            goes on with the last values.
        return_steps: bool, default False. True returns (z, steps).

    Returns:
        z: a tree like init.
        steps: with `return_steps`, the steps taken: an int, or (B,) int64 with `rows`.

    Gradient: that of the point, by the implicit function theorem, to context and all that fn closes over, of any order;
    to init none. Backward solves its equation by iteration, with the same tol and max_steps. Under `torch.func`
    transforms as many further steps are differentiated as the search took.
    Cost: steps of fn without a graph, and one with; backward runs fn once and differentiates that step once for each of
    its own steps. Bytes held: z. One device sync a step, forward and backward.

    Raises:
        RuntimeError: forward or in backward: no convergence within max_steps, or values that are no longer finite.
        TypeError: structure or dtype of init, or of what fn returns.
        ValueError: a leaf without B rows; tol not above 0; `compact` without `rows`.

    Source: Bai et al. 2019, Deep Equilibrium Models; Christianson 1994 for the adjoint by iteration.

    Example:
        >>> a = torch.tensor(4.0, requires_grad=True)
        >>> root = tl.fixed_point(lambda x: (x + a / x) / 2, torch.tensor(1.0))
        >>> torch.autograd.grad(root, a)
        (tensor(0.2500),)
    """
    check_callable(fn=fn)
    functions = (Called("fn", fn, ("z",) if context is None else ("z", "context")),)
    carry = Carry(init, lambda: functions[0].parameter("z"))
    leaves: list[Any] = carry.tree.flatten(init) or []
    _check(carry, leaves, rows)
    if compact and not rows:
        raise WrongValue("compact=True is for rows that converge on their own; give rows=True")
    around.check_whole("fixed_point")
    search = SearchLimits("fixed_point", _tolerance(tol, leaves), _most(max_steps), bool(rows), bool(strict))

    with torch.no_grad():
        found, steps, ratios = _search(fn, carry, init, context, search, compact, functions)
    if not bool((ratios <= search.tol).all()):
        taken = steps if isinstance(steps, int) else int(transforms.numbers(steps).max())
        search.fail("z", taken, ratios)
    z = _with_gradient(fn, found, steps, context, search, functions)
    return (z, steps) if return_steps else z


def _search(
    fn: Callable[..., Any],
    carry: Carry,
    init: Any,
    context: Any,
    search: SearchLimits,
    compact: bool,
    functions: tuple[Called, ...],
) -> tuple[Any, Any, Tensor]:
    """Repeats fn until nothing changes: (z, steps, how much the last step changed it, on the CPU)."""
    leaves = carry.tree.flatten(init) or []
    shape = (len(leaves[0]),) if search.rows else ()
    change = torch.zeros(shape, dtype=torch.float32, device=leaves[0].device)
    asked = [change]

    def goes_on(state: Any, *_: Any) -> Tensor:
        asked[0] = state[1].cpu()  # all that a device is waited for
        return (asked[0] > search.tol) & (asked[0] < torch.inf)

    def body(t: int, state: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        old = carry.tree.flatten(state[0]) or []
        if search.rows:
            carry.expect(old)
        versions = Versions(old)
        out = fn(state[0], *context)
        new = carry.check(out, t)
        if versions.changed() is not None:
            raise Misuse(
                "fn changed its argument in place, so that nobody can tell how far it came; let it change a clone"
            )
        return (out, distance(new, old, 1.0, rows=search.rows)), None

    loop = ConditionalLoop(
        search.name, body, (init, change), search.max_steps, context, cond=goes_on, compact=compact,
        functions=functions,
    )  # fmt: skip
    loop.first = torch.ones(shape, dtype=torch.bool, device="cpu") if search.rows else True
    loop.context.paths = [f"context{path}" for path in loop.context.paths]
    ended, (z, ratios) = run_loop(loop, None, False)
    if ended.taken < search.max_steps and not compact:  # so the condition was asked about the last step, of all rows
        ratios = asked[0]
    return z, ended.steps(), transforms.numbers(ratios).cpu()


def _with_gradient(
    fn: Callable[..., Any], z: Any, steps: Any, context: Any, search: SearchLimits, functions: tuple[Called, ...]
) -> Any:
    """The solution with its gradient, where one is wanted."""

    def body(t: int, state: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        return fn(state, *context), None

    if transforms.maybe_level() is not None or transforms.forward_mode():
        more = () if context is None else (context,)
        for _ in range(steps if isinstance(steps, int) else int(transforms.numbers(steps).max())):
            z = fn(z, *more)
        return z
    if not adjoint.applies():
        return z
    loop = Loop(search.name, body, z, 1, context, functions=functions)
    loop.init = [x.detach().requires_grad_() for x in loop.init]
    return loop.carry.tree.unflatten(adjoint.connected(loop, search))


def _check(carry: Carry, leaves: list[Any], rows: bool) -> None:
    """Raises where init is nothing that can converge."""
    if not leaves:
        raise WrongType("init has no tensor")
    for path, x in zip(carry.tree.paths, leaves, strict=True):
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            raise WrongType(f"init{path} is {describe(x)}; expected floating or complex tensors")
        if rows and (not x.dim() or len(x) != len(leaves[0])):
            raise WrongValue(
                f"with rows=True all tensors of init have as many leading rows as the first, but init{path} is "
                f"{describe(x)}"
            )


def _tolerance(tol: Any, leaves: list[Tensor]) -> float:
    if tol is None:
        return max(torch.finfo(x.dtype).eps for x in leaves) ** 0.75
    if isinstance(tol, bool) or not isinstance(tol, (int, float)):
        raise WrongType(f"tol must be a number, got {arguments.describe(tol)}")
    if not tol > 0:
        raise WrongValue(f"tol must be above 0, got {tol}")
    return float(tol)


def _most(max_steps: Any) -> int:
    max_steps = arguments.as_int(max_steps, "max_steps")
    if max_steps < 1:
        raise WrongValue(f"max_steps must be at least 1, got {max_steps}")
    return max_steps
