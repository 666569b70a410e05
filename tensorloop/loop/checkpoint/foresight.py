"""What checkpoints will do with a loop: its first steps run for their bytes, and leave no trace."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from tensorloop import schedule
from tensorloop._common.errors import Misuse
from tensorloop._common.progress import Progress
from tensorloop._common.scope import library_code
from tensorloop.loop.checkpoint.measure import StepBytes
from tensorloop.loop.checkpoint.options import Checkpoints, WhatFits
from tensorloop.loop.checkpoint.sweep import Sweep
from tensorloop.loop.effects.notes import StepNotes
from tensorloop.loop.loop import Loop
from tensorloop.schedule import Forecast, Schedule


class Foreseen(NamedTuple):
    """Bytes of one step, those at peak, and what the schedule does."""

    step: StepBytes
    peak: int
    forecast: Forecast


class _Measured(Exception):
    """Ends a sweep whose first steps were measured."""


class _FirstSteps(Sweep):
    """The steps of a loop that tell its sizes: two at most, or seven of one whose arrays may grow."""

    def __init__(self, loop: Loop, plan: Checkpoints | Schedule, length: int | None, most: int) -> None:
        super().__init__(loop, plan, length)
        self.given, self.schedule = self.schedule, None  # steps are measured where there is none yet
        self.most = most

    def _actions(self, state: Any) -> Iterator[Any]:
        yield from self._first_steps()
        self.schedule = self.given or self._schedule_of(state)
        while self.has_arrays and self.loop.taken < min(self.most, 7):
            yield schedule.Advance(self.loop.taken, 7)
        if self.stale and self.budget is not None:
            self._make_room()
        raise _Measured

    def _weighs(self, t: int) -> bool:
        return self.has_arrays and t in (3, 6)

    def _measured_next(self, t: int) -> int:
        return max(self.most - 1, t)


def foreseen(loop: Loop, plan: Checkpoints | Schedule, length: int | None, most: int | None) -> Foreseen | None:
    """Returns what a plan would do with a loop of `length` steps, or of `most` where nobody knows; None for no step.

    Two steps run at most, seven of a loop that carries arrays. What they write in Python and to buffers, and the random
    numbers they draw, are undone.

    Raises:
        RuntimeError: the body does what no checkpointed loop takes.
        ValueError: a budget too small for one step, with the least that works.
    """
    if most is None:
        return None
    notes = loop.notes = StepNotes()
    sweep = _FirstSteps(loop, plan, length, most)
    captures = sweep.captures
    numbers = captures.rng_state()
    try:
        with library_code(), sweep.steps.ambient.begun(), suppress(_Measured):
            sweep.run(Progress(False, loop.name, None))
    except Misuse:
        if not isinstance(plan, WhatFits):  # where a plain loop may be what runs
            raise
        return None
    finally:
        captures.writes.settle()
        captures.writes.restore({})
        numbers.restore(captures.generators, numbers.cuda)
        notes.undo()
    sizes, plan_made = sweep.sizes, sweep.schedule or sweep.given
    if sizes is None:
        return None
    moved = sweep.snapshots.places.default is not None
    carry = 0 if moved else sizes.carry
    found = schedule.forecast(plan_made or schedule.of(1, most), most, carry, sizes.residuals, length is not None)
    return Foreseen(sizes, found.bytes + sizes.beyond + 2 * sizes.carry, found)
