"""Gradients of solutions: of z with z = f(z), whatever found it, by one step at z and the adjoint equation.

    z = f(z, theta)    dL/dtheta = w df/dtheta,  where  w = v + w df/dz  and v = dL/dz

(the implicit function theorem). So backward needs the residuals of a single step, and finds w as z was found: by
iteration, each of which multiplies with the derivative of that step.

One autograd node, `Solution`, stands for the search. Its step is that of a checkpointed loop of one step, which knows
what the function closes over (`captures`) and runs it again in backward. Where the gradient is itself differentiated,
w is the solution of an equation whose function is differentiable, and so another such node: any order works.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse, named
from tensorloop._common.progress import Progress
from tensorloop._common.scope import here, library_code, running
from tensorloop._common.user_line import warn
from tensorloop._torch import transforms
from tensorloop._torch.engine import gradients, keeps_graph
from tensorloop.loop.checkpoint import double_backward
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.checkpoint.replay import Replay
from tensorloop.loop.checkpoint.substitutes import differentiate
from tensorloop.loop.checkpoint.sweep import Sweep
from tensorloop.loop.checkpoint.sweep_result import CarryOutput
from tensorloop.loop.loop import Loop


class NotConvergedWarning(UserWarning):
    """Warns that the search for a fixed point, or for its gradient, ended before it had converged, and how far it came.

    Given by `tl.fixed_point` with `strict=False`; otherwise that is a RuntimeError.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", tl.loop.NotConvergedWarning)  # what there is after three steps will do
        ...     tl.fixed_point(lambda z: 1 - 0.5 * z, torch.zeros(()), max_steps=3, strict=False)
        tensor(0.7500)
    """


SMALLEST = torch.finfo(torch.float32).tiny  # a gradient may be of any size, but 0 / 0 is no distance


class SearchLimits(NamedTuple):
    """How long to search. `rows`: whether leading dims are rows, each with a distance of its own."""

    name: str
    tol: float
    max_steps: int
    rows: bool
    strict: bool

    def fail(self, what: str, steps: int, ratios: Tensor) -> None:
        """Says that a search has not converged."""
        ratios = ratios.cpu()
        worst = float(ratios.max())
        rows = ""
        if self.rows:
            bad = int((~(ratios <= self.tol)).sum())
            rows = f" in {bad} of {ratios.numel()} rows"
        text = (
            f"{what} has not converged after {steps} steps{rows}: the last one changed it by {worst:.2g} of its size, "
            f"where tol is {self.tol:.2g}"
        )
        if self.strict:
            raise Misuse(f"{text} (strict=False warns and goes on)")
        warn(f"{self.name}: {text}", NotConvergedWarning)


def distance(new: Sequence[Tensor], old: Sequence[Tensor], floor: float, *, rows: bool) -> Tensor:
    """How much a step changed something, against its size or `floor`: 0-d, or (B,) for each row. The largest leaf's."""
    found = [_size(a - b, rows) / _size(a, rows).clamp(min=floor) for a, b in zip(new, old, strict=True)]
    return found[0] if len(found) == 1 else torch.stack(found).amax(0)


def _size(x: Tensor, rows: bool) -> Tensor:
    """The largest entry, or that of each row; 0 where there is none."""
    x = x.unsqueeze(1) if rows and x.dim() == 1 else x.flatten(1 if rows else 0)
    return (torch.linalg.vector_norm(x, torch.inf, -1) if x.shape[-1] else x.abs().sum(-1)).float()


def applies() -> bool:
    """Whether gradients can go through a node: not under transforms, nor where none are wanted."""
    return torch.is_grad_enabled() and transforms.maybe_level() is None and not transforms.forward_mode()


def connected(loop: Loop, search: SearchLimits) -> list[Tensor]:
    """The solution that a loop of one step begins at, as outputs of a node that knows its gradient."""
    values: list[Tensor] = [x.detach() for x in loop.init]
    with running(), library_code():
        sweep = Sweep(loop, Checkpoints(k=1), 1)
        with sweep.steps.ambient.begun(), Progress(False, loop.name, 1) as bar:
            sweep.run(bar)
        swept = sweep.result([CarryOutput(i) for i in range(len(values))])
        step = StepEquation(Replay(swept, False), search)
        if not step.params:
            return values
        if here.recorder is not None:
            here.recorder.note(step.params)
        outputs = list(Solution.apply(step, len(values), *values, *step.params))
        if here.nodes is not None:
            here.nodes.append(weakref.ref(outputs[0].grad_fn))
        if here.recorder is not None:
            here.recorder.own(outputs)
        return outputs


class Linear:
    """A function near its solution: what a gradient of its values becomes."""

    def __init__(self, to_values: Callable[..., Any], to_params: Callable[..., Any]) -> None:
        self.to_values, self.to_params = to_values, to_params


class Equation:
    """values = function(values, params), of which a solution is known. The function can be differentiated."""

    params: Sequence[Tensor] | None = None  # where a change of them is noticed by others than autograd

    def __init__(self, search: SearchLimits) -> None:
        self.search = search

    def function(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
        """The right side."""
        raise NotImplementedError

    def vjp(self, values: Sequence[Tensor], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Its gradients, of values and params, as a differentiable function of all that is given."""
        with torch.enable_grad():
            given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in (*values, *params)]
            outputs = self.function(given[: len(values)], given[len(values) :])
            pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
            found = torch.autograd.grad(
                [x for x, _ in pairs], given, [g for _, g in pairs], create_graph=True, allow_unused=True
            )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]

    @contextmanager
    def linear(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> Iterator[Linear]:
        """The function near its solution, with the residuals of one evaluation."""
        with torch.enable_grad():
            at, of = ([x.detach().requires_grad_() for x in given] for given in (values, params))
            outputs = self.function(at, of)

        def back(grads: Sequence[Tensor], inputs: list[Tensor]) -> Sequence[Tensor | None]:
            pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
            return gradients([x for x, _ in pairs], inputs, [g for _, g in pairs], True)

        yield Linear(lambda grads: back(grads, at), lambda grads: back(grads, of))


class StepEquation(Equation):
    """A user's function: params are the arrays and tensors that it closes over."""

    def __init__(self, replay: Replay, search: SearchLimits) -> None:
        super().__init__(search)
        self.replay, inputs = replay, replay.swept.inputs
        self.params = [*inputs.explicit[len(inputs.init) :], *inputs.captures]

    def vjp(self, values: Sequence[Tensor], params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """As of every equation."""
        n = len(params) - len(self.replay.swept.inputs.captures)
        explicit = [*values, *params[:n]]
        return [*double_backward.differentiated(self.replay, grads, explicit, params[n:])]  # pyright: ignore[reportReturnType]

    @contextmanager
    def linear(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> Iterator[Linear]:
        """As of every equation: the step is run once, as a replay."""
        replay, swept = self.replay, self.replay.swept
        with replay.lock, replay.as_then():
            step = replay.reverse(0, 1, replay.restore(0))
            leaves = [x for _, x in step.inputs]
            outputs: list[Any] = [swept.substitutes.get(id(x), x) for x in step.carry]
            stands = [a.stand_in for a in swept.inputs.arrays if a.stand_in is not None]
            del step

            def alive(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
                pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
                return [x for x, _ in pairs], [g for _, g in pairs]

            def to_values(grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
                of, given = alive(grads)
                return gradients(of, leaves, given, True) if of else [None] * len(leaves)

            def to_params(grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
                of, given = alive(grads)
                return differentiate(gradients, of, stands, given, swept.inputs.captures, swept.substitutes)

            try:
                yield Linear(to_values, to_params)
            finally:
                outputs.clear()  # the graph, before the replay looks at what is left of its step
                leaves.clear()


class Adjoint(Equation):
    """w = v + w df/dz, an equation in w. Its params: v, then z and the params of f."""

    def __init__(self, of: Equation) -> None:
        super().__init__(of.search)
        self.of = of

    def function(self, values: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
        """As of every equation."""
        n = len(values)
        back = self.of.vjp(params[n : 2 * n], params[2 * n :], values)
        return [v + x for v, x in zip(params[:n], back, strict=False)]


class Solution(torch.autograd.Function):
    """(values, params) -> values, the solution of an equation: as a function of its params."""

    @staticmethod
    def forward(ctx: Any, equation: Equation, n: int, *given: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs = tuple(x.detach() for x in given[:n])
        ctx.replay, ctx.n = equation, n
        ctx.save_for_backward(*outputs, *(given[n:] if equation.params is None else ()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        equation: Equation | None = ctx.replay
        if equation is None:
            raise RuntimeError(
                "Trying to backward through a fixed point a second time, but what it kept was freed by the first; "
                "give retain_graph=True to the first backward"
            )
        kept = ctx.saved_tensors  # asked for once: torch.utils.checkpoint gives it once
        found = named(equation.search.name)(_gradients)(
            equation, kept[: ctx.n], equation.params or kept[ctx.n :], grads
        )
        if not keeps_graph():
            ctx.replay = None
        return (None, None, *[None] * ctx.n, *found)


def _gradients(
    equation: Equation, values: Sequence[Tensor], params: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the params; differentiable where the caller's backward is."""
    recorded = torch.is_grad_enabled()
    if any(map(transforms.is_legacy_batched, grads)):
        raise Misuse(
            "its gradient is searched for one cotangent at a time, and is_grads_batched (jacobian(vectorize=True)) "
            "gives many; leave that out, or use torch.func.jacrev"
        )
    with torch.no_grad(), equation.linear(values, params) as linear:
        w = _solved(linear, [x.detach() if x.requires_grad else x for x in grads], equation.search)
        if not recorded:
            return linear.to_params(w)
    w = Solution.apply(Adjoint(equation), len(w), *w, *grads, *values, *params)
    return equation.vjp(values, params, w)[len(values) :]


def _solved(linear: Linear, v: list[Tensor], search: SearchLimits) -> list[Tensor]:
    """w = v + w df/dz, by iteration from v."""
    w, steps, going = v, 0, True
    ratios = torch.full((), torch.inf, device="cpu")
    while going and steps < search.max_steps:
        steps += 1
        back = linear.to_values(w)
        new = [a if b is None else a + b for a, b in zip(v, back, strict=True)]
        # all that a device is waited for
        ratios = transforms.numbers(distance(new, w, SMALLEST, rows=search.rows)).cpu()
        w = new
        if bool((ratios <= search.tol).all()):
            return w
        going = bool(ratios.isfinite().all())
    search.fail("the gradient (the adjoint equation, at a point where fn contracts)", steps, ratios)
    return w
