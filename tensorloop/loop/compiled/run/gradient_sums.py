"""Accumulates gradients while the steps of a loop are reversed block by block."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.compiler.graph.backward_step import Missing
from tensorloop.compiler.lengths import grows
from tensorloop.compiler.operations import value_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import StepFailed
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.program import Pool

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Coming(NamedTuple):
    """Gradients that come: which are missing, those of the carry (zeros where one is), and of outs that have one."""

    missing: Missing
    carry: list[Tensor]
    outs: Sequence[Tensor]


class GradientSums:
    """The gradient of the carry between parts, and those of sequences and invariants, complete after the last part.

    A carry whose gradient is missing, after the last step or because the step behind it makes no use of it, is given
    zeros, and its part of a step is run all the same: that costs nothing and gives the same, unless what zero is
    multiplied with is infinite or no number. Whether it was shows in the end (`sound`). Then all is done again,
    `exact`: without what is missing, the steps one at a time until each is as the one behind it.
    """

    def __init__(self, plan: Plan, steps: int, coming: Coming, *, exact: bool = False) -> None:
        nodes = [plan.step.next_carry[i] for i in plan.flowing_carry]
        self.plan, self.steps, self.coming, self.exact = plan, steps, coming, exact
        # Gradients of arrays change in place.
        self.carry = [x.clone() if grows(n) else x for n, x in zip(nodes, coming.carry, strict=True)]
        self.absent = coming.missing.carry if exact else frozenset[int]()
        self.room: float = math.inf  # bytes that steps which are reversed together may take
        self.pool: Pool = {}  # what parts get is copied, or gone before the next
        self.sequences: dict[int, Tensor] = {}  # by place
        self.invariants: dict[int, Tensor] = {}

    @property
    def missing(self) -> Missing:
        """The gradients that are missing at the step that is next."""
        return Missing(self.coming.missing.outs, self.absent)

    def reverse(
        self, part: slice, invariants: Sequence[Tensor], saved: Sequence[Tensor], lengths: Sequence[int] = ()
    ) -> None:
        """Takes the gradients through some steps; `saved` is what was kept of these, `lengths` of the last one."""
        left, turned = part, self.plan.step.reverse
        while left.start < left.stop:
            following = frozenset[int]()
            most = self.room // max(self.plan.backward(self.missing).bytes_a_step, 1)
            count = int(min(left.stop - left.start, max(most, 1)))
            if self.exact:
                following = self.plan.reached(self.missing).none
                count = count if following == self.absent else 1
            cut = left.start + count if turned else left.stop - count
            now, left = (slice(left.start, cut), slice(cut, left.stop)) if turned else (
                slice(cut, left.stop), slice(left.start, cut))  # fmt: skip
            some = saved
            if count < part.stop - part.start:
                inner = slice(now.start - part.start, now.stop - part.start)
                some = [x if array else x[inner] for x, array in zip(saved, self.plan.whole, strict=True)]
            self._reverse(now, invariants, some, lengths)
            lengths = [n - more * count for n, more in zip(lengths, self.plan.step.growth, strict=True)]
            self.absent = following

    def _reverse(
        self, part: slice, invariants: Sequence[Tensor], saved: Sequence[Tensor], lengths: Sequence[int]
    ) -> None:
        program, reached, count = (
            self.plan.backward(self.missing),
            self.plan.reached(self.missing),
            part.stop - part.start,
        )
        whole = count == self.steps
        given = [*saved, *(g if whole else g[part] for g in self.coming.outs)]
        program.check_inputs(invariants, given, ())
        pool = None if whole else self.pool
        try:
            self.carry, _, outs, sums, _ = program(count, invariants, given, self.carry, lengths, pool=pool)
        except StepFailed as failed:  # of a reversed loop the last step is at index 0
            turned = self.plan.step.reverse
            failed.done = (self.steps - part.start if turned else part.stop) - 1 - failed.done
            raise
        sequences = dict(zip(sorted(reached.sequences), outs, strict=True))
        terms = dict(zip(sorted(reached.invariants), sums, strict=True))
        if whole:
            self.sequences, self.invariants = sequences, terms
            return
        for k, g in sequences.items():
            if k not in self.sequences:
                step = self.plan.step
                value = value_of(step.sequences[k])
                self.sequences[k] = room_for(self.steps, value, step.place.device, zeros=self.exact)
            self.sequences[k][part] = g
        fresh = [k for k in terms if k not in self.invariants]
        for k in terms.keys() & self.invariants.keys():
            self.invariants[k].add_(terms[k])
        self.invariants |= dict(zip(fresh, _own([terms[k] for k in fresh]), strict=True))

    def sound(self) -> bool:
        """Whether zeros for missing gradients made no NaN or infinity; a sum shows it if there is one."""
        if self.exact or not (self.coming.missing.carry or self.plan.reached(self.missing).none):
            return True
        every = [*self.carry, *self.sequences.values(), *self.invariants.values()]
        sums = [x.sum(dtype=_WIDE.get(x.dtype)) for x in every]
        if len(sums) > 1 and sums[0].device != HOST:  # one wait for the device instead of one each
            alike = len({x.dtype for x in sums}) == 1
            return bool(torch.stack(sums if alike else [x.double() for x in sums]).isfinite().all())
        return all(math.isfinite(x.item()) for x in sums)


def room_for(steps: int, value: Tensor, device: torch.device, *, zeros: bool = False) -> Tensor:
    """Returns memory for a value of each step."""
    made = torch.zeros if zeros else torch.empty
    return made((steps, *value.shape), dtype=value.dtype, device=device)


def _own(sums: list[Tensor]) -> list[Tensor]:
    """Returns the first terms in memory that may be added to: two invariants may have one gradient."""
    found, met = list[Tensor](), set[int]()
    for x in sums:
        if x.is_sparse:
            found.append(x.clone())
            continue
        storage = x.untyped_storage()
        alone = storage.nbytes() == x.nbytes and x.is_contiguous() and storage._cdata not in met
        met.add(storage._cdata)
        found.append(x if alone else x.clone())
    return found
