"""The report on a `Growth` as HTML."""

import platform
from html import escape

import torch

from tensorloop._common.html import table
from tensorloop.memory.report import charts, picture
from tensorloop.memory.report.figures import SUPERLINEAR, Figures, LineGrowth, kinds_of


def body(growth: Figures, error: str = "") -> list[str]:
    """Summary, guilty lines, charts, tables; `error` is what to show where it failed at some T."""
    found = [f"<p>{escape(summary(growth))}</p>"]
    if growth.failed:
        T, message = growth.failed
        found += [f"<h2>Failed at T = {T:,}</h2>", f"<pre>{escape(error or message)}</pre>"]
    found += [_guilty(line) for line in growth.lines if line.superlinear]
    found += picture.charts(charts.panels(growth), charts.bars(growth))
    found += ["<h2>By T</h2>", _sizes(growth)]
    if growth.lines:
        found += ["<h2>By line</h2>", _lines(growth)]
    return [*found, _legend()]


def summary(growth: Figures) -> str:
    """One sentence on the whole."""
    saved = f"{charts.size(growth.bytes[-1])} for backward ({charts.power(growth.marginal, growth.Ts)})"
    first = f"At T = {growth.Ts[-1]:,} a step saves {saved}"
    if not growth.peaks:  # something else may have been measured
        return f"At T = {growth.Ts[-1]:,}: {saved.replace(' for backward', '')}; the power of T beside a constant."
    peak = f"{charts.size(growth.peaks[-1])} alive at its peak ({charts.power(growth.peak_marginal, growth.Ts)})"
    return f"{first} and has {peak}; powers of T beside a constant."


def _guilty(line: LineGrowth) -> str:
    named = zip(("saves", "has at its peak", "allocates in all"), kinds_of(line), strict=True)
    told = [f"{verb} {charts.size(n[-1])}, T^{p:.2f}" for verb, (n, p) in named if p > SUPERLINEAR]
    advice = f"<p>{escape(line.advice)}</p>" if line.advice else ""
    code = line.site.code + (f"\n{line.site.library}  {line.site.library.code}" if line.site.library else "")
    return (
        f'<div class="guilty"><p class="fast">{escape(str(line.site))} grows faster than T: {"; ".join(told)}</p>'
        f"<pre>{escape(code)}</pre>{advice}</div>"
    )


def _sizes(growth: Figures) -> str:
    names, figures = ["T", "saved, bytes" if growth.peaks else "bytes"], [growth.bytes]
    powers = [charts.power(growth.marginal, growth.Ts)]
    if growth.peaks:
        names, figures = [*names, "peak, bytes"], [*figures, growth.peaks]
        powers.append(charts.power(growth.peak_marginal, growth.Ts))
    rows = [[f"{n:,}" for n in sizes] for sizes in zip(growth.Ts, *figures, strict=True)]
    rows.append(["beside a constant", *powers])
    if growth.seconds:
        names.append("seconds")
        seconds = (*(f"{n:.4g}" for n in growth.seconds), charts.power(growth.seconds_exponent, growth.Ts))
        rows = [[*row, cell] for row, cell in zip(rows, seconds, strict=True)]
    return table(names, rows)


def _lines(growth: Figures) -> str:
    rows = []
    for line in growth.lines:
        cells = [cell for sizes, p in kinds_of(line) for cell in (f"{sizes[-1]:,}", charts.power(p, sizes))]
        rows.append([str(line.site), line.site.code, *cells])
    return table(["line", "code", "saved, bytes", "as", "peak, bytes", "as", "made, bytes", "as"], rows, (0, 1))


def _legend() -> str:
    return (
        "<p>Saved: bytes made by a line that wait for backward. Peak: the most of them alive at one time, forward and "
        "backward. Made: all that the line allocates in a step, alive or not; it costs time. T^p: the power of T that "
        "the figures follow beside a constant (of seconds, without one); hatched bars grow faster than T. Bytes are "
        "counted and repeat themselves; seconds are measured and do not.</p>"
        f"<p>torch {escape(torch.__version__)}, Python {platform.python_version()}, {escape(platform.machine())}, "
        f"{torch.get_num_threads()} threads.</p>"
    )
