"""Reports on growth as HTML and PNG: all that they must name, nothing loaded from elsewhere, no text over another."""

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from tensorloop.memory import Growth, LineGrowth, Site
from tensorloop.memory import _charts as charts
from tensorloop.memory import _html as html
from tensorloop.memory import _svg as svg
from tensorloop.memory._page import document

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 6.7  # pixels of a letter at 11 px in a wide font; the widest, capitals of a bold one, are above it


def line(number: int, code: str, sizes: tuple[int, ...], power: float, advice: str | None = None) -> LineGrowth:
    site = Site(str(Path.cwd() / "model" / "decoder.py"), number, "loss", code)
    more = tuple(2 * n for n in sizes)
    return LineGrowth(site, sizes, sizes, power, power, 0.5, advice, more, power)


def growth(Ts: tuple[int, ...], *lines: LineGrowth, failed: tuple[int, str] | None = None) -> Growth:
    saved = tuple(sum(line.saved[i] for line in lines) for i in range(len(Ts)))
    peaks, seconds = tuple(n + 40 for n in saved), tuple(T / 1000 for T in Ts)
    return Growth(Ts, saved, 1.91, 1.96, peaks, seconds, 1.9, 1.95, 1.02, lines, failed)


def squares(Ts: tuple[int, ...], scale: int) -> tuple[int, ...]:
    return tuple(scale * T * T for T in Ts)


USUAL = (64, 128, 256, 512)
CAT = line(31, "keys = torch.cat([keys, k], dim=2)", squares(USUAL, 128), 2.0, "Append to a TensorArray.")
CELL = line(29, "h = cell(x, h) if h is not None and 1 < 2 else start", (6_400, 12_800, 25_600, 51_200), 1.0)
MANY = tuple(2**n for n in range(1, 13))
CASES = {
    "usual": growth(USUAL, CAT, CELL),
    "one line": growth((64, 128), line(3, "h = h @ w", (512, 1024), 1.0)),
    "many": growth(MANY, *(line(i, f"x{i} = {'very ' * 30} long", squares(MANY, 10 - i), 2.0) for i in range(9))),
    "narrow": growth((64, 72), line(3, "h = h @ w", (1000, 1001), 0.0)),
    "failed": growth((64,), line(3, "h = h @ w", (512,), float("nan")), failed=(128, "RuntimeError: no <memory>")),
    "nothing": growth(USUAL, line(3, "return w.sum()", (0, 0, 0, 0), 0.0)),
}
every_case = pytest.mark.parametrize("found", CASES.values(), ids=CASES.keys())


def page_on(found: Growth, target: str, error: str = "") -> str:
    return document(f"Memory of {target}", html.body(found, error))


def drawings(found: Growth) -> list[str]:
    return [*map(svg.curves, charts.panels(found)), *map(svg.bars, charts.bars(found))]


def boxes(drawing: str) -> list[tuple[str, Bbox]]:
    """Each text of a drawing, and the place it takes; turned ones are left out."""
    found = []
    for element in ElementTree.fromstring(drawing).iter(f"{SVG}text"):
        words = "".join(element.itertext())
        width = LETTER * len(words) + (14 if len(element) else 0)
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        x -= {"start": 0, "middle": width / 2, "end": width}[element.attrib["text-anchor"]]
        if "transform" not in element.attrib:
            found.append((words, Bbox.from_extents(x, y - 9, x + width, y + 2)))
    return found


def overlapping(texts: list[tuple[str, Bbox]]) -> list[tuple[str, str]]:
    return [(a, b) for (a, first), (b, second) in combinations(texts, 2) if first.overlaps(second)]


@every_case
def test_no_text_lies_over_another(found: Growth):
    for drawing in drawings(found):
        texts = boxes(drawing)
        assert overlapping(texts) == []
        box = [float(n) for n in ElementTree.fromstring(drawing).attrib["viewBox"].split()]
        assert [words for words, at in texts if not (at.x0 >= 0 <= at.y0 and at.x1 <= box[2] and at.y1 <= box[3])] == []


@every_case
def test_no_text_of_the_picture_lies_over_another(found: Growth):
    figure = found.plot("Memory of model/decoder.py:loss")
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    texts = [(text.get_text(), text.get_window_extent()) for text in shown]
    assert len(texts) >= 2
    assert overlapping([(words, at.padded(-1)) for words, at in texts]) == []
    assert [words for words, at in texts if not (at.x0 >= 0 <= at.y0 and at.x1 <= figure.bbox.x1)] == []


def test_texts_that_overlap_are_seen():
    drawing = svg.curves(charts.panels(CASES["usual"])[0])
    moved = re.sub(r'y="[0-9.]+" text-anchor="start"', 'y="50" text-anchor="start"', drawing)
    assert overlapping(boxes(moved))


@every_case
def test_a_page_stands_alone(found: Growth):
    page = page_on(found, "a<b>.py:loss", "Traceback: <error>")
    assert page.count("<svg") == page.count("</svg>") == len(drawings(found))
    addresses = re.findall(r"\w+://[^\"' ]+", page)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<link|<img|src=|@import|url\((?!#)", page)
    assert "a&lt;b&gt;.py:loss" in page
    assert "<b>" not in page
    assert "nan" not in page
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))


def test_a_page_names_what_was_found():
    page = page_on(CASES["usual"], "model.py:loss")
    first = page.index('<div class="guilty">')
    assert (
        "model/decoder.py:31 grows faster than T: saves 32 MiB, T^2.00; has at its peak 32 MiB, T^2.00; "
        "allocates in all 64 MiB, T^2.00<" in page[first:]
    )
    assert "Append to a TensorArray." in page[first:]
    assert page.count('<div class="guilty">') == 1
    assert "At T = 512 a step saves 32 MiB for backward (T^1.96) and has 32 MiB alive at its peak (T^1.95)" in page
    assert "h = cell(x, h) if h is not None and 1 &lt; 2 else start" in page
    assert ">saved  T^1.96<" in page  # one number, in the text and on the curve
    assert ">peak  T^1.95<" in page
    assert "T^1.91" not in page
    assert "T^1.90" not in page
    assert ">time  T^1.02<" in page


def test_a_page_shows_how_it_failed():
    page = page_on(CASES["failed"], "model.py:loss", "line 7\nRuntimeError: no <memory>")
    assert "<h2>Failed at T = 128</h2>\n<pre>line 7\nRuntimeError: no &lt;memory&gt;</pre>" in page
    assert "no &lt;memory&gt;" in page_on(CASES["failed"], "model.py:loss")


def test_bars_show_the_largest_lines_and_hatch_the_guilty():
    saved, made = charts.bars(CASES["usual"])
    assert [(row.where, row.figures, row.guilty) for row in saved.rows] == [
        ("model/decoder.py:31", "32 MiB, 100%, T^2.00", True),
        ("model/decoder.py:29", "50 KiB, <1%, T^1.00", False),
    ]
    assert made.title == "Allocated in all, forward and backward, by line, T = 512"
    assert svg.bars(saved).count('fill="url(#') == 1
    assert len(charts.bars(CASES["many"])[0].rows) == charts.TOP


def test_curves_are_told_apart_without_colour():
    drawing = svg.curves(charts.panels(CASES["usual"])[0])
    dashes = re.findall(r'<polyline [^>]*stroke-width="2" stroke-dasharray="([^"]*)"', drawing)
    assert len(dashes) == len(set(dashes)) == 2
    assert drawing.count("<circle") == 4
    assert drawing.count("<rect") == 4


def test_a_curve_lies_where_its_values_say():
    panel = charts.Panel("title", "MiB", (charts.Curve("saved", (1, 10, 100), (1.0, 10.0, 100.0), 0),))
    (points,) = re.findall(r'points="([^"]+)"', svg.curves(panel))
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in points.split())
    assert x0 < x1
    assert y0 > y1
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.2)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.8, 2000, [1, 10, 100, 1000]),
        (0.8, 40, [1, 3, 10, 30]),
        (0.9, 6, [1, 2, 5]),
        (1.4, 3.5, [1.5, 2, 3]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert charts.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (17_703_168, "16.9 MiB"), (1_047_000, "1,022 KiB")]
)
def test_sizes_are_easy_to_read(n: int, text: str):
    assert charts.size(n) == text


def test_names_that_touch_move_apart():
    assert charts.spread([0.0, 1.0, 50.0], 10) == [-4.5, 5.5, 50.0]
    assert charts.labelled((64, 128, 256, 512), 40) == [64, 128, 256, 512]
    assert charts.labelled((64, 65, 66, 512), 40) == [66, 512]
