"""Bytes kept by the loop of the home page, and by its twin with `torch.cat`: `python -m docs.curve`.

The bytes are counted, so they are the same on any day; the picture is `docs/images/readme_curve.svg`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import tensorloop as tl
from docs.house import frame

PICTURE = Path(__file__).parent / "images" / "readme_curve.svg"
STEPS = (32, 64, 128, 256, 512, 1024)
WAYS = {"torch.cat": "#d95f0e", "TensorArray": "#2b83d6"}
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 34, 420, 250
_MARGIN = 160
# In a dark theme the same picture is light on dark; colours of curves are those that both bear.
_STYLE = (
    "<style>.card { fill: #ffffff } .text { fill: #333333 } .line { stroke: #cccccc }"
    " @media (prefers-color-scheme: dark) { .card { fill: #1e2129 } .text { fill: #dddddd } .line { stroke: #555555 } }"
    "</style>"
)
Point = tuple[int, int]


def with_array(cell: torch.nn.GRUCell, xs: Tensor) -> Tensor:
    """The loop of docs/README.md."""
    h, states = xs.new_zeros(8, 16), tl.TensorArray()
    for x in xs:
        states.append(h[:, None])
        h = cell(x + tl.attention(h[:, None], states, states)[:, 0], h)
    return h.square().mean()


def with_cat(cell: torch.nn.GRUCell, xs: Tensor) -> Tensor:
    """The same loss from a tensor that is made anew at each step."""
    h = xs.new_zeros(8, 16)
    past = h[:, :0].view(8, 0, 1, 16)
    for x in xs:
        past = torch.cat([past, h[:, None, None]], 1)
        h = cell(x + tl.attention(h[:, None, None], past, past)[:, 0, 0], h)
    return h.square().mean()


def counted(loop: Callable[[torch.nn.GRUCell, Tensor], Tensor], steps: Sequence[int]) -> list[Point]:
    """(T, bytes kept for backward) for each T."""
    cell, points = torch.nn.GRUCell(16, 16), []
    for T in steps:
        xs = torch.randn(T, 8, 16)
        points.append((T, tl.memory.saved_bytes(lambda xs=xs: loop(cell, xs))))
    return points


def exponent(points: Sequence[Point]) -> float:
    """The power of T that the last doubling shows."""
    (t0, b0), (t1, b1) = points[-2:]
    return math.log(b1 / b0) / math.log(t1 / t0)


def draw(curves: Mapping[str, Sequence[Point]]) -> str:
    """Both axes logarithmic, as SVG."""
    most, least = (f(b for points in curves.values() for _, b in points) for f in (max, min))
    low, high = math.floor(math.log10(least)), math.log10(most) + 0.1
    first, last = math.log2(STEPS[0]), math.log2(STEPS[-1])

    def place(T: int, size: float) -> tuple[float, float]:
        x = _LEFT + _WIDTH * (math.log2(T) - first) / (last - first)
        return round(x, 1), round(_TOP + _HEIGHT * (high - math.log10(size)) / (high - low), 1)

    bottom = _TOP + _HEIGHT
    parts = [_STYLE, _text(_LEFT, 20, "Bytes kept for backward over the number of steps T", "start")]
    for power in range(low, math.floor(high) + 1):
        y = place(STEPS[0], 10**power)[1]
        parts += [_line(_LEFT, y, _LEFT + _WIDTH, y), _text(_LEFT - 8, y + 4, _size(10**power), "end")]
    for T in STEPS:
        x = place(T, most)[0]
        parts += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 20, f"{T:,}", "middle")]
    for name, points in curves.items():
        spots = [place(T, size) for T, size in points]
        path = " ".join(f"{x},{y}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{WAYS[name]}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{WAYS[name]}"/>' for x, y in spots]
        x, y = spots[-1]
        parts.append(_text(x + 10, y + 4, f"{name}, T^{exponent(points):.2f}", "start", WAYS[name]))
        parts.append(_text(x + 10, y + 22, f"{points[-1][1] / 1e6:,.1f} MB", "start", WAYS[name]))
    return frame(_LEFT + _WIDTH + _MARGIN, bottom + 30, parts, 'class="card" rx="8"')


def _size(size: int) -> str:
    return f"{size // 10**6:,} MB" if size >= 10**6 else f"{size // 10**3:,} kB"


def _line(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" class="line"/>'


def _text(x: float, y: float, text: str, anchor: str, fill: str | None = None) -> str:
    colour = f'fill="{fill}"' if fill else 'class="text"'
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="13" {colour}>{text}</text>'


def main() -> None:
    """Counts and draws."""
    PICTURE.write_text(draw({"torch.cat": counted(with_cat, STEPS), "TensorArray": counted(with_array, STEPS)}))


if __name__ == "__main__":
    main()
