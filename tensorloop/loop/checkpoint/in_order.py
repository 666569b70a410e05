"""The actions of a schedule's reversal, refused where one does not fit what came before it."""

from collections.abc import Container, Iterator

from tensorloop._common.errors import Misuse
from tensorloop.schedule import Action, Advance, Backward, Drop, Release, Restore, Schedule, Snapshot


def singly(actions: Iterator[Action], held: Container[int]) -> Iterator[Action]:
    """The same actions, but that steps which are reversed together have their carries kept, and are reversed alone."""
    for action in actions:
        if not (isinstance(action, Backward) and action.steps > 1):
            yield action
            continue
        start, last = action.step, action.step + action.steps - 1
        mine = [t for t in range(start, last) if t not in held]
        for t in range(start, last):
            if t in mine:
                yield Snapshot(t)
            yield Advance(t, t + 1)
        yield Backward(last)
        for t in reversed(range(start, last)):
            yield Restore(t)
            if t in mine:
                yield Drop(t)
            yield Backward(t)


def reversal(schedule: Schedule, length: int, held: list[int]) -> Iterator[Action]:
    """The actions that reverse `length` steps, each checked: a schedule may be the user's own."""
    at: int | None = None  # the step of the working state
    left = length
    for action in schedule.reverse(length, sorted(held)):
        if isinstance(action, Restore):
            at = action.step
        elif not isinstance(action, Drop | Release):
            advances = isinstance(action, Advance)
            start = action.start if advances else action.step
            if at != start:
                has = "none" if at is None else f"that of step {at}"
                raise Misuse(f"the schedule wants {action}, but the state at hand is {has}")
            if advances:
                at = action.stop
            elif isinstance(action, Backward):
                left -= action.steps
                if start != left or action.steps < 1:
                    last = start + action.steps - 1
                    raise Misuse(f"the schedule reverses step {last} where {left + action.steps - 1} is next")
                at = None
        yield action
    if left:
        raise Misuse(f"the schedule ended with {left} steps not reversed")
