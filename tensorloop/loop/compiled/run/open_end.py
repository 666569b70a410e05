"""A compiled loop of unknown length: it runs in parts, and each has memory of its own.

So nothing is copied as there are more steps, and little stays empty: a thirtieth of what is full, or SPARE bytes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop.loop.compiled.run.array_memory import ArrayMemory, bytes_a_step
from tensorloop.loop.compiled.run.looped import RunAtOnce, apart

FEW_STEPS, FEW_BYTES = 8, 2**15  # of the first part, the more of both
SPARE = 2**18  # bytes, up to which the next part is as long as all before it


@dataclasses.dataclass
class RunInParts(RunAtOnce):
    """A loop of unknown length that runs by a plan. It ends after `most` steps, if not before."""

    most: int | None = None
    counts: list[int] = dataclasses.field(default_factory=list)  # steps of each part

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Runs the loop in parts and returns (the last carry, outs, what a backward keeps, part by part)."""
        state, _, invariants = self.split(tensors)  # there are no sequences: they have a length
        plan, arrays, going = self.plan, ArrayMemory(self.plan, self.lengths), True
        each = max(plan.forward.bytes_a_step + bytes_a_step(plan), 1)
        kept: list[list[Tensor]] = []
        parts: list[list[Tensor]] = []
        while going and self.done != self.most:
            size = max(FEW_STEPS, FEW_BYTES // each, min(self.done, max(SPARE // each, 2 * FEW_STEPS)), self.done // 32)
            size = size if self.most is None else min(size, self.most - self.done)
            arrays.make_room(state, size)
            with self.after(self.done):
                found = plan.forward(size, invariants, [], state, self._lengths(self.done), self.ask)
            state, done, outs, _, going = found
            self.done = arrays.at = self.done + done
            self.counts.append(done)
            parts.append(plan.outs_of(outs))
            kept.append(plan.saved_of(outs, [], state))
            for part in kept[:-1]:
                self._share(part, kept[-1])
        return state, apart(self._joined(parts, kept), tensors), [x for part in kept for x in part]

    def _share(self, part: list[Tensor], other: list[Tensor]) -> None:
        """Lets a part have the arrays of a later one, which may lie elsewhere."""
        for j, whole in enumerate(self.plan.whole):
            if whole:
                part[j] = other[j]

    def _joined(self, parts: list[list[Tensor]], kept: list[list[Tensor]]) -> list[Tensor]:
        """The outs of all steps; a backward that keeps some has them from there."""
        if len(parts) == 1:
            return parts[0]
        found = []
        for k, node in enumerate(self.plan.step.outs):
            whole = torch.cat([part[k] for part in parts])
            places = [j for j, n in enumerate(self.plan.saved) if n is node]
            for part, own, y in zip(parts, kept, whole.split(self.counts), strict=True):
                part[k] = y
                for j in places:
                    own[j] = y
            found.append(whole)
        return found

    def pieces(self, saved: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Returns what each part has kept: (of how many steps, that), the first steps first."""
        n = len(self.plan.saved)
        return [(count, saved[k * n : (k + 1) * n]) for k, count in enumerate(self.counts)]
