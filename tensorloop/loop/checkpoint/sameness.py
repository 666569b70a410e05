"""Whether a value that has been exchanged does the same: a function made anew from the same code, say.

`for x in data: def cell(h): ...` makes a function a round, and an attribute that `forward` sets is a new function each
time. Those do the same where code, defaults and what they close over do; tensors are the same only if they are one.
"""

from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from tensorloop.loop.effects.notes import contents

_DEEPEST, _MOST = 12, 1000  # beyond, things count as others


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are plain and equal, or functions or modules that do the same."""
    return a is b or _Comparison().same(a, b)


class _Comparison:
    """Compares, and remembers what is being compared: a function may close over itself."""

    def __init__(self) -> None:
        self._met = dict[tuple[int, int], Any]()  # the two, which stay alive and keep their ids
        self._depth = 0

    def same(self, a: Any, b: Any) -> bool:
        if a is b or (id(a), id(b)) in self._met:
            return True
        if type(a) is not type(b) and not self.same(type(a), type(b)):
            return False
        if isinstance(a, Tensor) or self._depth == _DEEPEST or len(self._met) == _MOST:
            return False
        self._met[id(a), id(b)] = a, b
        self._depth += 1
        try:
            return self._inside(a, b)
        finally:
            self._depth -= 1

    def _inside(self, a: Any, b: Any) -> bool:
        if isinstance(a, FunctionType):
            return self._functions(a, b)
        if isinstance(a, MethodType):
            return self.same(a.__func__, b.__func__) and self.same(a.__self__, b.__self__)
        if isinstance(a, partial):
            return self.same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        if isinstance(a, type):
            return (a.__qualname__, a.__bases__) == (b.__qualname__, b.__bases__) and self._spaces(vars(a), vars(b))
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(self.same, a, b))
        if isinstance(a, dict):
            return self._spaces(a, b)
        spaces = [getattr(x, "__dict__", None) for x in (a, b)]
        if isinstance(spaces[0], dict) and type(a).__eq__ is object.__eq__:
            return self.same(*spaces)
        try:
            return bool(a == b or (a != a and b != b))
        except Exception:  # an array, say, or two that cannot be compared
            return False

    def _spaces(self, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
        unread = {"__dict__", "__weakref__", "__doc__", "__firstlineno__", "_abc_impl"}
        return a.keys() == b.keys() and all(self.same(a[key], b[key]) for key in a.keys() - unread)

    def _functions(self, a: FunctionType, b: FunctionType) -> bool:
        if not _same_code(a.__code__, b.__code__):
            return False
        cells = [[contents(cell) for cell in x.__closure__ or ()] for x in (a, b)]
        return (
            self.same((a.__defaults__, a.__kwdefaults__), (b.__defaults__, b.__kwdefaults__))
            and self.same(*cells)
            and a.__globals__ is b.__globals__
        )


def _same_code(a: CodeType, b: CodeType) -> bool:
    """Whether it does the same, wherever it is written."""
    if a == b:
        return True
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount")
    names += ("co_posonlyargcount", "co_kwonlyargcount")
    if any(getattr(a, name) != getattr(b, name) for name in names) or len(a.co_consts) != len(b.co_consts):
        return False
    pairs = list(zip(a.co_consts, b.co_consts, strict=True))
    return all(
        _same_code(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and _equal(x, y)
        for x, y in pairs
    )


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants of code are equal; 0.0 and -0.0 are not, and neither are (1,) and (True,)."""
    return a == b if isinstance(a, frozenset) else repr(a) == repr(b)
