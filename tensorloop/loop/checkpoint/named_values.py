"""What the names in a body's code lead to, followed without running any of it.

From variables, globals, defaults, arguments of a `partial` and `self` to the attributes that the code names, from those
to theirs, and into the functions of the user's that are met on the way: those of the same file, and those of files that
are not installed packages. A path of names leads to each value; whether the code really reads it that way is looked at
where the value has changed, as that takes long.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.loop.checkpoint.static_attributes import GONE, attribute, found_names, method_of

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_FUNCTIONS = FunctionType | MethodType | partial
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_STANDARD = (os.path.dirname(os.__file__), "<frozen ")


class Name(NamedTuple):
    """How code refers to something."""

    kind: str  # "variable", "global", "attribute", "default", "argument"; on the way "call" of an object, "super"
    name: str
    of: str  # of an attribute: the name of its object
    code: CodeType


class Held(NamedTuple):
    """A value that is compared, and the names that lead to it, through calls and attributes."""

    path: tuple[Name, ...]
    read: Callable[[], Any]
    value: Any

    @property
    def kind(self) -> str:
        """That of the last of the names."""
        return self.path[-1].kind

    @property
    def name(self) -> str:
        """The last of the names."""
        return self.path[-1].name


class _Thing(NamedTuple):
    """Something that code may ask for its attributes."""

    name: str
    read: Callable[[], Any]
    value: Any
    path: tuple[Name, ...]


def is_plain(x: Any) -> bool:
    """Whether a value is compared by what it is, and has nothing in it."""
    return type(x) in _PLAIN or isinstance(x, Enum)


def is_ours(x: FunctionType | type) -> bool:
    """Whether something is this library's."""
    return (x.__module__ or "").startswith("tensorloop.")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


class Walk:
    """Over the names of a body and of the functions that they lead to."""

    def __init__(self) -> None:
        self.functions: dict[int, FunctionType] = {}  # in the order in which they were met
        self._met = set[tuple[Any, ...]]()

    def into(self, function: Any, path: tuple[Name, ...]) -> Iterator[Held]:
        """What a callable refers to, and what the functions it refers to do. `path` led here."""
        function, owner, partials = _unwrapped(function)
        if function is None or (met := (id(function), id(owner), path[-1:])) in self._met:
            return
        self._met.add(met)
        self.functions.setdefault(id(function), function)
        if not is_ours(function):
            yield from self._values(function, [*_given(function, owner, partials, path), *_outside(function, path)])
            return
        found = [_contents(cell) for cell in function.__closure__ or ()]
        found += getattr(owner, "__dict__", {}).values()
        # A user's function may be held by an object of ours, as a search's model holds it.
        held = [y for x in found if is_ours(type(x)) and not callable(x) for y in getattr(x, "__dict__", {}).values()]
        for inner in filter(callable, (*found, *held)):
            yield from self.into(inner, path)

    def _values(self, function: FunctionType, todo: list[_Thing]) -> Iterator[Held]:
        """What these things are, and the attributes that the function's code may ask them for."""
        code = function.__code__
        names = {name for inner in codes_in(code) for name in inner.co_names}
        seen = set[tuple[int, str]]()
        while todo:
            thing = todo.pop()
            value, path = thing.value, thing.path
            if is_plain(value) or isinstance(value, FunctionType | BuiltinFunctionType):
                yield Held(path, thing.read, value)
            if isinstance(value, _FUNCTIONS):
                if _is_near(value, function) or path[-1].kind == "variable":
                    yield from self.into(value, path)
            elif not (is_plain(value) or isinstance(value, Tensor) or (id(value), thing.name) in seen):
                seen.add((id(value), thing.name))
                if not isinstance(value, type | ModuleType) and _is_near(value, function, but=function):
                    yield from self.into(value, (*path, Name("call", thing.name, "", code)))
                todo += _attributes(thing, names, code)


def _attributes(holder: _Thing, names: set[str], code: CodeType) -> Iterator[_Thing]:
    for name in found_names(holder.value, names):
        value = attribute(holder.value, name)
        path = (*holder.path, Name("attribute", name, holder.name, code))
        if not (isinstance(holder.value, ModuleType) and isinstance(value, BuiltinFunctionType)):  # torch.sin
            yield _Thing(name, partial(_read, holder.read, name), value, path)
        for base in type(holder.value).__mro__[1:] if "super" in names and isinstance(value, MethodType) else ():
            if isinstance(inherited := vars(base).get(name), FunctionType):
                bound = MethodType(inherited, holder.value)
                yield _Thing(name, partial(_itself, bound), bound, (*holder.path, Name("super", name, "", code)))


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
        owner, function = function, method_of(function)
    return function, owner, partials


def _given(
    function: FunctionType, owner: Any, partials: Sequence[partial[Any]], path: tuple[Name, ...]
) -> Iterator[_Thing]:
    """What a function's arguments are before it is called: `self`, what partials give, defaults."""
    code = function.__code__
    places = list(code.co_varnames[: code.co_argcount])
    if owner is not None and places:
        yield _Thing(places[0], lambda: owner, owner, path or (Name("argument", places[0], "", code),))
        del places[0]
    given = set[str]()
    for outer in partials:
        for name in outer.keywords.keys() - given:
            read = partial(outer.keywords.get, name, GONE)
            yield _Thing(name, read, read(), (*path, Name("argument", name, "", code)))
        given |= outer.keywords.keys()
    values = [x for inner in reversed(partials) for x in inner.args]
    for name, value in zip(places, values, strict=False):
        yield _Thing(name, partial(_itself, value), value, (*path, Name("argument", name, "", code)))
    for name in places[len(values) :] + list(function.__kwdefaults__ or ()):
        read = partial(_default, function, name)
        if name not in given and (value := read()) is not GONE:
            yield _Thing(name, read, value, (*path, Name("default", name, "", code)))


def _outside(function: FunctionType, path: tuple[Name, ...]) -> Iterator[_Thing]:
    """The variables of a function's closure, and the globals of which its code has the names."""
    code, variables = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        read = partial(_contents, cell)
        yield _Thing(name, read, read(), (*path, Name("variable", name, "", code)))
    names = {name for inner in codes_in(code) for name in inner.co_names}
    for name in names & variables.keys():
        yield _Thing(name, partial(variables.get, name, GONE), variables[name], (*path, Name("global", name, "", code)))


def _is_near(x: Any, function: FunctionType, but: FunctionType | None = None) -> bool:
    """Whether what runs where `x` is called is in the function's file, or in one that is no installed package's."""
    found, _, _ = _unwrapped(x)
    if found is None or found is but or is_ours(found):
        return False
    if found.__globals__ is function.__globals__:
        return True
    file = found.__code__.co_filename
    return not (file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED))


def _itself(x: Any) -> Any:
    return x


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _default(function: FunctionType, name: str) -> Any:
    code, defaults = function.__code__, function.__defaults__ or ()
    places = code.co_varnames[: code.co_argcount]
    i = places.index(name) - len(places) + len(defaults) if name in places else -1
    return defaults[i] if i >= 0 else (function.__kwdefaults__ or {}).get(name, GONE)
