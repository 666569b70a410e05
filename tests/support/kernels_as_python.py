"""Kernels of the CPU as the Python that they are written in, for a count of the lines that tests run.

numba's machine code hides its lines from every counter. As a plugin of pytest, before anything else is imported:
`pytest -p tests.support.kernels_as_python`. Slow, and deaf to what only machine code does: tests of compiling fail.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

os.environ["NUMBA_DISABLE_JIT"] = "1"

import numpy as np
from numba import extending


class Pointer:
    """Numbers at an address."""

    def __init__(self, address: int, like: Any) -> None:
        self._address, self._dtype = int(address), np.dtype(type(like))
        self._bytes = ctypes.c_char * self._dtype.itemsize

    def __getitem__(self, j: int) -> Any:
        found = self._at(j)[0]
        return int(found) if self._dtype.kind in "iu" else found  # a kernel's sums of small ints are not small

    def __setitem__(self, j: int, x: Any) -> None:
        self._at(j)[0] = x

    def _at(self, j: int) -> np.ndarray:
        place: Any = self._bytes.from_address(self._address + int(j) * self._dtype.itemsize)
        return np.frombuffer(place, self._dtype)


def copy(target: int, source: int, count: int) -> None:
    """The bytes, which may be the same ones."""
    ctypes.memmove(int(target), int(source), int(count))


def above(address: int, key: Any, worst: Any) -> np.uint64:
    """A bit for each number that is, added to `key`, above `worst` or NaN."""
    from tensorloop.kernels.cpu.beam import BLOCK

    numbers = Pointer(address, key)
    return np.uint64(sum(1 << v for v in range(BLOCK) if not key + numbers[v] <= worst))


INTRINSICS: dict[str, Callable[..., Any]] = {
    "pointer": Pointer,
    "copy_bytes": copy,
    "copy_block": copy,
    "zero_block": lambda target, count: ctypes.memset(int(target), 0, int(count)),
    "prefetch": lambda address: None,
    "_above": above,
    "_lowest": lambda bits: (int(bits) & -int(bits)).bit_length() - 1,
}


def intrinsic(function: Any = None, **options: Any) -> Any:
    """In place of numba's: what the kernels know by that name."""
    return INTRINSICS[function.__name__] if function is not None else intrinsic


extending.intrinsic = intrinsic
np.seterr(all="ignore")  # machine code says nothing of it
