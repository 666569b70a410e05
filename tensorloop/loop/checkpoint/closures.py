"""What a body's code refers to beside tensors: plain values of closure cells, defaults, globals, attributes it names.

A Python closure holds variables, not values: `for i in range(3): body = lambda k, c: c * data[i]` makes three bodies
that all see the last `i` once the loop has gone on, and so would every replay. Values that stood still while the first
sweep ran are compared when a backward begins; those that moved are the body's own, a counter say.
"""

import dis
import reprlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from tensorloop._common.errors import Misuse

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_FUNCTIONS = FunctionType | MethodType | partial
_GONE = object()
_BINDS = {"variable": "STORE_DEREF", "global": "STORE_GLOBAL", "attribute": "STORE_ATTR"}


class _Held(NamedTuple):
    """A plain value, and the code that refers to it."""

    kind: str  # "variable", "default", "global" or "attribute"
    name: str
    of: str  # of an attribute: the name of its object
    read: Callable[[], Any]
    value: Any
    code: CodeType


class Constants:
    """The plain values that a body refers to, from before a sweep on."""

    def __init__(self, body: Callable[..., Any]) -> None:
        met: dict[int, FunctionType] = {}
        self.held = list(_values(body, met))
        self.functions = list(met.values())

    @property
    def code(self) -> CodeType | None:
        """That of the user's function, if it has one."""
        return next((x.__code__ for x in self.functions if not _is_ours(x)), None)

    def settle(self) -> None:
        """After the sweep: what has changed in it is the body's own."""
        self.held = [x for x in self.held if _same(x.read(), x.value)]

    def check(self) -> None:
        """Raises where a value is another one than in the sweep."""
        for x in self.held:
            now = x.read()
            if not _same(now, x.value) and _matters(x):
                name = f"{x.of}.{x.name}" if x.of else x.name
                was, is_now = reprlib.repr(x.value), "gone" if now is _GONE else reprlib.repr(now)
                raise Misuse(
                    f"the {x.kind} {name}, which the body uses, was {was} in the forward pass and is {is_now} "
                    f"in backward, which runs steps again; bind it where the body is made "
                    f"(`lambda ..., {x.name}={name}: ...`), or pass it in the carry or in xs"
                )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (a == b or (a != a and b != b)))


def _matters(held: _Held) -> bool:
    """Whether the code reads the value by that name, and nothing there binds it anew. Asked about suspects alone."""
    found = [list(dis.get_instructions(code)) for code in _codes(held.code)]
    if any((i.opname, i.argval) == (_BINDS.get(held.kind), held.name) for code in found for i in code):
        return False
    if held.kind == "global":
        return any((i.opname, i.argval) == ("LOAD_GLOBAL", held.name) for code in found for i in code)
    if held.kind == "attribute":
        pairs = [(a.argval, b) for code in found for a, b in pairwise(code) if b.opname == "LOAD_ATTR"]
        # One instruction may load two names; the attribute is the second's.
        return any(
            b.argval == held.name and held.of in (a, *(a if isinstance(a, tuple) else ())[-1:]) for a, b in pairs
        )
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _values(function: Any, met: dict[int, FunctionType]) -> Iterator[_Held]:
    """The plain values that a callable refers to, and those that the functions it refers to do."""
    owner = None
    while isinstance(function, partial | MethodType):
        if isinstance(function, MethodType):
            owner, function = function.__self__, function.__func__
        else:
            function = function.func
    if not isinstance(function, FunctionType):
        methods = (getattr(type(function), name, None) for name in ("forward", "__call__"))
        owner, function = function, next((x for x in methods if isinstance(x, FunctionType)), None)
        if function is None:
            return
    if id(function) in met:
        return
    met[id(function)] = function
    if _is_ours(function):
        found = [_contents(cell) for cell in function.__closure__ or ()]
        found += getattr(owner, "__dict__", {}).values()
        # A user's function may be held by an object of ours, as a search's model holds it.
        held = [y for x in found if _is_ours(type(x)) and not callable(x) for y in getattr(x, "__dict__", {}).values()]
        for inner in filter(callable, (*found, *held)):
            yield from _values(inner, met)
    else:
        yield from _values_of(function, owner, met)


def _is_ours(function: FunctionType | type) -> bool:
    return (function.__module__ or "").startswith("tensorloop.")


def _values_of(function: FunctionType, owner: Any, met: dict[int, FunctionType]) -> Iterator[_Held]:
    code, variables = function.__code__, function.__globals__
    names = {name for inner in _codes(code) for name in inner.co_names}
    objects: list[tuple[str, Any]] = [] if owner is None or not code.co_varnames else [(code.co_varnames[0], owner)]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = _contents(cell)
        if type(value) in _PLAIN:
            yield _Held("variable", name, "", partial(_contents, cell), value, code)
        elif isinstance(value, _FUNCTIONS):
            yield from _values(value, met)
        else:
            objects.append((name, value))
    for name in names & variables.keys():
        value = variables[name]
        if type(value) in _PLAIN:
            yield _Held("global", name, "", partial(variables.get, name, _GONE), value, code)
        elif not isinstance(value, FunctionType):
            objects.append((name, value))
        elif value.__globals__ is variables:
            yield from _values(value, met)
    defaults = function.__defaults__ or ()
    for i, value in enumerate(defaults, code.co_argcount - len(defaults)):
        if type(value) in _PLAIN:
            yield _Held("default", code.co_varnames[i], "", partial(_default, function, i), value, code)
    for of, holder in objects:
        attributes = getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            for name in names & attributes.keys():
                if type(value := attributes[name]) in _PLAIN:
                    yield _Held("attribute", name, of, partial(attributes.get, name, _GONE), value, code)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _default(function: FunctionType, i: int) -> Any:
    defaults = function.__defaults__ or ()
    i -= function.__code__.co_argcount - len(defaults)
    return defaults[i] if 0 <= i < len(defaults) else _GONE
