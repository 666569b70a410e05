"""docs/errors.md: each heading is a part of a message that the library has, and its block provokes it."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
VALUE = "…"


def messages(source: str) -> list[str]:
    """The strings of a file, with a sign for each value that is put into them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@functools.cache
def strings() -> list[str]:
    """Those of the library."""
    return [text for path in (ROOT / "tensorloop").rglob("*.py") for text in messages(path.read_text())]


def is_there(heading: str) -> bool:
    """Whether some message has the parts of a heading, in order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in heading.split(VALUE)), re.DOTALL)
    return any(pattern.search(text) for text in strings())


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_heading_is_part_of_a_message(heading: str):
    assert is_there(heading)


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_section_provokes_its_message(heading: str):
    provoked = "".join(re.findall(r"says\((.*)\):", SECTIONS[heading]))
    assert all(part.strip() in provoked for part in heading.split(VALUE))


def test_a_heading_that_no_message_has_is_seen():
    assert not is_there("the moon is out of range")
    assert messages("f'slot {i} is' f' gone'")[0] == "slot … is gone"
