"""Keyword arguments that a function does not have: the error names the one that it has for it."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def hints(*groups: tuple[str, str]) -> dict[str, str]:
    """From (keywords apart by spaces, what to say of each)."""
    return {key: hint for keys, hint in groups for key in keys.split()}


def names_instead(**hints: str) -> Callable[[_F], _F]:
    """For a function: what to say of keywords that other libraries have; of others the nearest of its own."""

    def mark(function: _F) -> _F:
        name = getattr(function, "__name__", "")
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for key in options:
                if key not in known:
                    raise TypeError(_message(name, key, hints.get(key), list(known)))
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]

    return mark


def _message(name: str, key: str, hint: str | None, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    said = hint or (f"did you mean {near[0]}=" if near else f"it takes {', '.join(sorted(known))}")
    return f"{name}: there is no argument {key}=; {said}"
