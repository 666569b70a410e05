"""Copies of the state on objects for a first step, which may change them in place; and what shares memory there.

A carry holds each tensor by itself. Where a body writes into one that another attribute shows, too, the other would
keep its old numbers from the second step on; so that is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensorloop._common import pytree
from tensorloop._common.errors import Misuse
from tensorloop._torch import transforms
from tensorloop._torch.versions import version_of
from tensorloop.loop.holders import MOST_ELEMENTS
from tensorloop.tensor_array.array import TensorArray

Leaves = Iterable[tuple[str, Any]]  # by path


def is_large(x: Any) -> bool:
    """Whether a container is not looked into."""
    return isinstance(x, list | tuple | dict) and len(x) > MOST_ELEMENTS


def leaves_of(path: str, value: Any) -> Leaves:
    """The tensors and arrays of an attribute."""
    if not isinstance(value, nn.Module):
        for x in pytree.leaves(value, is_large):
            if isinstance(x, Tensor | TensorArray):
                yield path, x


class Copies:
    """One copy of each tensor, however many attributes show it: each of them gets an alias, an object of its own."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any, Any]] = {}  # by the id of a tensor: itself, its copy, the copy's version

    def of(self, value: Any) -> Any:
        """Returns a copy that a step may change while the value stays as it is; modules and weights are not copied."""
        return value if isinstance(value, nn.Module) else pytree.mapped(self._copy, value, is_large)

    def _copy(self, x: Any) -> Any:
        if not isinstance(x, Tensor | TensorArray) or _is_weight(x):
            return x
        if id(x) in self._made:
            copy = self._made[id(x)][1]
            if isinstance(copy, TensorArray):
                return copy
            return copy.view_as(copy) if copy.requires_grad else copy.detach()
        copy = x.__copy__() if isinstance(x, TensorArray) else x.clone()
        self._made[id(x)] = x, copy, _version(copy)
        return copy

    def check_apart(self, before: Leaves, now: Leaves) -> None:
        """Raises where a step wrote into what two attributes showed before it, or show after it."""
        written = [(x, copy) for x, copy, version in self._made.values() if _is_changed(x, copy, version)]
        for places, changed in ((before, [x for x, _ in written]), (now, [x for _, x in written])):
            groups: dict[int, list[tuple[str, Any]]] = {}
            for path, x in places if changed else ():
                groups.setdefault(_memory(x), []).append((path, x))
            for x in changed:
                shown = [path for path, y in groups.get(_memory(x), ()) if _overlap(x, y)]
                if len(shown) > 1:
                    raise _refusal(*shown[:2])


Key = tuple[str, int]  # the path of an attribute, and the place of a leaf in it


class Aliases:
    """Leaves of the state that share memory after the first step. The carry holds each by itself from there on.

    So no step may write into one of them, for as long as steps leave it where it is.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        groups: dict[int, list[tuple[Key, Any]]] = {}
        for key, x in _leaves_by_key(state).items():
            groups.setdefault(_memory(x), []).append((key, x))
        self._partners: dict[Key, set[Key]] = {}
        for group in groups.values():
            for key, x in group:
                if partners := {other for other, y in group if other != key and _overlap(x, y)}:
                    self._partners[key] = partners

    def __bool__(self) -> bool:
        return bool(self._partners)

    def note(self, state: Mapping[str, Any]) -> dict[Key, tuple[Any, Any]]:
        """Before a step: the leaves, and their versions."""
        return {key: (x, _version(x)) for key, x in _leaves_by_key(state).items() if key in self._partners}

    def check(self, noted: Mapping[Key, tuple[Any, Any]], state: Mapping[str, Any]) -> None:
        """After a step: raises where it wrote into one of them; those that it set anew are free."""
        for key, (x, version) in noted.items():
            if version is not None and _version(x) != version:
                raise _refusal(key[0], min(self._partners[key])[0])
        now = _leaves_by_key(state)
        kept = {key for key, (x, _) in noted.items() if now.get(key) is x}
        left = {key: partners & kept for key, partners in self._partners.items() if key in kept}
        self._partners = {key: partners for key, partners in left.items() if partners}


def _leaves_by_key(state: Mapping[str, Any]) -> dict[Key, Any]:
    return {(path, i): x for path, value in state.items() for i, (_, x) in enumerate(leaves_of(path, value))}


def _refusal(written: str, other: str) -> Misuse:
    return Misuse(
        f"the body writes into {written}, which shares memory with {other}, and a carry holds each by itself; let the "
        f"body set it anew (x = x + y for x += y), or keep one of the two"
    )


def _is_weight(x: Any) -> bool:
    """A leaf with gradient, which nobody writes to."""
    return isinstance(x, Tensor) and x.is_leaf and x.requires_grad


def _version(x: Any) -> int | None:
    return len(x) if isinstance(x, TensorArray) else version_of(x)


def _is_changed(x: Any, copy: Any, version: int | None) -> bool:
    if version is None and transforms.maybe_level() is None:  # of inference mode
        return not torch.equal(x, copy)
    return _version(copy) != version


def _memory(x: Any) -> int:
    """Where the numbers of a tensor are; of others, who they are."""
    if isinstance(x, TensorArray) or transforms.is_fake(x) or transforms.numbers(x).layout is not torch.strided:
        return id(x)
    return transforms.storage(x)._cdata


def _overlap(a: Any, b: Any) -> bool:
    """Whether two that are in the same memory have an element in common."""
    if a is b or isinstance(a, TensorArray):
        return a is b
    a, b = transforms.numbers(a), transforms.numbers(b)
    if a.dtype != b.dtype or a.layout is not torch.strided or transforms.is_fake(a):
        return True
    with transforms.outside_transforms(), torch.no_grad():
        mark = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool, device="cpu")
        mark.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
        return bool(mark.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def all_leaves(holders: Iterable[Any], values: Iterable[dict[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors and arrays of all attributes, `values` for each holder."""
    for holder, of_holder in zip(holders, values, strict=True):
        for key, value in of_holder.items():
            yield from leaves_of(holder.path_of(key), value)
