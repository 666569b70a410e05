"""Moves in torch operations: any device, any dtype, fake tensors too."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop.kernels.moves import Moves


def regroup(rows: Sequence[Tensor], moves: Moves) -> list[Tensor]:
    """Targets (B, width) from sources (B, width), at least one of each: one `cat` a target."""
    parts: list[list[Tensor]] = [[] for _ in moves.targets]
    for target, _, length, terms in moves.segments:
        if not terms:
            parts[target].append(rows[0].new_zeros(()).expand(len(rows[0]), length))
            continue
        first, *others = (rows[source].narrow(1, start, length) for source, start in terms)
        for other in others:
            first = first + other
        parts[target].append(first)
    return [torch.cat(some, 1) if some else rows[0].new_empty(len(rows[0]), 0) for some in parts]


regroup_sums = regroup  # for tables whose `sums` is true: kernels add in fewer dtypes than they move
