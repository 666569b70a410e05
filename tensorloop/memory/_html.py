"""A report as one HTML file: no scripts, nothing loaded from elsewhere."""

import platform
from html import escape

import torch

from tensorloop.memory import _charts, _svg
from tensorloop.memory._growth import SUPERLINEAR, Growth, LineGrowth

_STYLE = """
body { font: 15px/1.5 Helvetica, Arial, DejaVu Sans, sans-serif; color: #222; background: #fff }
body { max-width: 960px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 1.8em }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right }
td.text, th.text { text-align: left }
code, pre, td.text { font-family: monospace; font-size: 13px }
pre { background: #f4f4f4; padding: .8em; overflow-x: auto }
svg { max-width: 100%; height: auto }
.guilty { border-left: 5px solid #a84300; padding: .1em 1em; margin: 1em 0; background: #faf3ee }
.fast { font-weight: bold }
"""


def page(growth: Growth, target: str, error: str = "") -> str:
    """The report on one function; `error` is what to show where it failed at some T."""
    body = [f"<h1>Memory of <code>{escape(target)}</code></h1>", f"<p>{escape(summary(growth))}</p>"]
    if growth.failed:
        T, message = growth.failed
        body += [f"<h2>Failed at T = {T:,}</h2>", f"<pre>{escape(error or message)}</pre>"]
    body += [_guilty(line) for line in growth.lines if line.superlinear]
    body += [_svg.curves(panel) for panel in _charts.panels(growth)]
    body += [_svg.bars(chart) for chart in _charts.bars(growth)]
    body += ["<h2>By T</h2>", _sizes(growth), "<h2>By line</h2>", _lines(growth)]
    body.append(
        "<p>Saved: bytes made by a line that wait for backward. Peak: the most of them alive at one time, forward and "
        "backward. Made: all that the line allocates in a step, alive or not; it costs time. T^p: the power of T that "
        "the figures follow; hatched bars grow faster than T. Bytes are counted and repeat themselves; seconds are "
        "measured and do not.</p>"
        f"<p>torch {escape(torch.__version__)}, Python {platform.python_version()}, {escape(platform.machine())}, "
        f"{torch.get_num_threads()} threads.</p>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Memory of {escape(target)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def summary(growth: Growth) -> str:
    """One sentence on the whole."""
    saved = f"{_charts.size(growth.bytes[-1])} for backward ({_charts.power(growth.marginal, growth.Ts)})"
    peak = f"{_charts.size(growth.peaks[-1])} alive at its peak ({_charts.power(growth.peak_marginal, growth.Ts)})"
    return f"At T = {growth.Ts[-1]:,} a step saves {saved} and has {peak}; powers of T beside a constant."


def _guilty(line: LineGrowth) -> str:
    kinds = (
        ("saves", line.saved, line.exponent),
        ("has at its peak", line.peak, line.peak_exponent),
        ("allocates in all", line.made, line.made_exponent),
    )
    told = [f"{verb} {_charts.size(n[-1])}, T^{p:.2f}" for verb, n, p in kinds if p > SUPERLINEAR]
    advice = f"<p>{escape(line.advice)}</p>" if line.advice else ""
    return (
        f'<div class="guilty"><p class="fast">{escape(str(line.site))} grows faster than T: {"; ".join(told)}</p>'
        f"<pre>{escape(line.site.code)}</pre>{advice}</div>"
    )


def _sizes(growth: Growth) -> str:
    columns = zip(growth.Ts, growth.bytes, growth.peaks, growth.seconds, strict=True)
    rows = [[f"{T:,}", f"{saved:,}", f"{peak:,}", f"{seconds:.4g}"] for T, saved, peak, seconds in columns]
    fitted = (growth.exponent, growth.peak_exponent, growth.seconds_exponent)
    beside = (growth.marginal, growth.peak_marginal)
    rows.append(["fitted", *(_charts.power(p, growth.Ts) for p in fitted)])
    rows.append(["beside a constant", *(_charts.power(p, growth.Ts) for p in beside), ""])
    return _table(["T", "saved, bytes", "peak, bytes", "seconds"], rows)


def _lines(growth: Growth) -> str:
    rows = []
    for line in growth.lines:
        figures = ((line.saved, line.exponent), (line.peak, line.peak_exponent), (line.made, line.made_exponent))
        cells = [cell for sizes, p in figures for cell in (f"{sizes[-1]:,}", _charts.power(p, sizes))]
        rows.append([str(line.site), line.site.code, *cells])
    return _table(["line", "code", "saved, bytes", "as", "peak, bytes", "as", "made, bytes", "as"], rows, texts=2)


def _table(head: list[str], rows: list[list[str]], texts: int = 0) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if i < texts else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    inner = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<table>\n<tr>{row(head, 'th')}</tr>\n{inner}\n</table>"
