"""Which loops run in this thread: what a TensorArray must know of the loop around it.

Every loop takes a *serial* when it begins, and every array remembers the newest serial when it was made. So an array
whose number is below the serial of the loop around it was made outside of that loop: it may be read there, not written.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from tensorloop._torch import overrides


class Recorder(Protocol):
    """Notes all that the body of a checkpointed loop uses (`loop/checkpoint/captures`)."""

    def record_use(self, buffer: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carries out a method of an array that the body uses."""

    def meet_array(self, buffer: Any) -> None:
        """The body uses this array."""

    def note(self, leaves: Iterable[Any]) -> None:
        """These are used where no torch function of the body shows it."""

    def own(self, results: Iterable[Any]) -> None:
        """These were made in this step, which no torch function shows."""


class _ThreadState(threading.local):
    serial = 0
    # That of the innermost checkpointed loop whose body runs here.
    recorder: Recorder | None = None
    # The nodes of checkpointed loops in the step that runs here of another (weak references), or None.
    nodes: Any = None
    # Whether operations are a loop's own, not its body's: the recorders of loops around it pass them by.
    in_library = False
    # The public function that the loops of this library are called by, where that is another than theirs.
    caller: str | None = None
    # How many loops of no steps learn the shapes of their outputs.
    shapes = 0
    # How many replays of checkpointed loops run.
    replays = 0
    # How many looks at the bodies of compiled loops are on. Loops in a body are a part of its step; they do the same
    # with gradients and without, as the look sees one of the two.
    looks = 0
    # Under vmap: which elements run in all of the loops around, a 0-d bool tensor; None for all.
    elements: Any = None
    # The substitutes of replays that run here, outermost first (`loop/checkpoint/substitutes`).
    substitutes: tuple[dict[int, Any], ...] = ()


here = _ThreadState()
_latest = [0]
# Told of every loop that runs: by name, it gives a context to run the loop in.
observer: ContextVar[Callable[[str], AbstractContextManager[object]] | None] = ContextVar("observer", default=None)


def observed(name: str) -> AbstractContextManager[object]:
    """The context in which the loop of this name runs: the observer's, where there is one."""
    watch = observer.get()
    return nullcontext() if watch is None else watch(name)


def newest_serial() -> int:
    """The serial of the loop begun last, in any thread."""
    return _latest[0]


@contextmanager
def called_as(caller: str | None) -> Iterator[None]:
    """Loops that begin inside are called by this public function; None: by their own."""
    outer, here.caller = here.caller, caller
    try:
        yield
    finally:
        here.caller = outer


@contextmanager
def without_numbers() -> Iterator[None]:
    """Marks code that runs on tensors without numbers, for their shapes alone."""
    here.shapes += 1
    try:
        yield
    finally:
        here.shapes -= 1


@contextmanager
def running() -> Iterator[None]:
    """A loop runs here."""
    outer = here.serial
    _latest[0] += 1
    here.serial = _latest[0]
    try:
        yield
    finally:
        here.serial = outer


@contextmanager
def library_code() -> Iterator[None]:
    """Operations inside are a checkpointed loop's own."""
    outer, here.in_library = here.in_library, True
    try:
        yield
    finally:
        here.in_library = outer


@contextmanager
def without_recorder() -> Iterator[None]:
    """As if no recorder was there: what is read inside is not read by the body."""
    outer, here.recorder = here.recorder, None
    try:
        with overrides.unseen():
            yield
    finally:
        here.recorder = outer


def unrecorded() -> AbstractContextManager[object]:
    """Operations of the library's own: the recorder does not see them."""
    return nullcontext() if here.recorder is None else overrides.unseen()
