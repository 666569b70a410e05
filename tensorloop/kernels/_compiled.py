"""How kernels are compiled: without the GIL, division as in numpy, kept on disk where there is a place.

numba keeps what it compiled beside the source, or in the user's cache where it may not write there. It compares dates
of the kernel's own file: after a change to what several files share (`_pointers.py`), `make clean`.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel: compiled for the types of its first call, then for others as they come."""
    return _kept(function, _OPTIONS)


def summing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose sums may be added up in any order, several numbers at a time: the same one each time."""
    return _kept(function, {**_OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}})


def _kept(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to write to, as in a sealed container: compiled in every process
        return njit(**options)(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of kernels, compiled into each."""
    return njit(inline="always", **_OPTIONS)(function)
