"""What a body's Python is told about tensors: sizes, lengths, kinds. Its course depends on nothing else."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_BETWEEN = "torch.overrides", "torch._tensor", "tensorloop.loop.compiled.look.calls"


@contextmanager
def sizes_seen() -> Iterator[list[str]]:
    """Notes all that functions of tensors give beside tensors, where the caller is not the library itself."""
    with _Told() as mode:
        yield mode.told


class _Told(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        out = func(*args, **(kwargs or {}))
        if not _is_tensors(out) and not is_ours(_caller(sys._getframe(1))):
            self.told.append(repr(out))
        return out


def _caller(frame: FrameType) -> FrameType:
    """Who called a function of tensors: some are written in Python, and call the mode themselves."""
    while frame.f_globals.get("__name__") in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs the library's code."""
    return frame.f_globals.get("__name__", "").startswith("tensorloop.")


def _is_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and bool(x) and all(map(_is_tensors, x)))
