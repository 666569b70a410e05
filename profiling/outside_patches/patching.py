"""Unified diffs, applied without the program `patch`: which lines they change, and a package with them changed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")
_MADE_FOR = re.compile(r"Made for (?P<package>\S+) (?P<version>\S+), (?P<licence>[^:]+): (?P<what>.+)\.$")


class Hunk(NamedTuple):
    """Lines that are there, from a number on, and what they become."""

    start: int
    old: list[str]
    new: list[str]


class Patch(NamedTuple):
    """A file's contents: what it is for, and the hunks of each file, by the path below site-packages."""

    package: str
    version: str
    licence: str
    what: str
    files: dict[str, list[Hunk]]
    lines: int
    """Lines that begin with + or -."""

    @property
    def folder(self) -> str:
        """The folder that is imported."""
        return next(iter(self.files)).split("/")[0]


class DoesNotApply(Exception):
    """The lines that a patch changes are not there."""


def read(path: Path) -> Patch:
    """Reads a patch whose first line is `Made for PACKAGE VERSION, LICENCE: WHAT.`"""
    first, *lines = path.read_text().splitlines()
    said = _MADE_FOR.match(first)
    if not said:
        raise ValueError(f"{path.name} begins with {first!r}; expected 'Made for PACKAGE VERSION, LICENCE: WHAT.'")
    changed = [line for line in lines if line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- "))]
    return Patch(**said.groupdict(), files=dict(_files(lines)), lines=len(changed))


def patches() -> list[Patch]:
    """All that are here, in order."""
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _files(lines: list[str]) -> Iterator[tuple[str, list[Hunk]]]:
    hunks: list[Hunk] = []
    for line in lines:
        if line.startswith("--- "):
            continue
        if line.startswith("+++ "):
            hunks = []
            yield line.removeprefix("+++ b/"), hunks
        elif found := _HUNK.match(line):
            # With no old lines the number is that of the line before.
            hunks.append(Hunk(int(found[1]) - (found[2] != "0"), [], []))
        else:
            if line[:1] in ("-", " "):
                hunks[-1].old.append(line[1:])
            if line[:1] in ("+", " "):
                hunks[-1].new.append(line[1:])


def changed(text: str, hunks: list[Hunk]) -> str:
    """A file's text with all hunks applied, and its own line ends."""
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.replace("\r\n", "\n").split("\n")
    for hunk in reversed(hunks):
        there = slice(hunk.start, hunk.start + len(hunk.old))
        if lines[there] != hunk.old:
            raise DoesNotApply(f"line {hunk.start + 1} is {lines[there]}; expected {hunk.old}")
        lines[there] = hunk.new
    return end.join(lines)


def patched_copy(patch: Patch, installed: Path, into: Path) -> None:
    """Copies the package from a site-packages folder, and applies the patch to the copy."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed / patch.folder, into / patch.folder, ignore=ignored)
    for name, hunks in patch.files.items():
        path = into / name
        path.write_bytes(changed(path.read_bytes().decode(), hunks).encode())
