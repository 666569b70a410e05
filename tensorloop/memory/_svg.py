"""Charts as SVG text, by the standard library alone: a report must not need matplotlib."""

import math
from collections.abc import Sequence
from html import escape

from tensorloop.memory._charts import Bars, Curve, Panel, labelled, spread, ticks

# Colour, dashes and marker of each style: told apart in greyscale and with any kind of colour vision.
STYLES = (("#0072B2", "", "circle"), ("#D55E00", "7 4", "square"), ("#222222", "2 3", "triangle"))
_GUIDE = "#8a8a8a"
_FONTS = "Helvetica, Arial, DejaVu Sans, sans-serif"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 112, 34, 44  # room around the plot: figures, names, title, T
_LETTER = 7.6  # pixels of a bold letter at 11 px, in the widest of the usual fonts


def curves(panel: Panel, width: int = 470, height: int = 290) -> str:
    """Curves on log axes; their names stand at the right, moved apart where they would overlap."""
    low, high = panel.range
    x = _log(panel.curves[0].Ts[0], panel.curves[0].Ts[-1], _LEFT, width - _RIGHT)
    y = _log(low / 1.15, high * 1.15, height - _BOTTOM, _TOP)
    bottom, right = height - _BOTTOM, width - _RIGHT
    parts = [_text(8, 16, panel.title, weight="bold")]
    for value in ticks(low / 1.15, high * 1.15):
        parts.append(_line(_LEFT, y(value), right, y(value), "#dddddd"))
        parts.append(_text(_LEFT - 6, y(value) + 4, f"{value:,g}", anchor="end"))
    for T in labelled(panel.curves[0].Ts, (right - _LEFT) / _LETTER):
        parts.append(_line(x(T), bottom, x(T), bottom + 4, "#444444"))
        parts.append(_text(x(T), bottom + 17, f"{T:,}", anchor="middle"))
    parts.append(_line(_LEFT, bottom, right, bottom, "#444444"))
    parts.append(_line(_LEFT, _TOP, _LEFT, bottom, "#444444"))
    parts.append(_text((_LEFT + right) / 2, height - 8, "T (steps)", anchor="middle"))
    parts.append(_text(14, (_TOP + bottom) / 2, panel.unit, anchor="middle", turned=True))
    for curve in panel.curves:
        parts += _curve(curve, x, y)
    parts += _names(panel.curves, y, right)
    return _svg(width, height, parts, panel.title)


def bars(chart: Bars, width: int = 960) -> str:
    """A bar for each line, its place and code above it; lines that grow faster than T are hatched."""
    step, top = 44, 34
    room = max(len(row.figures) for row in chart.rows) * _LETTER + 16
    most = max(row.value for row in chart.rows)
    hatch = "fast-" + "".join(letter for letter in chart.title.lower() if letter.isalnum())
    parts = [_hatch(hatch), _text(8, 16, chart.title, weight="bold")]
    for i, row in enumerate(chart.rows):
        y, length = top + i * step, max((width - room - 16) * row.value / most, 1.5)
        weight = "bold" if row.guilty else "normal"
        parts.append(_text(8, y + 10, row.where, weight=weight, code=row.code))
        fill = f"url(#{hatch})" if row.guilty else "#d0d0d0"
        parts.append(f'<rect x="8" y="{y + 16:.1f}" width="{length:.1f}" height="15" fill="{fill}" stroke="#444444"/>')
        parts.append(_text(length + 16, y + 28, row.figures, weight=weight))
    return _svg(width, top + step * len(chart.rows), parts, chart.title)


class _log:
    """Maps values on a log scale to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.start = math.log(low), start
        self.slope = (end - start) / ((math.log(high) - self.low) or 1.0)

    def __call__(self, value: float) -> float:
        return self.start + self.slope * (math.log(value) - self.low)


def _curve(curve: Curve, x: _log, y: _log) -> list[str]:
    points = [(x(T), y(value)) for T, value in zip(curve.Ts, curve.values, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    if curve.guide:
        return [f'<polyline points="{path}" fill="none" stroke="{_GUIDE}" stroke-width="1" stroke-dasharray="1 3"/>']
    colour, dashes, marker = STYLES[curve.style]
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
    return [line, *(_marker(marker, a, b, colour) for a, b in points)]


def _marker(shape: str, x: float, y: float, colour: str) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    if shape == "square":
        place = f'x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"'
        return f'<rect {place} fill="white" stroke="{colour}" stroke-width="2"/>'
    return f'<path d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z" fill="{colour}"/>'


def _names(curves: Sequence[Curve], y: _log, right: float) -> list[str]:
    ordered = sorted(curves, key=lambda curve: y(curve.values[-1]))
    parts = []
    for curve, height in zip(ordered, spread([y(curve.values[-1]) for curve in ordered], 15), strict=True):
        colour = _GUIDE if curve.guide else STYLES[curve.style][0]
        parts.append(_line(right + 6, y(curve.values[-1]), right + 14, height, colour))
        weight = "normal" if curve.guide else "bold"
        parts.append(
            _text(right + 17, height + 4, curve.label, weight=weight, colour="#666666" if curve.guide else colour)
        )
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
    colour: str = "#222222",
    code: str = "",
    turned: bool = False,
) -> str:
    """Text, and behind it, however wide it is, a line of code."""
    if code:
        code = f'<tspan dx="14" font-family="monospace" font-weight="normal">{escape(code)}</tspan>'
    extra = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"{extra}>'
        f"{escape(text)}{code}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _hatch(name: str) -> str:
    """A filling; its name must be the only one on a page."""
    return (
        f'<defs><pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="7" height="7" fill="#f6c8a4"/><rect width="3" height="7" fill="#a84300"/></pattern></defs>'
    )


def _svg(width: int, height: int, parts: list[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" font-family="{_FONTS}" font-size="11">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )
