"""What the whole process takes: resident memory over time, beside what ran when.

A second process looks at ours from outside, with the package memory_profiler, so that measuring takes neither our
interpreter's lock nor our memory. Both stamp the time by the same clock.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from tensorloop._common import scope
from tensorloop._common.extras import refuse_without
from tensorloop.memory.counting.saved import must_be_function
from tensorloop.memory.report.timeline import Mark, Timeline

# Its standard input is a pipe from us: when we are gone, however that came, it ends.
_SAMPLER = """
import os, sys, threading, memory_profiler
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
with open(sys.argv[3], "w", buffering=1) as stream:
    memory_profiler.memory_usage(int(sys.argv[1]), float(sys.argv[2]), timeout=1e9, timestamps=True, stream=stream)
"""
_MIB = 2**20  # memory_profiler's unit
_PATIENCE = 60  # seconds for the second process to start

_Marks = list[tuple[str, float, float]]
_marks: ContextVar[_Marks | None] = ContextVar("marks", default=None)


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Notes in the `timeline` that runs around it when the block began and ended; elsewhere it does nothing.

    Args:
        name: string, what the block is called in the timeline.

    Returns:
        A context manager.

    Example:
        >>> def train():
        ...     with tl.memory.mark("forward"):
        ...         return torch.ones(1000).sum()
        >>> [mark.name for mark in tl.memory.timeline(train).marks]
        ['step', 'forward']
    """
    if not isinstance(name, str):
        raise TypeError(f"mark: name must be a string, got {name!r}")
    begin = time.time()
    try:
        yield
    finally:
        if (marks := _marks.get()) is not None:
            marks.append((name, begin, time.time()))


def timeline(fn: Callable[..., Any], *args: Any, interval: float = 0.002) -> Timeline:
    """Samples the resident memory of the process while a function runs once, backward too.

    Args:
        fn: function that gives a scalar loss, whose backward is run here and whose gradients stay where they belong; or
            anything else, such as a whole training step, and then backward is its own business.
        args: passed to `fn`.
        interval: float, seconds between samples, default 0.002.

    Returns:
        A `Timeline`.

    Forward, backward and each loop of this package (`scan`, `while_loop`, `fori_loop`, `map`, `beam_search`) are
    marked; a block of your own with `mark(name)`. What was allocated before stays with the allocator and is used again
    without a rise: run it in a fresh process, first.

    Cost: a second process, started anew each time (a quarter of a second).

    Raises:
        ImportError: memory_profiler is not installed.
        RuntimeError: the second process cannot look at this one.

    Example:
        >>> tl.memory.timeline(lambda: torch.ones(1000).sum()).rise >= 0
        True
    """
    must_be_function(fn, "timeline")
    if not isinstance(interval, int | float) or not interval > 0:
        raise ValueError(f"timeline: interval must be a number of seconds above 0, got {interval!r}")
    refuse_without("memory_profiler", "timeline")
    gc.collect()  # what waits for the collector would make the curve fall in the middle of the run
    marks: _Marks = []
    with _noted(marks), _sampled(interval) as samples:
        begin = time.time()
        loss = fn(*args)
        differentiable = isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1
        marks.append(("forward" if differentiable else "step", begin, time.time()))
        if differentiable:
            with mark("backward"):
                loss.backward()
        del loss
    first = samples[0][0]
    return Timeline(
        times=tuple(when - first for when, _ in samples),
        rss=tuple(n for _, n in samples),
        marks=tuple(Mark(name, a - first, b - first) for name, a, b in sorted(marks, key=lambda m: (m[1], -m[2]))),
    )


@contextmanager
def _noted(marks: _Marks) -> Iterator[None]:
    """Collects marks; the loops of this package mark themselves."""
    token, observed = _marks.set(marks), scope.observer.set(mark)
    try:
        yield
    finally:
        scope.observer.reset(observed)
        _marks.reset(token)


@contextmanager
def _sampled(interval: float) -> Iterator[list[tuple[float, int]]]:
    """Samples (time, bytes) of this process; the list is filled when the block ends."""
    samples: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "samples", Path(folder) / "errors"
        with errors.open("w") as stream:
            sampler = subprocess.Popen(
                [sys.executable, "-c", _SAMPLER, str(os.getpid()), str(interval), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stream,
            )
        try:
            _await_samples(file, 2, sampler, errors)
            yield samples
            _await_samples(file, 2 + len(_read(file)), sampler, errors)  # one at least that began after the block
        finally:
            sampler.kill()
            sampler.communicate()
        samples += _read(file)


def _await_samples(file: Path, least: int, sampler: subprocess.Popen[bytes], errors: Path) -> None:
    begun = time.monotonic()
    while len(_read(file)) < least:
        if sampler.poll() is not None or time.monotonic() - begun > _PATIENCE:
            said = errors.read_text().strip().splitlines()
            raise RuntimeError(f"timeline: the second process stopped: {said[-1] if said else 'it said nothing'}")
        time.sleep(0.005)


def _read(file: Path) -> list[tuple[float, int]]:
    """Whole lines of `MEM mebibytes seconds`."""
    if not file.exists():
        return []
    lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(float(when), round(float(mib) * _MIB)) for _, mib, when in lines]
