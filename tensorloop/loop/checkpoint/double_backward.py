"""Derivatives of derivatives of a checkpointed loop.

`backward(create_graph=True)` wants the gradient as a differentiable function of the loop's inputs and of the gradient
that came in. There the loop is run once more, as a plain loop, on leaves that stand for the inputs, and differentiated
by autograd: residuals of all steps, no schedule. The result is again wrapped as one node whose backward does the same
one order higher, so any order works. Wrapping keeps the inner graph apart from the outer one: an input may depend on a
tensor that the body closes over, and that path must count once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import named
from tensorloop._torch import overrides
from tensorloop._torch.engine import silent
from tensorloop.loop.checkpoint.array_versions import Version, dense, token_of, values_of
from tensorloop.loop.checkpoint.replay import Replay
from tensorloop.loop.checkpoint.snapshots import SavedTensor
from tensorloop.loop.checkpoint.substitutes import differentiate, substitute
from tensorloop.loop.checkpoint.sweep_result import (
    ArrayOutput,
    CarryOutput,
    DepartedRows,
    Output,
    StackedOutput,
    SweepResult,
)
from tensorloop.tensor_array.internals import with_store

# Explicit inputs, as leaves -> outputs with their graph.
Function = Callable[[list[Tensor]], list[Tensor]]
# The closed-over tensors, and what stands for some of them.
Outside = tuple[list[Tensor], dict[int, Tensor]]


def differentiated(
    replay: Replay,
    grads: Sequence[Tensor | None],
    explicit: Sequence[Tensor] | None = None,
    captures: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """The gradients of a loop's inputs, as differentiable as its inputs and `grads`.

    `explicit` and `captures` stand for the inputs where that is not what they are.
    """
    swept = replay.swept
    live = [k for k, grad in enumerate(grads) if grad is not None]
    cotangents = [grad for grad in grads if grad is not None]
    explicit = swept.inputs.explicit if explicit is None else explicit
    captures = swept.inputs.captures if captures is None else captures
    outside = swept.inputs.captures, swept.substitutes
    plain = named(swept.name)(_plain)  # a higher derivative is asked for without the loop's node
    function = _vjp(
        lambda leaves: [out for k, out in enumerate(plain(replay, leaves)) if k in live], len(explicit), outside
    )
    values = _dense_values(swept)
    if any(type(x) is Version for x in swept.snapshots.initial.state):
        swept.snapshots.forget()  # arrays go back to their beginning: later snapshots of them are void
    n = len(explicit) + len(live)
    return list(DifferentiableReplay.apply(function, outside, values, n, *explicit, *cotangents, *captures))


class DifferentiableReplay(torch.autograd.Function):
    """A function of explicit inputs and of closed-over ones, as a node that runs it anew for each derivative."""

    @staticmethod
    def forward(
        ctx: Any, function: Function, outside: Outside, values: dict[int, Tensor], n: int, *inputs: Tensor
    ) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function, ctx.outside, ctx.values, ctx.n = function, outside, values, n
        ctx.save_for_backward(*inputs)
        with torch.enable_grad():
            outputs = function(_leaves(inputs[:n], values))
        ctx.mark_non_differentiable(*(found := [x.detach() for x in outputs if not x.requires_grad]))
        rest = iter(found)
        return tuple(x.detach() if x.requires_grad else next(rest) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, n = ctx.saved_tensors, ctx.n
        higher = _vjp(ctx.function, n, ctx.outside)
        if torch.is_grad_enabled():
            found = DifferentiableReplay.apply(
                higher, ctx.outside, ctx.values, n + len(grads), *inputs[:n], *grads, *inputs[n:]
            )
        else:
            with torch.enable_grad():
                leaves = _leaves(inputs[:n], ctx.values)
            found = [x.detach() for x in higher([*leaves, *grads])]  # nobody asked for their graph
        return (None, None, None, None, *found)


def _leaves(inputs: Sequence[Tensor], values: dict[int, Tensor]) -> list[Tensor]:
    return [values.get(i, x).detach().requires_grad_() for i, x in enumerate(inputs)]


def _vjp(function: Function, n: int, outside: Outside) -> Function:
    """(n inputs, cotangents) -> gradients of the inputs and of the closed-over tensors."""

    def gradients(leaves: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad(), silent(outside[0]):
            outputs = function(leaves[:n])
            pairs = [(x, g) for x, g in zip(outputs, leaves[n:], strict=True) if x.requires_grad]
            given = [*leaves[:n], *outside[0]]
            if not pairs:
                return [torch.zeros_like(x) for x in given]
            found = differentiate(_recorded, [x for x, _ in pairs], leaves[:n], [g for _, g in pairs], *outside)
            return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(given, found, strict=True)]

    return gradients


def _recorded(
    outputs: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Tensor], _: bool
) -> Sequence[Tensor | None]:
    """A backward pass that can itself be differentiated."""
    return torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True)


def _dense_values(swept: SweepResult) -> dict[int, Tensor]:
    """The values of array inputs, by place: their tokens hold none."""
    inputs, state = swept.inputs, swept.snapshots.initial.state
    values = {len(inputs.init) + k: values_of(state[i]) for k, (i, _) in enumerate(inputs.array_tokens)}
    start = len(inputs.init) + len(inputs.array_tokens) + len(inputs.xs)
    for k, captured in enumerate(inputs.arrays):
        values[start + k] = captured.twin.block.data[: captured.twin.length].clone()
    return values


def _plain(replay: Replay, leaves: list[Tensor]) -> list[Tensor]:
    """Runs all steps as a plain loop from these inputs; its outputs, arrays as what they hold."""
    given, inputs, snapshots = iter(leaves), replay.swept.inputs, replay.swept.snapshots
    kept = snapshots.initial.restored()
    inits = {i: next(given) for i, _ in inputs.init}
    arrays = {i: next(given) for i, _ in inputs.array_tokens}
    xs = {k: next(given) for k, _ in inputs.xs}
    captured = [next(given) for _ in inputs.arrays]
    with replay.as_then(), substitute(replay.swept.substitutes), overrides.unseen_by_classes():
        snapshots.set_surroundings(snapshots.initial, draws=replay.swept.draws)
        for stand, array in zip(captured, inputs.arrays, strict=True):
            array.buffer.token = token_of(stand)
        return _run(replay, [_first(x, inits.get(i), arrays.get(i)) for i, x in enumerate(kept)], xs)


def _run(replay: Replay, state: list[Any], xs: dict[int, Tensor]) -> list[Tensor]:
    swept, steps = replay.swept, replay.steps
    ys: list[list[Any]] = []
    departed: list[list[Any]] = []
    steps.body.on = False
    try:
        for t in range(swept.taken):
            row = [
                steps.number(k, t) if x is None else steps.part(xs.get(k, x), d, t).clone()
                for k, (x, d) in enumerate(steps.xs)
            ]
            state, y = steps.run(t, state, row)
            ys.append(steps.ys_of(y, t))
            departed += [leaves for _, leaves in steps.take_departed()]
            if swept.draws:
                replay.draw_again(t, state)
    finally:
        steps.body.on = True
        steps.captures.nodes.clear()  # their graph is wanted

    def value_of(output: Output) -> Tensor:
        match output:
            case CarryOutput(place):
                return state[place]
            case ArrayOutput(place):
                return state[place].stack()
            case DepartedRows(number, leaf):
                return departed[number][leaf]
            case StackedOutput(leaf):
                return steps.joined([leaves[leaf] for leaves in ys])

    outputs = [value_of(output) for output in swept.outputs]
    return [swept.substitutes.get(id(x), x) for x in outputs]  # a body may return a capture as it is


def _first(x: Any, init: Tensor | None, values: Tensor | None) -> Any:
    """A leaf of the first state."""
    if type(x) is SavedTensor:
        return x.values.clone() if init is None else init.clone()
    if type(x) is not Version:
        return x
    if values is not None:
        return dense(values, x.blank)
    return with_store(x.blank, None) if x.undo is None or not x.length else dense(values_of(x), x.blank)
