"""What a step has read that it did not make, and how its code came to it: where all is the same, so is its way.

A step that was followed and found without effects need not be followed again as long as it finds what it found then:
Python does the same again. What it was told of tensors' numbers is looked at elsewhere. A later loop has functions and
closures of its own, so each value is noted by how it is reached from the loop's functions: a variable of a closure, a
global, an attribute, an item. Tensors may be others with the same shape and dtype; objects are the same ones.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop._torch.overrides import unseen
from tensorloop._torch.storage import PLAIN as PLAIN_TENSORS
from tensorloop.loop.effects import fetches, known
from tensorloop.loop.effects.notes import GONE, contents
from tensorloop.loop.effects.operands import EMPTY, NEW, UNKNOWN, words

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_ONE = BuiltinFunctionType, MethodDescriptorType, property, type(...)
_ASK_KIND = words("isinstance issubclass callable type getattr hasattr len iter next super enumerate zip map")
_MOST, _MOST_NODES = 256, 4096  # elements of a container, nodes of a step
_SIZED = (list, dict, set, frozenset, tuple, bytearray, memoryview, deque)


class _Node(NamedTuple):
    """A value: fetched from another one by a key, held against what it was."""

    parent: int
    fetch: Callable[[Any, Any], Any]
    key: Any
    matches: Callable[[Any, Any], bool]
    expected: Any


class Reads:
    """Notes what a step reads; `roots` are the loop's functions."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self.complete = True
        self.is_new: Any = None  # says of an object whether the step that is followed made it
        self._nodes: list[_Node] = []
        self._roots = len(roots)
        self._noted: dict[tuple[int, Any, Any], int] = {}
        self._numbers: dict[int, int] = {}  # of what was met, by its id
        self._cells: dict[int, tuple[int, int]] = {}  # a function's number, and which of its variables
        self._globals: dict[int, int] = {}
        self._of_codes: dict[int, int | None] = {}  # functions by their code, None where there are several
        self._codes: set[int] = set()
        self._held: list[Any] = []  # so that no id comes twice
        for k, root in enumerate(roots):
            at = self._add(k, fetches.itself, None, root)
            if at is not None and known.in_python(type(root), "__call__"):
                self._part(at, fetches.attribute, "__call__", root)

    def end(self) -> None:
        """The step is over: nothing of it is held."""
        for held in (self._noted, self._numbers, self._cells, self._globals, self._of_codes, self._codes, self._held):
            held.clear()

    def hold(self, roots: Sequence[Any]) -> bool:
        """Whether all that was read is the same, in a loop with these functions."""
        if len(roots) != self._roots:  # another carry: its numbers and objects are among them
            return False
        values = [*roots]
        for parent, fetch, key, matches, expected in self._nodes:
            value = fetch(values[parent], key)
            if value is not expected and not matches(value, expected):
                return False
            values.append(value)
        return True

    # -- what is said about it later

    def plain(self) -> tuple[Any, ...]:
        """The plain values among it."""
        return tuple((type(x.expected), x.expected) for x in self._nodes if x.matches in (_is_equal, _is_alike))

    def values(self, roots: Sequence[Any]) -> list[Any]:
        """Returns the values as they are now, fetched from these roots; `GONE` for what can no longer be fetched."""
        values = [*roots]
        for parent, fetch, key, _, _ in self._nodes:
            try:
                values.append(fetch(values[parent], key))
            except (AttributeError, TypeError, KeyError, IndexError, ValueError):  # what it was fetched from is another
                values.append(GONE)
        return values

    def holding(self, values: Sequence[Any]) -> list[bool]:
        """Which of those values are what they were when they were read, all the way to them."""
        found = [True] * self._roots
        for node, value in zip(self._nodes, values[self._roots :], strict=True):
            found.append(found[node.parent] and self.is_held(len(found), value))
        return found

    def is_held(self, at: int, value: Any) -> bool:
        """Whether a value is what it was."""
        node = self._nodes[at - self._roots]
        return value is node.expected or node.matches(value, node.expected)

    def is_module(self, at: int) -> bool:
        """Whether a value is noted for its hooks and parts."""
        return self._nodes[at - self._roots].matches is _is_same_module

    def said(self, at: int, values: Sequence[Any]) -> tuple[str, str]:
        """Returns what kind of thing a value is and how code comes to it: ("attribute", "self.config.scale")."""
        if at < self._roots:
            return "argument", "" if isinstance(values[at], (FunctionType, MethodType, partial)) else "self"
        node = self._nodes[at - self._roots]
        if node.fetch is fetches.referred:  # unless there is a way to it
            named = range(self._roots), (k for k, x in enumerate(self._nodes, self._roots) if x.fetch != node.fetch)
            other = next((k for k in chain(*named) if values[k] is values[at]), None)
            if other is not None:
                return self.said(other, values)
        above = self.said(node.parent, values)
        return fetches.said(node.fetch, node.key, values[node.parent], values[at], above)

    # -- what is read

    def variable(self, frame: FrameType, name: str, cell: Any) -> None:
        """A variable of a closure."""
        at = self._cells.get(id(cell))
        if at is not None:
            self._add(at[0], fetches.closure_variable, at[1], contents(cell))
        elif cell is UNKNOWN:
            self.complete = False
            owner = self._of_codes.get(id(frame.f_code))
            if owner is not None:
                key = frame.f_code.co_freevars.index(name)
                self._add(owner, fetches.closure_variable, key, frame.f_locals.get(name, GONE))
        elif not self.is_new(cell):
            self.complete = False

    def of_globals(self, frame: FrameType, name: str) -> None:
        """A global."""
        value = frame.f_globals.get(name, GONE)
        at = self._globals.get(id(frame.f_globals))
        if at is not None:
            self._add(at, fetches.global_of, name, value)
        elif (module := known.module_of(frame)) in sys.modules and fetches.module_global(None, (module, name)) is value:
            self._add(0, fetches.module_global, (module, name), value)
        else:
            self.complete = False

    def attribute(self, owner: Any, name: str) -> None:
        """An attribute, which may be the object's or its class's."""
        kind = type(owner)
        if isinstance(owner, Tensor):
            if name in known.dict_of(owner):
                self._part(self._numbers.get(id(owner)), fetches.attribute, name, owner)
                self.complete = False
        elif known.is_proxy(kind) or issubclass(kind, threading.local):
            self.complete = False
            if issubclass(kind, threading.local) and (at := self._numbers.get(id(owner))) is not None:
                self._part(at, fetches.attribute, name, owner)
        elif kind is super:
            self.inherited(owner.__thisclass__, owner.__self__, name)
        elif not isinstance(owner, _SCALARS):
            at = self._numbers.get(id(owner))
            if at is None and self.is_new(owner):
                held = known.dict_of(owner)
                of_library = kind.__module__ == "builtins" or known.is_trusted(kind.__module__ or "")
                if (type(held) is dict and name in held) or of_library:
                    return
                owner, kind = kind, type(kind)
                if self.is_new(owner):
                    return
            if at is None and issubclass(kind, (type, ModuleType)):
                at = self._constant(owner)
            self._part(at, fetches.way_to(owner, name), name, owner)

    def inherited(self, kind: Any, owner: Any, name: str) -> None:
        """Stays complete after `super()` only if it finds a function or the like: its code is noted when it begins."""
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        above = kinds[kinds.index(kind) + 1 :] if kind in kinds else ()
        found = next((base.__dict__[name] for base in above if name in base.__dict__), None)
        self.complete &= isinstance(found, (FunctionType, *_ONE))

    def compared(self, a: Any, b: Any) -> None:
        """`a is b`: of containers it is known what is in them, not which they are."""
        self.complete &= (
            a is None or b is None or not {type(a), type(b)} & {list, dict, set, tuple, MethodType, partial}
        )

    def all_attributes(self, owner: Any) -> None:
        """The `__dict__` of an object, of which nobody sees all that is read."""
        self._part(self._numbers.get(id(owner)), fetches.own_dict, "__dict__", owner)
        self.complete = False

    def item(self, container: Any, key: Any) -> None:
        """An item."""
        if isinstance(container, (*_SCALARS, Tensor)) or container is NEW:
            return
        exact = type(container) in (dict, list, tuple) and type(key) in (str, int, bool)
        if not exact or (type(key) is not int and type(container) is not dict):
            return self.whole(container)
        at = self._numbers.get(id(container))
        if at is not None or not self.is_new(container):
            self._part(at, fetches.item, key, container)
        return None

    def given(self, name: str, args: Sequence[Any]) -> None:
        """A function in C, by its name, reads what it is given."""
        self.complete &= name not in ("id", "hash")
        for x in args:
            if not isinstance(x, Tensor):
                self.whole(x, name in _ASK_KIND)

    def whole(self, x: Any, asks_kind: bool = True, depth: int = 4) -> None:
        """All of an object that is iterated over, compared or asked whether it is true."""
        kind = type(x)
        if isinstance(x, (*_SCALARS, Tensor, type, ModuleType, FunctionType, *_ONE)) or x is EMPTY or x is NEW:
            return
        if isinstance(x, nn.Module):
            return self.module(x)
        at = self._numbers.get(id(x))
        if kind in (list, tuple, dict):
            if (at is None and kind is not tuple and not self.is_new(x)) or depth == 0 or len(x) > _MOST:
                self.complete = False
                return None
            if at is not None:
                self._add(at, fetches.shape, None, fetches.shape(x))
            for key, y in x.items() if kind is dict else enumerate(x):
                if at is not None:
                    self._add(at, fetches.item, key, y)
                self.whole(y, asks_kind, depth - 1)
        elif kind in (set, frozenset):
            plain = all(isinstance(y, _SCALARS) for y in x)
            if at is not None and plain:
                self._add(at, fetches.elements, None, frozenset(x))
            elif not (plain and self.is_new(x)):
                self.complete = False
        elif at is None:
            self.complete &= x is not UNKNOWN and self.is_new(x)
        elif not (asks_kind and _is_users(kind) and kind.__weakrefoffset__ != 0):
            self.complete = False
            if not isinstance(x, _SIZED) or len(x) <= _MOST:
                self._add(at, fetches.elements, None, fetches.elements(x))
        return None

    def module(self, module: nn.Module) -> None:
        """A module of torch's calls its parts and hooks, which no instruction of the user's shows."""
        for m in module.modules():
            key = weakref.ref(m)
            if (0, fetches.referred, key) in self._noted:
                continue
            self.complete &= not fetches.hooks(m)
            self._node(0, fetches.referred, key, m, _is_same_module, tuple(map(id, fetches.parts(m))))
            if not known.is_trusted(type(m).__module__ or ""):
                self._part(self._numbers.get(id(m)), fetches.way_to(m, "forward"), "forward", m)

    def begins(self, frame: FrameType) -> None:
        """Code of the user's begins: it must be known how whoever called it came to it."""
        code, caller = frame.f_code, frame.f_back
        if id(code) not in self._codes and not (caller and known.module_of(caller).startswith("tensorloop.loop")):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            kinds = (first if isinstance(first, type) else type(first)).__mro__
            base = next((kind for kind in kinds if _runs(kind.__dict__.get(code.co_name), code)), None)
            if base is None:  # neither a method nor a property
                self.complete = False
            elif not self.is_new(base):
                self._part(self._constant(base), fetches.attribute, code.co_name, base)
        self.complete &= bool(code.co_flags & 2)
        self._know_codes(code)

    # -- how it is noted

    def _part(self, at: int | None, fetch: Callable[[Any, Any], Any], key: Any, owner: Any) -> None:
        if at is None:
            self.complete = False
        else:
            self._add(at, fetch, key, fetch(owner, key))

    def _constant(self, x: Any) -> int | None:
        found = self._numbers.get(id(x))
        return self._add(0, fetches.referred, weakref.ref(x), x) if found is None else found

    def _add(self, parent: int, fetch: Callable[[Any, Any], Any], key: Any, value: Any) -> int | None:
        found = self._noted.get((parent, fetch, key))
        if found is not None:
            return found
        matches, expected = _expected(value)
        if matches is None:  # it cannot be known again
            self.complete, matches, expected = False, _is_of, type(value)
        return self._node(parent, fetch, key, value, matches, expected)

    def _node(self, parent: int, fetch: Any, key: Any, value: Any, matches: Any, expected: Any) -> int | None:
        if len(self._nodes) >= _MOST_NODES:
            self.complete = False
            return None
        self._nodes.append(_Node(parent, fetch, key, matches, expected))
        at = self._noted[parent, fetch, key] = self._roots + len(self._nodes) - 1
        known_by_kind = isinstance(value, _SCALARS) or (isinstance(value, Tensor) and not known.dict_of(value))
        if not known_by_kind and id(value) not in self._numbers:
            self._numbers[id(value)] = at
            self._held.append(value)
            self._open(value, at)
        return at

    def _open(self, x: Any, at: int) -> None:
        """Notes what is reached through something without an instruction that says so."""
        if isinstance(x, FunctionType):
            self._know_codes(x.__code__)
            self._globals.setdefault(id(x.__globals__), at)
            self._cells |= {id(cell): (at, i) for i, cell in enumerate(x.__closure__ or ())}
            self._held += x.__closure__ or ()
            self._of_codes[id(x.__code__)] = None if id(x.__code__) in self._of_codes else at
            code, given = x.__code__, len(x.__defaults__ or ())
            for name in (*code.co_varnames[code.co_argcount - given : code.co_argcount], *(x.__kwdefaults__ or ())):
                self._add(at, fetches.default, name, fetches.default(x, name))
            if _is_ours(x):
                self._open_ours(at, fetches.closure_variable, enumerate(map(contents, x.__closure__ or ())))
        elif isinstance(x, (MethodType, staticmethod, classmethod, property)):
            for name in {property: ("fget",), MethodType: ("__func__", "__self__")}.get(type(x), ("__func__",)):
                self._add(at, fetches.slot, name, getattr(x, name))
        elif isinstance(x, partial):
            self._add(at, fetches.slot, "func", x.func)
            self._add(at, fetches.given, None, fetches.given(x))
            for key in (*range(len(x.args)), *x.keywords):
                self._add(at, fetches.argument, key, fetches.argument(x, key))
        elif type(x) is tuple:
            for key, y in enumerate(x):
                self._add(at, fetches.item, key, y)
        elif _is_ours(type(x)):
            self._open_ours(at, fetches.attribute, known.dict_of(x).items() if known.dict_of(x) else ())
        elif isinstance(x, nn.Module):
            self.module(x)

    def _open_ours(self, at: int, fetch: Callable[[Any, Any], Any], parts: Iterable[tuple[Any, Any]]) -> None:
        """Adds the user's functions that one of this library's own holds: no instruction shows that they are called."""
        for key, x in parts:
            if isinstance(x, (FunctionType, MethodType, partial)):
                self._add(at, fetch, key, x)
            elif _is_ours(type(x)):
                self._node(at, fetch, key, x, _is_of, type(x))

    def _know_codes(self, code: CodeType) -> None:
        if id(code) not in self._codes:
            self._codes.add(id(code))
            self._held.append(code)
            for inner in code.co_consts:
                if type(inner) is CodeType:
                    self._know_codes(inner)


class _Nobody:
    """Notes nothing, for a step of which nobody asks what it reads."""

    complete = True
    is_new: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


NOBODY: Any = _Nobody()


def _runs(x: Any, code: CodeType) -> bool:
    """Whether a method or a property runs a code."""
    return getattr(getattr(x, "fget", None) or getattr(x, "__func__", x), "__code__", None) is code


def _is_users(kind: type) -> bool:
    """Whether all that an object of a class holds are attributes."""
    return kind.__dictoffset__ != 0 and not issubclass(kind, known.OWNERS) and not issubclass(kind, tuple)


def _is_ours(x: Any) -> bool:
    return (x.__module__ or "").startswith("tensorloop.")


# -- whether a value is what it was; that it is the same object was asked before


def _expected(x: Any) -> tuple[Any, Any]:
    kind = type(x)
    if x is GONE or isinstance(x, _ONE):
        return _never, x
    if kind in (int, str, bool, bytes, type(None), torch.Size, torch.dtype, torch.device, range, frozenset):
        return _is_equal, x
    if kind in (float, complex):
        return _is_alike, x
    if kind in PLAIN_TENSORS:
        with unseen():
            return _is_tensor, (x.shape, x.dtype, x.device, x.requires_grad)
    if kind is FunctionType:
        return _has_code, x.__code__
    if kind is tuple:
        return _is_tuple, len(x)
    if kind in (list, dict, MethodType, partial, set):
        return _is_of, kind
    try:
        return _is_referred, weakref.ref(x)
    except TypeError:
        if kind in (staticmethod, classmethod):
            return _never, x
        # It cannot be known again, but all that is read of it is.
        return (_is_of, kind) if _is_users(kind) or known.of_type(kind, "__slots__") is not None else (None, None)


def _never(x: Any, expected: Any) -> bool:
    return False


def _is_equal(x: Any, expected: Any) -> bool:
    return type(x) is type(expected) and x == expected


def _is_alike(x: Any, expected: Any) -> bool:
    return type(x) is type(expected) and repr(x) == repr(expected)  # 0.0 is not -0.0, and nan is nan


def _is_tensor(x: Any, expected: Any) -> bool:
    shape, dtype, device, grad = expected
    kind = type(x) in PLAIN_TENSORS
    return kind and x.shape == shape and x.dtype is dtype and x.requires_grad is grad and x.device == device


def _has_code(x: Any, expected: Any) -> bool:
    return type(x) is FunctionType and x.__code__ is expected


def _is_tuple(x: Any, expected: Any) -> bool:
    return type(x) is tuple and len(x) == expected


def _is_of(x: Any, expected: Any) -> bool:
    return type(x) is expected


def _is_referred(x: Any, expected: Any) -> bool:
    return expected() is x


def _is_same_module(x: Any, expected: Any) -> bool:
    # All parts live as long as they are the same: so does each id.
    return x is not None and not fetches.hooks(x) and tuple(map(id, fetches.parts(x))) == expected
