"""Attributes of modules and other objects as a state: which of them a step sets, taken off and put back.

The first step is given copies of what it might change in place, so that what was there before stays as it was. From
then on the attributes that it set are with whoever runs the steps: between two of them a mark stands in their place.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tensorloop._common import pytree
from tensorloop._common.errors import WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.versions import version_of
from tensorloop.loop.effects.follow import own, refuse_older
from tensorloop.loop.holders import Holder, SlotsDict, find_holders
from tensorloop.loop.state_copies import Aliases, Copies, all_leaves, is_large
from tensorloop.tensor_array.array import TensorArray

R = TypeVar("R")
State = dict[str, Any]  # by path
_PLAIN = (bool, int, float, complex, str, bytes)


class _Mark:
    """Stands where there is no attribute, or where one is with a loop."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<{self.what}>"


_MISSING, _TAKEN = _Mark("no such attribute"), _Mark("in the carry of a loop that runs")


class _Place(NamedTuple):
    """An attribute that steps set: where it is, its value before the loop, whether steps write into that tensor."""

    values: MutableMapping[Any, Any]
    key: Any
    before: Any
    in_place: bool

    def get(self) -> Any:
        return self.values.get(self.key, _MISSING)

    def put(self, value: Any) -> None:
        if value is _MISSING:
            self.values.pop(self.key, None)
        else:
            self.values[self.key] = value


class Attributes:
    """The attributes of some objects, as they change from before a loop on."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._holders = find_holders(objects)
        self._changed = [x.values.object if isinstance(x.values, SlotsDict) else x.values for x in self._holders]
        refuse_older(self._changed, "carries the attributes of an object")
        self._before = [{key: x.values[key] for key in x.names()} for x in self._holders]
        self._places: dict[str, _Place] = {}
        self._aliases = Aliases({})
        self._uncounted = set[str]()  # places that no step has written into as far as their versions tell
        self._swapped = set[str]()  # those of them where a later step has put another object
        self.begun = False  # whether the first step is done

    def first(self, call: Callable[[], R], names: Sequence[str]) -> tuple[R, State]:
        """The first step: what it gave, and the attributes that it set, and those of `names`."""
        given: list[dict[Any, _AttributeBefore]] = []
        copies = Copies()
        for holder in self._holders:
            given.append({key: _AttributeBefore(copies.of(holder.values[key])) for key in holder.names()})
            holder.values.update({key: x.value for key, x in given[-1].items()})
        out = call()
        for holder, shown, before in zip(self._holders, given, self._before, strict=True):
            self._find(holder, shown, before, names)
        now = [{key: x.values[key] for key in x.names()} for x in self._holders]
        copies.check_apart(all_leaves(self._holders, self._before), all_leaves(self._holders, now))
        if unknown := [name for name in names if name not in self._places]:
            raise WrongValue(f"names: no attribute has the path {unknown[0]!r} after the first step")
        state = {path: place.get() for path, place in self._places.items()}
        self._aliases = Aliases(state)
        self.put_back()
        self._take()
        self.begun = True
        return out, state

    def around(self, state: Mapping[str, Any], call: Callable[[], R]) -> tuple[R, State]:
        """A later step, which finds `state`: what it gave, and the state after it."""
        places = self._places
        outside = [place.get() for place in places.values()]
        try:
            for path, place in places.items():
                place.put(state[path])
            own(state.values(), self._changed)
            noted = self._aliases.note(state) if self._aliases else None
            versions = {path: _version(state[path]) for path in self._uncounted}
            out, after = call(), {path: place.get() for path, place in places.items()}
            for path, version in versions.items():
                if after[path] is not state[path]:
                    self._swapped.add(path)
                elif _version(after[path]) != version:
                    self._uncounted.discard(path)
            if noted is not None:
                self._aliases.check(noted, after)
            return out, after
        finally:
            for place, value in zip(places.values(), outside, strict=True):
                place.put(value)

    def put_last(self, state: Mapping[str, Any]) -> None:
        """After the last step: its state, in the tensors that were there where steps write into them.

        What batch norm writes no version counts, as graphs that saved a buffer do not need its numbers: nor do we then.
        """
        for path, place in self._places.items():
            value = state[path]
            if place.in_place and path not in self._swapped and _takes(place.before, value):
                with torch.no_grad():
                    (place.before.data if path in self._uncounted else place.before).copy_(value)
                value = place.before
            place.put(value)

    def put_back(self) -> None:
        """Makes all as it was before the loop."""
        for holder, before in zip(self._holders, self._before, strict=True):
            for key in [key for key in holder.names() if key not in before]:
                del holder.values[key]
            for key in before:
                if holder.values.get(key, _MISSING) is not before[key]:
                    holder.values[key] = before[key]

    def find_late(self) -> str | None:
        """Says what a later step has set and the first did not: replays would find it as the last step left it."""
        for holder, before in zip(self._holders, self._before, strict=True):
            for key in {**before, **dict.fromkeys(holder.names())}:
                path, now, was = holder.path_of(key), holder.values.get(key, _MISSING), before.get(key, _MISSING)
                if path not in self._places and not _same(now, was):
                    return (
                        f"the body set {path} at a later step than the first, so that it is not in the carry; give "
                        f"carrying names=[{path!r}], and the attribute a value of its kind before the loop"
                    )
        return None

    def _find(
        self, holder: Holder, given: dict[Any, "_AttributeBefore"], before: dict[Any, Any], names: Sequence[str]
    ) -> None:
        """Notes what the first step has set in one place."""
        written = False
        for key in {**given, **dict.fromkeys(holder.names())}:
            now, shown = holder.values.get(key, _MISSING), given.get(key)
            if shown is None or shown.has_changed(now) or holder.path_of(key) in names:
                in_place = shown is not None and now is shown.value and isinstance(now, Tensor)
                written |= in_place
                self._places[holder.path_of(key)] = _Place(holder.values, key, before.get(key, _MISSING), in_place)
                if in_place and shown is not None and not shown.has_changed(now):
                    self._uncounted.add(holder.path_of(key))
        if written and holder.kind == "buffers":  # batch norm writes to buffers, and not all of them count it
            for key in holder.names():
                if isinstance(before.get(key), Tensor) and (path := holder.path_of(key)) not in self._places:
                    self._places[path] = _Place(holder.values, key, before[key], True)
                    self._uncounted.add(path)

    def _take(self) -> None:
        for place in self._places.values():
            place.put(_TAKEN)


class _AttributeBefore:
    """An attribute as the first step finds it."""

    __slots__ = ("_leaves", "_tree", "_versions", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._tree = None if isinstance(value, Tensor | nn.Module) or is_large(value) else pytree.Tree(value)
        self._leaves = self._leaves_of(value) or []
        self._versions = [_version(x) for x in self._leaves]

    def _leaves_of(self, value: Any) -> list[Any] | None:
        return [value] if self._tree is None else self._tree.flatten(value)

    def has_changed(self, now: Any) -> bool:
        """Whether it is another one now, or has become another. Of arrays, and in inference mode, nobody knows."""
        if now is not self.value:
            return not _same(now, self.value)
        leaves = self._leaves_of(now)
        if leaves is None or any(x is not y for x, y in zip(leaves, self._leaves, strict=True)):
            return True
        return any(
            isinstance(x, TensorArray) or (isinstance(x, Tensor) and (v is None or _version(x) != v))
            for x, v in zip(leaves, self._versions, strict=True)
        )


def _version(x: Any) -> int | None:
    return version_of(x) if isinstance(x, Tensor) else None


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)


def _takes(before: Any, value: Any) -> bool:
    """Whether a value can be written into the tensor that was there."""
    if not (isinstance(before, Tensor) and isinstance(value, Tensor)) or transforms.maybe_level() is not None:
        return False
    alike = (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device)
    return alike and not (before.requires_grad or value.requires_grad or before.is_inference())
