"""The specification: every numerical operation again in a few lines of plain PyTorch, for the tests to compare with.

Slow, obvious, and differentiable as often as anybody likes. A loop buffer is here a tuple of its values: each write
makes a new one, so that the gradients are those of a functional array by construction. Shapes are not checked.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Slots = tuple[Tensor, ...]


def unstack(values: Tensor) -> Slots:
    """The n slices of values (n, *F)."""
    return tuple(values.unbind(0))


def append(slots: Slots, x: Tensor) -> Slots:
    """`x` in a new slot at the end."""
    return (*slots, x)


def write(slots: Slots, i: int, x: Tensor) -> Slots:
    """`x` in slot i; i == len appends."""
    return (*slots[:i], x, *slots[i + 1 :])


def scatter(slots: Slots, indices: Sequence[int], values: Tensor) -> Slots:
    """values[j] in slot indices[j], in order; slots begun on the way are 0."""
    for i, x in zip(indices, values.unbind(0), strict=True):
        slots = slots + tuple(torch.zeros_like(x) for _ in range(i - len(slots)))
        slots = write(slots, i, x)
    return slots


def write_rows(slots: Slots, pos: Sequence[int], x: Tensor, where: Sequence[bool]) -> Slots:
    """Row b of x (B, *F) in row b of slot pos[b] where where[b]; rows not written of a new slot are 0."""
    for b, (i, writes) in enumerate(zip(pos, where, strict=True)):
        if writes:
            slots = slots + tuple(torch.zeros_like(x) for _ in range(i + 1 - len(slots)))
            rows = slots[i].unbind(0)
            slots = write(slots, i, torch.stack([*rows[:b], x[b], *rows[b + 1 :]]))
    return slots


def gather(slots: Slots, indices: Tensor) -> Tensor:
    """(*I, *F) for indices of any shape I."""
    return stack(slots)[indices]


def stack(slots: Slots) -> Tensor:
    """(n, *F)"""
    return torch.stack(slots)
