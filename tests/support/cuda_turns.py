"""Blocks of numba's simulator whose threads take turns, each up to the next barrier: no polling, and no chance in it.

The simulator's own threads run all at once and are polled. Here a thread that lacks a barrier runs ahead of those that
have a higher number, every time, so what it reads too early or writes too soon shows. Each barrier must be met by all
threads of the block that are left.
"""

from threading import Semaphore
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel as simulator


class Thread(simulator.BlockThread):
    """One that runs when it is told to, up to its next barrier or its end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.turn, self.done = Semaphore(0), Semaphore(0)
        self.waits = False

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.waits = False
            self.done.release()

    def syncthreads(self) -> None:
        self.waits = True
        self.done.release()
        self.turn.acquire()
        self.waits = False
        if self.abort:
            raise RuntimeError("another thread of the block has failed")

    def go_on(self) -> None:
        self.turn.release() if self.waits else self.start()
        self.done.acquire()


class Block(simulator.BlockManager):
    """A block of threads, to be put in place of the simulator's own."""

    def run(self, grid_point: Any, *args: Any) -> None:
        places = np.ndindex(*self._block_dim)
        threads = [Thread(lambda: self._f(*args), self, grid_point, place, self._debug) for place in places]
        while threads:
            for thread in threads:
                thread.go_on()
                if thread.exception:
                    error, trace = thread.exception
                    _stop(threads)
                    raise error.with_traceback(trace)
            waiting = [thread for thread in threads if thread.waits]
            if waiting and len(waiting) < len(threads):
                _stop(threads)
                raise RuntimeError(f"{len(waiting)} of {len(threads)} threads of a block came to a barrier")
            threads = waiting


def _stop(threads: list[Thread]) -> None:
    for thread in threads:
        if thread.waits:
            thread.abort = True
            thread.go_on()
