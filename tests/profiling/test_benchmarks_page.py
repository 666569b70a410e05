"""The headline of the benchmarks: sentences and picture from results on disk, a peer's wins among a peer's."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from docs.site import slug

ROOT = Path(__file__).parents[2]


def test_the_headline_has_both_sides(scripts: dict[str, Any]):
    page = scripts["benchmarks_page"]
    won = [page.Fact("loops", "a loop", peer, 2.0, theirs, "ms") for peer, theirs in (("x", 40.0), ("y", 3.0))]
    lost = page.Fact("hf", "a search", "`generate`", 1.25, 1.0, "times")
    first, _, peers, _, last = page.headline([*won, lost]).splitlines()
    assert first.startswith(
        "- A loop: **2 ms**; x 40 ms, y 3 ms ([figures](loops.md), [script](../../profiling/loops.py)"
    )
    assert peers == "Where peers win:"
    assert last.startswith("- A search: 1.25 times the time of `generate` ([figures](hf.md)")


def test_nothing_is_said_without_figures(scripts: dict[str, Any], tmp_path: Path):
    assert scripts["benchmarks_page"].facts(tmp_path) == []


def test_every_figure_has_a_bar_and_its_number(scripts: dict[str, Any]):
    page = scripts["benchmarks_page"]
    found = [page.Fact("a", "less & less", "x", 1.0, 50.0, "ms"), page.Fact("a", "more", "y", 3.0, 1.0, "ms")]
    drawn = ElementTree.fromstring(page.draw(found))
    names = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"less & less, against x", "0.02", "more, against y", "3"} <= set(names)
    fills = [bar.get("fill") for bar in drawn.iter("{http://www.w3.org/2000/svg}rect") if bar.get("fill")]
    assert fills == [page.OURS, page.THEIRS]


def test_the_page_is_that_of_the_results(scripts: dict[str, Any]):
    page = scripts["benchmarks_page"]
    found = page.facts(ROOT / "profiling" / "results")
    assert len(found) >= 9
    assert (ROOT / page.PICTURE).read_text() == page.draw(found)
    text = (ROOT / page.PAGE).read_text()
    assert page.headline(found) in text
    assert not re.search(r"\bW\d", text)


def test_no_page_shows_a_key(scripts: dict[str, Any]):
    pages = [*(ROOT / "docs" / "benchmarks").glob("*.md"), *(ROOT / "profiling").rglob("*.md")]
    short = ROOT / "profiling" / "results" / "short"  # tables of a run, beside its results
    shown = {page.name for page in pages if not page.is_relative_to(short) and re.search(r"\bW\d", page.read_text())}
    assert shown == set()


def test_each_figure_of_the_readme_stands_on_the_page_that_it_links_to():
    page = (ROOT / "docs" / "benchmarks" / "headline.md").read_text()
    tables = {slug(part.splitlines()[0]): part for part in page.split("\n## ")[1:]}
    _, table, _ = re.split(r"<!-- headline:(?:begin|end) -->", (ROOT / "README.md").read_text())
    caption, *rows = (line for line in table.strip().splitlines() if line)
    assert caption in page
    assert len(rows[2:]) == len(tables)
    for row in rows[2:]:
        address = re.search(r"docs/benchmarks/headline\.md#([\w-]+)\)", row)
        assert address is not None
        _, _, *lines = (line for line in tables[address[1]].splitlines() if line[:1] == "|")  # heads, and a rule
        assert len(lines) > 1
        assert all(line.split("|")[2].strip() in row for line in lines)
