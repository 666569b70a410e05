"""Why a loop is not compiled."""

import re
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tensorloop._common.user_line import UserLine, is_ours

# What cures several.
VALUES = "keep values in tensors: torch.where chooses by them, table[i[None]][0] takes a row by one"
NATIVE = "write it with other operations, or before or after the loop, or set compile=False"
TRIED = "choose by tensors (torch.linalg.cholesky_ex, torch.where), or try around the loop"
STATE = "carry it as a tensor, give it as xs, do it outside of the loop, or let tl.carrying carry it"
FUNCTION = "write what it gives as y + (s - s.detach()), which is y with the gradient of s, or set compile=False"
GAP = "set compile=False, and report it: this is a gap, not a rule"
MEMORY = "let go of other tensors, or give a part of what is large, or set compile=False"
CURE_OF_ERRORS = "set compile=False if the eager loop is right"

# What torch says of what stands for a number, where it takes numbers alone.
_STAND_INS = [
    ("NumberRead", ".item() reads a value in Python", VALUES),
    ("concrete integers", "an operation takes i, the number of the step, as a Python number", "torch.tensor(i)"),
    ("Expected cond to be True", "it takes a power of a negative number by i", "torch.tensor(-0.5) ** i"),
]
_NO_MEMORY = r"can't allocate memory|CUDA out of memory|Storage size calculation overflowed"


class _Raised(threading.local):
    met: "list[Signal] | None" = None  # those that were made while a step is looked at


_raised = _Raised()


@contextmanager
def remembered() -> "Iterator[list[Signal]]":
    """Collects every signal that is made inside the block, also those that somebody catches."""
    outer, _raised.met = _raised.met, []
    try:
        yield _raised.met
    finally:
        _raised.met = outer


class Signal(BaseException):
    """Ends a step that is looked at. It is raised through the body, whose `except Exception` is not meant for it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if _raised.met is not None:
            _raised.met.append(self)


class Refused(Signal):
    """Why a body is not compiled, what a user can do about it, and the file and line that say so."""

    def __init__(self, reason: str, cure: str, place: UserLine | None = None) -> None:
        super().__init__(reason)
        self.reason, self.cure, self.place = reason, cure, place

    def alone(self) -> "Refused":
        """A copy of the refusal without the frames it was raised in, to be kept, or raised again."""
        return Refused(self.reason, self.cure, self.place)


def of_error(error: BaseException) -> Refused:
    """An error that the look at a step met, and the user's line that it comes from; it holds no frames."""
    if isinstance(error, Refused):
        return error.alone()
    text = str(error).strip().partition("\n")[0]
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__) if not is_ours(f)]
    place = frames[-1] if frames else None
    for what, reason, cure in _STAND_INS:
        if what in text:
            return Refused(reason, cure, place)
    if (lacking := memory_lacking(error)) is not None:
        return Refused(f"looking at its step {lacking}", MEMORY, place)
    said = f"looking at its step raised {type(error).__name__}" + (f": {text}" if text else "")
    return Refused(said, CURE_OF_ERRORS, place)


def is_of_device(error: BaseException) -> bool:
    """Whether an error is that of a device that fails, or has no memory left: it says nothing of a loop's body."""
    return memory_lacking(error) is not None or "CUDA error" in str(error)


def memory_lacking(error: BaseException) -> str | None:
    """Says of an error that there was too little memory, on whichever device; None where that was not the cause."""
    text = str(error)
    if not isinstance(error, torch.OutOfMemoryError) and not re.search(_NO_MEMORY, text):
        return None
    asked = re.search(r"tried to allocate ([\d.,]+ \w+)", text, re.IGNORECASE)
    return "takes more memory than there is" + (f", {asked[1]} at once" if asked else "")
