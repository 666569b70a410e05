"""Work shared among threads: the caller works too, and waits for nobody who has not begun.

numba's own parallel loops are not used. Its workqueue layer ends the process when two threads enter it at once, its
OpenMP layer does so after a fork, and each keeps a second pool of threads beside torch's that spins for the same
cores. A kernel that has released the GIL runs as well in an ordinary Python thread. Waking one takes some 50 us, so
small work stays with the caller; and a thread that wakes late finds nothing left to do, so a busy machine costs
no more than that.
"""

import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

# Bytes read and written that one thread gets through in about the time it takes to wake another.
PIECE = 1 << 20
# Pieces for each thread: what one thread is late by, others make good.
SHARES = 4


def share(
    kernel: Callable[..., Any], count: int, size: int, args: tuple[Any, ...], alive: Sequence[Tensor] = ()
) -> None:
    """Runs `kernel(start, stop, *args)` over range(count), in pieces, on at most as many threads as torch uses.

    `size`: bytes read and written for all of `count`. The kernel releases the GIL, and its pieces touch nothing that
    another one writes. All of them have run on return. `alive`: tensors of which the kernel has the addresses only; a
    thread that works still when an interrupt has taken the caller away must find them there.
    """
    threads = min(torch.get_num_threads(), size // PIECE, count)
    if threads < 2:
        if count:
            kernel(0, count, *args)
        return
    step = -(-count // (threads * SHARES))
    pieces = [(start, min(start + step, count)) for start in range(0, count, step)]
    job = _Job(kernel, args, pieces, alive)
    helpers = _helpers(os.getpid())
    helpers.at_least(threads - 1)
    for _ in range(threads - 1):
        helpers.jobs.put(job)
    job.work()
    job.done.acquire()
    if job.error is not None:
        raise job.error


class _Job:
    error: BaseException | None = None

    def __init__(
        self, kernel: Callable[..., Any], args: tuple[Any, ...], pieces: list[tuple[int, int]], alive: Sequence[Tensor]
    ) -> None:
        self._kernel, self._args, self._alive = kernel, args, alive
        self._last = len(pieces)
        self._open = pieces[::-1]  # popped from its end; a pop and a count are each one step of the interpreter
        self._finished = itertools.count(1)
        self.done = threading.Semaphore(0)

    def work(self) -> None:
        """Takes pieces until there are none; whoever finishes the last one says so."""
        while True:
            try:
                start, stop = self._open.pop()
            except IndexError:
                return
            try:
                self._kernel(start, stop, *self._args)
            except BaseException as error:  # the caller raises it, when all have finished
                self.error = error
            if next(self._finished) == self._last:
                self.done.release()


class _Helpers:
    """Threads that wait for jobs. They are daemons and hold nothing while they wait."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self._started = 0
        self._starting = threading.Lock()

    def at_least(self, number: int) -> None:
        if self._started >= number:
            return
        with self._starting:
            while self._started < number:
                threading.Thread(target=self._run, name="tensorloop", daemon=True).start()
                self._started += 1

    def _run(self) -> None:
        while True:
            self.jobs.get().work()


@functools.lru_cache(maxsize=1)
def _helpers(process: int) -> _Helpers:
    """The helpers of this process: a fork has none of its parent's threads."""
    return _Helpers()
