"""Attributes of objects, classes and modules as their dicts and slots have them: no property, no `__getattr__` runs."""

from functools import lru_cache
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

from torch import nn

GONE = object()  # where there is no such attribute any more
_NOTHING: dict[str, Any] = {}
_MRO: Any = type.__dict__["__mro__"]


class _Fields(NamedTuple):
    x: Any


_FIELDS: Any = (MemberDescriptorType, type(vars(_Fields)["x"]))  # a slot, and a field of a named tuple


def is_on(holder: Any, name: str) -> bool:
    """Whether an object itself has an attribute, not only its class."""
    try:
        return not isinstance(holder, type) and name in object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return False


def attribute(holder: Any, name: str) -> Any:
    """What `holder.name` is: methods are bound to the holder, and so is a property's function, which is not called."""
    try:
        own = _NOTHING if isinstance(holder, type) else object.__getattribute__(holder, "__dict__")
    except AttributeError:
        own = _NOTHING
    if name in own:
        return own[name]
    if isinstance(holder, nn.Module) and isinstance(inner := own.get("_modules"), dict) and name in inner:
        return inner[name]  # torch.jit's modules have something else there
    found: Any = GONE
    for kind in _mro(holder) if isinstance(holder, type) else type(holder).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            break
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return MethodType(found.__func__, holder if isinstance(holder, type) else type(holder))
    if isinstance(holder, type):
        return found
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, _FIELDS):
        try:
            return found.__get__(holder)
        except AttributeError:  # a slot that nothing is in
            return GONE
    return MethodType(found, holder) if isinstance(found, FunctionType) else found


@lru_cache(maxsize=1024)
def method_of(kind: type) -> FunctionType | None:
    """The function that runs where an object of a class is called; None where it is not written in Python."""
    found = (getattr(kind, name, None) for name in ("forward", "__call__"))
    return next((x for x in found if isinstance(x, FunctionType)), None)


def _mro(kind: type) -> tuple[type, ...]:
    """A class and its bases, whatever its metaclass says; then what all classes have."""
    metaclass: type[Any] = type(kind)
    return (*_MRO.__get__(kind), *metaclass.__mro__)
