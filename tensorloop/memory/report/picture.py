"""Charts by matplotlib: a figure, and the same inside a page."""

import base64
import importlib.util
import io
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tensorloop.memory.report.charts import Bars, Panel, labelled, spread, ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour, line style, marker and filling: told apart in greyscale and with any kind of colour vision.
_STYLES = (("#0072B2", "-", "o", "full"), ("#D55E00", "--", "s", "none"), ("#222222", ":", "^", "full"))
_GUIDE = "#8a8a8a"
_ROOM = 40  # letters below a panel


def new_figure(width: float, height: float, title: str | None) -> "Figure":
    """An empty figure, which pyplot does not know."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontweight="bold")
    return figure


def draw(title: str, panels: Sequence[Panel], groups: Sequence[Bars]) -> "Figure":
    """Panels side by side, bars below; no title stands above where it is empty."""
    heights = [3.4] * bool(panels) + [0.6 + 0.5 * len(group.rows) for group in groups]
    figure = new_figure(11, sum(heights) + (0.9 if title else 0.3), title)
    grid = figure.add_gridspec(len(heights) or 1, 2, height_ratios=heights or [1])
    for i, panel in enumerate(panels):
        _curves(figure.add_subplot(grid[0, i]), panel)
    for i, group in enumerate(groups, bool(panels)):
        _bars(figure.add_subplot(grid[i, :]), group)
    return figure


def charts(panels: Sequence[Panel], groups: Sequence[Bars]) -> list[str]:
    """Panels and bars as HTML; empty where there is nothing to draw, or matplotlib is not installed: tables stay."""
    if not (panels or groups) or importlib.util.find_spec("matplotlib") is None:
        return []
    return [embed(draw("", panels, groups), "; ".join(chart.title for chart in (*panels, *groups)))]


def embed(figure: "Figure", alt: str) -> str:
    """A figure as HTML that loads nothing."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100, metadata={"Software": None})
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _curves(axes: "Axes", panel: Panel) -> None:
    for curve in panel.curves:
        style: dict[str, Any] = {"color": _GUIDE, "linestyle": (0, (1, 3)), "linewidth": 0.9}
        if not curve.guide:
            colour, line, marker, fill = _STYLES[curve.style]
            style = {"color": colour, "linestyle": line, "marker": marker, "fillstyle": fill, "linewidth": 1.8}
        axes.plot(curve.Ts, curve.values, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    named = labelled(panel.curves[0].Ts, _ROOM)
    axes.set_xticks(named, [f"{T:,}" for T in named])
    low, high = panel.range
    axes.set_ylim(low / 1.15, high * 1.15)
    marks = ticks(low / 1.15, high * 1.15)
    axes.set_yticks(marks, [f"{value:,g}" for value in marks])
    axes.minorticks_off()
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("T (steps)")
    axes.set_ylabel(panel.unit)
    axes.set_title(panel.title, loc="left", fontsize=10, pad=22)  # above the names, which may rise over the axes
    _names(axes, panel)


def _names(axes: "Axes", panel: Panel) -> None:
    """Names at the right edge, moved apart, each joined to the end of its curve."""
    low, high = (math.log(value) for value in axes.get_ylim())
    ordered = sorted(panel.curves, key=lambda curve: curve.values[-1])
    wanted = [(math.log(curve.values[-1]) - low) / (high - low) for curve in ordered]
    for curve, height in zip(ordered, spread(wanted, 0.075), strict=True):
        colour = _GUIDE if curve.guide else _STYLES[curve.style][0]
        axes.annotate(
            curve.label,
            xy=(curve.Ts[-1], curve.values[-1]),
            xytext=(1.06, height),
            textcoords="axes fraction",
            color="#666666" if curve.guide else colour,
            fontsize=9,
            fontweight="normal" if curve.guide else "bold",
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5), "shrinkB": 4},
        )


def _bars(axes: "Axes", chart: Bars) -> None:
    """A bar for each line, its place and code above it; lines that grow faster than T are hatched."""
    most = max(row.value for row in chart.rows)
    for i, row in enumerate(chart.rows):
        colour, edge, hatch = ("#f6c8a4", "#a84300", "///") if row.guilty else ("#d0d0d0", "#444444", None)
        axes.barh(i + 0.3, row.value, height=0.36, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.8)
        style: Any = {"fontsize": 8.5, "fontweight": "bold" if row.guilty else "normal", "verticalalignment": "center"}
        axes.annotate(f"{row.where}   {row.code}", (0, i - 0.09), family="monospace", **style)
        axes.annotate(row.figures, (row.value, i + 0.3), (5, 0), textcoords="offset points", **style)
    axes.set_xlim(0, most * 1.3)  # room for the figures
    axes.set_ylim(len(chart.rows) - 0.4, -0.4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set_title(chart.title, loc="left", fontsize=10)
