"""What graphs keep between calls, over all loops: the streams on which they are captured, and a bound on their memory.

A graph runs in memory that nobody else may have meanwhile, and cuBLAS has memory of its own for each stream that it
meets, whose address is in the graph. Torch takes that from wherever the stream first needed it, and may drop it at any
time: when a graph goes (torch 2.12 and newer), when a library asks for it. So no graph is captured on a stream that
anybody else has, or that ran anything before: the workspace then lies in the pool of the graphs themselves, and
who drops it gives it back to that pool, from which the graphs of this stream alone are served.
"""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable

import torch

from tensorloop._common.errors import Misuse
from tensorloop._common.kept_memory import GIVE_BACK
from tensorloop._torch.cuda_numbers import drop_workspaces, workspace_bytes
from tensorloop._torch.grad_modes import lasting
from tensorloop._torch.tracing import without_modes
from tensorloop.compiler.step import Unsupported
from tensorloop.compiler.targets.graphs.capture import recording
from tensorloop.compiler.targets.ptx.driver import device_of

MOST = 2**30  # bytes that the recordings of all loops keep together
RECENT = 1000  # calls of loops: what was used within them is not let go for another, which would do the same in turn
_lock = threading.RLock()  # finalizers come in between


class Seat:
    """Where the graphs of one stream of a caller's are captured: a stream of its own, and the pool that they share.

    Replays on a stream come one after the other, and leave nothing in the pool that is needed after them. An `anchor`,
    a graph of next to nothing, keeps the pool while the others come and go. The stream is never given back: torch
    would find this one's workspace for the next stream of the same address, and the pool may be gone by then.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.ExternalStream(device_of(device.index or 0).new_stream(), device=device)
        self.pool, self.anchor = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with lasting(), without_modes():
            mark = torch.zeros((), device=device)
            with torch.cuda.stream(self.stream), recording(self.anchor, self.pool):
                mark.zero_()
        self._mark = mark


_seats: dict[tuple[int, int], Seat] = {}


def seat_of(stream: torch.cuda.Stream) -> Seat:
    """Returns the seat for graphs that are to be replayed on this stream."""
    key = stream.device_index, stream.stream_id
    with _lock:
        if key not in _seats:
            _seats[key] = Seat(torch.device("cuda", stream.device_index))
        return _seats[key]


class NoRoom(Exception):
    """The recordings of other loops, which are in use, leave no room for one more; says so."""


class Held:
    """The bytes that one recording keeps; `drop` takes it from its loop when others need the memory."""

    def __init__(self, drop: Callable[[], object]) -> None:
        self.bytes, self.drop, self.call = 0, drop, next(_calls)
        with _lock:
            _held[id(self)] = weakref.ref(self)
        weakref.finalize(self, _held.pop, id(self), None).atexit = False

    def add(self, more: int) -> None:
        """It is to keep so many bytes more; those that were not used for long go, or this one does: `NoRoom`."""
        with _lock:
            if id(self) not in _held:  # it has gone, and whoever runs it is the last to do so
                return
            _held.move_to_end(id(self))
            self.bytes += more
            while (total := _total()) > MOST:
                oldest = next(iter(_held.values()))()
                if oldest is self or (oldest is not None and self.call - oldest.call < RECENT):
                    raise NoRoom(
                        f"find {total - MOST:,} bytes too few beside those of other loops, of {MOST:,} for all"
                    )
                _drop_first()

    def used(self) -> None:
        """It is the last one to go."""
        with _lock:
            if id(self) in _held:
                self.call = next(_calls)
                _held.move_to_end(id(self))


_calls = itertools.count()
_held = OrderedDict[int, "weakref.ref[Held]"]()  # by id; the one that was used last is at the end


def _total() -> int:
    """Bytes that all recordings keep, and cuBLAS for the streams on which they were captured."""
    kept = sum(held.bytes for ref in _held.values() if (held := ref()) is not None)
    return kept + sum(workspace(torch.device("cuda", index)) for index, _ in _seats)


def _drop_first() -> None:
    held = _held.popitem(last=False)[1]()
    if held is not None:
        held.drop()


def workspace(device: torch.device) -> int:
    """Bytes of cuBLAS's that the graphs of one stream keep; without a device, those on an A100."""
    try:
        return workspace_bytes(device_of(device.index or 0).facts.capability[0])
    except Unsupported:
        return workspace_bytes(8)


def clear() -> None:
    """Lets all recordings go, and cuBLAS's memory, which torch gives back for all streams at once."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise Misuse("cuda.clear: a CUDA graph is being captured, and may use what would be given back; call it before")
    with _lock:
        while _held:
            _drop_first()
        _seats.clear()
    drop_workspaces()


GIVE_BACK.append(clear)
