"""A compiled loop of which nobody knows how many steps it has: it runs in parts, and each has memory of its own.

So nothing is copied as there are more steps, and little stays empty: a thirtieth of what is full, or SPARE bytes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop.loop.compiled.run.array_memory import ArrayMemory, bytes_a_step
from tensorloop.loop.compiled.run.node import Run, apart

FEW_STEPS, FEW_BYTES = 8, 2**15  # of the first part, the more of both
SPARE = 2**18  # bytes, up to which the next part is as long as all before it


@dataclasses.dataclass
class OpenRun(Run):
    """One such loop. It ends after `most` steps, if not before."""

    most: int | None = None
    counts: list[int] = dataclasses.field(default_factory=list)  # steps of each part

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """(the last carry, ys, what a backward keeps, part by part)."""
        state, _, captures = self.split(tensors)  # there are no sequences: they have a length
        plan, arrays, going = self.plan, ArrayMemory(self.plan, self.lengths), True
        each = max(plan.forward.bytes_a_step + bytes_a_step(plan), 1)
        kept: list[list[Tensor]] = []
        ys: list[list[Tensor]] = []
        while going and self.done != self.most:
            size = max(FEW_STEPS, FEW_BYTES // each, min(self.done, max(SPARE // each, 2 * FEW_STEPS)), self.done // 32)
            size = size if self.most is None else min(size, self.most - self.done)
            arrays.make_room(state, size)
            state, done, wanted, _, going = plan.forward(size, captures, [], state, self._lengths(self.done), self.ask)
            self.done = arrays.at = self.done + done
            self.counts.append(done)
            ys.append(plan.ys_of(wanted))
            kept.append(plan.saved_of(wanted, [], state))
            for part in kept[:-1]:
                self._share(part, kept[-1])
        return state, apart(self._joined(ys, kept), tensors), [x for part in kept for x in part]

    def _share(self, part: list[Tensor], other: list[Tensor]) -> None:
        """Lets a part have the arrays of a later one, which may lie elsewhere."""
        for j, whole in enumerate(self.plan.whole):
            if whole:
                part[j] = other[j]

    def _joined(self, ys: list[list[Tensor]], kept: list[list[Tensor]]) -> list[Tensor]:
        """The ys of all steps; a backward that keeps some has them from there."""
        if len(ys) == 1:
            return ys[0]
        found = []
        for k, node in enumerate(self.plan.traced.ys):
            whole = torch.cat([part[k] for part in ys])
            places = [j for j, n in enumerate(self.plan.saved) if n is node]
            for part, own, y in zip(ys, kept, whole.split(self.counts), strict=True):
                part[k] = y
                for j in places:
                    own[j] = y
            found.append(whole)
        return found

    def pieces(self, saved: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """As `Run` says."""
        n = len(self.plan.saved)
        return [(count, saved[k * n : (k + 1) * n]) for k, count in enumerate(self.counts)]
