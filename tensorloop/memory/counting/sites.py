"""Lines of the user's source: what a figure is charged to."""

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorloop._common.user_line import cell_name

PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Parts of a path below which installed packages lie."""
ROWS = 60
"""Rows of a table that are printed."""


@dataclass(frozen=True)
class Site:
    """A line of source. `str()` gives `path.py:12`, the path relative to the working directory where it is below it.

    A line of a notebook's cell is `cell 3:12`, by the number beside the cell.

    Where a line of the user's calls an installed package or a module with parts, `library` and `module` say what in it
    made the bytes: `train.py:12 (encoder.layers.3.self_attn) via package/model.py:40`.

    Attributes:
        file: string, as Python names it: an absolute path, or `<stdin>`, `<string>` and the like where there is no
            file.
        line: int, the number of the line.
        function: string, the qualified name of the function that the line is in; `<module>` outside functions. Not
            compared: one line can hold several, and torch.compile gives them other names.
        code: string, the line itself, stripped; empty where the source is not to be had.
        module: string, the part of the `torch.nn` module called on the line, by its name in the module that the line is
            in (`encoder.layers.3.self_attn`) or below the class of what is called (`Sequential.0`). Empty where the
            line calls a module without parts, or none.
        library: `Site`, the innermost line in an installed package; None where the user's line called PyTorch or this
            library itself.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> site = tl.memory.saved_residuals(lambda: w.exp()).entries[0].site
        >>> type(site).__name__, site.line > 0
        ('Site', True)
    """

    file: str
    line: int
    function: str = field(compare=False)
    code: str
    module: str = ""
    library: "Site | None" = None

    def __str__(self) -> str:
        part = f" ({self.module})" if self.module else ""
        return f"{self.path}:{self.line}{part}{f' via {self.library}' if self.library else ''}"

    @property
    def path(self) -> str:
        """The file as `str()` shows it: `cell 3` in a notebook; of an installed package, from the package on."""
        if cell := cell_name(self.file):
            return cell
        if self.file.startswith("<"):
            return self.file
        for folder in PACKAGES:
            if folder in self.file:
                return printable(self.file.rpartition(folder)[2])
        try:
            return printable(str(Path(self.file).relative_to(Path.cwd())))
        except (ValueError, OSError):  # elsewhere; a working directory that is gone
            return printable(self.file)

    @property
    def own_code(self) -> str:
        """The line that called PyTorch: yours, or that of an installed package that yours called."""
        return self.library.code if self.library else self.code

    def as_dict(self) -> dict[str, Any]:
        """Gives the fields as a dict; `file` is the path that `str()` shows.

        Returns:
            A dict of what JSON can hold.
        """
        return {
            "file": self.path,
            **{name: getattr(self, name) for name in ("line", "function", "code", "module")},
            "library": self.library and self.library.as_dict(),
        }


WHERE = ("file", "line", "module", "library", "code")
"""What `cells_of` gives."""


def cells_of(site: Site) -> tuple[Any, ...]:
    """A site as the cells of a table of figures."""
    return site.path, site.line, site.module, site.library or "", site.code


UNKNOWN = Site("<unknown>", 0, "", "")
"""Where no line of the user's had a part: PyTorch's own threads."""


def site_at(file: str, line: int, function: str, module: str = "", library: Site | None = None) -> Site:
    """The site with its line of source."""
    return Site(file, line, function, linecache.getline(file, line).strip(), module, library)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of a table: columns numbered in `left` are text, the others figures and stand to the right.

    No more rows than can be read; files have them all.
    """
    if len(rows) > ROWS:
        more = f"... and {len(rows) - ROWS:,} more rows, in what save() writes"
        return [*table(header, rows[:ROWS], left), more]
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


def printable(text: str) -> str:
    """Text that any UTF-8 stream takes: the bytes of file names that are no UTF-8 as \\xe9."""
    text = re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
