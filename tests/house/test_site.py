"""The site: every page is in its navigation, every public name has an entry, anchors are what GitHub shows."""

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import tensorloop as tl
from docs.site import SOURCE, api_names, entries, linked, markdown, slug
from tests.house.test_docs import DOCUMENTS, INLINE_LINK, anchors, prose

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
IN_LISTS = re.compile(r"decisions/0|examples/g2p/data/")


def pages(nav: Any) -> list[str]:
    """Every page that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def public_names() -> set[str]:
    """`tl.__all__`, and that of each submodule, under the shortest name that each thing has."""
    found = {name: getattr(tl, name) for name in tl.__all__}
    for module in ("loop", "packed", "beam", "risk", "ordering", "hf", "schedule", "compat"):
        face = importlib.import_module(f"tensorloop.{module}")
        found |= {f"{module}.{name}": getattr(face, name) for name in face.__all__}
    shortest = {id(thing): name for name, thing in reversed(found.items())}
    return {name for name in shortest.values() if getattr(found[name], "__doc__", None) and callable(found[name])}


def test_every_page_is_in_the_navigation():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(page for page in there - set(pages(settings["nav"])) if not IN_LISTS.match(page)) == []
    assert sorted(set(pages(settings["nav"])) - there) == []


def test_every_public_name_has_an_entry():
    assert sorted(public_names() - {name.removeprefix("tensorloop.") for name in api_names()}) == []


def test_the_list_of_names_is_that_of_the_pages():
    rows = re.findall(r"^\| \[.*?\]\((\w+)\.md\) \| (.*) \|$", (DOCS / "api" / "README.md").read_text(), re.MULTILINE)
    listed = {page: sorted(re.findall(r"`(?:tl|tensorloop)\.([\w.]+)`", names)) for page, names in rows}
    for page, names in listed.items():
        shown = re.findall(r"^::: tensorloop\.([\w.]+)$", (DOCS / "api" / f"{page}.md").read_text(), re.MULTILINE)
        assert names == sorted(re.sub(r"^(\w+)\.\1$", r"\1", name) for name in shown), page
    assert sorted(listed) == sorted(path.stem for path in (DOCS / "api").glob("*.md") if path.stem != "README")


def is_described(name: str) -> bool:
    _, *path, last = name.split(".")
    thing = getattr(importlib.import_module(".".join(["tensorloop", *path])), last)
    if isinstance(thing, type) or inspect.isroutine(inspect.unwrap(thing)):
        return bool(thing.__doc__)
    # what a signature calls a type: a line of text below its assignment describes it
    room = (ROOT / "tensorloop" / path[0]).rglob("*.py")
    return sum(bool(re.search(rf'^{last} = .+\n"""\w', file.read_text(), re.MULTILINE)) for file in room) == 1


def test_every_entry_is_of_something_that_is_there():
    assert [name for name in sorted(api_names()) if not is_described(name)] == []


def test_anchors_are_those_of_github():
    texts = {path: path.read_text() for path in DOCUMENTS}
    headings = {path: re.findall(r"^#{1,6}\s+(.*?)\s*#*$", prose(text), re.MULTILINE) for path, text in texts.items()}
    other = {path: {slug(heading) for heading in found} - anchors(texts[path]) for path, found in headings.items()}
    assert {path: found for path, found in other.items() if found} == {}


def test_links_out_of_the_site_lead_into_the_repository():
    text = "[a](../README.md#why) [b](loops.md#x) [c](examples) [d](examples/looped.py) [e](https://x.org) [f](no.md)"
    assert linked(text, "memory.md") == (
        f"[a]({SOURCE}/blob/main/README.md#why) [b](loops.md#x) [c]({SOURCE}/tree/main/docs/examples) "
        f"[d]({SOURCE}/blob/main/docs/examples/looped.py) [e](https://x.org) [f](no.md)"
    )


def test_names_in_prose_lead_to_their_entries():
    text = "`tl.scan` [`tl.map`](x.md) `tl.nothing`\n```python\n`tl.scan`\n```\n# `tl.scan`"
    assert linked(text, "loops.md") == text.replace("`tl.scan`", "[`tl.scan`][tensorloop.scan]", 1)


def test_a_function_in_a_module_of_its_name_is_shown_and_not_the_module():
    assert linked("`tl.attention`", "loops.md") == "[`tl.attention`][tensorloop.attention.attention]"
    modules = {f"tensorloop.{path.stem}" for path in (ROOT / "tensorloop").iterdir()}
    assert modules & set(entries().values()) == set()


def test_docstrings_become_paragraphs_and_blocks():
    docstring = (
        "Adds [a, b] *twice*.\n\nShapes: (B, *F), (*F) with `x[0]`.\nCost: little.\n\nExample:\n    >>> 1\n    1\n"
    )
    assert markdown(docstring) == (
        "Adds \\[a, b\\] *twice*.\n\n\n**Shapes:** (B, \\*F), (\\*F) with `x[0]`.\n\n"
        "**Cost:** little.\n\n\n**Example:**\n\n```python\n>>> 1\n1\n```"
    )


def test_what_is_listed_in_a_docstring_is_a_list():
    docstring = "Adds.\n\nArgs:\n    a, b: (*F), a < b\n        and more.\n\nReturns:\n    `c`.\n\nCost: little.\n"
    assert markdown(docstring) == (
        "Adds.\n\n\n**Args:**\n\n- `a, b`: (\\*F), a &lt; b\n  and more.\n\n\n**Returns:**\n\n`c`.\n\n\n"
        "**Cost:** little."
    )


def loaded_from_elsewhere(text: str) -> list[str]:
    """Addresses that a browser asks when it shows this: pictures, scripts, styles, fonts."""
    return re.findall(r"(?:!\[[^\]]*\]\(|\bsrc=[\"']?|url\([\"']?|@import [\"']?)((?:https?:)?//[^\s)\"'>]+)", text)


def test_pages_load_nothing_from_elsewhere():
    pages = [*DOCS.rglob("*.md"), DOCS / "site.css"]
    assert [found for path in pages for found in loaded_from_elsewhere(prose(path.read_text()))] == []


def test_what_loads_something_is_found():
    assert loaded_from_elsewhere('![a](https://a.org/b.png) <img src="//c.org/d"> [e](https://f.org) ![g](h.png)') == [
        "https://a.org/b.png",
        "//c.org/d",
    ]


def test_the_list_of_pages_has_them_all():
    listed = set(INLINE_LINK.findall((DOCS / "pages.md").read_text()))
    pages = {path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("*/README.md")]}
    assert sorted(pages - listed - {"README.md", "pages.md"}) == []


def test_what_to_cite_and_to_install_is_up_to_date():
    """The version, wherever one finds what to cite, and the names of the extras."""
    text, readme, citation = ((ROOT / name).read_text() for name in ("docs/install.md", "README.md", "CITATION.cff"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = [re.findall(r"^ *version *[=:] *\{?([\d.]+)", page, re.MULTILINE) for page in (text, readme, citation)]
    assert cited == [[tl.__version__]] * 3
    table = text[text.index("| extra |") : text.index("Error messages")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(project["optional-dependencies"])


def swallowed_lists(text: str) -> list[str]:
    """Lists right after a line of prose: GitHub shows a list there, MkDocs goes on with the paragraph."""
    return re.findall(r"^(?![-*#|<> ]|\d+\. )[^\n]+\n((?:[-*]|1\.) [^\n]*)", prose(text), re.MULTILINE)


def test_a_list_begins_after_an_empty_line():
    assert [(path, found) for path in DOCS.rglob("*.md") for found in swallowed_lists(path.read_text())] == []


def test_a_swallowed_list_is_found():
    assert swallowed_lists("# A\n- b\n- c\n\nSome\n\n- d\n  e\n- f\n") == []
    assert swallowed_lists("Instead:\n- d\n- e\n") == ["- d"]
