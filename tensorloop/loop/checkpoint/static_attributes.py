"""Attributes of objects, classes and modules as their dicts and slots have them: no property, no `__getattr__` runs."""

from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple

from torch import nn

GONE = object()  # where there is no such attribute any more


class _Fields(NamedTuple):
    x: Any


_FIELDS: Any = (MemberDescriptorType, type(vars(_Fields)["x"]))  # a slot, and a field of a named tuple


def found_names(holder: Any, names: set[str]) -> set[str]:
    """Which of these names `attribute` finds."""
    found = {name for space in _own(holder) for name in names & space.keys()}
    for kind in _kinds(holder):
        found |= names & vars(kind).keys()
    return found


def attribute(holder: Any, name: str) -> Any:
    """What `holder.name` is: methods are bound to the holder, and so is a property's function, which is not called."""
    for space in _own(holder):
        if name in space:
            return space[name]
    found: Any = next((vars(kind)[name] for kind in _kinds(holder) if name in vars(kind)), GONE)
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


def method_of(x: Any) -> FunctionType | None:
    """The function that runs where an object is called; None where it is not written in Python."""
    found = (getattr(type(x), name, None) for name in ("forward", "__call__"))
    return next((x for x in found if isinstance(x, FunctionType)), None)


def _own(holder: Any) -> list[dict[str, Any]]:
    """What is on the object itself, of a module also the modules in it."""
    if isinstance(holder, type):
        return []
    try:
        own = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return []
    inner = own.get("_modules") if isinstance(holder, nn.Module) else None
    return [own] if inner is None else [own, inner]


def _kinds(holder: Any) -> tuple[type, ...]:
    """Whose dicts are looked into after the object's own: its class and the bases of it."""
    kind: type[Any] = type(holder)
    return (*vars(type)["__mro__"].__get__(holder), *kind.__mro__) if isinstance(holder, type) else kind.__mro__
