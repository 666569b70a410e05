"""What a process took over time: the data, as text, and as a picture of resident memory above what ran when."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from tensorloop._common.extras import refuse_without
from tensorloop._common.html import table
from tensorloop.memory.report.charts import size, unit_of
from tensorloop.memory.report.picture import embed, new_figure
from tensorloop.memory.report.result import Shown, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 10  # names of marks that have a row; those that took least are left out
_FILLS = (("#0072B2", ""), ("#f6c8a4", "///"), ("#d0d0d0", ""), ("#ffffff", "..."))


@dataclass(frozen=True)
class Mark:
    """Something that ran during a timeline.

    Attributes:
        name: string, such as `forward`, or what `mark` was given.
        begin: float, seconds since the first sample.
        end: float, seconds since the first sample.

    Example:
        >>> tl.memory.Mark("forward", begin=0.0, end=0.5).name
        'forward'
    """

    name: str
    begin: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline(Shown):
    """Resident memory of the process over time, and what ran when. `str()` gives a table, a notebook a picture.

    Attributes:
        times: tuple of floats, seconds since the first sample.
        rss: tuple of ints, bytes in main memory, of the whole process, at each of these times.
        marks: tuple of `Mark`, in the order in which they began: forward, backward, or a step; each loop; each `mark`
            of the user's.

    Example:
        >>> shown = tl.memory.timeline(lambda: torch.ones(1000).sum())
        >>> len(shown.times) == len(shown.rss)
        True
    """

    _name = "Timeline"
    _title = "Resident memory"

    times: tuple[float, ...]
    rss: tuple[int, ...]
    marks: tuple[Mark, ...]

    @property
    def rise(self) -> int:
        """The highest sample less the first, in bytes."""
        return max(self.rss) - self.rss[0]

    @property
    def kept(self) -> int:
        """The last sample less the first, in bytes."""
        return self.rss[-1] - self.rss[0]

    def as_dict(self) -> dict[str, Any]:
        """Gives times, bytes and marks as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        marks = [{"name": mark.name, "begin": mark.begin, "end": mark.end} for mark in self.marks]
        return {"times": list(self.times), "rss": list(self.rss), "marks": marks}

    def plot(self, title: str | None = None) -> "Figure":
        """Draws the curve, and below it a row for each name.

        Args:
            title: string above the picture; None gives it the usual one.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """
        refuse_without("matplotlib", "Timeline.plot")
        return draw(self, title)

    def _summary(self) -> str:
        return f"resident: {self.rss[0]:,} bytes, up by {self.rise:,}, at the end by {self.kept:,}"

    def _body(self) -> list[str]:
        found = [f"<p>{escape(self._summary())}</p>"]
        if importlib.util.find_spec("matplotlib") is not None:
            found.append(embed(draw(self), "Resident memory over time"))
        rows = [(mark.name, f"{mark.begin:.3f}", f"{mark.end:.3f}") for mark in self.marks]
        return [*found, *([table(("what", "begin, s", "end, s"), rows, (0,))] if rows else [])]

    def _cells(self) -> Table:
        """A row for each sample."""
        return ("seconds", "bytes"), list(zip(self.times, self.rss, strict=True))

    def __str__(self) -> str:
        rows = [self._summary()]
        rows += [f"{mark.begin:9.3f} s to {mark.end:9.3f} s  {mark.name}" for mark in self.marks]
        return "\n".join(rows)


def draw(timeline: Timeline, title: str | None = None) -> "Figure":
    """The curve, and below it a row for each name."""
    names = _names(timeline.marks)
    below = 0.3 + 0.3 * len(names)
    figure = new_figure(9, 4 + below, title)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, below))
    _resident(upper, timeline)
    _spans(lower, timeline.marks, names)
    lower.set_xlim(0, timeline.times[-1])
    lower.set_xlabel("seconds")
    return figure


def _names(marks: Sequence[Mark]) -> list[str]:
    """The names that get a row, in the order in which they began."""
    took: dict[str, float] = {}
    for mark in marks:
        took[mark.name] = took.get(mark.name, 0.0) + mark.end - mark.begin
    longest = sorted(took, key=lambda name: -took[name])[:_ROWS]
    return [name for name in took if name in longest]


def _resident(axes: "Axes", timeline: Timeline) -> None:
    unit, scale = unit_of(max(timeline.rise, 1))
    values = [(n - timeline.rss[0]) / scale for n in timeline.rss]
    axes.plot(timeline.times, values, color="black", linewidth=1.6)
    axes.fill_between(timeline.times, values, color="#e4e4e4")
    axes.set_ylabel(f"{unit} above the start")
    axes.set_ylim(min(0.0, *values), max(values) * 1.05 or 1)
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"Resident memory: {size(timeline.rss[0])} at the start, up by {size(timeline.rise)}"
    kept = f"{'-' if timeline.kept < 0 else ''}{size(abs(timeline.kept))}"
    axes.set_title(f"{title}, {kept} still there at the end", loc="left", fontsize=10)


def _spans(axes: "Axes", marks: Sequence[Mark], names: Sequence[str]) -> None:
    """A row for each name, a block for each time that it ran."""
    for row, name in enumerate(names):
        colour, hatch = _FILLS[row % len(_FILLS)]
        blocks = [(mark.begin, mark.end - mark.begin) for mark in marks if mark.name == name]
        axes.broken_barh(blocks, (row - 0.35, 0.7), facecolor=colour, hatch=hatch, edgecolor="#444444", linewidth=0.6)
    counts = [sum(mark.name == name for mark in marks) for name in names]
    axes.set_yticks(range(len(names)), [f"{n} ({c})" if c > 1 else n for n, c in zip(names, counts, strict=True)])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
