"""Gradients of a compiled loop on their way: its steps are reversed part by part, the last ones first."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorloop.loop.compiled.lengths import grows
from tensorloop.loop.compiled.operations import value_of
from tensorloop.loop.compiled.plan import Plan
from tensorloop.loop.compiled.program import Pool


class Totals:
    """The gradient of the carry between parts; those of xs, and sums over steps, which are complete after the last.

    `carry` and `ys` are the gradients that come, `missing` the ys that got none.
    """

    def __init__(
        self, plan: Plan, steps: int, missing: frozenset[int], carry: list[Tensor], ys: Sequence[Tensor]
    ) -> None:
        nodes = [plan.traced.next_carry[i] for i in plan.flowing_carry]
        self.plan, self.steps, self.ys = plan, steps, ys
        self.carry = [
            x.clone() if grows(n) else x for n, x in zip(nodes, carry, strict=True)
        ]  # arrays' change in place
        self.reversed = plan.reversed(missing)
        self.pool: Pool = {}  # what parts get is copied, or gone before the next
        self.xs: list[Tensor] = []
        self.sums: list[Tensor] = []

    def reverse(
        self, part: slice, captures: Sequence[Tensor], saved: Sequence[Tensor], lengths: Sequence[int] = ()
    ) -> None:
        """Takes the gradients through some steps; `saved` is what was kept of these, `lengths` of the last one."""
        count, program = part.stop - part.start, self.reversed.program
        if count == self.steps:
            self.carry, _, self.xs, self.sums, _ = program(count, captures, [*saved, *self.ys], self.carry, lengths)
            return
        given = [*saved, *(g[part] for g in self.ys)]
        self.carry, _, xs, sums, _ = program(count, captures, given, self.carry, lengths, pool=self.pool)
        if not self.xs:
            self.xs = [room_for(self.steps, value_of(self.plan.traced.xs[k])) for k in self.reversed.xs]
        for whole, g in zip(self.xs, xs, strict=True):
            whole[part] = g
        self.sums = [a.add_(b) for a, b in zip(self.sums, sums, strict=True)] if self.sums else _own(sums)


def room_for(steps: int, value: Tensor) -> Tensor:
    """Memory for a value of each step."""
    return torch.empty((steps, *value.shape), dtype=value.dtype, device="cpu")


def _own(sums: list[Tensor]) -> list[Tensor]:
    """The first terms, in memory that may be added to: two captures may have one gradient."""
    found, met = list[Tensor](), set[int]()
    for x in sums:
        storage = x.untyped_storage()
        alone = storage.nbytes() == x.nbytes and x.is_contiguous() and storage._cdata not in met
        met.add(storage._cdata)
        found.append(x if alone else x.clone())
    return found
