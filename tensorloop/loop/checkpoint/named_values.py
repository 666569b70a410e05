"""What the names in a body's code lead to, followed without running any of it.

From variables, globals, defaults, arguments of a `partial` and `self` to the attributes that the code reads of them,
from those to theirs, and into the functions of the user's that are met on the way: those of the same file, and those of
files that are not installed packages. Nothing is looked at that the code does not read, and no more than `MOST`
functions: a body may name an object that the whole program hangs on. It runs once a loop, so it is written for few
calls.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop.loop.checkpoint.code_names import Reads, names_in
from tensorloop.loop.checkpoint.static_attributes import GONE, attribute, is_on, method_of

MOST = 256  # functions, counted once for each object whose method they are
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_FUNCTIONS = FunctionType | MethodType | partial
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_STANDARD = (os.path.dirname(os.__file__), "<frozen ")
_UNREAD = Reads()


class Held(NamedTuple):
    """A value that is compared, and how code refers to it."""

    kind: str  # "variable", "global", "attribute", "default" or "argument"
    names: tuple[str, ...]  # `self.config.scale`
    read: Callable[[], Any]
    value: Any
    code: CodeType

    @property
    def name(self) -> str:
        """The last of the names."""
        return self.names[-1]


# Something that code refers to: kind, names, what reads it, value, what the code reads of it. The kind of an attribute
# that a class binds to its object is "method".
_Thing = tuple[str, tuple[str, ...], Callable[[], Any], Any, Reads]


def is_ours(x: FunctionType | type) -> bool:
    """Whether something is this library's."""
    return (x.__module__ or "").startswith("tensorloop.")


class Walk:
    """Over the names of a body and of the functions that they lead to."""

    def __init__(self, body: Any) -> None:
        self.plain: list[Held] = []
        self.others: list[Held] = []  # functions and modules
        self.functions: dict[int, FunctionType] = {}  # in the order in which they were met
        self._met = set[tuple[int, ...]]()
        self._todo: deque[Any] = deque((body,))
        while self._todo and len(self._met) < MOST:
            self._into(self._todo.popleft())

    def _into(self, called: Any) -> None:
        """What a callable refers to; the functions among it are for later."""
        function, owner, partials = _unwrapped(called)
        if function is None or (met := (id(function), id(owner), *map(id, partials))) in self._met:
            return
        self._met.add(met)
        self.functions.setdefault(id(function), function)
        if not is_ours(function):
            self._look(function, _given(function, owner, partials) + _outside(function))
            if owner is not None and (inherited := names_in(function.__code__).inherited):
                self._todo += _of_bases(owner, inherited, function)
            return
        found = [contents(cell) for cell in function.__closure__ or ()]
        found += getattr(owner, "__dict__", {}).values()
        # A user's function may be held by an object of ours, as a search's model holds it.
        held = [y for x in found if is_ours(type(x)) and not callable(x) for y in getattr(x, "__dict__", {}).values()]
        self._todo.extendleft(reversed([x for x in (*found, *held) if callable(x)]))

    def _look(self, function: FunctionType, things: list[_Thing]) -> None:
        """Keeps what these are and what the function's code reads of them."""
        code, seen = function.__code__, set[tuple[int, int]]()
        while things:
            kind, names, read, value, reads = things.pop()
            if type(value) in _PLAIN or isinstance(value, Enum):
                self.plain.append(Held(kind, names, read, value, code))
            elif isinstance(value, _FUNCTIONS | BuiltinFunctionType):
                if kind != "method":
                    self.others.append(Held(kind, names, read, value, code))
                if kind == "variable" or _is_near(value, function):
                    self._todo.append(value)
            elif not isinstance(value, Tensor) and (id(value), id(reads)) not in seen:
                seen.add((id(value), id(reads)))
                if reads.whole and not isinstance(value, type | ModuleType):
                    if isinstance(value, nn.Module) and names != code.co_varnames[:1]:
                        self.others.append(Held(kind, names, read, value, code))
                    if (found := method_of(type(value))) and found is not function and _is_near(found, function):
                        self._todo.append(value)
                if reads.attributes:
                    things += _attributes(read, value, names, reads)


def _attributes(read: Callable[[], Any], value: Any, names: tuple[str, ...], reads: Reads) -> list[_Thing]:
    things, is_module = list[_Thing](), isinstance(value, ModuleType)
    is_fixed = isinstance(read, partial) and read.func is _itself  # pyright: ignore[reportUnknownMemberType]
    for name, inner in reads.attributes.items():
        found = attribute(value, name)
        if found is not GONE and not (is_module and isinstance(found, BuiltinFunctionType)):  # torch.sin
            asked = partial(attribute, value, name) if is_fixed else partial(_read, read, name)
            kind = "method" if type(found) is MethodType and not is_on(value, name) else "attribute"
            things.append((kind, (*names, name), asked, found, inner))
    return things


def _read(holder: Callable[[], Any], name: str) -> Any:
    return attribute(holder(), name)


def _unwrapped(function: Any) -> tuple[FunctionType | None, Any, list[partial[Any]]]:
    """The function in Python that runs where a callable does, the object it is called on, and the partials around."""
    owner, partials = None, list[partial[Any]]()
    while isinstance(function, partial | MethodType):
        if isinstance(function, MethodType):
            owner, function = function.__self__, function.__func__
        else:
            partials.append(function)
            function = function.func
    if not isinstance(function, FunctionType):
        owner, function = function, method_of(type(function))
    return function, owner, partials


def _of_bases(owner: Any, names: frozenset[str], function: FunctionType) -> list[MethodType]:
    """The methods that `super()` may mean."""
    found = [vars(base).get(name) for base in type(owner).__mro__[1:] for name in names]
    return [MethodType(x, owner) for x in found if isinstance(x, FunctionType) and _is_near(x, function)]


def _given(function: FunctionType, owner: Any, partials: Sequence[partial[Any]]) -> list[_Thing]:
    """What a function's arguments are before it is called: `self`, what partials give, defaults."""
    code, things = function.__code__, list[_Thing]()
    variables = names_in(code).variables
    places = code.co_varnames[: code.co_argcount]
    if owner is not None and places:
        reads = variables.get(places[0], _UNREAD)
        things.append(("argument", places[:1], partial(_itself, owner), owner, reads))
        places = places[1:]
    if not (partials or function.__defaults__ or function.__kwdefaults__):
        return things
    given = set[str]()
    for outer in partials:
        for name in outer.keywords.keys() - given:
            read = partial(outer.keywords.get, name, GONE)
            things.append(("argument", (name,), read, read(), variables.get(name, _UNREAD)))
        given |= outer.keywords.keys()
    values = [x for inner in reversed(partials) for x in inner.args]
    for name, value in zip(places, values, strict=False):
        things.append(("argument", (name,), partial(_itself, value), value, variables.get(name, _UNREAD)))
    for name in (*places[len(values) :], *(function.__kwdefaults__ or ())):
        read = partial(_default, function, name)
        if name not in given and (value := read()) is not GONE:
            things.append(("default", (name,), read, value, variables.get(name, _UNREAD)))
    return things


def _outside(function: FunctionType) -> list[_Thing]:
    """The variables of a function's closure, and the globals that its code reads."""
    code, variables, things = function.__code__, function.__globals__, list[_Thing]()
    names = names_in(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read = partial(contents, cell)
        things.append(("variable", (name,), read, read(), names.variables.get(name, _UNREAD)))
    for name, reads in names.globals.items():
        if name in variables:
            things.append(("global", (name,), partial(variables.get, name, GONE), variables[name], reads))
    return things


def _is_near(x: Any, function: FunctionType) -> bool:
    """Whether what runs where `x` is called is in the function's file, or in one that is no installed package's."""
    found = x if isinstance(x, FunctionType) else _unwrapped(x)[0]
    if found is None or found.__globals__ is function.__globals__:
        return found is not None
    return not (_is_installed(found.__code__.co_filename) or is_ours(found))


@lru_cache(maxsize=1024)
def _is_installed(file: str) -> bool:
    return file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


def _itself(x: Any) -> Any:
    return x


def contents(cell: Any) -> Any:
    """What a variable of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _default(function: FunctionType, name: str) -> Any:
    code, defaults = function.__code__, function.__defaults__ or ()
    places = code.co_varnames[: code.co_argcount]
    i = places.index(name) - len(places) + len(defaults) if name in places else -1
    return defaults[i] if i >= 0 else (function.__kwdefaults__ or {}).get(name, GONE)
