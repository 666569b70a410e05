"""What the tests of schedules share: an interpreter that holds them to the rules, and the optimum by definition."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from tensorloop import Checkpoints
from tensorloop.schedule import Action, Advance, Backward, Drop, Release, Restore, Schedule, Snapshot


class Broken(Exception):
    """A schedule broke a rule."""


def rule(kept: bool, message: str) -> None:
    if not kept:
        raise Broken(message)


class Machine:
    """Carries out actions on step numbers: a state is there, or it is not."""

    def __init__(self, length: int, k: int | None) -> None:
        self.length, self.k = length, k
        self.at: int | None = 0  # the working state
        self.held = set[int]()
        self.kept = dict[int, int]()  # steps whose residuals are kept
        self.left = length  # steps 0..left-1 are not reversed yet
        self.extra = self.most = self.snapshots = 0
        self.done: list[Action] = []

    def do(self, action: Action) -> None:
        self.done.append(action)
        match action:
            case Advance(start, stop, keep):
                rule(self.at == start, f"{action}: the working state is at {self.at}")
                rule(start < stop <= self.length, f"{action}: not a stretch of the {self.length} steps")
                self.extra += 0 if keep else stop - start
                self.at = stop
                if keep:
                    self.kept[start] = stop
            case Release(start, stop):
                rule(self.kept.pop(start, None) == stop, f"{action}: not kept")
                self.extra += stop - start
            case Snapshot(step):
                rule(self.at == step, f"{action}: the working state is at {self.at}")
                rule(step not in self.held, f"{action}: held already")
                self.held.add(step)
                self.snapshots += 1
                self.most = max(self.most, len(self.held))
                rule(self.k is None or self.most <= self.k, f"{action}: {self.most} held, k is {self.k}")
            case Restore(step):
                rule(step in self.held, f"{action}: not held")
                self.at = step
            case Drop(step):
                rule(step in self.held, f"{action}: not held")
                self.held.remove(step)
            case Backward(step, steps):
                rule(self.at == step, f"{action}: the working state is at {self.at}")
                rule(step == self.left - steps, f"{action}: step {self.left - 1} is next")
                self.left, self.at = step, None


def swept(schedule: Schedule, length: int, known: bool = True, prompt: bool = True) -> Machine:
    """The state of things after the sweep.

    Where the length is not known, a `prompt` caller asks for no action once the loop has ended; another one goes on
    until a step is wanted that is not there.
    """
    machine = Machine(length, schedule.k)
    for action in schedule.sweep(length if known else None):
        if not known and machine.at == length and (prompt or isinstance(action, Advance)):
            break
        rule(not isinstance(action, Restore | Backward), f"{action}: in the sweep")
        rule(bool(machine.done) or action == Snapshot(0), f"{action}: comes first")
        rule(not (known and action == Snapshot(length)), f"{action}: at the end")
        if not known and isinstance(action, Advance) and action.stop > length:
            machine.do(Advance(action.start, length, action.keep))
            break
        machine.do(action)
    rule(machine.at == length, f"the sweep ended at {machine.at}")
    return machine


def run(schedule: Schedule, length: int, known: bool = True, prompt: bool = True) -> Machine:
    """The whole of a schedule, checked. `done` is then what the reversal did."""
    machine = swept(schedule, length, known, prompt)
    machine.at, machine.done = None, []
    unordered = sorted(machine.held, key=lambda step: (step * 7919) % 101)
    for action in schedule.reverse(length, unordered):
        machine.do(action)
    rule(machine.left == 0, f"{machine.left} steps are not reversed")
    rule(not machine.held, f"still held: {sorted(machine.held)}")
    return machine


# -- the optimum, by definition


@cache
def reversal(length: int, slots: int) -> int:
    """The fewest steps to advance over in reversing a segment, its start held and one of `slots`."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(m + reversal(m, slots) + reversal(length - m, slots - 1) for m in range(1, length))


@cache
def snapshots(length: int, slots: int) -> int:
    """The fewest snapshots to take in reversing a segment with the fewest steps."""
    if length <= 2 or slots == 1:
        return 0
    best = reversal(length, slots)
    return min(
        (length - m > 1) + snapshots(m, slots) + snapshots(length - m, slots - 1)
        for m in range(1, length)
        if m + reversal(m, slots) + reversal(length - m, slots - 1) == best
    )


@cache
def optimum(length: int, k: int) -> int:
    """The fewest extra steps, the sweep included."""
    whole = reversal(length, k)
    if k == 1:
        return length + whole
    return min([length + whole, *(m + reversal(m, k) + optimum(length - m, k - 1) for m in range(1, length))])


def bytes_of_a_step(loop: Callable[[Any], Any], grows: bool = False) -> tuple[int, int, int, int]:
    """Of a loop that is called with `checkpoints`: (least budget, a step's residuals, what it takes beyond, carry).

    `grows`: steps do, so that the least is said where that is seen.
    """
    numbers: list[int] = []
    for _ in range(20 if grows else 1):
        try:
            loop(Checkpoints(budget=numbers[0] if numbers else 1))
            break
        except ValueError as error:
            said = str(error).partition("is too small for one step")[2].partition("which takes")[2]
            numbers = [*map(int, re.findall(r"\d+", said))]
    assert numbers, "no budget is too small"
    return numbers[0], numbers[1], numbers[2], numbers[3]
