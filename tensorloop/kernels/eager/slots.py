"""Rows of a loop buffer in torch operations, each at a slot of its own."""

import torch
from torch import Tensor


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, *F) to slots[pos[b], b] of (n, B, *F), in place, where `where` (B,) bool is true."""
    rows = torch.arange(len(pos), device=slots.device)
    old = slots[pos, rows]
    slots[pos, rows] = torch.where(where.view(-1, *[1] * (old.dim() - 1)), x, old)


def take_rows(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    """slots[pos[b], b] of (n, B, *F), which is 0 afterwards, in row b of (B, *F); 0 where `where` (B,) is false."""
    rows = torch.arange(len(pos), device=slots.device)
    old = slots[pos, rows]
    takes, zero = where.view(-1, *[1] * (old.dim() - 1)), old.new_zeros(())
    slots[pos, rows] = torch.where(takes, zero, old)
    return torch.where(takes, old, zero)
