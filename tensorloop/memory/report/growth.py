"""The result of `growth`: its figures, and how they are shown."""

from typing import TYPE_CHECKING

from tensorloop._common.extras import refuse_without
from tensorloop.memory.counting.sites import WHERE, cells_of
from tensorloop.memory.report import charts, html, picture
from tensorloop.memory.report.figures import Figures
from tensorloop.memory.report.result import Shown, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Growth(Figures, Shown):
    """The figures that `growth` measured: bytes at several sizes, and the power of T that they follow.

    `str()` gives a table, a notebook shows a report. What stands after `marginal` is empty where `growth` was given
    `measure`, and not compared by ==.

    Attributes:
        Ts: the sizes, a tuple of ints; so are the tuples below, one for each size.
        bytes: saved for backward, or what `measure` gave.
        exponent: float, the slope of the least-squares line through (log T, log bytes).
        marginal: float, the p of a curve a + b T^p through the last three sizes, -4 to 8: no constant term can hide it.
        peaks: the most bytes alive at one time in forward and backward.
        seconds: of forward and backward, floats; the least of a few runs.
        peak_exponent: float, as `exponent`, of `peaks`.
        peak_marginal: float, as `marginal`, of `peaks`; the slope between the last two sizes where the last four do not
            lie on one such curve.
        seconds_exponent: float, as `exponent`, of `seconds`.
        lines: tuple of `LineGrowth`, guilty ones first: what grows faster than T in saved bytes, in its peak, in
            traffic alone, each by bytes at the largest T; then the rest.
        failed: the T at which the function failed, and its error; the figures are those of smaller T. None where it did
            not.
        failed_at: the user's lines that the error came through, outermost first.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> make = lambda T: lambda: sum((w * t).sin().sum() for t in range(T))
        >>> round(tl.memory.growth(make, (8, 16, 32)).exponent, 2)
        1.0
    """

    _name = "Growth"
    _title = "Memory over T"

    def plot(self, title: str | None = None) -> "Figure":
        """Draws bytes and time over T, and the lines that save and allocate most.

        Args:
            title: string above the picture; None gives it the usual one.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """
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
        header = (*WHERE, "T", "saved", "peak", "made", "seconds")
        empty = ("",) * len(self.Ts)
        peaks, seconds = self.peaks or empty, self.seconds or empty
        whole = zip(self.Ts, self.bytes, peaks, empty, seconds, strict=True)
        rows = [["(all)", "", "", "", "", *cells] for cells in whole]
        for line in self.lines:
            sizes = zip(self.Ts, line.saved, line.peak, line.made, empty, strict=True)
            rows += [[*cells_of(line.site), *cells] for cells in sizes]
        return header, rows
