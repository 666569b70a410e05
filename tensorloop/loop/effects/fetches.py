"""What leads from one value to another, as a step of a loop came to it, and how that is said."""

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from torch import nn

from tensorloop.loop.effects import known
from tensorloop.loop.effects.notes import GONE, contents, home, of_class


def itself(x: Any, key: Any) -> Any:
    """The value, one of the roots."""
    return x


def referred(x: Any, key: Any) -> Any:
    """A class or a module, which are known by themselves."""
    return key()


def closure_variable(x: Any, key: int) -> Any:
    """A variable of a function's closure, by its place."""
    return contents(x.__closure__[key])


def global_of(x: Any, key: str) -> Any:
    """A global of a function's module."""
    return x.__globals__.get(key, GONE)


def module_global(x: Any, key: tuple[str, str]) -> Any:
    """A global of any module."""
    module = sys.modules.get(key[0])
    return GONE if module is None else module.__dict__.get(key[1], GONE)


def slot(x: Any, key: str) -> Any:
    """Returns a part of a bound method, a partial, a property or the like, by the name of the attribute."""
    return getattr(x, key)


def default(x: Any, key: str) -> Any:
    """Returns the default of a function's argument; `GONE` if it has none."""
    code, defaults = x.__code__, x.__defaults__ or ()
    places = code.co_varnames[: code.co_argcount]
    i = places.index(key) - len(places) + len(defaults) if key in places else -1
    return defaults[i] if i >= 0 else (x.__kwdefaults__ or {}).get(key, GONE)


def argument(x: Any, key: Any) -> Any:
    """Returns an argument that a partial holds; `GONE` if it holds none there."""
    if type(key) is str:
        return x.keywords.get(key, GONE)
    return x.args[key] if key < len(x.args) else GONE


def given(x: Any, key: Any = None) -> Any:
    """Which arguments a partial gives."""
    return len(x.args), *x.keywords


def way_to(x: Any, key: str) -> Callable[[Any, str], Any]:
    """The fastest way to an attribute that finds it wherever it may have gone since."""
    own, kind = known.dict_of(x), type(x)
    if type(own) is not dict:
        return attribute
    found = known.of_type(kind, key)
    if key in own:
        return attribute if hasattr(type(found), "__set__") else held
    if isinstance(x, nn.Module) and found is None:
        return in_module
    return of_kind if type(found) in (FunctionType, property) and type(kind) is type else attribute


_dict_of = object.__getattribute__


def held(x: Any, key: str) -> Any:
    """An object's own attribute."""
    return _dict_of(x, "__dict__").get(key, GONE)


def in_module(x: Any, key: str) -> Any:
    """An attribute, parameter, buffer or part of a module of torch's."""
    own = _dict_of(x, "__dict__")
    for part in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if key in part:
            return part[key]
    return GONE


def of_kind(x: Any, key: str) -> Any:
    """A class's attribute, as long as the object has none of its own."""
    return GONE if key in _dict_of(x, "__dict__") else getattr(type(x), key, GONE)


def attribute(x: Any, key: str) -> Any:
    """An attribute wherever it is; no code of its class runs."""
    place, name = home(x, key)
    found = place.get(name, GONE) if type(place) is dict else GONE
    return of_class(x, key) if found is GONE else found


def item(x: Any, key: Any) -> Any:
    """An item of a dict, list or tuple."""
    if type(x) is dict:
        return x.get(key, GONE)
    return x[key] if -len(x) <= key < len(x) else GONE


def shape(x: Any, key: Any = None) -> Any:
    """The keys of a dict, the length of others."""
    return tuple(x) if type(x) is dict else len(x)


def own_dict(x: Any, key: str) -> Any:
    """The `__dict__` of an object."""
    return known.dict_of(x)


def elements(x: Any, key: Any = None) -> Any:
    """Returns what is in a set, or in anything that is no plain dict, list or tuple; none of its class's code runs."""
    if isinstance(x, (set, frozenset)):
        return frozenset(filter(_is_plain, set.__iter__(x) if isinstance(x, set) else frozenset.__iter__(x)))
    if isinstance(x, dict):
        items = OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x)
        return tuple((k, y) for k, y in items if _is_plain(k) and _is_plain(y))
    kinds: tuple[Any, ...] = list, tuple, deque
    for kind in kinds:
        if isinstance(x, kind):
            return tuple(filter(_is_plain, kind.__iter__(x)))
    if isinstance(x, ContextVar):
        return found if _is_plain(found := x.get(None)) else None
    is_array = isinstance(x, (memoryview, array)) or type(x).__name__ == "ndarray"
    return x.tobytes() if is_array else bytes(x) if isinstance(x, bytearray) else None


def _is_plain(x: Any) -> bool:
    return isinstance(x, (int, float, complex, str, bytes, type(None)))


def parts(module: nn.Module) -> Any:
    """The modules that a module of torch's calls."""
    return module.__dict__.get("_modules", {}).values()


_MODAL = {"p", "momentum", "dropout", "lower"}  # attributes of modules of torch that do something else in training


def settings(module: nn.Module) -> dict[str, Any]:
    """The plain values of a module whose code nobody follows; its mode, if by these it may do something else in it."""
    kind = type(module)  # a bare nn.Module holds what the user puts into it
    own = module.__dict__ if kind is not nn.Module and known.is_trusted(kind.__module__ or "") else {}
    return {name: x for name, x in own.items() if _is_plain(x) and (name != "training" or not _MODAL.isdisjoint(own))}


def hooks(module: nn.Module) -> Any:
    """Whether it calls others before or behind its own code."""
    own = module.__dict__
    return own.get("_forward_hooks") or own.get("_forward_pre_hooks") or "forward" in own


_KINDS: dict[Any, str] = {closure_variable: "variable", global_of: "global", module_global: "global"}
_KINDS |= {default: "default", argument: "argument", given: "arguments", item: "item", elements: "elements"}


def said(fetch: Any, key: Any, holder: Any, value: Any, above: tuple[str, str]) -> tuple[str, str]:
    """How a value is named: what it is, and the way there. `above` names what it was fetched from."""
    path, kind = above[1], _KINDS.get(fetch, "attribute")
    if fetch is closure_variable:
        return kind, holder.__code__.co_freevars[key]
    if fetch in (global_of, module_global):
        return kind, key if fetch is global_of else key[1]
    if fetch is itself:
        return above
    if fetch is slot:
        return above if path or key != "__self__" else ("argument", holder.__func__.__code__.co_varnames[0])
    if fetch in (default, argument):
        if type(key) is int:
            key = holder.func.__code__.co_varnames[key] if type(holder.func) is FunctionType else f"number {key}"
        return kind, f"{key} of {path}" if path and fetch is argument else key
    if fetch is referred:
        return "module" if isinstance(value, nn.Module) else "class", getattr(value, "__name__", type(value).__name__)
    if fetch is item and above[0].endswith(" of"):
        return above
    if fetch is item:
        return kind, f"{path}[{key!r}]"
    if fetch in (shape, elements, given):
        return f"{'keys' if fetch is shape and type(holder) is dict else _KINDS.get(fetch, 'length')} of", path
    name = key[1] if type(key) is tuple else key
    return kind, f"{path}.{name}" if path else name
