"""Copies of entries where torch gives a view, steps of rows or heads of scores: each sees what is changed in the other.

A slice along time is no strided view of the values, so it is a copy, and what it is a copy of is remembered here while
both are there. What is changed in it is written to where it was taken from, and what was taken from there is read anew,
by operations that autograd sees: gradients are those of views, and so are torch's errors where backward needs what was
changed. Memory is known by its storage, so that views of copies need no mark. Whoever changes values in place calls
`changed` behind it.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tensorloop._common import pytree
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly, runs_eagerly
from tensorloop._torch.overrides import unseen_by_classes
from tensorloop._torch.storage import PLAIN, has_storage
from tensorloop._torch.versions import version_of
from tensorloop.packed.table.operators import IN_PLACE

_IN_PLACE = frozenset({"__setitem__", *IN_PLACE})
_SAME_NUMBERS = frozenset({"requires_grad_", "share_memory_", "rename_"})


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function of this name changes its first argument."""
    if name.startswith("__"):
        return name in _IN_PLACE
    return (name.endswith("_") and name not in _SAME_NUMBERS) or (bool(kwargs) and bool(kwargs.get("inplace")))


@runs_eagerly
class Ordinary(Tensor):
    """A tensor that remembers something, and is printed, copied and saved as one that does not."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, and so saved, as an ordinary tensor."""
        return _strip(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A tensor of the same numbers."""
        if id(self) not in memo:
            new = copy.deepcopy(_strip(self.detach() if self.is_leaf else self), memo)
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **kwargs: Any) -> str:
        """As an ordinary tensor."""
        with unseen_by_classes():
            shown = super().__repr__(**kwargs)
        return shown.replace(f"{type(self).__name__}(", "tensor(", 1)  # as long, so that lines break as they do there


class _Strides(NamedTuple):
    """Where in its memory a tensor has its numbers."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def see(self, numbers: Tensor, other: "_Strides") -> Tensor:
        """Returns the numbers at another place of the same memory, from those that stand at this place."""
        ends = (
            1 + at.offset + sum((n - 1) * k for n, k in zip(at.size, at.stride, strict=True)) for at in (self, other)
        )
        table = numbers.new_empty(max(ends))
        table.as_strided(*self).copy_(numbers)
        return table.as_strided(*other)


class _Held:
    """A tensor that can be had again as long as its memory is there, which this does not keep alive."""

    def __init__(self, x: Tensor, keep: bool = False) -> None:
        self.place, self.dtype, self.device = _place_of(x), x.dtype, x.device
        base, wrapped = _base_of(x), transforms.maybe_level() is not None and transforms.is_wrapped(x)
        self._tensor, self._base = weakref.ref(x), None if base is x else weakref.ref(base)
        self._storage = None if wrapped else weakref.ref(x.untyped_storage())
        self._kept = x if wrapped and keep else None  # whose storage gives no tensor of the transform

    def is_in(self, memory: Any) -> bool:
        """Whether it lies in this storage; inside of a transform that cannot be known."""
        return self._storage is None or self._storage() is memory

    def get(self) -> Tensor | None:
        """The tensor, or another of its numbers; None where they are gone."""
        if (x := self._tensor()) is not None:
            return x
        if self._base is not None and (base := self._base()) is not None:
            return base.as_strided(*self.place)
        if self._storage is None or (storage := self._storage()) is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.place.offset, *self.place[:2])


class _TakenFrom:
    """Where a copy was taken from. `find` gives for each of its numbers the place among those of `tensor`."""

    def __init__(self, tensor: _Held, memory: int, find: Callable[[], Tensor]) -> None:
        self.tensor, self.memory, self._find, self._places = tensor, memory, find, None

    @property
    def places(self) -> Tensor:
        """Returns what `find` gives, and calls it only once."""
        if self._places is None:
            with torch.no_grad():
                self._places = self._find()
        return self._places


class _Copy(NamedTuple):
    """A tensor, where it was taken from, and where that was: the nearest that is there counts."""

    tensor: _Held
    sources: list[_TakenFrom]
    like: _Strides  # that was indexed by `key`
    key: Any
    alive: Any  # a weak reference that forgets the copy

    def find(self) -> tuple[Tensor, _TakenFrom, Tensor] | None:
        """The copy, its source and that as a tensor; None where no source is there."""
        found = next(((s, x) for s in self.sources if (x := s.tensor.get()) is not None), None)
        if found is None:
            return None
        if (y := self.tensor.get()) is None:
            raise WrongType(
                "in torch.func a view of a slice is not changed in place; write x[:, a:b] = ... of its source"
            )
        return y, *found


_COPIES: dict[int, _Copy] = {}  # by the memory of the copy
_TAKEN: dict[int, dict[int, _Copy]] = {}  # by the memory of each source, and that of the copy


@called_eagerly
def changed(x: Tensor, since: int | None = None, but: _Copy | None = None) -> None:
    """To be called when numbers of a tensor were changed in place: what it was taken from follows, and its copies.

    Nothing was changed where its version is still `since`: by dropout with p = 0, for one.
    """
    if not _COPIES or (memory := _memory_of(x)) is None or (since is not None and version_of(x) == since):
        return
    with unseen_by_classes():
        ours = _COPIES.get(id(memory))
        if ours is not None and ours is not but and (found := ours.find()) is not None:
            y, source, target = found
            if ours.key == "unfold" and len(source.places.unique()) < source.places.numel():
                raise WrongValue("windows that overlap are not changed in place; clone() them first")
            # A copy outside of autograd, as `detach` gives it, changes the numbers alone.
            with torch.set_grad_enabled(torch.is_grad_enabled() and y.requires_grad >= target.requires_grad):
                put(target, source.places, y)
            changed(target, None, ours)
        for taken in list(_TAKEN.get(id(memory), {}).values()):
            if taken is not but and (found := taken.find()) is not None and found[1].memory == id(memory):
                y, source, target = found
                y.copy_(target.flatten()[source.places])
                changed(y, None, taken)


def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int | None] | None:
    """Returns what a function may change in place, as `changed` takes it; None if nothing was taken from anything."""
    given = _tensors(args[0] if args else kwargs.get("input")) if _COPIES else None
    if not given:
        return None
    return given[0], version_of(given[0]) if transforms.maybe_level() is None else None


@called_eagerly
def follow(out: Any, x: Any, again: Callable[[Any], Any], key: Any = None) -> Any:
    """Gives `out`, which is `again(x)` of packed x. Its tensors are as views of x from now on."""
    memory = _memory_of(x._memory)
    if memory is not None:
        for i, y in enumerate(_tensors(out)):
            mine = _memory_of(y)
            if mine is not None and mine is not memory and id(mine) not in _COPIES and y.numel():
                _remember(y, id(mine), x, id(memory), lambda numbers, i=i: _tensors(again(numbers))[i], key)
    return mark(out)


def _remember(y: Tensor, mine: int, x: Any, memory: int, again: Callable[[Any], Tensor], key: Any) -> None:
    like, base = x._with(None), _base_of(x._memory)
    held, n = _Held(base, keep=True), base.numel()
    place = held.place if base is x._memory else _place_of(x._memory)

    def count() -> Tensor:
        numbers = torch.arange(n, device=held.device).view(held.place.size)
        return again(like._with(held.place.see(numbers, place)))

    sources = [_TakenFrom(held, memory, count)]
    if (known := _COPIES.get(memory)) is not None:
        of = known.tensor.place
        sources += [
            _TakenFrom(s.tensor, s.memory, lambda s=s: again(like._with(of.see(s.places, place))))
            for s in known.sources
        ]

    def forget(_: Any) -> None:
        _COPIES.pop(mine, None)
        for s in sources:
            taken = _TAKEN.get(s.memory, {})
            taken.pop(mine, None)
            if not taken:
                _TAKEN.pop(s.memory, None)

    found = _Copy(_Held(y), sources, place, key, weakref.ref(_memory_of(y), forget))
    _COPIES[mine] = found
    for s in sources:
        _TAKEN.setdefault(s.memory, {})[mine] = found


def put(x: Tensor, places: Tensor, given: Tensor) -> None:
    """Writes numbers in place. `put_` would keep what it writes for backward, though it only asks for the sizes."""
    if x.is_contiguous():
        x.view(-1)[places] = given
    else:
        x[torch.unravel_index(places, x.shape)] = given


def is_same(value: Any, x: Any, key: Any) -> bool:
    """Whether a value is `x[key]` of this very key, as it is in `x[key] += 1`: what was changed is there already."""
    if not _COPIES or len(given := _tensors(value)) != 1:
        return False
    memory, source = _memory_of(given[0]), _memory_of(x._memory)
    known = _COPIES.get(id(memory))
    if known is None or known.key is not key or known.like != _place_of(x._memory):
        return False
    return known.sources[0].memory == id(source) and known.tensor.place == _place_of(given[0])


@called_eagerly
def mark(out: Any) -> Any:
    """Ordinary tensors that are such copies, have some, or are views of either, as those that call `changed`."""
    if _COPIES:
        for y in out if isinstance(out, (tuple, list)) else (out,):
            if type(y) is Tensor and _is_followed(_memory_of(y)):
                y.__class__ = Sliced
    return out


def _is_followed(memory: Any) -> bool:
    """Whether a storage is that of a copy or of a source, and none that has the address of one that is gone."""
    ours = _COPIES.get(id(memory))
    if ours is not None and ours.alive() is memory:
        return True
    sources = (s for taken in _TAKEN.get(id(memory), {}).values() for s in taken.sources)
    return any(s.memory == id(memory) and s.tensor.is_in(memory) for s in sources)


@runs_eagerly
class Sliced(Ordinary):
    """An ordinary tensor of entries that were taken from packed rows."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs as for an ordinary tensor; where it changed something in place, what that was taken from follows."""
        kwargs = kwargs or {}
        if any(not issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # a packed tensor's function, or a ragged size's
        name = getattr(func, "__name__", "")
        watched = watch(args, kwargs) if is_in_place(name, kwargs) else None
        if all(kind in (Sliced, Tensor, Parameter) for kind in types):
            with unseen_by_classes():
                out = func(*args, **kwargs)
        else:
            given = pytree.mapped(lambda x: _strip(x) if type(x) is Sliced else x, (args, kwargs))
            out = func(*given[0], **given[1])
        if watched is not None:
            changed(*watched)
            return args[0] if isinstance(out, Tensor) else out
        if "out" in kwargs:
            changed(kwargs["out"])
        return out if name == "__get__" and func.__self__.__name__ == "_base" else mark(out)


PLAIN.add(Sliced)


def _strip(x: Tensor) -> Tensor:
    """An ordinary tensor of the same memory."""
    with unseen_by_classes():
        return x.as_subclass(Tensor)


def _base_of(x: Tensor) -> Tensor:
    """The tensor that has all numbers of the same kind that this one, a view, sees some of."""
    return x if x._base is None or x._base.dtype != x.dtype else x._base


def _place_of(x: Tensor) -> _Strides:
    return _Strides(x.shape, x.stride(), int(x.storage_offset()))


def _memory_of(x: Tensor) -> Any:
    """The storage of a tensor, inside of all transforms; None where it has none."""
    x = x if transforms.maybe_level() is None else transforms.numbers(x)
    return x.untyped_storage() if has_storage(x) else None


def _tensors(x: Any) -> list[Tensor]:
    """The tensors that have the numbers of a result."""
    if isinstance(x, (tuple, list)):
        return [t for part in x for t in _tensors(part)]
    return [x] if isinstance(x, Tensor) else [x._memory] if hasattr(type(x), "_memory") else []
