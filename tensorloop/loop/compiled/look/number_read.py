"""What `.item()` gives of a tensor that changes from step to step: a number that can be compared, and nothing else.

A comparison is an answer (`values_read`), exact as Python's is. Sums and products of floats are made in float64, which
is what Python's floats are. All else that Python can do with a number is refused.
"""

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor

from tensorloop.compiler.refused import VALUES
from tensorloop.loop.compiled.look.call_watch import refusal

_SAID = ".item()"
_NUMBERS = (int, float, bool, complex)
_EXACT = 2**53  # up to which integers are float64's, too


class _Kind(type):
    """The class of NumberRead, which `isinstance` takes for Python's number: who compares classes is refused."""

    def __eq__(cls, other: object) -> bool:
        return _refuse() if other in _NUMBERS else cls is other

    def __hash__(cls) -> int:
        return id(cls)


class NumberRead(metaclass=_Kind):
    """A number, by the tensor of no dims that has it; `tell` tells Python a bool."""

    __slots__ = ("_tell", "_x")

    def __init__(self, x: Tensor, tell: Callable[[Tensor, str], bool]) -> None:
        self._x, self._tell = x, tell

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns float or int, so that isinstance() takes it for Python's number."""
        return float if self._x.is_floating_point() else int

    def __getattr__(self, name: str) -> Never:
        """Refuses the attributes of Python's numbers, such as `real` or `is_integer`; there are no others."""
        if not name.startswith("_") and hasattr(self.__class__, name):
            _refuse()
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return _compare("ne", self, 0)

    def __abs__(self) -> Any:
        return _computed("abs", self)

    def __neg__(self) -> Any:
        return _computed("neg", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
        """A call of torch that is given the number."""
        _refuse()


def is_read(x: Any) -> bool:
    """Whether x is a `NumberRead`."""
    return type(x) is NumberRead


def _compare(name: str, number: Any, other: Any) -> Any:
    operand = _operand(number, other)
    if operand is NotImplemented:
        return operand
    return number._tell(getattr(torch, name)(number._x, operand), _SAID)


def _computed(name: str, number: Any, *others: Any) -> Any:
    """The result of arithmetic, of floats alone: Python's integers have no bounds."""
    operands = [_operand(number, x) for x in others]
    if NotImplemented in operands:
        return NotImplemented
    if not number._x.is_floating_point() or (name == "div" and (isinstance(operands[0], Tensor) or not operands[0])):
        _refuse()
    return NumberRead(getattr(torch, name)(number._x, *operands), number._tell)


def _operand(number: Any, other: Any) -> Any:
    """Returns the other operand in the form with which torch computes what Python would."""
    floats = number._x.is_floating_point()
    if is_read(other) and other._x.dtype is number._x.dtype:
        return other._x
    if type(other) is bool or (type(other) is int and (abs(other) <= _EXACT if floats else abs(other) < 2**63)):
        return float(other) if floats else int(other)
    if type(other) is float and (floats or (other.is_integer() and abs(other) < _EXACT)):
        return other if floats else int(other)
    if other is None or isinstance(other, str):
        return NotImplemented
    return _refuse()


def _refuse(*_: Any) -> Never:
    raise refusal(f"{_SAID} reads a value in Python", VALUES)


def _binary(name: str, *, turned: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        found = _computed(name, self, other)
        return -found if turned and found is not NotImplemented else found

    return method


def _fill() -> None:
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(NumberRead, f"__{name}__", lambda self, other, name=name: _compare(name, self, other))
    for name in ("add", "sub", "mul"):
        setattr(NumberRead, f"__{name}__", _binary(name))
        setattr(NumberRead, f"__r{name}__", _binary(name, turned=name == "sub"))
    NumberRead.__truediv__ = _binary("div")  # pyright: ignore[reportAttributeAccessIssue]
    others = "float int index complex round trunc floor ceil hash repr str format pos pow rpow mod rmod floordiv"
    for name in f"{others} rfloordiv rtruediv divmod rdivmod and or xor lshift rshift invert".split():
        setattr(NumberRead, f"__{name}__", _refuse)


_fill()
