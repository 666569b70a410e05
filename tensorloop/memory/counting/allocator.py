"""What the CUDA allocator says of itself: bytes given out, and a history of who asked for them.

The history is torch's memory snapshot, whose functions have an underscore but are documented. Tried with a recorded
snapshot of torch 2.13.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tensorloop.memory.counting.finder import PACKAGE, USER, kind_of_file
from tensorloop.memory.counting.sites import UNKNOWN, Site, site_at

EVENTS = 1_000_000  # what the history holds; older events are forgotten

Allocations = dict[tuple[Site, bool], list[int]]
"""(line, made by a thread that runs no Python) -> bytes at the peak, bytes now, blocks now."""


class Allocator:
    """The allocator of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Starts the peak and the history afresh."""
        self.reset_peak()
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=EVENTS, device=self.device, clear_history=True
        )

    def stop(self) -> None:
        """Ends the history."""
        torch.cuda.memory._record_memory_history(enabled=None, device=self.device)

    def allocated(self) -> int:
        """Bytes given out now."""
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most bytes given out at one time."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Starts the peak from what is given out now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def replayed(self) -> Allocations:
        """The history by line."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        snapshot: Any = torch.cuda.memory._snapshot(self.device)
        return replayed(snapshot["device_traces"][index])


def replayed(events: Iterable[Mapping[str, Any]]) -> Allocations:
    """Bytes at the peak and at the end of a history, by line; what was given out before it does not count."""
    blocks: dict[int, tuple[tuple[Site, bool], int]] = {}
    live: Allocations = {}
    now = most = 0
    rising = False
    for event in events:
        if event["action"] == "alloc":
            key, size = _line(event["frames"]), event["size"]
            blocks[event["addr"]] = key, size
            sizes = live.setdefault(key, [0, 0, 0])
            sizes[1] += size
            sizes[2] += 1
            now += size
            rising = rising or now > most
            most = max(most, now)
        elif event["action"] == "free_requested" and event["addr"] in blocks:
            if rising:
                _keep(live)
                rising = False
            key, size = blocks.pop(event["addr"])
            live[key][1] -= size
            live[key][2] -= 1
            now -= size
    if rising:
        _keep(live)
    return live


def _keep(live: Allocations) -> None:
    """The bytes of now are those of the peak."""
    for sizes in live.values():
        sizes[0] = sizes[1]


def _line(frames: Iterable[Mapping[str, Any]]) -> tuple[Site, bool]:
    """The innermost frame of the user's; without any frame the thread is one of PyTorch's, which run backward."""
    frames = list(frames)
    package: Site | None = None
    for frame in frames:
        kind = kind_of_file(frame["filename"])
        if kind in (USER, PACKAGE):
            site = site_at(frame["filename"], frame["line"], frame["name"])
            if kind == USER:
                return replace(site, library=package), False
            package = package or site
    return package or UNKNOWN, not frames
