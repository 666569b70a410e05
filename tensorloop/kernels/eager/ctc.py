"""The CTC loss of packed rows by torch's own, over padded ones: any device that has it, float32 and float64."""

import torch
from torch import Tensor

_FORWARDS = torch.ops.aten._ctc_loss.default
_BACKWARDS = torch.ops.aten._ctc_loss_backward.default


def ctc_loss(
    values: Tensor, offsets: Tensor, tokens: Tensor, token_offsets: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """(B,): the loss of each row of log-probabilities (N, V) and of each of tokens (M,), and what backward needs.

    Offsets are (B+1,) int64. It is infinite where no path has the tokens.
    """
    padded, lens = _pad(values, offsets)
    if not values.numel():  # torch refuses that
        return torch.where(token_offsets.diff() == 0, 0.0, torch.inf).to(values.dtype), values.new_empty(0)
    losses, alpha = _FORWARDS(padded, tokens, lens, token_offsets.diff().tolist(), blank, False)
    return losses, alpha


def ctc_loss_grad(
    grad: Tensor,
    values: Tensor,
    offsets: Tensor,
    tokens: Tensor,
    token_offsets: Tensor,
    blank: int,
    losses: Tensor,
    alpha: Tensor,
) -> Tensor:
    """(N, V): the gradient, for that of the losses (B,), as if values came from a log-softmax, which adds e^value."""
    if not values.numel():
        return torch.zeros_like(values)
    padded, lens = _pad(values, offsets)
    sizes = token_offsets.diff().tolist()
    found = _BACKWARDS(grad.contiguous(), padded, tokens, lens, sizes, losses, alpha, blank, False).transpose(0, 1)
    # It is NaN for a row without paths, and for values of -inf, through which no path goes.
    found = torch.where((grad[:, None, None] == 0) | (padded.transpose(0, 1) == -torch.inf), 0, found)
    return torch.cat([values.new_zeros(0, values.shape[1]), *(row[:n] for row, n in zip(found, lens, strict=True))])


def _pad(values: Tensor, offsets: Tensor) -> tuple[Tensor, list[int]]:
    """(T, B, V), and the lengths."""
    lens = offsets.diff().tolist()
    padded = values.new_zeros(max(lens, default=0), len(lens), values.shape[1])
    for b, row in enumerate(values.split(lens)):
        padded[: len(row), b] = row
    return padded, lens
