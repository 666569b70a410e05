"""What functions of a loop reach in Python beside tensors: whether a step of them changed it, and as it was.

A compiled loop runs its body once. A counter of its closure, a list that it appends to, an attribute that it sets, a
generator that it draws from would each be one step further, not T. So what the code names is copied before that step,
some levels deep, and compared after it. A loop that then runs as an eager one finds everything as it was.

That is done on every call and costs some microseconds; hence the bounds. What is beyond them is not seen.
"""

import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.slots import slots_of
from tensorloop._common.user_line import UserLine
from tensorloop.compiler.refused import Refused

MOST_OBJECTS = 64
MOST_ELEMENTS = 1000  # of one object
MOST_LEVELS = 4

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
_PASSED_BY = _PLAIN | {type, torch.dtype, torch.device, torch.Size}
_TENSORS = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_FOREIGN = sys.stdlib_module_names | {"torch", "tensorloop", "numpy"}  # their objects are not looked into
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}
_GONE = object()


class _Held(NamedTuple):
    """Something that may change: how it is read and set, and what it was."""

    name: str
    read: Callable[[], Any]
    put: Callable[[Any], Any]
    was: Any


class Appeared(Refused):
    """A step made what was not there before, or was None: it may be that the first one alone does."""


class PythonState:
    """What functions reach, as it is now; of each its name, itself and the names of its arguments."""

    def __init__(self, functions: Sequence[tuple[str, Any, Sequence[str]]]) -> None:
        self._functions = functions
        self.retake()

    def retake(self) -> None:
        """Takes what is there now for what was."""
        self._held: list[_Held] = []
        self._containers: list[tuple[str, Any, Any]] = []  # (name, object, a copy of what is in it)
        self._states: list[_Held] = []  # of generators of random numbers
        self._iterators: list[str] = []
        self._tensors: list[tuple[Tensor, int]] = []  # and how many hooks each has
        self._met: set[int] = set()
        self._place: UserLine | None = None
        for what, function, _ in self._functions:
            self._look(what, function, MOST_LEVELS)

    def check(self) -> None:
        """Raises `Refused` where something is another now."""
        if self._iterators:
            raise Refused(
                f"the body may take the next of {self._iterators[0]}, an iterator",
                "give what it iterates over as xs",
                self._place,
            )
        if any(not _same(x.read(), x.was) for x in self._states):
            raise Refused(
                "the body draws random numbers of Python or NumPy",
                "draw with torch, or before the loop and give them as xs",
                self._place,
            )
        if any(_hooks_of(x) != n for x, n in self._tensors):
            raise Refused(
                "the body registers a hook", "register it on what the loop returns, or on what it is given", self._place
            )
        for name in self._changed():
            raise (Appeared if self._only_appeared() else Refused)(
                f"the body changes {name}, a Python value outside of it",
                "carry it as a tensor, or let tl.carrying do so",
                self._place,
            )

    def changed(self) -> bool:
        """Whether a Python value is another now."""
        return next(iter(self._changed()), None) is not None

    def put_back(self) -> None:
        """Makes everything what it was, but iterators."""
        for x in (*self._held, *self._states):
            if not _same(x.read(), x.was):
                x.put(x.was)
        for _, x, was in self._containers:
            if not _same_elements(x, was):
                _fill(x, was)

        for x, n in self._tensors:
            hooks: Any = x._backward_hooks
            for key in [*(hooks or ())][n:]:
                del hooks[key]

    def _only_appeared(self) -> bool:
        """Whether all that changed was None before, or not there."""
        changed = [x.was for x in self._held if not _same(x.read(), x.was)]
        for _, x, was in self._containers:
            if not _same_elements(x, was):
                if not isinstance(x, dict):
                    return False
                changed += [was.get(k, _GONE) for k in (*x, *was) if not _same(x.get(k, _GONE), was.get(k, _GONE))]
        return all(was is None or was is _GONE for was in changed)

    def _changed(self) -> Iterable[str]:
        for x in self._held:
            if not _same(x.read(), x.was):
                yield x.name
        for name, x, was in self._containers:
            if not _same_elements(x, was):
                yield name if not isinstance(x, dict) else f"{name}{_first_change(x, was)}"

    # -- finding it

    def _look(self, name: str, x: Any, levels: int) -> None:
        kind = type(x)
        if kind in _TENSORS:
            self._tensors.append((x, _hooks_of(x)))
            return
        if kind in _PASSED_BY or not levels or id(x) in self._met or len(self._met) >= MOST_OBJECTS:
            return
        self._met.add(id(x))
        if kind is FunctionType:
            self._look_at_function(x, levels)
        elif kind is partial:
            self._look_at_all(name, (x.func, *x.args, *x.keywords.values()), levels)
        elif kind is MethodType:
            self._look_at_all(name, (x.__self__, x.__func__), levels)
        elif kind is BuiltinFunctionType:
            self._look(name, x.__self__, levels - 1)
        elif isinstance(x, (list, dict, set, deque, tuple)):
            self._look_at_container(name, x, levels)
        elif isinstance(x, torch.nn.Module):
            self._look_at_module(name, x, levels)
        elif isinstance(x, type) and issubclass(x, torch.autograd.Function):
            self._look_at_custom_function(name, x, levels)
        else:
            self._look_at_object(name, x, levels)

    def _look_at_all(self, name: str, xs: Iterable[Any], levels: int) -> None:
        for x in xs:
            if type(x) not in _PASSED_BY:
                self._look(name, x, levels)

    def _look_at_function(self, function: FunctionType, levels: int) -> None:
        variables, code = function.__globals__, function.__code__
        room = variables.get("__name__", "").partition(".")[0]
        if room == "torch":
            return
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        if room == "tensorloop":  # a user's function may be inside
            self._look_at_all("", (x for _, cell in cells if callable(x := _contents(cell))), levels)
            return
        if self._place is None:
            self._place = code.co_filename, code.co_firstlineno
        for name, cell in cells:
            x = _contents(cell)
            self._held.append(_Held(name, partial(_contents, cell), partial(setattr, cell, "cell_contents"), x))
            self._look(name, x, levels - 1)
        self._look_at_all("a default", function.__defaults__ or (), levels - 1)
        names = _names(code)
        for name in names:
            x = variables.get(name, _GONE)
            if type(x) is ModuleType:
                self._look_at_generators(x, names)
            elif x is not _GONE:
                if type(x) in _PLAIN:
                    put = partial(variables.__setitem__, name)
                    self._held.append(_Held(name, partial(variables.get, name), put, x))
                self._look(name, x, levels - 1)

    def _look_at_generators(self, module: ModuleType, names: Sequence[str]) -> None:
        """Random numbers that a function draws by the name of a module."""
        if module is random:
            self._look("random", getattr(random, "_inst", None), 1)
        elif module.__name__ == "numpy.random" or (module.__name__ == "numpy" and "random" in names):
            numpys: Any = sys.modules["numpy"].random
            self._hold_state("numpy.random", numpys.get_state, numpys.set_state)

    def _hold_state(self, name: str, read: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        was = read()
        self._states.append(_Held(name, lambda: _as_before(read(), was), put, was))

    def _look_at_container(self, name: str, x: Any, levels: int) -> None:
        if len(x) > MOST_ELEMENTS:
            return
        if not isinstance(x, tuple):
            self._containers.append((name, x, dict(x) if isinstance(x, dict) else list(x)))
        if levels > 1:
            self._look_at_all(name, x.values() if isinstance(x, dict) else x, levels - 1)

    def _look_at_module(self, name: str, module: torch.nn.Module, levels: int) -> None:
        attributes = vars(module)
        for key, x in attributes["_modules"].items():
            self._look(f"{name}.{key}", x, levels)  # however deep
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            if hooks:
                self._look_at_all("a hook", hooks.values(), levels)
        if type(module).__module__.startswith("torch."):  # their writes to buffers are operations
            put = partial(attributes.__setitem__, "training")
            self._held.append(_Held(f"{name}.training", partial(attributes.get, "training"), put, module.training))
            return
        self._containers.append((name, attributes, dict(attributes)))
        for values in (attributes["_buffers"], attributes["_modules"]):
            if values:
                self._containers.append((name, values, dict(values)))
        for key in attributes.keys() - _OF_MODULES:
            self._look(f"{name}.{key}", attributes[key], levels - 1)
        self._look_at_method(type(module).forward, levels)

    def _look_at_custom_function(self, name: str, cls: Any, levels: int) -> None:
        """What a custom Function counts or collects, on its class or by what its forward and backward name."""
        for base in cls.__mro__[: cls.__mro__.index(torch.autograd.Function)]:
            for key, x in vars(base).items():
                if isinstance(x, staticmethod):
                    self._look(name, x.__func__, levels)
                elif not key.startswith("_") or type(x) in _PLAIN:
                    put = partial(setattr, base, key)
                    self._held.append(_Held(f"{name}.{key}", partial(getattr, base, key, _GONE), put, x))
                    self._look(f"{name}.{key}", x, levels - 1)

    def _look_at_object(self, name: str, x: Any, levels: int) -> None:
        kind = type(x)
        if hasattr(kind, "__next__"):
            self._iterators.append(name)
        elif kind is random.Random:
            self._hold_state(name, x.getstate, x.setstate)
        elif hasattr(type(x), "bit_generator"):
            numpys = x.bit_generator
            self._hold_state(name, lambda: numpys.state, partial(setattr, numpys, "state"))
        elif kind.__module__.partition(".")[0] not in _FOREIGN or kind.__module__ == "types":
            attributes = getattr(x, "__dict__", None)
            if type(attributes) is dict:
                self._containers.append((name, attributes, dict(attributes)))
                for key, value in attributes.items():
                    self._look(f"{name}.{key}", value, levels - 1)
            for key in slots_of(x):
                value = getattr(x, key, _GONE)
                self._held.append(_Held(f"{name}.{key}", partial(getattr, x, key, _GONE), partial(_set, x, key), value))
                self._look(f"{name}.{key}", value, levels - 1)
            self._look_at_method(getattr(kind, "__call__", None), levels)  # noqa: B004 - the function is wanted

    def _look_at_method(self, function: Any, levels: int) -> None:
        if type(function) is FunctionType:
            self._look("", function, levels)


def _names(code: CodeType) -> Sequence[str]:
    """Names of globals and attributes, also in the functions defined inside."""
    inner = [x for x in code.co_consts if type(x) is CodeType]
    return [*code.co_names, *(name for x in inner for name in _names(x))] if inner else code.co_names


def _set(x: Any, name: str, value: Any) -> None:
    if value is _GONE:
        object.__delattr__(x, name)
    else:
        object.__setattr__(x, name, value)  # a frozen dataclass's own refuses


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is still empty
        return _GONE


def _hooks_of(x: Tensor) -> int:
    return len(x._backward_hooks) if x._backward_hooks else 0


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) in _PLAIN and type(a) is type(b) and (a == b or (a != a and b != b)))


def _same_elements(x: Any, was: Any) -> bool:
    if len(x) != len(was):
        return False
    if not isinstance(x, dict):
        return all(map(operator.is_, x, was)) or all(map(_same, x, was))
    if all(map(operator.is_, x.values(), was.values())) and all(map(operator.is_, x, was)):
        return True
    return all(_same(x.get(key, _GONE), value) for key, value in was.items())


def _first_change(x: dict[Any, Any], was: dict[Any, Any]) -> str:
    key = next(k for k in (*x, *was) if not _same(x.get(k, _GONE), was.get(k, _GONE)))
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _fill(x: Any, was: Any) -> None:
    """Puts elements back, those that are others alone: another thread may have its own in there."""
    if isinstance(x, dict):
        for key in [k for k in x if k not in was]:
            del x[key]
        for key, value in was.items():
            if x.get(key, _GONE) is not value:
                x[key] = value
    elif isinstance(x, list):
        x[:] = was
    else:
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(was)


def _as_before(now: Any, was: Any) -> Any:
    """A generator's state; the one that it was where it is equal to that."""
    same = repr(now) == repr(was) if type(now) is not tuple else all(map(_equal, now, was))
    return was if same else now


def _equal(a: Any, b: Any) -> bool:
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
