"""Lines of the user's source: what a figure is charged to."""

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Site:
    """A line of source. `str()` gives `path.py:12`, the path relative to the working directory where it is below it."""

    file: str
    """As Python names it: an absolute path, or `<stdin>`, `<string>` and the like where there is no file."""
    line: int
    function: str = field(compare=False)
    """The qualified name of the function that the line is in; `<module>` outside functions. Not compared: one line
    can hold several, and torch.compile gives them other names."""
    code: str
    """The line itself, stripped; empty where the source is not to be had."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def path(self) -> str:
        """The file as `str()` shows it."""
        if self.file.startswith("<"):
            return self.file
        try:
            return str(Path(self.file).relative_to(Path.cwd()))
        except (ValueError, OSError):  # elsewhere; a working directory that is gone
            return self.file

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold; `file` is the path that `str()` shows."""
        return {"file": self.path, "line": self.line, "function": self.function, "code": self.code}


UNKNOWN = Site("<unknown>", 0, "", "")
"""Where no line of the user's had a part: PyTorch's own threads."""


def site_at(file: str, line: int, function: str) -> Site:
    """The site with its line of source."""
    return Site(file, line, function, linecache.getline(file, line).strip())


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of a table: columns numbered in `left` are text, the others figures and stand to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def shortened(code: str, limit: int = 60) -> str:
    """The beginning of a line of source."""
    return code if len(code) <= limit else code[: limit - 3] + "..."
