"""Log-probabilities of the next token from a decoder's state, without keeping them for backward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop._common import arguments
from tensorloop._common.errors import named
from tensorloop._torch import transforms
from tensorloop._torch.autocast import autocasts
from tensorloop._torch.formula import differentiate, is_differentiated


@named("linear_log_softmax")
def linear_log_softmax(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gives `log_softmax(linear(x, weight, bias), -1)` and computes it again in backward: for large vocabularies.

    Args:
        x: (*batch, H), floating.
        weight: (V, H), as `torch.nn.Linear` has it.
        bias: (V,), or None for none.

    Returns:
        (*batch, V) log-probabilities.

    Gradient: to all three, twice.
    Cost: keeps x and one number for each row of x where log_softmax keeps V; one product more in backward. Under
    autocast and `torch.func` it is the formula and keeps what that keeps.

    Raises:
        TypeError, ValueError: dtypes and shapes that do not fit (from torch).

    Example:
        >>> x, weight = torch.randn(2, 3, 8), torch.randn(50, 8)
        >>> torch.allclose(tl.beam.linear_log_softmax(x, weight), F.linear(x, weight).log_softmax(-1), atol=1e-5)
        True
    """
    for part, what in ((x, "x"), (weight, "weight")):
        arguments.dense_tensor(part, what)
    if autocasts(x) or transforms.maybe_level() is not None or transforms.forward_mode():
        return _formula(x, weight, bias)
    return _Scores.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.log_softmax(F.linear(x, weight, bias), -1)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = F.linear(x, weight, bias)
        total = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(x, weight, bias, total)
        return logits.sub_(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias, total = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if is_differentiated(grad):
            return differentiate(_formula, (x, weight, bias), grad)
        rows = F.linear(x, weight, bias).sub_(total).exp_().mul_(grad.sum(-1, keepdim=True)).neg_().add_(grad)
        flat, given = rows.reshape(-1, rows.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            rows @ weight if wanted[0] else None,
            flat.t() @ given if wanted[1] else None,
            flat.sum(0) if wanted[2] else None,
        )
