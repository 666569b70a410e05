"""Where objects hold their attributes: dicts and slots, of modules also those of the modules that they hold."""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from tensorloop._common.slots import slots_of

MOST_ELEMENTS = 1000  # a larger container, a vocabulary say, is not looked into
_OF_MODULES = frozenset(vars(nn.Module()))


class Holder(NamedTuple):
    """A dict of attributes, buffers or items."""

    path: str
    values: MutableMapping[Any, Any]
    kind: str  # "attributes", "buffers" or "items"
    numbers: dict[Any, int]  # of keys that are no names

    def names(self) -> list[Any]:
        """The keys that are no module's own."""
        of_module = self.kind == "attributes" and "_modules" in self.values
        return [key for key in self.values if not (of_module and key in _OF_MODULES)]

    def path_of(self, key: Any) -> str:
        """How a user says where it is."""
        return f"{self.path}{key}" if self.kind != "items" else f"{self.path}{_in_brackets(key, self.numbers)}"


class SlotsDict(MutableMapping[str, Any]):
    """The `__slots__` of an object that are set, as a dict."""

    def __init__(self, x: Any) -> None:
        self.object, self._names = x, slots_of(x)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.object, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.object, name, value)  # a frozen dataclass's own refuses

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.object, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self.object, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def find_holders(objects: Sequence[Any]) -> list[Holder]:
    """The holders of some objects, each once."""
    found: dict[int, Holder] = {}
    for i, x in enumerate(objects):
        for holder in _holders(x, f"objects[{i}]" if len(objects) > 1 else "", set()):
            values = holder.values
            found.setdefault(id(values.object if isinstance(values, SlotsDict) else values), holder)
    return list(found.values())


def _holders(x: Any, path: str, met: set[int]) -> Iterator[Holder]:
    if isinstance(x, dict):
        yield Holder(path, x, "items", {})
        yield from _in_container(x, path, met)
        return
    modules = [(path, x)]
    if isinstance(x, nn.Module):
        modules = [(".".join(part for part in (path, name) if part), y) for name, y in x.named_modules()]
    for path, x in modules:
        if id(x) in met:
            continue
        met.add(id(x))
        prefix = f"{path}." if path else ""
        for values in [vars(x)] if hasattr(x, "__dict__") else []:
            yield Holder(prefix, values, "attributes", {})
            if isinstance(x, nn.Module):
                yield Holder(prefix, values["_buffers"], "buffers", {})
            for key, value in values.items():
                if not (isinstance(x, nn.Module) and key in _OF_MODULES):
                    yield from _in_container(value, f"{prefix}{key}", met)
        if slots_of(x):
            yield Holder(prefix, SlotsDict(x), "attributes", {})


def _in_container(x: Any, path: str, met: set[int]) -> Iterator[Holder]:
    """The holders of modules in lists, tuples and dicts, which `named_modules` does not know."""
    if not isinstance(x, list | tuple | dict) or len(x) > MOST_ELEMENTS or id(x) in met:
        return
    met.add(id(x))
    numbers: dict[Any, int] = {}
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        inner = f"{path}{_in_brackets(key, numbers)}"
        if isinstance(value, nn.Module):
            yield from _holders(value, inner, met)
        else:
            yield from _in_container(value, inner, met)


def _in_brackets(key: Any, numbers: dict[Any, int]) -> str:
    """Writes a key in brackets so that it differs from the others: two modules, say, may look alike."""
    if isinstance(key, str | int | float | bytes):
        return f"[{key!r}]"
    return f"[{type(key).__name__} {numbers.setdefault(key, len(numbers))}]"
