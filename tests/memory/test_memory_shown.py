"""How results of the memory tools show themselves: one line, a page in a notebook, files, pictures."""

import csv
import importlib.util
import json
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import Tensor

from tensorloop import memory
from tensorloop.memory import Growth, LineGrowth, LiveStorages, Mark, Residuals, Site, SiteBytes, Timeline, Tracker
from tensorloop.memory.counting.sites import ROWS

D = 8
W = torch.eye(D).roll(1, 0).requires_grad_()


def cat_cache(T: int) -> Callable[[], Tensor]:
    xs = torch.randn(T, 1, D, requires_grad=True)

    def loss() -> Tensor:
        past, total = torch.zeros(0, D), torch.zeros(())
        for x in xs.unbind(0):
            past = torch.cat([past, x @ W])
            total = total + past.square().mean()
        return total

    return loss


def tracked() -> Tracker:
    with memory.track() as tracker:
        cat_cache(8)().backward()
    return tracker


RESULTS: dict[str, Callable[[], Any]] = {
    "growth": lambda: memory.growth(cat_cache, (8, 16, 32)),
    "bytes alone": lambda: memory.growth(cat_cache, (8, 16, 32), measure=memory.saved_bytes),
    "residuals": lambda: memory.saved_residuals(cat_cache(8)),
    "nothing kept": lambda: memory.saved_residuals(lambda: torch.zeros(3).sum()),
    "tracker": tracked,
    "timeline": lambda: Timeline((0.0, 0.5, 1.0), (1 << 20, 3 << 20, 2 << 20), (Mark("scan <1>", 0.1, 0.6),)),
}
every_result = pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())


# -- one line


@every_result
def test_a_result_is_one_short_line(make: Callable[[], Any]):
    found = make()
    assert re.fullmatch(r"<(Growth|Residuals|Tracker|Timeline): [^\n]{10,110}>", repr(found))
    assert "0x" not in repr(found)
    assert str(found) != repr(found)


def test_the_line_has_the_figures():
    found = memory.growth(cat_cache, (8, 16, 32))
    fast = sum(line.superlinear for line in found.lines)
    line = f"{found.bytes[-1]:,} bytes at T=32, T^{found.marginal:.2f}; {fast} of {len(found.lines)} lines"
    assert repr(found) == f"<Growth: {line} grow faster than T>"
    assert repr(tracked()).startswith("<Tracker: ")
    assert repr(memory.saved_residuals(cat_cache(8))).startswith("<Residuals: ")


def test_what_results_are_made_of_is_short_too():
    kept, found = memory.saved_residuals(cat_cache(8)), memory.growth(cat_cache, (8, 16, 32))
    entry = tracked().sites()[0]
    shown = [repr(kept.entries[0]), repr(found.lines[0]), repr(found.lines[-1]), repr(entry)]
    assert [re.match(r"<\w+ \S*test_memory_shown\.py:\d+.*: [\d,]+ bytes.*>$", text) is not None for text in shown] == (
        [True] * 4
    )
    assert isinstance(entry, SiteBytes)
    assert isinstance(found.lines[0], LineGrowth)
    with LiveStorages() as live:
        x = torch.zeros(D)
    assert repr(live) == "<LiveStorages: 32 bytes in 1 storages, 32 at the peak>"
    del x


# -- pages


@every_result
def test_a_notebook_shows_a_page(make: Callable[[], Any]):
    found = make()
    page = found._repr_html_()
    assert page.startswith('<div class="tensorloop">')
    assert page.endswith("</div>")
    assert "<html" not in page
    assert "<h1" not in page
    assert not re.search(r"<script|<link|@import|url\((?!#)|src=\"(?!data:)", page)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    rules = [rule.strip() for part in style[1].split("}") for rule in part.split("{")[0].split(",") if rule.strip()]
    assert all(rule.startswith(".tensorloop") for rule in rules)  # none of the notebook's own elements
    assert page.count("<table>") == page.count("</table>")


def test_the_page_of_python_is_that_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorloop.memory.command import main

    monkeypatch.chdir(tmp_path)
    code = Path(__file__).read_text()
    Path("model.py").write_text(code + "\n\ndef loss(T):\n    return cat_cache(T)()\n")
    assert main(["model.py:loss", "--T", "8,16,32", "--no-progress", "--report", "there.html"]) == 0
    memory.growth(cat_cache, (8, 16, 32)).save("here.html", "Memory of model.py:loss")
    here, there = (re.sub(r"<img[^>]*>", "", Path(name).read_text()) for name in ("here.html", "there.html"))
    headings = [re.findall(r"<h[12]>.*?</h[12]>|<title>.*?</title>|<th.*?</th>", page) for page in (here, there)]
    assert headings[0] == headings[1]
    assert "Use a tl.TensorArray" in here


def test_one_power_in_text_page_and_picture():
    """Bytes beside a large constant: two fits would say T^1.0 and T^2.0."""
    site = Site("m.py", 1, "f", "x")
    sizes, Ts = (1_000_400, 1_001_600, 1_006_400), (20, 40, 80)
    line = LineGrowth(site, sizes, sizes, 2.0, 2.0, 1.0, None, sizes, 2.0)
    found = Growth(Ts, sizes, 0.004, 2.0, sizes, (1.0, 2.0, 4.0), 0.004, 2.0, 1.0, (line,))
    page = found._repr_html_()
    figure = found.plot()
    drawn = " ".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))
    for shown in (str(found), page, drawn):
        powers = set(re.findall(r"T\^([0-9.]+[0-9])", shown))
        assert {f"{float(power):.2f}" for power in powers} == {"2.00", "1.00"}  # of bytes, of seconds


# -- files


@every_result
@pytest.mark.parametrize("suffix", [".png", ".html", ".htm", ".json", ".csv", ".PNG"])
@pytest.mark.few(".png", ".html", ".json", ".csv", ".htm-growth", ".PNG-growth")
def test_every_file(make: Callable[[], Any], suffix: str, tmp_path: Path):
    found, path = make(), tmp_path / f"result{suffix}"
    found.save(path, "A <title>")
    data = path.read_bytes()
    if suffix.lower() == ".png":
        assert data.startswith(b"\x89PNG")
    elif suffix == ".json":
        assert json.loads(data) == json.loads(json.dumps(found.as_dict()))
    elif suffix == ".csv":
        header, *rows = csv.reader(data.decode().splitlines())
        assert all(len(row) == len(header) for row in rows)
        assert rows or found.bytes == 0
    else:
        text = data.decode()
        assert "<title>A &lt;title&gt;</title>" in text
        assert "<h1>A &lt;title&gt;</h1>" in text
        assert found._repr_html_().splitlines()[-1] in text


@every_result
@pytest.mark.parametrize("name", ["result", "result.svg", "result.txt"])
def test_another_ending_is_refused(make: Callable[[], Any], name: str, tmp_path: Path):
    found = make()
    message = rf"{found._name}\.save: path must end in \.png, \.html, \.json or \.csv; got '.*{name}'"
    with pytest.raises(ValueError, match=message):
        found.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_rows_of_a_csv_add_up(tmp_path: Path):
    found = memory.growth(cat_cache, (8, 16, 32))
    found.save(str(tmp_path / "growth.csv"))
    rows = list(csv.DictReader((tmp_path / "growth.csv").read_text().splitlines()))
    for T, n in zip(found.Ts, found.bytes, strict=True):
        at = [row for row in rows if row["T"] == str(T)]
        assert int(at[0]["saved"]) == n == sum(int(row["saved"]) for row in at[1:])
    kept = memory.saved_residuals(cat_cache(8))
    kept.save(tmp_path / "kept.csv")
    rows = list(csv.DictReader((tmp_path / "kept.csv").read_text().splitlines()))
    assert sum(int(row["bytes"]) for row in rows if row["kind"] == "made") == kept.bytes


# -- pictures


@every_result
def test_a_plot_is_a_figure_on_which_no_text_lies_over_another(make: Callable[[], Any]):
    figure = make().plot("A title")
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts]
    assert "A title" in [words for words, _ in boxes]
    assert [(a, b) for (a, first), (b, second) in combinations(boxes, 2) if first.overlaps(second)] == []


@every_result
def test_matplotlib_is_asked_for(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found, find = make(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    message = rf"{found._name}\.plot: needs matplotlib: pip install 'tensorloop\[memory\]'"
    with pytest.raises(ImportError, match=message):
        found.save(tmp_path / "x.png")
    assert found._repr_html_()  # goes without


# -- long tables


def test_a_table_too_long_to_read_says_what_is_left_out():
    entries = tuple(
        memory.Residual(Site("m.py", i, "f", "x"), None, "add", (i,), "float32", 4 * i, 1, "other")
        for i in range(1, 100)
    )
    text = str(Residuals(entries, ())).splitlines()
    assert text[-1] == f"... and {99 - ROWS} more rows, in what save() writes"
    assert len(text) == ROWS + 3
    assert len(Residuals(entries, ())._cells()[1]) == 99


def test_a_deep_model_tells_of_few_of_its_layers():
    Ts, sizes = (8, 16, 32), (64, 256, 1024)
    sites = [
        Site("m.py", 1, "f", "y = model(x)", f"layers.{i}", Site("/p/site-packages/a.py", 3, "g", "z"))
        for i in range(40)
    ]
    lines = tuple(LineGrowth(site, sizes, sizes, 2.0, 2.0, 0.1, "Do less.", sizes, 2.0) for site in sites)
    text = str(Growth(Ts, sizes, 2.0, 2.0, lines=lines))
    assert text.count("Do less.") == 12
    assert "... and 28 more lines that grow faster than T" in text
    assert "m.py:1 (layers.0) via a.py:3  y = model(x)\n    calls a.py:3  z\n" in text
