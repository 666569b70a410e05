"""What a schedule says: actions on step numbers, and how it says them."""

import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorloop._common.saved import saved


@saved()
@dataclass(frozen=True, slots=True, repr=False)
class Advance:
    """Run steps start..stop-1 from the working state, which is at `start`; it is at `stop` afterwards.

    Attributes:
        start: int, the first step to run.
        stop: int, one more than the last.
        keep: bool, default False. True: what their gradient needs is kept for the Backward of the same steps, which
            then runs none of them again. A loop that cannot do so runs them again.
    """

    start: int
    stop: int
    keep: bool = False

    def __repr__(self) -> str:
        return f"Advance(start={self.start}, stop={self.stop}{', keep=True' if self.keep else ''})"


@saved()
@dataclass(frozen=True, slots=True, repr=False)
class Snapshot:
    """Keep the working state, which is at `step`.

    Attributes:
        step: int, the number of the step that the state is before.
        place: "cpu" or a folder. None (default): where the loop's `offload` says; without one in memory, as it is.
    """

    step: int
    place: str | Path | None = None

    def __repr__(self) -> str:
        return f"Snapshot(step={self.step}{'' if self.place is None else f', place={str(self.place)!r}'})"


@saved()
@dataclass(frozen=True, slots=True)
class Restore:
    """Make the snapshot of `step` the working state. The snapshot stays held.

    Attributes:
        step: int, that of the snapshot.
    """

    step: int


@saved()
@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the snapshot of `step`.

    Attributes:
        step: int, that of the snapshot.
    """

    step: int


@saved()
@dataclass(frozen=True, slots=True)
class Release:
    """Forget what the gradient of these steps needs, which an `Advance` has kept; snapshots stay.

    Attributes:
        start: int, as of that Advance.
        stop: int, as of that Advance.

    Example:
        >>> plan = tl.schedule.Budgeted(30, carry=1, residuals=8)
        >>> next(x for x in plan.sweep(None) if isinstance(x, tl.schedule.Release))
        Release(start=0, stop=1)
    """

    start: int
    stop: int


@saved()
@dataclass(frozen=True, slots=True, repr=False)
class Backward:
    """Run `step` with what its gradient needs, from the working state, and reverse it. That state is then lost.

    Attributes:
        step: int; the working state is at it.
        steps: int, default 1: how many from there on are run one after the other and reversed at once.
    """

    step: int
    steps: int = 1

    def __repr__(self) -> str:
        return f"Backward(step={self.step}{'' if self.steps == 1 else f', steps={self.steps}'})"


Forward = Advance | Snapshot | Drop | Release
"""An action of the forward pass: what `tl.schedule.Schedule.sweep` yields."""

Action = Forward | Restore | Backward
"""An action of either pass: what `tl.schedule.Schedule.reverse` yields."""


def as_count(x: Any, least: int, name: str, what: str) -> int:
    """`x` as an int, refused in the name of a public function."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name}: {what} must be an int, got {type(x).__name__} {x!r}")
    if x < least:
        hint = "; the initial carry is the first snapshot" if what == "k" else ""
        raise ValueError(f"{name}: {what} must be at least {least}, got {x}{hint}")
    return int(x)
