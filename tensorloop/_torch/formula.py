"""Gradients by formula: of what a kernel computes, and, in a backward pass that is itself differentiated, of anything.

`evaluate` runs a `Formula` as one autograd node. `differentiate` is for a custom `autograd.Function` whose backward is
a kernel: where `is_differentiated` says that no kernel will do, it takes the gradients of an equal function in
ordinary operations. Private names of torch, tried with 2.11 and 2.13: `__signature__` on a Function's forward.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.eager_only import runs_kernels


class Formula(NamedTuple):
    """A computation on plain tensors, and its derivatives in differentiable operations: any order is right.

    Inputs may have any more dims at the end, and the output then has them too: under vmap the batch dim is one of them.
    """

    run: Callable[..., Tensor]  # (*inputs) -> output
    vjp: Callable[..., tuple[Tensor | None, ...]] | None = None  # (gradient, *kept) -> that of each input
    jvp: Callable[..., Tensor] | None = None  # (tangents, *kept) -> that of the output; None is 0
    keeps: tuple[int, ...] = ()  # which of (*inputs, output) are kept for the derivatives


@runs_kernels
def evaluate(formula: Formula, *inputs: Tensor) -> Tensor:
    """The formula of these inputs, recorded as one node."""
    return _Evaluate.apply(formula, *inputs)  # pyright: ignore[reportReturnType]


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(formula: Formula, *inputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return formula.run(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.formula, *given = inputs
        if ctx.formula.keeps:
            kept = [(*given, output)[i] for i in ctx.formula.keeps]
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:  # a missing gradient stays missing
            return (None,) * len(ctx.needs_input_grad)
        return None, *ctx.formula.vjp(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.formula.jvp(tangents, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], formula: Formula, *inputs: Tensor) -> tuple[Tensor, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        batched = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in zip(inputs, in_dims[1:], strict=True)
        ]
        out = evaluate(formula, *batched)
        return out, out.dim() - 1


# torch asks for the signature at every call. Worked out once, a call takes 23 us, not 32.
setattr(_Evaluate.forward, "__signature__", inspect.signature(_Evaluate.forward))  # noqa: B010


def is_differentiated(*grads: Tensor | None) -> bool:
    """Whether the backward pass that gives these gradients is recorded, or under a transform: kernels are not then."""
    if torch.is_grad_enabled() or transforms.maybe_level() is not None:
        return True
    for x in grads:  # `any` of a generator is a frame for each, at every step of a loop
        if x is not None and transforms.is_legacy_batched(x):
            break
    else:
        return False
    return True


def differentiate(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `function(*inputs)`, as part of the graph where backward is recorded; of None they are None."""
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: inputs may depend on each other, which is not this function's business.
        aliases = [
            None if x is None else x.view_as(x) if recorded and x.requires_grad else x.detach().requires_grad_()
            for x in inputs
        ]
        wanted = [x for x in aliases if x is not None]
        out = function(*aliases)
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=recorded, materialize_grads=True))
    return tuple(None if x is None else next(found) for x in aliases)
