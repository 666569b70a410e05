"""Rows shared out among the threads of torch's own OpenMP, once a loop."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensorloop.compiler.emitter.ir import machine

LEAST = 100_000_000  # operations that a thread should have, some milliseconds: below, waking it costs more than it does
LINE = 64


class _Here(threading.local):
    count = 0  # of a team that there would be, where this thread works alone
    team = True


here = _Here()


@contextmanager
def alone(users: bool = False) -> Iterator[None]:
    """A block in which this thread does what a team would have done, and torch's operations have one thread too.

    `torch.set_num_threads` would also tell Python threads that begin meanwhile how many they have, for ever. Where code
    of `users` runs inside it may have set that itself: to another number, which stays, or back to the one thread that
    it found, which must not.
    """
    library = _library(os.getpid())
    if library is None:
        yield
        return
    before, outer = torch.get_num_threads(), (here.count, here.team)
    here.count, here.team = here.count or before, False
    library.omp_set_num_threads(1)
    products = _of_products()(1)
    try:
        yield
    finally:
        if users:
            found = torch.get_num_threads()
            torch.set_num_threads(before if found == 1 else found)
        else:
            library.omp_set_num_threads(before)
        _of_products()(products)
        here.count, here.team = outer


def parts(rows: int, work: int) -> int:
    """Returns how many pieces rows are cut into."""
    if rows < 2 or work < 2 * LEAST:
        return 1
    most = min(here.count or torch.get_num_threads(), rows, work // LEAST)
    return most if most > 1 and _library(os.getpid()) is not None else 1


def together(shared: int, barriers: int, steps: int) -> int:
    """Returns how many threads do steps together."""
    return parts(shared // (barriers * machine.BARRIER), steps * shared)


def run_together(member: int, table: int, steps: int, scratch: int, count: int) -> None:
    """Calls `member` on every thread of a team, of at most `count`; each finds out there which one it is, of how many.

    The job: how many have arrived at a barrier, and how often all have, each in a line of its own; in the third, three
    functions and what there is to do.
    """
    library = _library(os.getpid())
    assert library is not None
    job = (ctypes.c_int64 * 32)()
    place = ctypes.addressof(job)
    skipped = -place % LINE // 8
    functions = (_sched_yield(), library.omp_get_thread_num, library.omp_get_num_threads)
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in functions]
    job[skipped + 16 : skipped + 22] = [*addresses, table, steps, scratch]
    library.GOMP_parallel(member, place + 8 * skipped, count, 0)


def team(member: int, count: int) -> Callable[[int], None]:
    """Calls `member` with a job on every thread of a team of so many."""

    def enter(job: int) -> None:
        library = _library(os.getpid())
        assert library is not None
        library.GOMP_parallel(member, job, count, 0)

    return enter


def run(enter: Callable[[int], None], table: int, steps: int, scratch: tuple[int, int], rows: int, count: int) -> None:
    """Calls what threads, or one, enter with a job of so many parts; these are claimed, so that any number does all.

    `scratch`: where it begins, and the bytes of each part.
    """
    bounds = [rows * n // count for n in range(count + 1)]
    job = (ctypes.c_int64 * (6 + len(bounds)))(0, count, table, steps, *scratch, *bounds)
    enter(ctypes.addressof(job))


@functools.cache
def _library(process: int) -> Any:
    """The OpenMP that torch loaded; None without one, and in a forked process, whose team is gone."""
    if process != _BORN[0]:
        return None
    assert torch.__file__
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            found = ctypes.CDLL(str(path))
            for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_set_num_threads"):
                getattr(found, name)
        except (OSError, AttributeError):
            continue
        call = found.GOMP_parallel
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return found
    return None


@functools.cache
def _of_products() -> Callable[[int], int]:
    """Sets how many threads MKL has here, which torch's products of matrices go through; gives what was set before."""
    assert torch.__file__
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu*.so*")):
        try:
            return ctypes.CDLL(str(path)).MKL_Set_Num_Threads_Local
        except (OSError, AttributeError):  # a build with another library
            continue
    return lambda count: 0


@functools.cache
def _sched_yield() -> Any:
    return ctypes.CDLL(None).sched_yield


_BORN = [os.getpid()]
