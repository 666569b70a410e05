"""Random numbers drawn before a loop by torch's own operations, in the order in which an eager loop draws.

So they are the eager loop's numbers, bit for bit, and so is the state that the generators are left in. To the loop they
are sequences like any other.
"""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from tensorloop._torch.transforms import random_numbers_allowed
from tensorloop.compiler.graph.complex_pairs import split_pairs
from tensorloop.loop.compiled.look.draws import DrawOp


class DrawnNumbers:
    """The draws of a loop, block by block. A block that comes again is drawn from the state that it began with."""

    def __init__(self, draws: Sequence[DrawOp], generators: Sequence[Generator], *, reverse: bool) -> None:
        self.draws, self.generators, self.reverse = list(draws), list(generators), reverse
        self._states: dict[int, list[Tensor]] = {}

    @property
    def tensors(self) -> int:
        """Returns how many real sequences the draws are."""
        return sum(1 + d.example.is_complex() for d in self.draws)

    def between(self, start: int, stop: int, size: int) -> list[Tensor]:
        """The draws of these steps, of blocks of `size` steps."""
        blocks = [self._block(at // size, min(size, stop - at)) for at in range(start, stop, size)]
        if len(blocks) == 1:
            return blocks[0]
        return [torch.cat(parts) for parts in zip(*(blocks[::-1] if self.reverse else blocks), strict=True)]

    def _block(self, i: int, steps: int) -> list[Tensor]:
        """Draws a block: (steps, *shape) of each draw, in index order, of complex ones the parts."""
        now = [g.get_state() for g in self.generators]
        again = self._states.setdefault(i, now) is not now
        if again:
            self._set(self._states[i])
        found = [
            torch.empty((steps, *d.example.shape), dtype=d.example.dtype, device=d.example.device) for d in self.draws
        ]
        rows = [x.unbind(0) for x in found]
        with random_numbers_allowed():  # in a batched backward too: the same for all its elements
            for t in reversed(range(steps)) if self.reverse else range(steps):
                for draw, row in zip(self.draws, rows, strict=True):
                    draw.fill(row[t])
        if again:
            self._set(now)
        return split_pairs(found)

    def _set(self, states: Sequence[Tensor]) -> None:
        for g, state in zip(self.generators, states, strict=True):
            g.set_state(state)
