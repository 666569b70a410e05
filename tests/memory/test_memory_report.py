"""Reports on growth as HTML and PNG: all that they must name, nothing loaded from elsewhere, no text over another."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from tensorloop._common.html import document
from tensorloop.memory import Growth, LineGrowth, Site
from tensorloop.memory.report import charts, html, picture


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


def overlapping(texts: list[tuple[str, Bbox]]) -> list[tuple[str, str]]:
    return [(a, b) for (a, first), (b, second) in combinations(texts, 2) if first.overlaps(second)]


def texts_of(figure: Figure) -> list[tuple[str, Bbox]]:
    """Each text that is shown, and the place it takes."""
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


@pytest.mark.parametrize("title", ["Memory of model/decoder.py:loss", ""])
@every_case
def test_no_text_of_the_picture_lies_over_another(found: Growth, title: str):
    figure = picture.draw(title, charts.panels(found), charts.bars(found))
    texts = texts_of(figure)
    assert len(texts) >= 1 + bool(title)
    assert overlapping([(words, at.padded(-1)) for words, at in texts]) == []
    assert [words for words, at in texts if not (at.x0 >= 0 <= at.y0 and at.x1 <= figure.bbox.x1)] == []


def test_texts_that_overlap_are_seen():
    figure = CASES["usual"].plot()
    for text in figure.findobj(Annotation):
        text.set_position((1.06, 0.5))
    assert overlapping(texts_of(figure))


@every_case
def test_a_page_stands_alone(found: Growth):
    page = page_on(found, "a<b>.py:loss", "Traceback: <error>")
    assert page.count("<img") == bool(charts.panels(found) or charts.bars(found))
    page = re.sub(r'src="data:image/png;base64,[^"]+"', "", page)
    assert not re.search(r"\w+://|<script|<link|src=|@import|url\(", page)
    assert "a&lt;b&gt;.py:loss" in page
    assert "<b>" not in page
    assert "nan" not in page


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
    drawn = [words for words, _ in texts_of(picture.draw("", charts.panels(CASES["usual"]), []))]
    assert {"saved  T^1.96", "peak  T^1.95", "time  T^1.02"} <= {*drawn}  # one number, in the text and on the curve
    assert not re.search(r"T\^1\.9[01]", " ".join([page, *drawn]))


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
    (axes,) = picture.draw("", [], [saved]).axes
    assert [patch.get_hatch() for patch in axes.patches if isinstance(patch, Rectangle)] == ["///", None]
    assert len(charts.bars(CASES["many"])[0].rows) == charts.TOP


def curves_of(panel: charts.Panel) -> list[Line2D]:
    (axes,) = picture.draw("", [panel], []).axes
    return [line for line in axes.lines if line.get_marker() != "None"]


def test_curves_are_told_apart_without_colour():
    curves = curves_of(charts.panels(CASES["usual"])[0])
    assert len({line.get_linestyle() for line in curves}) == len({str(line.get_marker()) for line in curves}) == 2


def test_a_curve_lies_where_its_values_say():
    panel = charts.Panel("title", "MiB", (charts.Curve("saved", (1, 10, 100), (1.0, 10.0, 100.0), 0),))
    (line,) = curves_of(panel)
    points = line.get_transform().transform(line.get_xydata())
    assert points[0][0] < points[1][0]
    assert points[0][1] < points[1][1]
    assert tuple(points[1] - points[0]) == pytest.approx(tuple(points[2] - points[1]))


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
