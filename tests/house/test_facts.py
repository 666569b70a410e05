"""What runs where and with which versions stands once, as data: pages take it from there, in no other words."""

import ast
import re
from pathlib import Path

import pytest

import tensorloop as tl
from docs import facts

ROOT = Path(__file__).parents[2]
HISTORY = ("docs/decisions/", "docs/benchmarks/", "docs/notebooks/", "docs/from_0_2.md")  # what was, and what ran when
PAGES = [page for page in facts.PAGES if not page.relative_to(ROOT).as_posix().startswith(HISTORY)]
MODULES = sorted(Path(tl.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_the_facts(page: Path):
    assert facts.written(page) == page.read_text(), "python -m docs.facts"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_have_no_second_wording(page: Path):
    name = page.relative_to(ROOT).as_posix().removeprefix("docs/")
    assert list(facts.second_wordings(page.read_text(), name)) == []


def docstrings(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))


def test_docstrings_have_no_second_wording():
    public = [path for path in MODULES if not {"_torch", "compiler", "kernels"} & {*path.parts}]
    found = {path.name: list(facts.second_wordings(docstrings(path), "")) for path in public}
    assert {name: wordings for name, wordings in found.items() if wordings} == {}


def test_docstrings_have_their_sentences():
    for sentence, files in facts.DOCSTRINGS:
        for file in files:
            assert sentence in " ".join(docstrings(ROOT / file).split())


def test_every_fact_stands_somewhere():
    used = {found["name"] for page in facts.PAGES for found in facts.MARK.finditer(page.read_text())}
    assert used == facts.SENTENCES.keys() | facts.TABLES.keys()


def test_extras_are_those_of_the_project():
    assert facts.EXTRAS.keys() == facts.EXTRAS_NEEDS.keys()
    for name, (brings, _) in facts.EXTRAS.items():
        if name in ("hf", "progress", "memory", "examples"):
            needs = ",".join(facts.EXTRAS_NEEDS[name])
            needs = needs.replace("tensorloop[progress]", ",".join(facts.EXTRAS_NEEDS["progress"]))
            assert sorted(re.findall(r"[a-z-]+(?=>=)", needs)) == sorted(brings.split(", "))


@pytest.mark.parametrize(
    "text",
    [
        "It works on the CPU only.",
        "Everything runs on both.",
        "This records the steps as CUDA graphs.",
        "It has not met a real GPU.",
        "You need PyTorch 2.11 or newer.",
        "torch>=2.11",
    ],
)
def test_a_second_wording_is_found(text: str):
    assert list(facts.second_wordings(text, "faq.md"))
    assert not list(facts.second_wordings(f"<!-- fact: needs -->{text}<!-- /fact -->", "faq.md"))


def test_what_differs_is_written_and_what_is_wrapped_otherwise_stays(monkeypatch: pytest.MonkeyPatch):
    page = ROOT / "docs" / "page.md"
    sentence = facts.fact("compile-gpu", page)
    wrapped = sentence.replace(" the ", "\nthe ")
    marked = "Yes.<!-- fact: compile-gpu --> {}<!-- /fact --> So.\n"
    for text, wanted in ((wrapped, wrapped), ("On a GPU nothing.", sentence)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: marked.format(text))
        assert facts.written(page) == marked.format(wanted)


@pytest.mark.parametrize("page", facts.PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_mark_hides_text_behind_it(page: Path):
    """A line that begins with a comment is not rendered."""
    hidden = re.findall(r"^\s*(?:[-*] )?<!-- /?fact.*?-->[^\n]*\S[^\n]*$", page.read_text(), re.MULTILINE)
    assert [line for line in hidden if not re.fullmatch(r"<!-- /?fact[^>]*-->", line)] == []
