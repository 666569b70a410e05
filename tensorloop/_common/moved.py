"""Modules that moved, under their old names: importing one warns, and hands on what is at its new place."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tensorloop._common.user_line import warn


class _OldNames(MetaPathFinder, Loader):
    """Finds a module by its old name; asked last, so that it never stands before a module that is there."""

    def __init__(self, new_names: Mapping[str, str]) -> None:
        self.new_names = new_names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.new_names else None

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, "__getattr__", hands_on(module.__name__, self.new_names[module.__name__]))  # noqa: B010


def hands_on(old: str, new: str, *names: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for the module `old`: it warns and looks into `new`, for these `names` or for all."""

    def load(name: str) -> Any:
        if name.startswith("__") or (names and name not in names):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warn(f"{old}.{name} is {new}.{name} now; the old name goes in the version after next", DeprecationWarning)
        return getattr(import_module(new), name)

    return load


def keep_old_names(package: str, rooms: Mapping[str, str]) -> None:
    """Keeps modules that lay in `package` importable by their old names; `rooms` has room -> the modules in it."""
    moved = {name: f"{package}.{room}.{name.split('.')[-1]}" for room, names in rooms.items() for name in names.split()}
    sys.meta_path.append(_OldNames({f"{package}.{name}": new for name, new in moved.items()}))
