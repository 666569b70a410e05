"""A CUDA device for a torch that has none: `start()` makes cuda:0 and cuda:1 in this process, until it ends.

Tensors on it are torch's plain tensors, whose memory is the host's; every operation is the CPU's. What torch does on a
device is real: dispatch, autograd's threads, generators of its own, the refusal of mixed devices. `counted()` counts
what a device would be given to do, and notes where the host would wait for it.
"""

import atexit
import contextlib
import ctypes
import itertools
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorloop.compiler.targets.graphs import pieces
from tensorloop.compiler.targets.ptx import driver
from tests.device import built, fused, recording
from tests.support.pretended_driver import PretendedDriver

DRIVER = PretendedDriver()
_pooled = itertools.count()
HERE = str(Path(__file__).parent)
DEVICES = 2
SYNC_MODE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"

Watcher = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)


@dataclass(frozen=True)
class Sync:
    """The host waits for the device: how, by which operation of torch, in which lines, the innermost first."""

    kind: str
    operation: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} ({self.operation}) at {' < '.join(self.lines) or 'no line of Python'}"


@dataclass
class Counts:
    """What has been asked of the devices: launches by operation, and syncs in order."""

    operations: Counter[str] = field(default_factory=Counter)
    syncs: list[Sync] = field(default_factory=list)
    reads: int = 0  # of the state of a generator
    recorded: int = 0  # operations that graphs have recorded, which launched nothing

    @property
    def launches(self) -> int:
        return sum(self.operations.values())

    def places(self) -> list[str]:
        """Each operation and each sync with how often it was, the most frequent first."""
        found = Counter(self.operations) + Counter(f"sync: {sync}" for sync in self.syncs)
        return [f"{times:5} {what}" for what, times in found.most_common()]


class Watch:
    """What is told of each launch and sync of any thread: those who count, and torch's own switch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.counting: list[Counts] = []
        self.mode = 0  # of `set_sync_debug_mode`: 2 refuses syncs
        self.left: int | None = None  # launches and syncs until the device is lost, after which each one fails
        self.lock = threading.Lock()
        self.told = Watcher(self.tell)
        self.inside = threading.local()
        self.fused = fused.register(self.one_launch)

    @contextlib.contextmanager
    def one_launch(self, operation: str) -> Iterator[None]:
        """What this thread launches meanwhile is that of one operation."""
        self.tell(b"launch", operation.encode())
        before, self.inside.one = getattr(self.inside, "one", False), True
        try:
            yield
        finally:
            self.inside.one = before

    def tell(self, what: bytes, operation: bytes) -> int:
        kind, name = what.decode(), operation.decode()
        if getattr(self.inside, "one", False) or getattr(recording.here, "silent", False):
            return 0
        records = getattr(recording.here, "recorder", None) is not None
        if self.is_lost():
            return 2
        if recording.modelled[0] and kind == "launch" and name in recording.PRODUCTS:
            recording.computes_product()
        with self.lock:
            for counts in self.counting:
                if kind == "launch":
                    if records:
                        counts.recorded += 1
                    else:
                        counts.operations[name] += 1
                elif kind == "read":
                    counts.reads += 1
                elif kind != "offset":
                    counts.syncs.append(Sync(kind, name, lines()))
        if kind == "launch" or (kind in ("read", "offset") and not records):
            return 0
        return int(self.mode == 2 or recording.forbids_waiting())

    def is_lost(self) -> bool:
        """Whether the device is lost now; else there is one call less until it is."""
        with self.lock:
            if self.left:
                self.left -= 1
                return False
            return self.left == 0

    @contextlib.contextmanager
    def losing(self, calls: int) -> Iterator[None]:
        self.left = calls
        self.listen()
        try:
            yield
        finally:
            self.left = None
            self.listen()

    def set_mode(self, mode: int | str) -> None:
        """Warns as torch does, which does so once a process."""
        warnings.warn(SYNC_MODE, UserWarning, stacklevel=2)
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(str(mode), mode)  # pyright: ignore
        self.listen()

    def listen(self) -> None:
        """Called back only while someone wants to know: that takes time."""
        self.library.watch(
            self.told
            if self.counting or self.mode or self.left is not None or recording.any_recording() or recording.modelled[0]
            else Watcher()
        )

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counts]:
        counts = Counts()
        self.counting.append(counts)
        self.listen()
        try:
            yield counts
        finally:
            self.counting.remove(counts)
            self.listen()


def lines() -> tuple[str, ...]:
    """The innermost lines that are running in this thread, `file:number`, without those of torch and of this watch."""
    found, frame = [], sys._getframe()
    while (frame := frame.f_back) and len(found) < 6:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith("<") and "site-packages" not in file:
            found.append(f"{file}:{frame.f_lineno}")
    return tuple(found)


_watch: list[Watch] = []


def start() -> None:
    """Makes the devices. What it changes in torch is not put back: it is for processes that only run tests."""
    if _watch:
        return
    if reason := built.why_not():
        raise RuntimeError(f"no pretended device: {reason}")
    _watch.append(Watch(built.library()))
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
    for name, value in replacements(_watch[0]).items():
        before = getattr(torch.cuda, name)
        for module in (torch.cuda, *modules):
            if module.__dict__.get(name) is before:
                setattr(module, name, value)
    torch.UntypedStorage.__new__ = new_storage
    recording.watches.append(_watch[0])
    torch._C._host_emptyCache = torch._C._cuda_emptyCache = lambda: None  # pyright: ignore
    torch._C._cuda_clearCublasWorkspaces = recording.drop_workspaces  # pyright: ignore
    driver.open_library = lambda: DRIVER
    pieces.SMALL = ()  # no kernels in graphs, but for tests of them: each takes a second to be made here
    torch._C._set_cudnn_enabled(False)  # torch's samples of operations forbid to set the flag itself
    torch.cuda.manual_seed_all(torch.initial_seed())
    # A device's thread of autograd drops its last task after `backward` has returned, and needs Python for that.
    atexit.register(time.sleep, 0.1)


def new_storage(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
    """Memory of a device is asked for by its size alone; a torch without CUDA has no way to make it."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
    return torch._C.StorageBase.__new__(cls, *args, device=device, **options)  # pyright: ignore


def counted() -> contextlib.AbstractContextManager[Counts]:
    """Counts launches and syncs of all threads while it is open."""
    return _watch[0].counted()


def losing(calls: int) -> contextlib.AbstractContextManager[None]:
    """Loses the device after so many launches, syncs and calls of graphs, while it is open."""
    return _watch[0].losing(calls)


class Stream(torch.Stream):
    """As `torch.cuda.Stream`, on the current device unless another is named: one of 32, which come again."""

    def __new__(cls, device: Any = None, priority: int = 0) -> "Stream":
        return named_stream(cls, next(_pooled) % 32 + 1, device)


class ExternalStream(torch.Stream):
    """As `torch.cuda.ExternalStream`."""

    def __new__(cls, stream_ptr: int, device: Any = None) -> "ExternalStream":
        return named_stream(cls, stream_ptr, device)


def named_stream(kind: Any, number: int, device: Any) -> Any:
    return torch.Stream.__new__(kind, stream_id=number, device_index=index_of(device).index, device_type=1)


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)  # pyright: ignore


def index_of(device: Any) -> torch.device:
    if device is None or (isinstance(device, int) and device < 0):
        return torch.device("cuda", torch.accelerator.current_device_index())
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def replacements(watch: Watch) -> dict[str, Any]:
    """What torch.cuda asks of its runtime, by name; the rest of torch.cuda is as it is.

    Each is an object of its own: `torch.compile` tells functions apart by what they are.
    """
    accelerator = torch.accelerator
    return {
        "_initialized": True,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "default_generators": tuple(torch.Generator(f"cuda:{i}") for i in range(DEVICES)),
        "current_device": lambda: accelerator.current_device_index(),
        "set_device": lambda device: accelerator.set_device_index(device),
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
        "current_stream": lambda device=None: accelerator.current_stream(device),
        "default_stream": lambda device=None: torch.Stream(
            stream_id=0, device_index=index_of(device).index, device_type=1
        ),
        "set_stream": lambda stream: accelerator.set_stream(stream),
        "synchronize": lambda device=None: accelerator.synchronize(device),
        "is_current_stream_capturing": lambda: recording.is_current_stream_capturing(),
        "graph_pool_handle": lambda: recording.graph_pool_handle(),
        "CUDAGraph": recording.Graph,
        "set_sync_debug_mode": watch.set_mode,
        "get_sync_debug_mode": lambda: watch.mode,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
