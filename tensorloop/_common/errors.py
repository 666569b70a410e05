"""Refusals: inside, a short fact; at the public function, the same with the function's name before it.

What checks an argument raises one of the four classes here, says the argument's path, what came, what was expected and
how to mend it, and need not know who was called. The public function lets no `Fact` out: `@named("scan")` around it, or
where a call costs less than a decorator does

    try:
        ...
    except Fact as fact:
        raise fact.named("TensorArray.append") from fact.__cause__

A user's own function runs inside public ones, and what it calls of ours is named already: a fact is never a user's.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class Fact(Exception):
    """An error that says what is wrong, without the name of the public function that was called."""

    kind: ClassVar[type[Exception]] = Exception

    def named(self, name: str) -> Exception:
        """The error that the user gets."""
        error = self.kind(f"{name}: {self}")
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error.with_traceback(self.__traceback__)


class WrongType(Fact, TypeError):
    """A type or a structure."""

    kind = TypeError


class WrongValue(Fact, ValueError):
    """A value, a shape or a length."""

    kind = ValueError


class WrongIndex(Fact, IndexError):
    """A slot that is not there."""

    kind = IndexError


class Misuse(Fact, RuntimeError):
    """The right thing at the wrong time."""

    kind = RuntimeError


class Freed(Misuse):
    """The memory of a tensor is not there."""


def named(name: str, hints: Mapping[str, str] | None = None) -> Callable[[_F], _F]:
    """For a public function: the facts that are raised inside become errors that begin with `name`.

    `hints`: what to say of keywords that it does not take, and that others have.
    """

    def mark(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except Fact as fact:
                raise fact.named(name) from fact.__cause__
            except TypeError as error:
                if (text := _unknown(error, function, options, hints or {})) is None:
                    raise
                raise TypeError(f"{name}: {text}") from None

        wrapper: Any = call
        # `_torch.eager_only` marks code, and may mark that of one function alone.
        wrapper.__code__ = wrapper.__code__.replace(co_name=wrapper.__name__)
        return wrapper

    return mark


def facts_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function without its name, for one that calls it and names what is wrong after itself."""
    plain = inspect.unwrap(function)

    def call(*args: Any, **options: Any) -> Any:
        try:
            return plain(*args, **options)
        except TypeError as error:
            if isinstance(error, Fact) or (text := _unknown(error, plain, options, {})) is None:
                raise
            raise WrongType(text) from None

    call.__name__ = plain.__name__
    return call


def _unknown(
    error: TypeError, function: Callable[..., Any], options: Mapping[str, Any], hints: Mapping[str, str]
) -> str | None:
    """Says what is wrong with the keywords of a call that raised `error`; None if the called function raised it."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        return None
    from tensorloop._common.keywords import describe_unknown  # what it takes to compare words loads slowly

    return describe_unknown(function, options, hints)
