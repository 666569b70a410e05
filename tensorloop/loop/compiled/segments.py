"""Checkpoints of a compiled loop: K carries are kept, and the programs run again over blocks of steps.

A block is to the schedule what a step is to that of an eager loop. What a backward keeps is held for one block at a
time; blocks of more steps than `MOST_STEPS` would hold more and run no faster.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._torch.engine import keeps_graph
from tensorloop.loop.compiled.node import Run
from tensorloop.loop.compiled.operations import value_of
from tensorloop.loop.compiled.program import Program

MOST_STEPS = 128


@dataclasses.dataclass
class Segmented(Run):
    """One loop that runs by a plan in blocks, with `k` carries kept. The number of steps is known."""

    k: int = 1
    snapshots: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)

    @property
    def _blocks(self) -> int:
        assert self.steps is not None
        return -(-self.steps // self._block)

    @property
    def _block(self) -> int:
        assert self.steps is not None
        return max(1, min(MOST_STEPS, -(-self.steps // self.k)))

    def _part(self, i: int) -> slice:
        """The indices of block i; a reversed loop begins at the end."""
        assert self.steps is not None
        start, end = i * self._block, min((i + 1) * self._block, self.steps)
        return slice(self.steps - end, self.steps - start) if self.plan.reverse else slice(start, end)

    def _rows(self, i: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sequences of block i; those that are drawn are drawn now."""
        _, xs, _ = self.split(tensors)
        part = self._part(i)
        given = [x[part] for x in xs[: len(xs) - self.drawn]]
        return given if self.draws is None else [*given, *self.draws.block(i, self._size(i))]

    def whole(self, xs: list[Tensor]) -> list[Tensor]:
        """All sequences, of all steps: those that are drawn, drawn again."""
        if self.draws is None:
            return xs
        blocks = [self.draws.block(i, self._size(i)) for i in range(self._blocks)]
        blocks = blocks[::-1] if self.plan.reverse else blocks
        return [*xs[: len(xs) - self.drawn], *(torch.cat(parts) for parts in zip(*blocks, strict=True))]

    def _size(self, i: int) -> int:
        part = self._part(i)
        return part.stop - part.start

    def _run(self, program: Program, i: int, tensors: Sequence[Tensor], carry: list[Tensor]) -> Any:
        """(the carry after block i, what the program wants of it, its sequences)."""
        _, _, captures = self.split(tensors)
        rows = self._rows(i, tensors)
        last, _, wanted, _ = program(self._size(i), captures, rows, carry)
        return last, wanted, rows

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Runs all blocks and keeps the carries that the schedule wants."""
        assert self.steps is not None
        state, _, _ = self.split(tensors)
        light = self.plan.light
        shapes = [(value_of(n).shape, value_of(n).dtype) for n in self.plan.traced.ys]
        ys = [torch.empty((self.steps, *shape), dtype=dtype, device="cpu") for shape, dtype in shapes]
        for action in schedule.of(self.k, self._blocks).sweep(self._blocks):
            if isinstance(action, schedule.Snapshot):
                self.snapshots[action.step] = state
            elif isinstance(action, schedule.Drop):
                del self.snapshots[action.step]
            else:
                for i in range(action.start, min(action.stop, self._blocks)):
                    state, wanted, _ = self._run(light, i, tensors, state)
                    for y, x in zip(ys, self.plan.ys_of(wanted, light=True), strict=True):
                        y[self._part(i)] = x
        self.done = self.steps
        return list(state), ys, []

    def backward(self, grads: Sequence[Tensor | None], tensors: list[Tensor], saved: list[Tensor]) -> list[Any]:
        """The gradients of the inputs, block by block from the last one."""
        snapshots = dict(self.snapshots)
        if not keeps_graph():
            self.snapshots.clear()
        total = _Total(self, grads)
        state: list[Tensor] = []
        for action in schedule.of(self.k, self._blocks).reverse(self._blocks, sorted(snapshots)):
            if isinstance(action, schedule.Snapshot):
                snapshots[action.step] = state
            elif isinstance(action, schedule.Drop):
                del snapshots[action.step]
            elif isinstance(action, schedule.Restore):
                state = snapshots[action.step]
            elif isinstance(action, schedule.Advance):
                for i in range(action.start, action.stop):
                    state, *_ = self._run(self.plan.bare, i, tensors, state)
            else:
                self._reverse(action.step, tensors, state, total)
        return self._placed(total.carry, total.xs, total.sums, total.missing)

    def _reverse(self, i: int, tensors: list[Tensor], state: list[Tensor], total: "_Total") -> None:
        """Runs block i with what a backward keeps, and then that."""
        part = self._part(i)
        _, _, captures = self.split(tensors)
        _, wanted, rows = self._run(self.plan.forward, i, tensors, state)
        saved = self.plan.saved_of(wanted, rows)
        del wanted, rows
        program = self.plan.backward(total.missing)
        given = [*saved, *(g[part] for g in total.ys)]
        del saved
        total.carry, _, found, sums = program(part.stop - part.start, captures, given, total.carry)
        for whole, g in zip(total.xs, found, strict=True):
            whole[part] = g
        total.add(sums)


class _Total:
    """Gradients on their way: of the carry between blocks, and those that are complete after the last block."""

    def __init__(self, run: Segmented, grads: Sequence[Tensor | None]) -> None:
        self.missing, self.carry, self.ys = run.coming(grads)
        plan = run.plan
        assert run.steps is not None
        found = plan.gradients(self.missing)["xs"]
        values = [value_of(plan.traced.xs[k]) for k in sorted(found)]
        self.xs = [torch.empty((run.steps, *x.shape), dtype=x.dtype, device="cpu") for x in values]
        self.sums: list[Tensor] = []

    def add(self, sums: list[Tensor]) -> None:
        """What one block gives to the captures' gradients."""
        self.sums = [a.add_(b) for a, b in zip(self.sums, sums, strict=True)] if self.sums else _own(sums)


def _own(sums: list[Tensor]) -> list[Tensor]:
    """The first terms, in memory that may be added to: two captures may have one gradient."""
    found, met = list[Tensor](), set[int]()
    for x in sums:
        storage = x.untyped_storage()
        alone = storage.nbytes() == x.nbytes and x.is_contiguous() and storage._cdata not in met
        met.add(storage._cdata)
        found.append(x if alone else x.clone())
    return found
