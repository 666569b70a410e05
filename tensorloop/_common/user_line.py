"""The user's line that runs now: the innermost one that is neither torch's nor this library's. Warnings stand there."""

import re
import sys
import warnings
from types import FrameType

UserLine = tuple[str, int]  # a file and a line


def user_place(frame: FrameType | None = None) -> UserLine | None:
    """Where that line is, among the callers of a frame."""
    frame = _user_frame(frame)
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def warn(text: str, kind: type[Warning] = UserWarning, place: UserLine | None = None) -> None:
    """Warns in the name of that line; what is shown is `place`, where there is a better one."""
    frame = _user_frame()
    names = {} if frame is None else frame.f_globals
    file, line = place or user_place() or ("<unknown>", 0)
    registry = names.setdefault("__warningregistry__", {})  # by which Python says each warning once
    warnings.warn_explicit(text, kind, file, line, names.get("__name__") or "<unknown>", registry)


def _user_frame(frame: FrameType | None = None) -> FrameType | None:
    frame = frame or sys._getframe(1)
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Whether code of torch's or this library's runs there, or of Python's that carries an error through a `with`."""
    return str(frame.f_globals.get("__name__")).split(".")[0] in ("torch", "tensorloop", "contextlib")


def cell_name(file: str) -> str | None:
    """`cell 3` for a notebook's cell, numbered as the notebook numbers it; None for any other file.

    A kernel compiles a cell under a name that nobody knows again, such as `ipykernel_29652/3477379381.py`.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()  # not imported: it may not be there
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    number = named and re.search(r"In\[(\d+)\]", named[1])
    return f"cell {number[1]}" if number else None
