"""What all results of these tools have: one line as `repr`, a table as text, a page in a notebook, and files."""

import csv
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tensorloop._common.html import document, fragment
from tensorloop.memory.counting.sites import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]
_SUFFIXES = (".png", ".html", ".htm", ".json", ".csv")


class Shown(ABC):
    """A result: `str()` gives a table, a notebook shows a page, `save` writes files and `plot` draws."""

    _name: ClassVar[str]
    """What users know its class by."""
    _title: ClassVar[str]
    """Of a page or picture that is given none."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Gives all figures as a dict.

        Returns:
            A dict of what JSON can hold.
        """

    @abstractmethod
    def plot(self, title: str | None = None) -> "Figure":
        """Draws it with matplotlib.

        Args:
            title: string above the picture; None gives it the usual one.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """

    @abstractmethod
    def _summary(self) -> str:
        """One line."""

    @abstractmethod
    def _body(self) -> list[str]:
        """HTML below a heading."""

    @abstractmethod
    def _cells(self) -> Table:
        """All figures, a header and rows."""

    def save(self, path: str | Path, title: str | None = None) -> None:
        """Writes a file, in the format that its name ends in.

        Args:
            path: `.png`, a picture (needs matplotlib); `.html`, a page that stands alone; `.json`, what `as_dict`
                gives; `.csv`, the figures as rows.
            title: stands above a picture or page.

        Raises:
            ValueError: another ending.
            ImportError: a picture is asked for and matplotlib is not installed.
            OSError: the file cannot be written.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in _SUFFIXES:
            raise ValueError(f"{self._name}.save: path must end in .png, .html, .json or .csv; got {str(path)!r}")
        if kind == ".png":
            self.plot(title).savefig(path, format="png", dpi=130)
        elif kind == ".json":
            write(path, json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n")
        elif kind == ".csv":
            header, rows = self._cells()
            text = io.StringIO(newline="")
            csv.writer(text, lineterminator="\n").writerows([header, *rows])
            write(path, text.getvalue())
        else:
            write(path, document(title or self._title, self._body()))

    def __repr__(self) -> str:
        return f"<{self._name}: {self._summary()}>"

    def _repr_html_(self) -> str:
        """Returns the HTML that a notebook shows."""
        return fragment(self._body())


def write(path: Path, text: str) -> None:
    """Writes UTF-8 with the line ends that the text has; names of files that are no UTF-8 in a readable form."""
    path.write_bytes(printable(text).encode("utf-8"))
