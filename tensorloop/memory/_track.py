"""Live and peak bytes of everything that runs in a block, by line."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tensorloop.memory._allocator import Allocations, Allocator
from tensorloop.memory._finder import BACKWARD
from tensorloop.memory._located import LocatedStorages
from tensorloop.memory._sites import Site, shortened, table


@dataclass(frozen=True)
class SiteBytes:
    """Bytes that one line made, in forward or in backward."""

    site: Site
    backward: bool
    """Made while backward ran the gradient of an operation of this line (or of the line that called backward)."""
    peak: int
    """Alive when all bytes together were at their peak."""
    live: int
    """Alive now."""
    count: int
    """Storages alive now."""

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "site": self.site.as_dict(),
            "backward": self.backward,
            "peak": self.peak,
            "live": self.live,
            "count": self.count,
        }


class Tracker(ABC):
    """Live and peak bytes, in all and by line. `str()` gives a table."""

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
        """Every line that has bytes at the peak or now, most at the peak first."""

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {"live": self.live, "peak": self.peak, "sites": [entry.as_dict() for entry in self.sites()]}

    def __str__(self) -> str:
        rows = [
            (
                f"{entry.peak:,}",
                f"{entry.live:,}",
                str(entry.site),
                "backward" if entry.backward else "forward",
                shortened(entry.site.code),
            )
            for entry in self.sites()
        ]
        first = f"{self.live:,} bytes live, {self.peak:,} at the peak"
        header = ("at peak", "live", "line", "pass", "code")
        return "\n".join([first, *(table(header, rows, left=(2, 3, 4)) if rows else [])])


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

    ```python
    with track() as tracker:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
    print(tracker)
    ```

    Args:
        device: None, or any but CUDA: a dispatch mode sees the operations of this thread, and counts the storages
            they make on every device. A CUDA device: the allocator of that device is asked, whose figures are those of
            `torch.cuda.memory_allocated`, other threads included, and its recorded history gives the lines.

    Bytes that backward makes belong to the line whose gradient they are part of, or where that ran before the
    block, to the line that called backward; of a graph that another thread made, to any line. What is older than the
    block (parameters) does not count. Values and gradients stay what they are. Compiled functions run as if they were
    not compiled.

    Cost: some 7 microseconds an operation, most of them the dispatch mode's own; 400 bytes a live storage; 30 MB at
    most to know the lines of the last quarter of a million operations with gradient.

    Raises:
        RuntimeError: a CUDA device is asked for and there is none.
    """
    if device is not None and torch.device(device).type == "cuda":
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
