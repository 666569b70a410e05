"""One function with loops, run eagerly and compiled: all that it gives, and the gradients of its inputs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl

AMINMAX_HAS_A_GRADIENT = "Aminmax" in str(torch.aminmax(torch.ones(1, requires_grad=True)).min.grad_fn)  # torch 2.13 on
Run = Callable[..., Any]  # (compile, *inputs) -> outputs
Loss = Callable[[list[Tensor]], Tensor]


class Outcome(NamedTuple):
    """What a run gave: tensors, gradients of its inputs, gradients of these."""

    outputs: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    second: Sequence[Tensor | None]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a tree, arrays as stacks of their slots."""
    return [
        x.stack() if isinstance(x, tl.TensorArray) else x
        for x in tree_leaves(tree)
        if isinstance(x, Tensor) or (isinstance(x, tl.TensorArray) and len(x))
    ]


def summed(outputs: Sequence[Tensor]) -> Tensor:
    """All numbers of those that have a gradient, with weights that are not alike."""
    terms = [x.real if x.is_complex() else x for x in outputs if x.requires_grad]
    return torch.stack(
        [(x.double().flatten() * torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64)).sum() for x in terms]
    ).sum()


def outcome(
    run: Run, compile: Any, inputs: Sequence[Tensor], loss: Loss | None = None, second: bool = False
) -> Outcome:
    """Runs it on copies of the inputs, which want gradients where they can have any."""
    torch.manual_seed(0)
    leaves = [
        x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex()) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    outputs = tensors_of(run(compile, *leaves))
    wanted = [x for x in leaves if x.requires_grad]
    if not any(x.requires_grad for x in outputs) or not wanted:
        return Outcome(outputs, [], [])
    total = (loss or summed)(outputs)
    grads = torch.autograd.grad(total, wanted, allow_unused=True, create_graph=second)
    more: Sequence[Tensor | None] = []
    if second and any(g is not None and g.requires_grad for g in grads):
        squares = [(g * g).sum() for g in grads if g is not None and g.requires_grad]
        more = torch.autograd.grad(torch.stack(squares).sum(), wanted, allow_unused=True)
    return Outcome(outputs, grads, more)


def check_alike(found: Outcome, expected: Outcome, tolerance: float = 1e-11) -> None:
    """The same numbers as far as rounding goes; gradients are missing where the others are."""
    for which, (some, others) in zip(Outcome._fields, zip(found, expected, strict=True), strict=True):
        assert len(some) == len(others), which
        for n, (x, y) in enumerate(zip(some, others, strict=True)):
            where = f"{which}[{n}]"
            assert (x is None) == (y is None), where
            if x is None or y is None:
                continue
            assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device), where
            assert x.requires_grad == y.requires_grad, where
            torch.testing.assert_close(
                x, y, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, w=where: f"{w}: {m}"
            )


def check_both(
    run: Run,
    *inputs: Tensor,
    compile: Any = "strict",
    tolerance: float = 1e-11,
    loss: Loss | None = None,
    second: bool = False,
) -> None:
    """The compiled loop gives what the eager one gives."""
    expected = outcome(run, False, inputs, loss, second)
    check_alike(outcome(run, compile, inputs, loss, second), expected, tolerance)
