"""The actions of a schedule's reversal, refused where one does not fit what came before it."""

from collections.abc import Iterator

from tensorloop._common.errors import Misuse
from tensorloop.schedule import Action, Advance, Backward, Drop, Restore, Schedule


def reversal(schedule: Schedule, length: int, held: list[int]) -> Iterator[Action]:
    """The actions that reverse `length` steps, each checked: a schedule may be the user's own."""
    at: int | None = None  # the step of the working state
    left = length
    for action in schedule.reverse(length, sorted(held)):
        if isinstance(action, Restore):
            at = action.step
        elif not isinstance(action, Drop):
            start = action.start if isinstance(action, Advance) else action.step
            if at != start:
                has = "none" if at is None else f"that of step {at}"
                raise Misuse(f"the schedule wants {action}, but the state at hand is {has}")
            if isinstance(action, Backward) and start != left - 1:
                raise Misuse(f"the schedule reverses step {start} where {left - 1} is next")
        yield action
        if isinstance(action, Advance):
            at = action.stop
        elif isinstance(action, Backward):
            at, left = None, left - 1
    if left:
        raise Misuse(f"the schedule ended with {left} steps not reversed")
