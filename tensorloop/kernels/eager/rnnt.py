"""The RNN-T loss in torch operations: the formula, and its gradient by autograd. All rows are padded."""

import torch
from torch import Tensor

from tensorloop.kernels.lattices import rnnt_formula


def rnnt_loss(scores: Tensor, offsets: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """(B,), and what backward needs; arguments are those of `rnnt_formula`."""
    with torch.no_grad():
        return rnnt_formula(scores, offsets, widths), scores.new_empty(0)


def rnnt_loss_grad(
    grad: Tensor, scores: Tensor, offsets: Tensor, widths: Tensor, losses: Tensor, alpha: Tensor
) -> Tensor:
    """(N, 2)"""
    with torch.enable_grad():
        given = scores.detach().requires_grad_()
        return torch.autograd.grad(rnnt_formula(given, offsets, widths), given, grad)[0]
