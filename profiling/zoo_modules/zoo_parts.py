"""What the zoo's lists of modules share: sizes, how a class of a package is found, how a module is called."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from zoo_modules.zoo_check import Batch

HEADS, HIDDEN = 2, 16
WAV = (400, 513, 130, 277)  # samples


def find(path: str) -> Any:
    """A class or function by its dotted name; packages are imported where they are used."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def first(module: Any, batch: Batch, *args: Any, **options: Any) -> Any:
    """The first of what a module gives."""
    return module(batch.x, *args, **options)[0]


LONG = (17, 32, 9, 24)  # which subsampling leaves something of
REFLECTED = (7, 12, 3, 9)  # rows that are reflected at their ends are longer than what is added
SHORT = "rows below the kernel's length are refused by the module's own check"


def made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """What makes a module of that class."""
    return lambda: find(path)(*args, **options)


def channels_first(module: Any, batch: Batch) -> Any:
    """Of (B, C, T*), turned on both sides."""
    return module(batch.x.transpose(1, 2)).transpose(1, 2)
