"""Loops whose body reads bools in Python: stretches of steps with the same answers, each run by the plan of these.

A plan ends its stretch where the next step has other answers. Each stretch is a node of the graph of its own, which
begins with the carry of the one before. The body runs in Python at the first step of a stretch, to find its plan; where
one bool is all that it reads, and both plans are known, the other one goes on without that.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from tensorloop.compiler.refused import VALUES, Refused
from tensorloop.loop.compiled.look.frame import Frame
from tensorloop.loop.compiled.look.look import Look
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.results import CheckpointsArg, carry_of, columns_of, put_columns, results_of
from tensorloop.loop.loop import Loop, State
from tensorloop.loop.rows_loop import ConditionalLoop

MOST_COURSES = 4  # plans of a loop, by the answers that the body gets
SHORT, WORTH = 16, 80  # after so many stretches, each must have had so many operations: about what beginning one costs
CHUNK = 64  # steps, from which short stretches have their slices of xs
LARGE = 8  # stretches of this part of all steps, or more, have theirs from xs itself
MOST_NUMBERS = 128  # steps whose random numbers are there at once, where no backward needs them
LEAST = 8  # steps for which a stretch makes room


def run_by_answers(
    look: Look, plan: Plan, checkpoints: CheckpointsArg, look_at: Callable[[Loop], tuple[Look, Plan]]
) -> tuple[Loop, State]:
    """Runs a loop in stretches: (the loop as it ended, its carry's leaves); `look_at` is for later stretches."""
    stood = list[tuple[Generator, Tensor]]()
    try:
        return _in_stretches(look, plan, checkpoints, look_at, stood)
    except BaseException:  # a refusal among them: all of it runs anew, from the same random numbers on
        for g, state in stood:
            g.set_state(state)
        raise


def _in_stretches(
    look: Look,
    plan: Plan,
    checkpoints: CheckpointsArg,
    look_at: Callable[[Loop], tuple[Look, Plan]],
    stood: list[tuple[Generator, Tensor]],
) -> tuple[Loop, State]:
    """Runs a loop in stretches; `stood` becomes the generators that it draws from, and their states before it."""
    loop, first, known, columns = look.frame.loop, plan, dict[Any, tuple[Look, Plan]](), list[Sequence[Any]]()
    parts, state, done, streak = _Parts(loop), loop.init, 0, 0
    while True:
        if look.draws and look.record is not None:
            met = {id(g) for g, _ in stood}
            stood += [(g, g.get_state()) for g in look.record.written.generators.seen if id(g) not in met]
        known[tuple(plan.answers), look.frame.root] = look, plan
        _check(first, len({answers for answers, _ in known}), len(columns), done)
        room = parts.room(plan, streak, done)
        if look.draws and not plan.grad:
            room = min(room or MOST_NUMBERS, MOST_NUMBERS)
        while True:
            look = dataclasses.replace(look, frame=Frame(parts.loop(state, done, room, kept=True)))
            try:
                taken, outputs = results_of(look, plan, room, checkpoints, None, done)
                break
            except Exception as error:  # of what is computed for all steps at once, also for those of other answers
                if isinstance(error, Refused) or room is None or room == 1:
                    raise
                room //= 2
        state, done, streak = carry_of(look, outputs, taken), done + taken, streak + taken
        plan.longest = max(plan.longest, streak)
        columns.append(columns_of(look, outputs, taken))
        if not _goes_on(loop, state, done):
            break
        rest = parts.loop(state, done, None)
        other = None
        if taken != room:
            streak = 0
            other = known.get((tuple(not x for x in plan.answers), Frame(rest).root))
        look, plan = look_at(rest) if other is None or len(plan.answers) > 1 else other
        if look.frame.loop.counters != loop.counters:
            raise Refused(
                "an int in the carry counts some steps, by what the body reads in Python", VALUES, plan.asked[1]
            )
    loop.taken = done
    reverse = loop.slices is not None and loop.slices.reverse
    put_columns(loop, look, [_joined(x, reverse) for x in zip(*columns, strict=True)])
    return loop, state


def _check(first: Plan, courses: int, stretches: int, done: int) -> None:
    """Refuses loops that would have too many plans, or too short stretches; the plan of the first step remembers it."""
    said, place = first.asked
    if courses > MOST_COURSES:
        first.restless = f"{said} and other values read in Python lead to more than {MOST_COURSES} courses"
    if stretches >= SHORT and done * len(first.trace.operations) < WORTH * stretches:
        first.restless = f"{said} reads a value in Python, which is another one after every few steps"
    if first.restless:
        raise Refused(first.restless, VALUES, place)


def _goes_on(loop: Loop, state: State, done: int) -> bool:
    """Whether there is another step after so many."""
    if loop.length is not None and done >= loop.length:
        return False
    if loop.until is not None:
        return not loop.truth(loop.answer_until(done - 1, state), "until")
    if loop.cond is not None:
        assert isinstance(loop, ConditionalLoop)
        return loop.truth(loop.answer(done, state), "cond_fn")
    return True


def _joined(parts: Sequence[Any], reverse: bool) -> Tensor | None:
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat([*(reversed(parts) if reverse else parts)])


class _Parts:
    """The steps of a loop from one to another, as loops."""

    def __init__(self, whole: Loop) -> None:
        self.whole = whole
        self._xs: list[Tensor | None] = []  # the steps first
        # The gradient of a slice is as large as what it is cut from: small ones are cut from chunks.
        self._chunks: dict[int, Sequence[Tensor]] = {}

    def room(self, plan: Plan, streak: int, done: int) -> int | None:
        """Returns how many steps to make room for, after so many of the same answers; None where nobody knows."""
        length = self.whole.length
        if self.whole.cond is not None or length is None:
            return None
        usual = plan.longest if plan.longest > streak else streak
        return min(length - done, max(2 * usual, LEAST) if usual else length)

    def loop(self, state: State, done: int, room: int | None, *, kept: bool = False) -> Loop:
        """The loop of some steps, by default of all that are left; `kept` where it will run, and not be looked at."""
        part, whole = copy.copy(self.whole), self.whole
        part.init, part.taken, part.last_tree = state, 0, (None, None)
        if whole.length is None:
            part.lower += done
            return part
        part.length = whole.length - done if room is None else room
        start = whole.length - done - part.length if whole.slices is not None and whole.slices.reverse else done
        part.lower += start
        if whole.slices is not None:
            part.slices = whole.slices.between(start, start + part.length)
            if kept and part.length < whole.length:
                part.slices.tensors = self._read(start, start + part.length)
        return part

    def _read(self, start: int, stop: int) -> list[tuple[Tensor | None, int]]:
        """The slices of xs from one place to another, the steps first."""
        slices = self.whole.slices
        assert slices is not None
        if not self._xs:
            self._xs = [None if x is None else x.movedim(d, 0) for x, d in slices.tensors]
        return [(None if x is None else self._cut(k, x, start, stop), 0) for k, x in enumerate(self._xs)]

    def _cut(self, k: int, x: Tensor, start: int, stop: int) -> Tensor:
        if not x.requires_grad or (stop - start) * LARGE >= len(x):
            return x[start:stop]
        if k not in self._chunks:
            self._chunks[k] = x.split(CHUNK)
        chunks = range(start // CHUNK, (stop - 1) // CHUNK + 1)
        parts = [self._chunks[k][j][max(start - j * CHUNK, 0) : stop - j * CHUNK] for j in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
