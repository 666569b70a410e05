"""What a schedule will do with a loop, before anything runs: extra steps, bytes, and a picture of it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tensorloop._common.extras import refuse_without
from tensorloop._common.saved import saved
from tensorloop.schedule.actions import Action, Advance, Backward, Drop, Release, Restore, Snapshot, as_count
from tensorloop.schedule.base import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@saved()
class _Stretch(NamedTuple):
    """Steps that run one after the other: when the first does, which they are, and how."""

    at: int
    start: int
    stop: int
    kind: str


@saved()
@dataclass(frozen=True, repr=False)
class Forecast:
    """A forecast of what a schedule does with a loop, by `tl.schedule.forecast`. `print` shows it in a line.

    Args:
        length, advances, bytes, snapshots, kept, runs, spans: the attributes below; `tl.schedule.forecast` gives them.

    Attributes:
        length: int, the number of steps.
        advances: int, the extra steps, as `tl.schedule.advances` counts them.
        bytes: int, the most that snapshots and residuals take at one time. The snapshot of step 0, which holds what the
            loop was given, is not counted.
        snapshots: int, the most snapshots held at one time, that of step 0 included.
        kept: int, how many steps keep their residuals from the forward pass.
        runs: list of (at, start, stop, kind), the steps that run one after the other, in order. `at` is how many have
            run before.
        spans: list of (step, start, stop), which snapshot is kept from when until when, in steps run.

    Example:
        >>> tl.schedule.forecast(tl.schedule.Binomial(4), 100, carry=1000, residuals=5000)
        100 steps: 379 extra (3.79 a step), at most 4 snapshots and 8,000 bytes
    """

    length: int
    advances: int
    bytes: int
    snapshots: int
    kept: int
    runs: list[_Stretch] = field(compare=False)
    spans: list[tuple[int, int, int]] = field(compare=False)  # of snapshots: (step, from when, until when)

    def __repr__(self) -> str:
        kept = f", the residuals of {self.kept} kept" if self.kept else ""
        size = f" and {self.bytes:,} bytes" if self.bytes else ""
        steps, snapshots = (
            f"{n} {word}{'s' * (n != 1)}" for n, word in ((self.length, "step"), (self.snapshots, "snapshot"))
        )
        extra = f"{self.advances} extra ({self.advances / max(self.length, 1):.2f} a step)"
        return f"{steps}{kept}: {extra}, at most {snapshots}{size}"

    def plot(self, title: str | None = None) -> "Figure":
        """Draws which steps run when, forward and backward, and from when until when snapshots are kept.

        Args:
            title: string above the picture; None gives it the line that `print` shows.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """
        refuse_without("matplotlib", "Forecast.plot")
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="steps run so far", ylabel="step", title=title or repr(self))
        axes.title.set_fontsize(10)
        axes.hlines(*zip(*self.spans, strict=True), color="#c8c8c8", linewidth=1) if self.spans else None
        shown: list[Line2D] = []
        for kind, color in _COLORS.items():
            lines = [[(x.at, x.start), (x.at + x.stop - x.start, x.stop)] for x in self.runs if x.kind == kind]
            if lines:
                axes.add_collection(LineCollection(lines, colors=color, linewidths=1.6))
                shown.append(Line2D([], [], color=color, label=kind))
        shown.append(Line2D([], [], color="#c8c8c8", label="a snapshot is kept"))
        figure.legend(handles=shown, fontsize=8, loc="outside lower center", ncols=3)
        axes.autoscale_view()
        return figure


_COLORS = {
    "run for the carry": "#4c78a8",
    "run, residuals kept": "#f58518",
    "run again with residuals, and reversed": "#e45756",
    "reversed from kept residuals": "#54a24b",
}
_AGAIN, _FROM_KEPT = [*_COLORS][2:]


def forecast(schedule: Schedule, length: int, carry: int = 0, residuals: int = 0, known: bool = True) -> Forecast:
    """Says what a schedule does with a loop of some length and sizes, without running anything.

    Args:
        schedule: a `Schedule`.
        length: int, the number of steps of the loop.
        carry: int, bytes of one carry; default 0.
        residuals: int, bytes that one step saves for its gradient; default 0.
        known: bool, default True. False does not tell the schedule the length, as in a `while_loop`.

    Returns:
        A `tl.schedule.Forecast`: extra steps, bytes, and `plot()`.

    Cost: O(1) of time an action.

    Raises:
        TypeError: schedule is no Schedule, or a number is no int.
        ValueError: a number below 0, and what the schedule raises.

    Example:
        >>> plan = tl.schedule.Budgeted(40_000, carry=1000, residuals=5000)
        >>> tl.schedule.forecast(plan, 20, carry=1000, residuals=5000)
        20 steps, the residuals of 7 kept: 13 extra (0.65 a step), at most 7 snapshots and 40,000 bytes
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"forecast: schedule must be a Schedule, got {type(schedule).__name__} {schedule!r}; schedule.of makes one"
        )
    length = as_count(length, 0, "forecast", "length")
    follower = _Follower(
        length, as_count(carry, 0, "forecast", "carry"), as_count(residuals, 0, "forecast", "residuals")
    )
    for action in schedule.sweep(length if known else None) if length else ():
        follower.do(action)
        if follower.at == length:
            break
    kept = sum(stop - start for start, stop in follower.kept.items())
    for action in schedule.reverse(length, [*follower.held]):
        follower.do(action)
    return follower.found(kept)


class _Follower:
    """Follows actions by the numbers."""

    def __init__(self, length: int, carry: int, residuals: int) -> None:
        self.length, self.carry, self.residuals = length, carry, residuals
        self.at = self.now = self.advances = self.bytes = self.most = 0
        self.held = dict[int, int]()  # snapshots, and since when
        self.kept = dict[int, int]()  # steps whose residuals are kept: the first, and one more than the last
        self.runs: list[_Stretch] = []
        self.spans: list[tuple[int, int, int]] = []

    def do(self, action: Action) -> None:
        match action:
            case Advance(start, stop, keep):
                self._run(start, min(stop, self.length), "run, residuals kept" if keep else "run for the carry")
                if keep:
                    self.kept[start] = self.at
                else:
                    self.advances += self.at - start
                self._count()  # not at a snapshot, which is the state at hand until this moves on
            case Release(start):
                self.advances += self.kept.pop(start) - start
            case Snapshot(step):
                self.held[step] = self.now
                self.most = max(self.most, len(self.held))
            case Drop(step):
                self.spans.append((step, self.held.pop(step), self.now))
            case Backward(step, steps):
                self._run(step, step + steps, _FROM_KEPT if step in self.kept else _AGAIN)
                self.kept[step] = step + steps
                self._count()
                del self.kept[step]
            case Restore(step):
                self.at = step

    def _run(self, start: int, stop: int, kind: str) -> None:
        self.runs.append(_Stretch(self.now, start, stop, kind))
        self.at, self.now = stop, self.now + (0 if kind == _FROM_KEPT else stop - start)

    def _count(self) -> None:
        """Residuals hold the state before the first of their steps in any case."""
        carries = len(self.held) - sum(step in self.held for step in {0, *self.kept})
        steps = sum(stop - start for start, stop in self.kept.items())
        self.bytes = max(self.bytes, carries * self.carry + steps * self.residuals)

    def found(self, kept: int) -> Forecast:
        return Forecast(self.length, self.advances, self.bytes, self.most, kept, self.runs, self.spans)
