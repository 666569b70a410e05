"""What a compiled LSTM became, from `tl.explain`, drawn: `python -m docs.partition`.

The picture is `docs/images/partition.svg`; a test holds that it is current. Columns are when an operation runs,
rows the two passes; the stripe between them is what a step keeps for backward.
"""

import itertools
import re
import textwrap
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

import tensorloop as tl
from docs.house import frame

PICTURE = Path(__file__).parent / "images" / "partition.svg"
COLUMNS = {
    "once": "once",
    "before the loop, all steps at once": "all T steps at once",
    "in the loop": "in the loop, T times",
    "after the loop, all steps at once": "all T steps at once",
}
_BOX, _GAP, _LINE, _HEAD, _SIDE, _WIDE = 204, 34, 17, 30, 16, 120  # pixels; _WIDE in letters
Passes = dict[str, dict[str, str]]


def explain() -> str:
    """What is said of an LSTM cell with 64 inputs and 128 units, for 4 rows."""
    cell, zeros = nn.LSTMCell(64, 128), torch.zeros(4, 128)

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = cell(x, state)
        return (h, c), h

    return str(tl.explain(body, (zeros, zeros), torch.zeros(100, 4, 64)))


def parse(text: str) -> tuple[Passes, str]:
    """({pass: {stage: its operations}}, what is kept for backward)."""
    found: Passes = {}
    stage = ""
    *lines, kept = re.sub(r"\n {3,}", " ", text[text.index("\nforward:") + 1 :]).splitlines()
    for line in lines:
        if not line.startswith(" "):
            found[line.partition(":")[0]] = {}
        else:
            stage, _, operations = line.strip().partition(": ")
            found[list(found)[-1]][stage] = operations
    return found, re.sub(r"(?<=ys), [^ ]+ in [^ ]+ steps +", ": ", kept)


def draw(text: str) -> str:
    """The picture, as SVG."""
    passes, kept = parse(text)
    boxes = {(p, s): re.split(r"(?<=\]), ", found) for p, stages in passes.items() for s, found in stages.items()}
    left = {stage: _SIDE + 84 + k * (_BOX + _GAP) for k, stage in enumerate(COLUMNS)}
    width = left[list(COLUMNS)[-1]] + _BOX + _SIDE
    y, parts, middle = _SIDE, list[str](), left["in the loop"] + _BOX // 2
    for name, stages in passes.items():
        height = max(_HEAD + _LINE * len(boxes[name, stage]) for stage in stages) + 10
        parts.append(_text(_SIDE, y + 20, name, bold=True))
        order = [stage for stage in COLUMNS if stage in stages]
        for stage in order:
            parts.append(_box(left[stage], y, height, COLUMNS[stage], boxes[name, stage], stage == "in the loop"))
        for a, b in itertools.pairwise(order):
            parts.append(_arrow(left[a] + _BOX, y + height // 2, left[b] - 2, y + height // 2))
        y += height
        if name == "forward":
            parts.append(_arrow(middle, y, middle, y + 24))
            lines = textwrap.wrap(kept, _WIDE)
            parts += [_text(left["once"], y + 44 + k * _LINE, line) for k, line in enumerate(lines)]
            y += 44 + _LINE * len(lines)
            parts.append(_arrow(middle, y - 8, middle, y + 16))
            y += 18
    return frame(width, y + _SIDE, parts)


def _box(x: int, y: int, height: int, title: str, lines: list[str], loop: bool) -> str:
    fill = "#fdf1dc" if loop else "#ffffff"
    body = "".join(_text(x + 10, y + _HEAD + 14 + k * _LINE, line) for k, line in enumerate(lines))
    frame = f'<rect x="{x}" y="{y}" width="{_BOX}" height="{height}" rx="4" fill="{fill}" stroke="#444444"/>'
    return frame + _text(x + 10, y + 20, title, bold=True) + body


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{14 if bold else 12}"{weight}>{escape(text)}</text>'


def _arrow(x0: int, y0: int, x1: int, y1: int) -> str:
    return f'<path d="M{x0} {y0} {x1} {y1}" stroke="#444444" stroke-width="1.3" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    PICTURE.write_text(draw(explain()))
