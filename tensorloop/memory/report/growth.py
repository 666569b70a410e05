"""The result of `growth`: its figures, and how they are shown."""

from typing import TYPE_CHECKING

from tensorloop.memory.report import charts, html, picture
from tensorloop.memory.report.figures import Figures
from tensorloop.memory.report.result import Shown, Table, refuse_without

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Growth(Figures, Shown):
    """Bytes at several sizes, and the power of T that they follow. `str()` gives a table, a notebook shows a report.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> make = lambda T: lambda: sum((w * t).sin().sum() for t in range(T))
        >>> round(tl.memory.growth(make, (8, 16, 32)).exponent, 2)
        1.0
    """

    _name = "Growth"
    _title = "Memory over T"

    def plot(self, title: str | None = None) -> "Figure":
        """Curves of bytes and time over T, and the lines that save and allocate most; needs matplotlib."""
        refuse_without("matplotlib", "Growth.plot")
        return picture.draw(title or self._title, charts.panels(self), charts.bars(self))

    def _summary(self) -> str:
        if not self.Ts:
            return "no sizes"
        fast = sum(line.superlinear for line in self.lines)
        lines = f"; {fast} of {len(self.lines)} lines grow faster than T" if self.lines else ""
        failed = f"; failed at T={self.failed[0]:,}" if self.failed else ""
        power = charts.power(self.marginal, self.Ts)
        return f"{self.bytes[-1]:,} bytes at T={self.Ts[-1]:,}, {power}{lines}{failed}"

    def _body(self) -> list[str]:
        return html.body(self)

    def _cells(self) -> Table:
        """A row for the whole and for each line, at each T."""
        header = ("file", "line", "module", "library", "code", "T", "saved", "peak", "made", "seconds")
        empty = ("",) * len(self.Ts)
        peaks, seconds = self.peaks or empty, self.seconds or empty
        whole = zip(self.Ts, self.bytes, peaks, empty, seconds, strict=True)
        rows = [["(all)", "", "", "", "", *cells] for cells in whole]
        for line in self.lines:
            site = line.site
            where = [site.path, site.line, site.module, site.library or "", site.code]
            sizes = zip(self.Ts, line.saved, line.peak, line.made, empty, strict=True)
            rows += [[*where, *cells] for cells in sizes]
        return header, rows
