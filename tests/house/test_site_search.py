"""What the site's search finds first: pages and docstrings, scored as lunr and the theme score them."""

import importlib
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from docs.site import WEIGHTS, WORDS, markdown, on_post_page, on_post_template, ranked, slug, weight

DOCS = Path(__file__).parents[2] / "docs"
FIRST = {  # what is typed -> the page that should answer, or the section
    "lstm": "howto/slow_lstm.md",
    "custom LSTM": "howto/slow_lstm.md",
    "slow loop": "howto/slow_lstm.md",
    "kv cache": "howto/kv_cache.md",
    "ppo": "howto/recurrent_ppo.md",
    "out of memory": "howto/out_of_memory.md",
    "spiking": "howto/spiking.md",
    "neural ode": "howto/neural_ode.md",
    "kalman": "howto/kalman.md",
    "ragged": "howto/ragged_batches.md",
    "nested tensor": "howto/ragged_batches.md",
    "amp": "mixed_precision.md",
    "autocast": "mixed_precision.md",
    "citation": "install.md",
    "install": "install.md",
    "mac": "install.md",
    "windows": "install.md",
    "supported systems": "install.md",
    "upgrade": "from_0_2.md",
    "migration": "from_0_2.md",
    "gallery": "gallery.md",
    "pictures": "gallery.md",
    "tbptt": "loops.md#truncated-backpropagation",
    "gradient checkpointing": "schedules.md",
    "gpu": "gpu.md",
    "checkpoint": "schedules.md",
    "torch.compile": "compiled.md",
    "scan": "loops.md",
    "TensorArray": "arrays.md",
    "beam search": "beam.md",
    "jax": "coming_from.md",
}


class Section(NamedTuple):
    page: str
    section: str  # empty for the page itself
    boost: float
    terms: dict[str, float]  # each with what the fields have given it


@cache
def settings() -> tuple[re.Pattern[str], dict[str, float]]:
    """What divides words, and the boosts of the fields, of mkdocs.yml."""
    plugins = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["plugins"]
    (search,) = (plugin["search"] for plugin in plugins if "search" in plugin)
    return re.compile(search["separator"]), {name: field["boost"] for name, field in search["fields"].items()}


def words(text: str) -> list[str]:
    return [word for word in settings()[0].split(text.lower()) if word]


def text_of(path: Path) -> str:
    """A page, with the docstrings that it shows."""

    def shown(found: re.Match[str]) -> str:
        *module, name = found[1].split(".")
        return f"## {name}\n{markdown(getattr(importlib.import_module('.'.join(module)), name).__doc__ or '')}"

    return re.sub(r"^::: (\S+)$", shown, path.read_text(), flags=re.MULTILINE)


@cache
def sections() -> list[Section]:
    """The index: what the fields hold of each word, times the word's rarity."""
    entries = []
    for path in sorted(DOCS.rglob("*.md")):
        for i, part in enumerate(re.split(r"^#{1,3} ", text_of(path), flags=re.MULTILINE)[1:]):
            title, _, text = part.partition("\n")
            place = path.relative_to(DOCS).with_suffix(".html").as_posix().replace("README", "index")
            entries.append({"location": f"{place}#{slug(title)}" if i else place, "title": title, "text": text})
    found = [
        {
            name: Counter(words(" ".join(entry[name]) if name == "tags" else entry[name]))
            for name in entry.keys() & {*settings()[1]}
        }
        for entry in ranked(entries)
    ]
    rows = Counter(chain.from_iterable(chain.from_iterable(fields.values()) for fields in found))
    result = []
    for entry, fields in zip(entries, found, strict=True):
        terms: dict[str, float] = {}
        for name, counts in fields.items():
            for term, n in counts.items():
                rarity = math.log(1 + abs((len(entries) - rows[term] + 0.5) / (rows[term] + 0.5)))
                terms[term] = terms.get(term, 0) + settings()[1][name] * rarity * 2.2 * n / (1.2 + n)
        path, _, section = entry["location"].partition("#")
        page = path.replace("index", "README").replace(".html", ".md")
        result.append(Section(page, section, entry["boost"], terms))
    return result


def found_first(query: str) -> Section:
    """Words asked for are beginnings of words; a section that has more of them counts more, and a page's own text."""
    asked = words(query)

    def score(section: Section) -> float:
        hits = {term: section.terms[term] for term in section.terms if term.startswith(tuple(asked))}
        share = sum(any(term.startswith(word) for term in hits) for word in asked) / len(asked)
        return section.boost * sum(hits.values()) * (1 + (share + (not section.section)) ** 2)

    return max(sections(), key=score)


@pytest.mark.parametrize(("query", "page"), FIRST.items(), ids=FIRST)
def test_what_is_found_first(query: str, page: str):
    found, (wanted, _, section) = found_first(query), page.partition("#")
    assert found.page == wanted
    assert found.section == section or not section


def test_guides_come_before_benchmarks_and_decisions():
    kinds = ["howto/kalman.md", "loops.md", "api/loop.md", "limits.md", "tested.md", "benchmarks/loops.md"]
    weights = [weight(page) for page in (*kinds, "decisions/README.md")]
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == len(weights)
    assert weight("tutorials/ragged.md") == weight(kinds[0])
    assert weight("benchmarks/README.md") == weight("benchmarks/loops.md") < weight("README.md")


def test_weights_and_words_are_those_of_pages():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    places = {
        f"{path.relative_to(DOCS).as_posix()}#{slug(title)}"
        for path in DOCS.rglob("*.md")
        for title in re.findall(r"^##+ (.*)$", path.read_text(), flags=re.MULTILINE)
    }
    assert sorted(set(WORDS) - pages - places) == []
    assert [start for start in WEIGHTS if not any(page.startswith(start) for page in pages)] == []


def test_words_are_given_to_pages_and_not_to_each_of_their_sections():
    page, section, other = ranked([{"location": x} for x in ("gpu.html", "gpu.html#installing", "api/index.html")])
    assert page == {"location": "gpu.html", "boost": weight("gpu.md"), "tags": WORDS["gpu.md"].split()}
    assert section == {"location": "gpu.html#installing", "boost": weight("gpu.md")}
    assert other == {"location": "api/index.html", "boost": weight("api/README.md")}


@pytest.mark.parametrize("written", [on_post_page, on_post_template])
def test_the_link_to_the_repository_asks_for_nothing(written: Callable[[str], str]):
    assert written('<a href="x" class="md-source" data-md-component="source">') == '<a href="x" class="md-source">'
