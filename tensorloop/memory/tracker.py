"""Live and peak bytes of everything that runs in a block, by line."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from tensorloop._common import html
from tensorloop._common.arguments import as_device
from tensorloop._common.errors import Fact
from tensorloop._common.extras import refuse_without
from tensorloop.memory.counting.allocator import Allocations, Allocator
from tensorloop.memory.counting.finder import BACKWARD
from tensorloop.memory.counting.located import LocatedStorages
from tensorloop.memory.counting.sites import WHERE, Site, cells_of, shortened, table
from tensorloop.memory.report import charts, picture
from tensorloop.memory.report.result import Shown, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = ("at peak", "live", "line", "pass", "code")


@dataclass(frozen=True, repr=False)
class SiteBytes:
    """Bytes that one line made, in forward or in backward.

    Attributes:
        site: `Site`, the line.
        backward: bool, whether they were made while backward ran the gradient of an operation of this line (or of the
            line that called backward).
        peak: int, bytes alive when all bytes together were at their peak.
        live: int, bytes alive now.
        count: int, storages alive now.

    Example:
        >>> with tl.memory.track() as tracker:
        ...     x = torch.ones(1000)
        >>> [site.live for site in tracker.sites()]
        [4000]
    """

    site: Site
    backward: bool
    peak: int
    live: int
    count: int

    def as_dict(self) -> dict[str, Any]:
        """Gives the fields as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        return {
            "site": self.site.as_dict(),
            **{name: getattr(self, name) for name in ("backward", "peak", "live", "count")},
        }

    def __repr__(self) -> str:
        return f"<SiteBytes {self.site}, {_pass(self)}: {self.peak:,} bytes at the peak, {self.live:,} live>"


class Tracker(Shown):
    """Live and peak bytes, in all and by line: what `track` gives. `str()` gives a table, a notebook shows a page.

    Example:
        >>> with tl.memory.track() as tracker:
        ...     x = torch.ones(1000).exp()
        >>> tracker.live, tracker.peak, len(tracker.sites())
        (4000, 8000, 1)
    """

    _name = "Tracker"
    _title = "Bytes by line"

    @property
    @abstractmethod
    def live(self) -> int:
        """Bytes made in the block that are alive now."""

    @property
    @abstractmethod
    def peak(self) -> int:
        """The most bytes alive at one time in the block, or since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Starts `peak` afresh from what is alive now: at the beginning of a training step, say."""

    @abstractmethod
    def sites(self) -> tuple[SiteBytes, ...]:
        """Lists every line that has bytes at the peak or now.

        Returns:
            A tuple of `SiteBytes`, most at the peak first.
        """

    def as_dict(self) -> dict[str, Any]:
        """Gives all figures as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        return {"live": self.live, "peak": self.peak, "sites": [entry.as_dict() for entry in self.sites()]}

    def plot(self, title: str | None = None) -> "Figure":
        """Draws the lines that have most bytes at the peak and now, as bars.

        Args:
            title: string above the picture; None gives it the usual one.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """
        refuse_without("matplotlib", "Tracker.plot")
        return picture.draw(title or self._title, [], self._bars())

    def __str__(self) -> str:
        rows = self._rows()
        return "\n".join([self._summary(), *(table(_HEADER, rows, left=(2, 3, 4)) if rows else [])])

    def _summary(self) -> str:
        return f"{self.live:,} bytes live, {self.peak:,} at the peak"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (f"{entry.peak:,}", f"{entry.live:,}", str(entry.site), _pass(entry), shortened(entry.site.code))
            for entry in self.sites()
        ]

    def _bars(self) -> list[charts.Bars]:
        found = []
        for title, of in (("At the peak, by line", "peak"), ("Alive now, by line", "live")):
            lines: dict[Site, int] = {}
            for entry in self.sites():
                lines[entry.site] = lines.get(entry.site, 0) + getattr(entry, of)
            found.append(charts.by_line(title, [(site, n, 0.0) for site, n in lines.items()]))
        return [chart for chart in found if chart.rows]

    def _body(self) -> list[str]:
        first = [f"<p>{escape(self._summary())}</p>", *picture.charts([], self._bars())]
        rows = self._rows()
        return [*first, *([html.table(_HEADER, rows, (2, 3, 4))] if rows else [])]

    def _cells(self) -> Table:
        """A row for each line and pass."""
        header = (*WHERE, "pass", "peak", "live", "count")
        return header, [(*cells_of(e.site), _pass(e), e.peak, e.live, e.count) for e in self.sites()]


def _pass(entry: SiteBytes) -> str:
    return "backward" if entry.backward else "forward"


class OperationTracker(Tracker):
    """Counts the storages that operations make, of any device: what was asked for, not what an allocator rounds to."""

    def __init__(self) -> None:
        self.storages = LocatedStorages()

    @property
    def live(self) -> int:
        """Bytes alive now, after the block too."""
        return self.storages.now

    @property
    def peak(self) -> int:
        """The most alive after any one operation.

        Gradients that meet are added in place, as without a mode, where the gradient formula is known to add nothing
        itself; elsewhere the peak of backward is an upper bound, as `LiveStorages.peak` is.
        """
        return self.storages.peak

    def reset_peak(self) -> None:
        """Starts `peak` afresh."""
        self.storages.reset_peak()

    def sites(self) -> tuple[SiteBytes, ...]:
        """By line and pass."""
        found: dict[tuple[Site, bool], list[int]] = {}
        for place in self.storages.places:
            sizes = found.setdefault((place.line.site, bool(place.flags & BACKWARD)), [0, 0, 0])
            for i, n in enumerate((self.storages.at_peak(place), place.now, place.count)):
                sizes[i] += n
        return _ranked(found)


class AllocatorTracker(Tracker):
    """Reads the statistics and the history of an allocator. What is freed after the block is not seen."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._start = allocator.allocated()
        self._end: tuple[int, int, Allocations] | None = None
        allocator.start()

    def stop(self) -> None:
        """Keeps the figures and ends the recording."""
        if self._end is None:
            self._end = self.live, self.peak, self.allocator.replayed()
            self.allocator.stop()

    @property
    def live(self) -> int:
        """Bytes by which the allocator gives out more than at the beginning."""
        return self._end[0] if self._end else self.allocator.allocated() - self._start

    @property
    def peak(self) -> int:
        """The most bytes given out beyond those at the beginning, as the allocator rounds them."""
        return self._end[1] if self._end else self.allocator.peak() - self._start

    def reset_peak(self) -> None:
        """Starts `peak` afresh; what `sites` gives at the peak stays that of the whole block."""
        self.allocator.reset_peak()

    def sites(self) -> tuple[SiteBytes, ...]:
        """By line; allocations by threads of PyTorch's own, such as backward on a device, have no line."""
        return _ranked(self._end[2] if self._end else self.allocator.replayed())


def _ranked(found: Allocations) -> tuple[SiteBytes, ...]:
    entries = [SiteBytes(site, backward, *sizes) for (site, backward), sizes in found.items() if any(sizes[:2])]
    return tuple(sorted(entries, key=lambda entry: (-entry.peak, -entry.live)))


@contextmanager
def track(device: str | torch.device | None = None) -> Iterator[Tracker]:
    """Counts the bytes of everything that runs in the block, by the user's line; cheap enough for a training step.

        with tl.memory.track() as tracker:
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
        print(tracker)

    Args:
        device: None, or any but CUDA: a dispatch mode sees the operations of this thread, and counts the storages they
            make on every device. A CUDA device: the allocator of that device is asked, whose figures are those of
            `torch.cuda.memory_allocated`, other threads included, and its recorded history gives the lines.

    Returns:
        A context manager that gives a `Tracker`, which can be read in the block and after it.

    Bytes that backward makes belong to the line whose gradient they are part of, or where that ran before the block, to
    the line that called backward; of a graph that another thread made, to any line. What is older than the block
    (parameters) does not count. Values and gradients stay what they are. Compiled functions run as if they were not
    compiled.

    Cost: some 7 microseconds an operation, most of them the dispatch mode's own; 400 bytes a live storage; 30 MB at
    most to know the lines of the last quarter of a million operations with gradient.

    Raises:
        RuntimeError: a CUDA device is asked for and there is none.

    Example:
        >>> with tl.memory.track() as tracker:
        ...     x = torch.ones(1000)
        ...     del x
        >>> tracker.live, tracker.peak
        (0, 4000)
    """
    if device is not None and _device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError(f"track: device={str(device)!r}, but torch sees no CUDA device; track() counts on any")
        tracker = AllocatorTracker(Allocator(torch.device(device)))
        try:
            yield tracker
        finally:
            tracker.stop()
        return
    counting = OperationTracker()
    with counting.storages:
        yield counting


def _device(device: Any) -> torch.device:
    try:
        return as_device(device, "device")
    except Fact as fact:
        raise fact.named("track") from None
