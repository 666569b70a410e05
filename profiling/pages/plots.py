"""Pictures of measurements: curves over T on log axes, each named where it ends; ratios as bars from 1."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any kind of colour vision; without yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# In the same order, so that no curve is known by its colour alone: a picture may be printed in grey.
MARKERS = "osD^vPX"
GAP = 0.085  # between the names of two curves, as a share of the axes' height
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))


class Curve(NamedTuple):
    label: str
    T: Sequence[int]
    values: Sequence[float]
    style: int  # which colour and marker
    ours: bool  # drawn heavier, on top


class Ratio(NamedTuple):
    label: str
    value: float
    ours: bool


@contextmanager
def drawing(path: Path, size: tuple[float, float]) -> "Iterator[Figure]":
    """A figure of so many inches to draw on, which is written to the path in the end; needs no display."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = pyplot.figure(figsize=size, layout="constrained")
    try:
        yield drawn
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=120)
    finally:
        pyplot.close(drawn)


def curves(
    axes: "Axes", lines: Sequence[Curve], unit: str, title: str, *, steps: str = "T (steps)", base: int = 2
) -> None:
    """Draws the curves on log axes; their names stand at the right, moved apart where they would overlap."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for line in lines:
        axes.plot(
            line.T,
            line.values,
            color=COLOURS[line.style],
            marker=MARKERS[line.style],
            linestyle=DASHES[line.style],
            markersize=6 if line.ours else 4.5,
            linewidth=2.8 if line.ours else 1.4,
            zorder=3 if line.ours else 2,
        )
    axes.set_xscale("log", base=base)
    axes.set_yscale("log")
    ticks = sorted({t for line in lines for t in line.T})
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    values = [value for line in lines for value in line.values]
    few = bool(values) and max(values) < 20 * min(values)  # powers of ten alone would be one or two ticks
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if few else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(steps)
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    _label_ends(axes, lines)


def _label_ends(axes: "Axes", lines: Sequence[Curve]) -> None:
    """Names at the right edge, joined to the last point of their curve by a thin line of its colour."""
    low, high = (math.log(v) for v in axes.get_ylim())
    ordered = sorted(lines, key=lambda line: line.values[-1])
    wanted = [(math.log(line.values[-1]) - low) / (high - low) for line in ordered]
    for number, (line, height) in enumerate(zip(ordered, spread(wanted, GAP), strict=True), 1):
        below_title = 1 - GAP * (len(ordered) - number)
        axes.annotate(
            line.label,
            xy=(line.T[-1], line.values[-1]),
            xycoords="data",
            xytext=(1.07, min(height, below_title)),
            textcoords="axes fraction",
            fontsize=8.5,
            fontweight="bold" if line.ours else "normal",
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": COLOURS[line.style],
                "linewidth": 0.7,
                "relpos": (0, 0.5),  # from the left end of the name, never through it
                "shrinkB": 3,
            },
        )


def ratios(axes: "Axes", groups: Mapping[str, Sequence[Ratio]], title: str) -> None:
    """A bar from 1 to each ratio, on a log axis, its figure beside it; a heading above each group."""
    height, names = 0, []
    for heading, group in groups.items():
        names.append((height, heading, "bold"))
        for row in group:
            height += 1
            axes.barh(height, row.value - 1, left=1, height=0.7, color=COLOURS[0] if row.ours else "#999999")
            below = row.value < 1
            axes.annotate(
                f"{row.value:.3g}",
                (row.value, height),
                (-4 if below else 4, 0),
                textcoords="offset points",
                horizontalalignment="right" if below else "left",
                verticalalignment="center",
                fontsize=8.5,
            )
            names.append((height, row.label, "normal"))
        height += 1.6
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    room = (high / low) ** 0.1  # for the figures
    axes.set_xlim(low / room**3.5, high * room)  # names begin where the axis does, so the left needs more
    axes.set_xticks([])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([y for y, _, _ in names], [text for _, text, _ in names], fontsize=8.5)
    for label, (_, _, weight) in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight(weight)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height, -1)
    axes.spines[:].set_visible(False)
    # Above the names, at the left, there is room for a long title.
    axes.set_title(title, loc="right", fontsize=10, pad=12)


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in rising order moved apart to `gap` at least; those that touch stay centred on their mean."""
    groups: list[list[float]] = []  # of neighbours that touch
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _top(groups[-2], gap) + gap > _bottom(groups[-1], gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + gap * i for group in groups for i in range(len(group))]


def _bottom(group: list[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _top(group: list[float], gap: float) -> float:
    return sum(group) / len(group) + gap * (len(group) - 1) / 2
