"""Random numbers drawn before a loop by torch's own operations, in the order in which an eager loop draws.

So they are the eager loop's numbers, bit for bit, and so is the state that the generators are left in. To the loop they
are sequences like any other.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from tensorloop._torch.cuda_numbers import graphs_draw
from tensorloop._torch.transforms import maybe_level, random_numbers_allowed
from tensorloop.compiler.graph.complex_pairs import split_pairs
from tensorloop.compiler.place import HOST
from tensorloop.loop.compiled.look.draws import DrawOp

if TYPE_CHECKING:
    from tensorloop.compiler.targets.graphs import DrawGraphs

GraphsByStream = dict[int, "DrawGraphs"]
MOST_STREAMS = 16  # on which a plan has graphs that draw


class DrawnNumbers:
    """The draws of a loop, block by block. A block that comes again is drawn from the state that it began with.

    On a device `graphs` draw them, those of the loop's plan.
    """

    def __init__(
        self, draws: Sequence[DrawOp], generators: Sequence[Generator], *, reverse: bool, graphs: GraphsByStream
    ) -> None:
        self.draws, self.generators, self.reverse, self.graphs = list(draws), list(generators), reverse, graphs
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
        found = self._drawn(steps)
        if again:
            self._set(now)
        return split_pairs(found)

    def take_back(self, steps: int) -> None:
        """Lets the generators stand where they stood behind so many steps of the first block."""
        if self._states:
            self._set(self._states[0])
            self._drawn(steps)

    def _drawn(self, steps: int) -> list[Tensor]:
        """Draws the numbers of so many steps anew."""
        examples = [draw.example for draw in self.draws]
        found = [torch.empty((steps, *x.shape), dtype=x.dtype, device=x.device) for x in examples]
        if steps:
            with random_numbers_allowed():  # in a batched backward too: the same for all its elements
                self._draw(found)
        return found

    def _draw(self, numbers: Sequence[Tensor]) -> None:
        device, sources = numbers[0].device, sorted({draw.source for draw in self.draws})
        own = [self.generators[k] for k in sources]

        def fill(numbers: Sequence[Tensor], own: Sequence[Generator]) -> None:
            """Draws step by step, as an eager loop does."""
            by_source, steps = dict(zip(sources, own, strict=True)), range(len(numbers[0]))
            rows = [x.unbind(0) for x in numbers]
            for t in reversed(steps) if self.reverse else steps:
                for draw, row in zip(self.draws, rows, strict=True):
                    draw.fill(row[t], by_source[draw.source])

        if device == HOST or not graphs_draw() or maybe_level() is not None:
            return fill(numbers, own)
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return fill(numbers, own)
            kept, key = self.graphs, torch.cuda.current_stream().stream_id
            if (graphs := kept.get(key)) is None:
                if len(kept) >= MOST_STREAMS:
                    kept.clear()
                from tensorloop.compiler.targets.graphs import DrawGraphs  # with what only devices need

                graphs = kept[key] = DrawGraphs(device, own, partial(kept.pop, key, None))
            return graphs.draw(numbers, own, fill, reverse=self.reverse)

    def _set(self, states: Sequence[Tensor]) -> None:
        for g, state in zip(self.generators, states, strict=True):
            g.set_state(state)
