"""Every Python block in the documents runs and prints what the page shows; every relative link resolves."""

import re
from pathlib import Path

import pytest

from docs.outputs import DOCUMENTS, ROOT, difference, fenced_blocks, python_blocks, run

INLINE_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
REFERENCE_LINK = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", re.MULTILINE)
REPOSITORY = "https://github.com/tensorloop/tensorloop"
HERE = re.compile(
    r"https://(?:github\.com/tensorloop/tensorloop/(?:blob|tree)|raw\.\w+\.com/tensorloop/tensorloop)/main/"
)
OUTSIDE = ("http://", "https://", "mailto:")
WITH_EXAMPLES = [path for path in DOCUMENTS if "```" in path.read_text()]


def prose(text: str) -> str:
    """The text without code: what looks like a link or a heading in there is none."""
    lines = text.splitlines()
    for block in fenced_blocks(text):
        lines[block.line - 1 : block.end - 1] = [""] * (block.end - block.line)
    return "\n".join(lines)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, made as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def broken_links(document: Path) -> list[str]:
    """Links of a document whose file or heading does not exist: relative ones, and those into this repository."""
    text = re.sub(r"`[^`\n]*`", "", prose(document.read_text()))
    broken = []
    for link in [*INLINE_LINK.findall(text), *REFERENCE_LINK.findall(text)]:
        own = HERE.match(link)
        if link.startswith(OUTSIDE) and not own:
            continue
        path, _, anchor = link[own.end() if own else 0 :].partition("#")
        target = (ROOT if own else document.parent) / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


def test_the_documents_are_found():
    assert ROOT / "README.md" in DOCUMENTS
    assert ROOT / "docs" / "README.md" in DOCUMENTS


def test_the_readme_shows_code_that_runs():
    assert list(python_blocks((ROOT / "README.md").read_text()))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.extended
def test_examples_run_and_print_what_is_shown(path: Path):
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    ran = run(text, name)
    assert len(ran) == text.count("```python\n")
    wrong = [found for one in ran if (found := difference(one))]
    assert not wrong, f"{name}: `python -m docs.outputs {name}` writes what is printed\n" + "\n\n".join(wrong)


def test_links_resolve():
    assert [(path, link) for path in DOCUMENTS for link in broken_links(path)] == []


def test_blocks_share_a_namespace():
    run("```python\na = 1\n```\ntext\n```python\nassert a == 1\n```\n", "doc.md")


def test_a_failing_block_fails_at_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        run("# title\n\n```python\na = 0\n1 / a\n```\n", "doc.md")
    assert f"{caught.traceback[-1].path}:{caught.traceback[-1].lineno + 1}".endswith("doc.md:5")


@pytest.mark.parametrize("info", ["py", "python3", "Python", "python notest", "pycon"])
def test_a_block_cannot_escape(info: str):
    with pytest.raises(ValueError, match="write 'python', so that it runs"):
        run(f"```{info}\n1 / 0\n```\n", "doc.md")


def test_an_open_fence_is_refused():
    with pytest.raises(ValueError, match="opened on line 2 is never closed"):
        run("text\n```python\na = 1\n", "doc.md")


def test_broken_links_are_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# A title, with `code`\n")
    (tmp_path / "doc.md").write_text(
        f"[u]({REPOSITORY}/blob/main/README.md) [v]({REPOSITORY}/blob/main/gone.md#x) [w]({REPOSITORY}/issues)\n"
        "[a](there.md) [b](gone.md) [c](there.md#a-title-with-code) [d](there.md#no) [e](https://example.org)\n"
        "`[f](code.md)`\n\n```text\n[g](fenced.md)\n```\n\n# Here\n[h](#here) [i](#nowhere)\n\n[j]: lost.md\n"
    )
    assert broken_links(tmp_path / "doc.md") == [
        f"{REPOSITORY}/blob/main/gone.md#x",
        *("gone.md", "there.md#no", "#nowhere", "lost.md"),
    ]
