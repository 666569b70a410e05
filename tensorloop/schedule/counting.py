"""Which schedule for a number of snapshots, and what a schedule costs."""

from tensorloop.schedule.actions import as_count
from tensorloop.schedule.base import Binomial, Schedule
from tensorloop.schedule.forecasting import forecast
from tensorloop.schedule.online import Online


def of(k: int, length: int | None) -> Schedule:
    """Returns the schedule that `checkpoints=K` stands for: `Binomial`, or `Online` where the length is not known.

    Args:
        k: int, the most snapshots held at once.
        length: int, the number of steps; None where it is not known.

    Returns:
        A `Binomial` or an `Online`.

    Raises:
        TypeError: k is no int.
        ValueError: k < 1.

    Example:
        >>> tl.schedule.of(8, length=None)
        Online(k=8)
    """
    return Online(k) if length is None else Binomial(k)


def advances(schedule: Schedule, length: int, known: bool = True) -> int:
    """Counts the extra steps that a schedule takes for a loop, without running anything; the forward pass is included.

    A checkpointed loop calls its body `length + advances(schedule, length)` times, backward included.

    Args:
        schedule: a `Schedule`.
        length: int, the number of steps of the loop.
        known: bool, default True. False does not tell the schedule the length, as in a `while_loop`.

    Returns:
        int, the steps run without their gradient: those of the forward pass, and those that backward runs again on its
            way.

    Cost: O(1) of time an action.

    Raises:
        TypeError: schedule is no Schedule.
        ValueError: length < 0, and what the schedule raises.

    Example:
        >>> [tl.schedule.advances(tl.schedule.Binomial(k), 100) for k in (1, 4, 16, 100)]
        [5050, 379, 184, 100]
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"advances: schedule must be a Schedule, got {type(schedule).__name__} {schedule!r}; schedule.of makes one"
        )
    return forecast(schedule, as_count(length, 0, "advances", "length"), known=known).advances
