"""Derivatives of derivatives of a checkpointed loop, and the size of a step's residuals.

`backward(create_graph=True)` wants the gradient as a differentiable function of the loop's inputs and of the gradient
that came in. There the loop is run once more, as a plain loop, on leaves that stand for the inputs, and differentiated
by autograd: residuals of all steps, no schedule. The result is again wrapped as one node whose backward does the same
one order higher, so any order works. Wrapping keeps the inner graph apart from the outer one: an input may depend on a
tensor that the body closes over, and that path must count once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import overrides, transforms
from tensorloop.loop.checkpoint.array_versions import Version, dense, token_of, values_of
from tensorloop.loop.checkpoint.snapshots import Kept
from tensorloop.loop.checkpoint.substitutes import differentiate
from tensorloop.tensor_array.friends import with_store

# Explicit inputs, as leaves -> outputs with their graph.
Function = Callable[[list[Tensor]], list[Tensor]]
# The closed-over tensors, and what stands for some of them.
Outside = tuple[list[Tensor], dict[int, Tensor]]


def differentiated(record: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a record's inputs, as differentiable as its inputs and `grads`."""
    live = [k for k, grad in enumerate(grads) if grad is not None]
    cotangents = [grad for grad in grads if grad is not None]
    outside = record.recorded, record.replaced
    explicit = record.inputs[: record.explicit]
    function = _vjp(
        lambda leaves: [out for k, out in enumerate(_plain(record, leaves)) if k in live], len(explicit), outside
    )
    values = _dense_values(record)
    if any(type(x) is Version for x in record.initial.state):
        record.forget()  # arrays go back to their beginning: later snapshots of them are void
    return list(
        _Again.apply(function, outside, values, len(explicit) + len(live), *explicit, *cotangents, *record.recorded)
    )


class _Again(torch.autograd.Function):
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
            found = _Again.apply(higher, ctx.outside, ctx.values, n + len(grads), *inputs[:n], *grads, *inputs[n:])
        else:
            with torch.enable_grad():
                leaves = _leaves(inputs[:n], ctx.values)
            found = higher([*leaves, *grads])
        return (None, None, None, None, *found)


def _leaves(inputs: Sequence[Tensor], values: dict[int, Tensor]) -> list[Tensor]:
    return [values.get(i, x).detach().requires_grad_() for i, x in enumerate(inputs)]


def _vjp(function: Function, n: int, outside: Outside) -> Function:
    """(n inputs, cotangents) -> gradients of the inputs and of the closed-over tensors."""

    def gradients(leaves: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
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


def _dense_values(record: Any) -> dict[int, Tensor]:
    """The values of array inputs, by place: their tokens hold none."""
    values = {}
    state = record.initial.state
    for k, (i, _) in enumerate(record.first):
        values[len(record.inits) + k] = values_of(state[i])
    start = len(record.inits) + len(record.first) + len(record.xs_recorded)
    for k, captured in enumerate(record.arrays):
        values[start + k] = captured.twin.block.data[: captured.twin.length].clone()
    return values


def _plain(record: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Runs the steps of a record as a plain loop from these inputs; its outputs, arrays as what they hold."""
    given = iter(leaves)
    state = record.initial.restored(record.name)
    inits = {i: next(given) for i, _ in record.inits}
    arrays = {i: next(given) for i, _ in record.first}
    xs = {k: next(given) for k, _ in record.xs_recorded}
    captured = [next(given) for _ in record.arrays]
    with record.as_then(), record.standing_in(), overrides.unseen_by_classes():
        return _run(record, state, inits, arrays, xs, captured)


def _run(record: Any, kept: list[Any], inits: Any, arrays: Any, xs: Any, captured: Sequence[Tensor]) -> list[Tensor]:
    loop = record.loop
    state = [_first(x, inits.get(i), arrays.get(i)) for i, x in enumerate(kept)]
    if record.random is not None:
        record.initial.random.restore(record.captures.generators)
    record.captures.set_buffers(record.initial.buffers)
    for stand, array in zip(captured, record.arrays, strict=True):
        array.buffer.token = token_of(stand)
    ys: list[list[Any]] = []
    pieces: list[list[Any]] = []
    record.body.on = False
    try:
        for t in range(record.steps):
            row = [
                x if x is None else loop.slices.part(xs.get(k, x), d, t).clone() for k, (x, d) in enumerate(record.xs)
            ]
            state, y = record.step(t, state, row)
            if loop.outputs is not None:
                ys.append(loop.outputs.leaves_of(y, t))
            pieces += [leaves for _, leaves in record.take_pieces()]
            record.draw_again(t, state)
    finally:
        record.body.on = True
        record.captures.nodes.clear()  # their graph is wanted
    outputs = [_output(record, place, state, ys, pieces) for place in record.output_places]
    return [record.replaced.get(id(x), x) for x in outputs]  # a body may return a capture as it is


def _first(x: Any, init: Tensor | None, values: Tensor | None) -> Any:
    if type(x) is Kept:
        return x.values.clone() if init is None else init.clone()
    if type(x) is not Version:
        return x
    if values is not None:
        return dense(values, x.blank)
    return with_store(x.blank, None) if x.tape is None or not x.length else dense(values_of(x), x.blank)


def _output(
    record: Any, place: tuple[Any, ...], state: list[Any], ys: list[list[Any]], pieces: list[list[Any]]
) -> Tensor:
    if place[0] == "carry":
        return state[place[1]]
    if place[0] == "array":
        return state[place[1]].stack()
    if place[0] == "piece":
        return pieces[place[1]][place[2]]
    values = [leaves[place[1]] for leaves in ys]
    if not isinstance(values[0], Tensor):
        return torch.tensor(values)
    return record.loop.outputs.joined(values, record.loop.slices.reverse)


def residual_bytes(outputs: Sequence[Tensor], captured: Iterable[Tensor]) -> int:
    """Bytes that the graph of a step keeps for its backward, each storage once, without what the body closes over."""
    storages: dict[int, int] = {}
    outside = {transforms.storage(x)._cdata for x in captured}
    visited: set[Any] = set()
    stack = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node is None or node in visited or type(node).__name__ == "AccumulateGrad":
            continue
        visited.add(node)
        for x in _saved(node):
            storage = transforms.storage(x)
            storages[storage._cdata] = storage.nbytes()
        stack += [below for below, _ in node.next_functions]
    return sum(size for key, size in storages.items() if key not in outside)


def _saved(node: Any) -> list[Tensor]:
    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    values += list(getattr(node, "saved_tensors", ()))
    flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [x for x in flat if isinstance(x, Tensor)]
