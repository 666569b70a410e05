"""Rows shared out among the threads of torch's own OpenMP, once a loop."""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

LEAST = 100_000_000  # operations that a thread should have, some milliseconds: below, waking it costs more than it does


def parts(rows: int, work: int) -> int:
    """How many pieces rows are cut into."""
    if rows < 2 or work < 2 * LEAST:
        return 1
    most = min(torch.get_num_threads(), rows, work // LEAST)
    return most if most > 1 and _parallel(os.getpid()) is not None else 1


def run(member: int, table: int, steps: int, scratch: tuple[int, int], rows: int, count: int) -> None:
    """Calls `member` on every thread of a team; parts are claimed, so that fewer threads do them all too.

    `scratch`: where it begins, and the bytes of each part.
    """
    bounds = [rows * n // count for n in range(count + 1)]
    job = (ctypes.c_int64 * (6 + len(bounds)))(0, count, table, steps, *scratch, *bounds)
    parallel = _parallel(os.getpid())
    assert parallel is not None
    parallel(member, ctypes.addressof(job), count, 0)


@functools.cache
def _parallel(process: int) -> Any:
    """GOMP_parallel of the library that torch loaded; None without one, and in a forked process, whose team is gone."""
    if process != _BORN[0]:
        return None
    assert torch.__file__
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            found = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return found
    return None


_BORN = [os.getpid()]
