"""How kernels are compiled: without the GIL, division as in numpy, kept on disk where there is a place.

Compiling takes seconds, once on a machine. Where it takes more than one, the log "tensorloop" says so, once a process.

numba keeps what it compiled beside the source, or in the user's cache where it may not write there. It compares dates
of the kernel's own file: after a change to what several files share (`pointers.py`), `make clean`.
"""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from numba import njit
from numba.core import event as events

PATIENCE = 1.0  # seconds of compiling that need no word
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


class Notice(events.Listener):
    """Tells of compiling that takes long. numba calls it for all that is compiled, not loaded, one at a time."""

    def __init__(self) -> None:
        self.spent = 0.0
        self.said = False
        self._depth = 0  # what a kernel calls is compiled inside of it
        self._begun = 0.0

    def on_start(self, event: events.Event) -> None:
        """Something begins to be compiled."""
        self._depth += 1
        if self._depth == 1:
            self._begun = perf_counter()

    def on_end(self, event: events.Event) -> None:
        """It is compiled, or has failed."""
        self._depth -= 1
        dispatcher: Any = (event.data or {}).get("dispatcher")
        function: Any = getattr(dispatcher, "py_func", None)
        module = getattr(function, "__module__", None) or ""
        if self.said or self._depth or not module.startswith("tensorloop."):
            return
        self.spent += perf_counter() - self._begun
        if self.spent > PATIENCE:
            self.said = True
            folder = dispatcher.stats.cache_path
            kept = f"kept for later processes in {folder}" if folder else "not kept: there is no folder to write to"
            # A warning by its level alone, which Python shows on stderr where nobody has set up logging.
            logging.getLogger("tensorloop").warning(
                f"tensorloop: kernels are compiled when first used, {self.spent:.1f} s so far, the last of them "
                f"{module}.{function.__name__}; more may follow. They are {kept}"
            )


events.register("numba:compile", Notice())
