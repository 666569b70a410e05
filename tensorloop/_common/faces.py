"""Faces of rooms: the names that a package hands on, each loaded when first touched; and late doors to rooms above."""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def face(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__`, `__all__` of a package whose `homes` are modules below tensorloop -> names in them."""
    home_of = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collector_at_rest():
            found = getattr(import_module(f"tensorloop.{home_of[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return load, lambda: sorted(home_of), sorted(home_of)


def late(home: str, name: str) -> Callable[..., Any]:
    """A function of a room that stands above the caller's, loaded when first called; `home` is a module of ours."""
    return lambda *args, **options: getattr(import_module(f"tensorloop.{home}"), name)(*args, **options)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Python's collector does not run inside: what makes many objects that stay would set it going over all others."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
