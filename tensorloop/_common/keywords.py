"""Keyword arguments that a function does not have: the error names the one that it has for it."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tensorloop._common.errors import WrongType

_F = TypeVar("_F", bound=Callable[..., Any])


def hints(*groups: tuple[str, str]) -> dict[str, str]:
    """From (keywords apart by spaces, what to say of each)."""
    return {key: hint for keys, hint in groups for key in keys.split()}


def names_instead(**hints: str) -> Callable[[_F], _F]:
    """For a function below `@named`: what to say of keywords that others have; for the rest, the nearest of its own."""

    def mark(function: _F) -> _F:
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for key in options:
                if key not in known:
                    raise WrongType(_describe_unknown(key, hints.get(key), list(known)))
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]

    return mark


def _describe_unknown(key: str, hint: str | None, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    said = hint or (f"did you mean {near[0]}=" if near else f"it takes {', '.join(sorted(known))}")
    return f"there is no argument {key}=; {said}"
