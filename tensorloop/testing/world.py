"""What a function reaches beside its arguments: tensors, numbers and what holds them, by name; put back after a run.

Followed are cells of closures, globals that the code names, defaults, bound objects, modules, containers, arrays of
numpy and the attributes of objects. Classes, and functions of torch, numpy and this library, are not looked into.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_FOREIGN = {"torch", "numpy", "numba", "tensorloop", "builtins"}
_OWN = frozenset(vars(nn.Module()))  # what a module has of torch, beside what its maker gives it
_LEAVES = (int, float, complex, bool, str, type(None))  # what is compared beside tensors
MOST = 20_000  # objects


def is_float(x: Any) -> bool:
    """Whether this is a tensor that may have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


class World:
    """All that `roots` reach, and how it was. What another world has, too, is named as it is there."""

    def __init__(self, *roots: Any, other: "World | None" = None) -> None:
        self.roots = roots
        self.names: dict[int, str] = {} if other is None else dict(other.names)  # of objects by id
        self.leaves: dict[str, Any] = {}
        self._put_back: list[Callable[[], object]] = []
        self._alive: list[Any] = []  # else an id may come twice
        for name, x in self._walk(self._alive):
            if not isinstance(x, _LEAVES):
                self.names[id(x)] = name
            if isinstance(x, Tensor):
                self.leaves[name] = x
                self._put_back.append(_restorer(x))
            elif isinstance(x, _LEAVES):
                self.leaves[name] = x
            else:
                self._put_back += map(_restorer_of, _holders(x))
        self.before = {name: _copy(x) for name, x in self.leaves.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: x for name, x in self.leaves.items() if isinstance(x, Tensor)}

    def now(self) -> dict[str, Any]:
        """Copies of all that is reached now, by name."""
        return {name: _copy(x) for name, x in self._walk([]) if isinstance(x, (Tensor, *_LEAVES))}

    def _walk(self, alive: list[Any]) -> Iterator[tuple[str, Any]]:
        """(name, object) of all that is reached, each object once, but for numbers and texts."""
        seen: set[int] = set()
        waiting = [("", root) for root in reversed(self.roots)]
        while waiting and len(seen) < MOST:
            name, x = waiting.pop()
            if isinstance(x, _LEAVES):
                yield name, x
            elif id(x) not in seen:
                seen.add(id(x))
                alive.append(x)
                name = self.names.get(id(x), name)
                yield name, x
                waiting += reversed([((name + part).lstrip("."), child) for part, child in _children(x)])
        self.is_whole = not waiting

    def put_back(self) -> None:
        """Makes everything what it was."""
        for restore in reversed(self._put_back):
            restore()


@contextmanager
def in_double(tensors: list[Tensor]) -> Iterator[bool]:
    """Inside, these tensors and new ones are of double precision, where that can be: they lie apart and are leaves."""
    tensors = list({id(x): x for x in tensors if is_float(x)}.values())
    places = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
    may = all(x.is_leaf and type(x) in (Tensor, nn.Parameter) for x in tensors)
    if not may or len(places) < sum(x.numel() > 0 for x in tensors):
        yield False
        return
    before, default = [x.data for x in tensors], torch.get_default_dtype()
    gradients = [x.grad for x in tensors]
    try:
        torch.set_default_dtype(torch.float64)
        for x in tensors:
            x.grad = None
            x.data = doubled(x.data)
        yield True
    finally:
        torch.set_default_dtype(default)
        for x, data, gradient in zip(tensors, before, gradients, strict=True):
            x.grad = None
            x.data = data
            x.grad = gradient


def doubled(x: Tensor) -> Tensor:
    """A float tensor in double precision."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _is_foreign(kind: Any) -> bool:
    return (getattr(kind, "__module__", None) or "builtins").partition(".")[0] in _FOREIGN


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    """(the part of a name, what it names) of what is right below an object."""
    if isinstance(x, Tensor | type | types.ModuleType):
        return
    if isinstance(x, nn.Module):
        for table in (x._parameters, x._buffers, x._modules):
            yield from ((f".{name}", child) for name, child in table.items())
        yield from ((f".{name}", child) for name, child in vars(x).items() if name not in _OWN)
    elif isinstance(x, functools.partial):
        yield from (("", child) for child in (x.func, x.args, x.keywords))
    elif isinstance(x, types.MethodType):
        yield from (("", child) for child in (x.__self__, x.__func__))
    elif isinstance(x, types.FunctionType):
        if not _is_foreign(x):
            yield from ((f".{name}", child) for name, child in _named_by(x).items())
            yield from (("", child) for child in (x.__defaults__, x.__kwdefaults__, getattr(x, "__wrapped__", None)))
    elif type(x).__module__ == "numpy" and type(x).__name__ == "ndarray":
        if x.dtype.kind in "biufc" and x.flags.writeable and min((0, *x.strides)) == 0:
            yield "", torch.from_numpy(x)  # of the same memory
    elif isinstance(x, list | tuple | deque):
        yield from ((f"[{i}]", child) for i, child in enumerate(x))
    elif isinstance(x, dict):
        yield from ((f"[{key!r}]", child) for key, child in x.items())
    elif not _is_foreign(type(x)):
        yield from ((f".{name}", child) for name, child in {**getattr(x, "__dict__", {}), **_slots(x)}.items())


def _slots(x: Any) -> dict[str, Any]:
    names = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(x, name) for name in names if name[:2] != "__" and hasattr(x, name)}


def _named_by(function: types.FunctionType) -> dict[str, Any]:
    """Returns what the code of a function reads beside its locals: cells and globals, by name."""
    found: dict[str, Any] = {}
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        found |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    return found


def _holders(x: Any) -> list[Any]:
    """Returns what of an object can be changed, and is to be put back."""
    if isinstance(x, nn.Module):
        return [x._parameters, x._buffers, x._modules, vars(x)]
    if isinstance(x, list | dict | set | deque | bytearray | torch.Generator):
        return [x]
    if isinstance(x, type | types.ModuleType) or _is_foreign(x if isinstance(x, types.FunctionType) else type(x)):
        return []
    if isinstance(x, types.FunctionType):
        return [x]
    return [
        *([vars(x)] if isinstance(getattr(x, "__dict__", None), dict) else []),
        *([_Slots(x, _slots(x))] if _slots(x) else []),
    ]


class _Slots(NamedTuple):
    """An object, and the values in its slots."""

    owner: Any
    values: dict[str, Any]


def _restorer_of(holder: Any) -> Callable[[], object]:
    if isinstance(holder, set | deque):
        copied, fill = holder.copy(), holder.update if isinstance(holder, set) else holder.extend
        return lambda: None if holder == copied else (holder.clear(), fill(copied))
    if isinstance(holder, list | bytearray):
        items = holder[:]
        return lambda: holder.__setitem__(slice(None), items)
    if isinstance(holder, dict):
        table = dict(holder)
        return lambda: None if _are_same(holder, table) else (holder.clear(), holder.update(table))
    if isinstance(holder, torch.Generator):
        state = holder.get_state()
        return lambda: holder.set_state(state)
    if isinstance(holder, _Slots):
        return lambda: [setattr(holder.owner, name, x) for name, x in holder.values.items()]
    return _restorer_of_names(holder)


def _are_same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(key in b and b[key] is x for key, x in a.items())


def _restorer_of_names(function: types.FunctionType) -> Callable[[], None]:
    cells = [(cell, cell.cell_contents) for cell in function.__closure__ or () if _is_full(cell)]
    names = _named_by(function).keys() & function.__globals__.keys()
    values = {name: function.__globals__[name] for name in names if name not in function.__code__.co_freevars}

    def restore() -> None:
        for cell, value in cells:
            cell.cell_contents = value
        function.__globals__.update(values)

    return restore


def _is_full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _restorer(x: Tensor) -> Callable[[], None]:
    data, gradient, wants = x.detach().clone(), x.grad if x.is_leaf else None, x.requires_grad
    its_own = None if gradient is None else _restorer(gradient)  # a backward pass adds to it in place

    def restore() -> None:
        if x.is_leaf:
            x.requires_grad_(wants).grad = gradient
        if its_own is not None:
            its_own()
        if x.shape == data.shape and x.dtype == data.dtype:
            if not any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True)):
                x.data.copy_(data)  # what is expanded cannot be written, by nobody
        elif x.is_leaf:
            x.data = data.clone()

    return restore


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x
