"""A user's own function, found by `SCRIPT.py:function` or `package.module:function`; its errors without our frames."""

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Function = Callable[..., Any]
_FOREIGN = (
    Path(torch.__file__).parent,
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)


class BadInput(Exception):
    """An error in what the user gave. The message says it all: nobody needs a traceback."""


@contextmanager
def function_of(target: str) -> Iterator[Function]:
    """The function that `target` names.

    Inside the block `sys.argv` is the script alone and the script's folder is on the path, as if Python had been
    called with it; `__name__` is its stem, so that `if __name__ == "__main__":` does not run.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise BadInput(f"{target}: give a file and a function in it, such as model.py:loss")
    argv, path, known = sys.argv, sys.path[:], set(sys.modules)
    try:
        if place.endswith(".py") or Path(place).is_file():
            module, stopped = _script(Path(place))
        else:
            module, stopped = _module(place), ""
        yield _function(module, place, name, stopped)
    finally:
        sys.argv, sys.path[:] = argv, path
        if (stem := Path(place).stem) not in known:
            sys.modules.pop(stem, None)


def refuse_arguments(function: Function, target: str) -> None:
    """Raises where `function(T)` cannot be called as it is declared."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin may have none
        return
    try:
        signature.bind(8)
    except TypeError as error:
        name = target.rpartition(":")[2]
        raise BadInput(
            f"{target} takes {signature} and is called with T alone ({error}); give a function of T, such as "
            f"def loss(T): return {name.rpartition('.')[2]}(...)"
        ) from None


def of_the_user(error: BaseException) -> str:
    """The traceback as Python prints it, of the user's own frames; where there are none, the error alone."""
    report = traceback.TracebackException.from_exception(error)
    _trim(report)
    return "".join(report.format() if report.stack else report.format_exception_only()).rstrip()


def one_line(error: BaseException) -> str:
    """The first line of the message, or the type where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _script(path: Path) -> tuple[ModuleType, str]:
    """Runs a file as a module; also what is to be said if it stopped by `sys.exit`."""
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 3)
        raise BadInput(f"{path}: there is no such file{_list('; near: ', near)}") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    path = path.resolve()  # a script may change the folder
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except SystemExit as error:
        line = traceback.extract_tb(error.__traceback__)[1].lineno
        return module, f"line {line} of it ended the program while it was imported (exit {error.code})"
    except Exception as error:
        raise BadInput(f"{path.name} fails while it is imported:\n{of_the_user(error)}") from None
    return module, ""


def _module(name: str) -> ModuleType:
    sys.argv = [name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            file = name.replace(".", "/") + ".py"
            raise BadInput(f"{name}: there is no such module; is the file {file} meant?") from None
        raise BadInput(f"{name} fails while it is imported:\n{of_the_user(error)}") from None
    except SystemExit as error:
        raise BadInput(f"{name} ended the program while it was imported (exit {error.code})") from None
    except Exception as error:
        raise BadInput(f"{name} fails while it is imported:\n{of_the_user(error)}") from None


def _function(module: ModuleType, place: str, name: str, stopped: str) -> Function:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            why = f" ({stopped})" if stopped else ""
            raise BadInput(f"{place}: there is no {name}{why}{_others(module, name)}")
        found = getattr(found, part)
    if not callable(found):
        raise BadInput(f"{place}: {name} is no function, it is of type {type(found).__name__}{_others(module, name)}")
    if stopped:
        print(f"tensorloop.memory: note: {place}: {stopped}; {name} was there by then", file=sys.stderr)
    return found


def _others(module: ModuleType, name: str) -> str:
    """The names that may have been meant: near ones, or all."""
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, own, 3)
    return _list("; near: ", near) or _list("; there are: ", sorted(own)[:10]) or "; it has no functions"


def _list(before: str, names: list[str]) -> str:
    return before + ", ".join(names) if names else ""


def _trim(report: traceback.TracebackException) -> None:
    report.stack[:] = [frame for frame in report.stack if not _foreign(frame.filename)]
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if other is not None:
            _trim(other)


def _foreign(filename: str) -> bool:
    return filename.startswith("<frozen ") or any(Path(filename).is_relative_to(folder) for folder in _FOREIGN)
