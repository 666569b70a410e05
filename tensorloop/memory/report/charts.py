"""What pictures show, before anybody draws them: curves with their exponents, lines as bars, units."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tensorloop.memory.counting.sites import Site, shortened
from tensorloop.memory.report.figures import SUPERLINEAR, Figures

TOP = 6  # lines drawn as bars


@dataclass(frozen=True)
class Curve:
    """Values over T. `style` says how it is drawn; a guide is no measurement but a power of T to compare with."""

    label: str
    Ts: tuple[int, ...]
    values: tuple[float, ...]
    style: int
    guide: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves on log axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        values = [value for curve in self.curves for value in curve.values]
        return min(values), max(values)


@dataclass(frozen=True)
class Bar:
    """One source line."""

    where: str
    code: str
    value: float
    figures: str
    guilty: bool


@dataclass(frozen=True)
class Bars:
    """Source lines, the largest first."""

    title: str
    unit: str
    rows: tuple[Bar, ...]


def panels(growth: Figures) -> list[Panel]:
    """Bytes and time of the whole over T."""
    unit, scale = unit_of(max(growth.bytes + growth.peaks))
    whole = bool(growth.peaks)  # else something was measured that need not be saved bytes
    saved = _curve("saved" if whole else "bytes", growth.Ts, growth.bytes, scale, growth.marginal, 0)
    peak = _curve("peak", growth.Ts, growth.peaks, scale, growth.peak_marginal, 1)
    seconds = _curve("time", growth.Ts, growth.seconds, 1e-3, growth.seconds_exponent, 2)
    made = [
        _panel("Bytes: saved for backward, and at the peak of a step" if whole else "Bytes", unit, [saved, peak]),
        _panel("Time of a step, forward and backward", "ms", [seconds]),
    ]
    return [panel for panel in made if panel is not None]


def bars(growth: Figures) -> list[Bars]:
    """The lines that save most and the lines that allocate most, at the largest T."""
    at = f"by line, T = {growth.Ts[-1]:,}"
    saved = [(line.site, line.saved[-1], line.exponent) for line in growth.lines if line.saved]
    made = [(line.site, line.made[-1], line.made_exponent) for line in growth.lines if line.made]
    several = len(growth.Ts) > 1
    groups = [
        by_line(f"Saved for backward, {at}", saved, several),
        by_line(f"Allocated in all, forward and backward, {at}", made, several),
    ]
    return [group for group in groups if group.rows]


def by_line(title: str, lines: Sequence[tuple[Site, int, float]], powers: bool = False) -> Bars:
    """The lines that have most bytes, with their share of all and, where asked for, the power of T that they follow."""
    lines = sorted((line for line in lines if line[1]), key=lambda line: -line[1])
    total = sum(n for _, n, _ in lines)
    unit, scale = unit_of(lines[0][1] if lines else 0)
    rows = []
    for site, n, exponent in lines[:TOP]:
        figures = [size(n), _share(n / total), *([power(exponent, (1, 2))] if powers else [])]
        rows.append(
            Bar(_place(site), shortened(site.code), n / scale, ", ".join(figures), powers and exponent > SUPERLINEAR)
        )
    return Bars(title, unit, tuple(rows))


def unit_of(largest: float) -> tuple[str, float]:
    """The name and the bytes of the unit in which a figure is easy to read."""
    power = min(max(int(math.log(max(largest, 1), 1024)), 0), 4)
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024.0**power


def size(n: float) -> str:
    """Bytes as a reader wants them: 17.7 MiB."""
    unit, scale = unit_of(n)
    return f"{n / scale:.3g} {unit}" if n / scale < 1000 else f"{n / scale:,.0f} {unit}"


def power(exponent: float, sizes: Sequence[float]) -> str:
    """T^1.95; a dash where there are too few sizes to tell."""
    return f"T^{exponent:.2f}" if len(sizes) > 1 and not math.isnan(exponent) else "-"


def ticks(low: float, high: float) -> list[float]:
    """Round values within a range of a log axis: powers of ten, and 2 and 5 of each where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= 3:
            return found
    return found


def labelled(Ts: Sequence[int], letters: float) -> list[int]:
    """The T named below a log axis with room for so many letters: the last, and before it those that leave a gap."""
    scale = letters / (math.log(Ts[-1] / Ts[0]) or 1.0)
    kept: list[int] = []
    for T in reversed(Ts):
        if not kept or scale * math.log(kept[-1] / T) > (len(f"{T:,}") + len(f"{kept[-1]:,}")) / 2 + 1:
            kept.append(T)
    return kept[::-1]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights in rising order moved apart to `gap` at least; those that touch stay centred on their mean."""
    groups: list[list[float]] = []
    for height in wanted:
        groups.append([height])
        while len(groups) > 1 and _end(groups[-2], gap) + gap > _start(groups[-1], gap):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_start(group, gap) + gap * i for group in groups for i in range(len(group))]


def _panel(title: str, unit: str, curves: list[Curve | None]) -> Panel | None:
    measured = [curve for curve in curves if curve is not None]
    if not measured:
        return None
    Ts, below = measured[0].Ts, 0.5 * min(curve.values[0] for curve in measured)
    guides = [
        Curve(f"T{'²' if power == 2 else ''}", Ts, tuple(below * (T / Ts[0]) ** power for T in Ts), -1, True)
        for power in (1, 2)
    ]
    return Panel(title, unit, (*measured, *guides))


def _curve(
    name: str, Ts: Sequence[int], values: Sequence[float], scale: float, exponent: float, style: int
) -> Curve | None:
    """None where there is nothing that a log axis could show."""
    if len(values) < 2 or min(values) <= 0:
        return None
    return Curve(f"{name}  T^{exponent:.2f}", tuple(Ts), tuple(value / scale for value in values), style)


def _place(site: Site, width: int = 60) -> str:
    place = str(site)
    return place if len(place) <= width else "..." + place[3 - width :]


def _share(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else "<1%"


def _start(group: list[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _end(group: list[float], gap: float) -> float:
    return sum(group) / len(group) + gap * (len(group) - 1) / 2
