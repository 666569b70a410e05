"""The carry of a loop: what may be in it, that it stays what it was, and the message when it does not.

A carry is a pytree whose leaves are tensors (shape, dtype and device stay), TensorArrays (dtype, device and element
shape stay, once known), Python numbers (the type stays: an int remains an int), None, or any other object (its type
stays; what it holds is its own business, as long as nothing must be kept, frozen or replayed).
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.scope import here, unrecorded
from tensorloop._common.slots import slots_of
from tensorloop.packed.table.base import is_packed
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import kind_of


def describe(leaf: Any) -> str:
    """A leaf in a few words, as it stands in a diff."""
    if isinstance(leaf, Tensor):
        return f"Tensor {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} {leaf.device}"
    if isinstance(leaf, TensorArray):
        return f"TensorArray of {leaf.element_shape} {str(leaf.dtype).removeprefix('torch.')} {leaf.device}"
    if is_packed(leaf):
        return f"PackedTensor {leaf.shape} {str(leaf.values.dtype).removeprefix('torch.')} {leaf.values.device}"
    return "None" if leaf is None else type(leaf).__name__


class Carry:
    """The structure and leaves that a carry must keep, learnt from `init`.

    `find_name` says what the user's body calls it, for errors; it is asked only then.
    """

    __slots__ = ("_find_name", "arrays", "hidden", "kinds", "leaves", "tree")

    def __init__(self, init: Any, find_name: Callable[[], str] = lambda: "carry") -> None:
        self._find_name = find_name
        self.tree, leaves = pytree.taken_apart(init)
        # What the objects among the leaves hold, by place: tensors that no loop sees.
        self.hidden = {i: find_tensors(x) for i, x in enumerate(leaves) if _is_object(x)}
        self.expect(leaves)

    def expect(self, leaves: Sequence[Any]) -> None:
        """From now on, leaves like these."""
        with unrecorded():  # for a loop in the body of another
            self.leaves = [describe(x) for x in leaves]
            self.arrays = [i for i, x in enumerate(leaves) if isinstance(x, TensorArray)]
            self.kinds = [_kind_of(x) for x in leaves]

    def check(self, tree: Any, step: int) -> list[Any]:
        """The leaves of what the body returned at `step`, or an error that lists all that differs."""
        leaves = self.tree.flatten(tree)
        if leaves is None:
            raise WrongType(self._structure_message(tree, step))
        if here.recorder is None:
            fit = self._fit(leaves)
        else:
            with unrecorded():
                fit = self._fit(leaves)
        if not fit:
            raise WrongType(self._leaves_message(leaves, step))
        return leaves

    def _fit(self, leaves: Sequence[Any]) -> bool:
        kinds = self.kinds
        for i, x in enumerate(leaves):
            kind = kinds[i]
            if type(kind) is tuple:
                if isinstance(x, Tensor):
                    if x.shape == kind[0] and x.dtype is kind[1] and x.device == kind[2]:
                        continue
                elif type(x) is TensorArray and self._array_fits(i, x):
                    continue
            elif type(x) is kind:
                continue
            return False
        return True

    def refuse_hidden(self, leaves: Sequence[Any], step: int, why: str) -> None:
        """Raises where the tensors in an object are not those that it held at first."""
        for i, first in self.hidden.items():
            now = find_tensors(leaves[i])
            changed = [path for path in now if now[path] is not first.get(path)] or [*first.keys() - now.keys()]
            if changed:
                name, path, kind = self._find_name(), self.tree.paths[i], type(leaves[i]).__name__
                raise WrongType(
                    f"{self.said(i)} is an object of class {kind}, and {name}{path}{changed[0]} in it became another "
                    f"tensor at step {step}; {why}, and the loop does not look into objects: "
                    f"{_say_instead(leaves[i])}"
                )

    def need_rows(self, leaves: Sequence[Any], rows: int, why: str) -> None:
        """Raises unless every leaf has so many rows, or is shared by all."""
        need_rows(leaves, rows, why, self.said)

    def said(self, i: int) -> str:
        """Leaf i in the user's words."""
        name = self._find_name()
        return f"{name}{self.tree.paths[i]}{'' if name == 'carry' else f' ({name} is the carry)'}"

    def _array_fits(self, i: int, array: TensorArray) -> bool:
        old: Any = self.kinds[i]
        if old[1:] == kind_of(array):  # fixed, and known as that
            return True
        new = _kind_of(array)
        if old == new:
            return True
        if not _refines(old, new):
            return False
        if new[1] is not None:  # else never written to: it fits any, and says nothing
            self.kinds[i], self.leaves[i] = new, describe(array)
        return True

    def _differs(self, i: int, x: Any) -> bool:
        kind = self.kinds[i]
        if isinstance(x, Tensor):
            return (x.shape, x.dtype, x.device) != kind
        if type(x) is TensorArray:
            return type(kind) is not tuple or not _refines(kind, _kind_of(x))
        return type(x) is not kind

    def _structure_message(self, tree: Any, step: int) -> str:
        name = self._find_name()
        is_carry = "" if name == "carry" else f" ({name} is its carry)"
        was, now = dict(zip(self.tree.paths, self.leaves, strict=True)), pytree.leaves_with_paths(tree)
        here = {path: describe(leaf) for path, leaf in now}
        lines = [f"  - {name}{path}: {was[path]}" for path in was if path not in here]
        lines += [f"  + {name}{path}: {here[path]}" for path in here if path not in was]
        grown = not was.keys() - here.keys() and any(re.search(r"\[\d+\]$", path) for path in here.keys() - was.keys())
        cure = "What grows is a TensorArray: begin with tl.TensorArray() in init, and return carry.append(x)."
        structures = f"  - {self.structure}\n  + {pytree.structure(tree)}"
        return (
            f"the body returned a carry of another structure at step {step}{is_carry}:\n{structures}\n"
            + "".join(f"{line}\n" for line in lines)
            + (cure if grown else "Return the same containers with the same keys as in init.")
            + (f" {_FIRST_ONLY}" if step == 0 and all(map(_is_start, self.kinds)) else "")
        )

    @property
    def structure(self) -> str:
        return pytree.structure(self.tree.unflatten([None] * self.tree.size))

    def _leaves_message(self, leaves: Sequence[Any], step: int) -> str:
        name, lines, hints = self._find_name(), [], set[str]()
        is_carry = "" if name == "carry" else f"{name} is its carry; "
        for i, x in enumerate(leaves):
            if self._differs(i, x):
                path = self.tree.paths[i]
                lines += [f"  - {name}{path}: {self.leaves[i]}", f"  + {name}{path}: {describe(x)}"]
                hints.add(_say_hint(self.leaves[i], self.kinds[i], x))
                if step == 0 and isinstance(x, Tensor) and _is_start(self.kinds[i], x.dtype):
                    hints.add(_FIRST_ONLY)
        return (
            f"the body changed the carry at step {step} ({is_carry}- what was, + what it returned):\n"
            + "\n".join(lines)
            + "\n"
            + " ".join(sorted(hints))
        )


_FIRST_ONLY = "Where the first step alone gets such an init and makes a state of it, give tl.first_only(init)."


def _is_start(kind: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether a leaf of init may be no state yet: None, a number, a tensor of rank 0, of no elements, or dtype."""
    if type(kind) is tuple:
        return len(kind) == 3 and (not kind[0] or 0 in kind[0] or dtype not in (None, kind[1]))
    return kind in (type(None), int, float, complex)


_PLAIN = (Tensor, TensorArray, bool, int, float, complex, str, bytes, torch.Generator, torch.nn.Module, type)


def _is_object(leaf: Any) -> bool:
    """Whether a leaf is none of those that a loop knows, so that tensors may hide in it."""
    return leaf is not None and not isinstance(leaf, _PLAIN)


def find_tensors(x: Any) -> dict[str, Tensor]:
    """The tensors that an object holds, in attributes and in the containers there, by path; the first few hundred."""
    found: dict[str, Tensor] = {}
    left = [("", x)]
    for _ in range(500):
        if not left:
            break
        path, x = left.pop()
        if isinstance(x, Tensor):
            found[path] = x
        elif isinstance(x, dict):
            left += [(f"{path}[{key!r}]", part) for key, part in islice(x.items(), 500)]
        elif isinstance(x, (list, tuple, set, frozenset)):
            left += [(f"{path}[{k}]", part) for k, part in enumerate(islice(x, 500))]
        elif path.count(".") < 4 and not isinstance(x, _PLAIN):
            left += [(f"{path}.{name}", getattr(x, name)) for name in slots_of(x) if hasattr(x, name)]
            left += [(f"{path}.{name}", part) for name, part in islice(getattr(x, "__dict__", {}).items(), 500)]
    return found


def _say_instead(x: Any) -> str:
    """Says what to write in place of an object that holds tensors."""
    if dataclasses.is_dataclass(x):
        return "declare all of its attributes as fields of the dataclass, and the loop takes it as a tree"
    return (
        "carry a dict, a tuple or a dataclass instead, or register the class with "
        "torch.utils._pytree.register_dataclass or torch.utils._pytree.register_pytree_node"
    )


def _kind_of(leaf: Any) -> Any:
    """Returns what must be the same of a leaf at every step, as far as it is known."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if type(leaf) is TensorArray:
        return TensorArray, leaf.element_shape, leaf.dtype, leaf.device
    return type(leaf)


def _refines(old: Any, new: Any) -> bool:
    """Whether the facts of an array agree where both are known."""
    if len(old) != 4 or any(None not in (a, b) and a != b for a, b in zip(old[2:], new[2:], strict=True)):
        return False
    if old[1] is None or new[1] is None:
        return True
    return len(old[1]) == len(new[1]) and all(a is None or a == b for a, b in zip(old[1], new[1], strict=True))


def _say_hint(was: str, kind: Any, x: Any) -> str:
    if kind in (int, float, bool, complex):
        wanted = "torch.tensor(...)" if isinstance(x, Tensor) else type(x).__name__
        return f"A Python number keeps its type: begin with a {wanted} in init, or convert what the body returns."
    if type(kind) is tuple and isinstance(x, Tensor) and len(kind) == 3 and kind[0] == x.shape:
        return "Convert with .to(...) in the body, or begin with that dtype and device in init."
    if type(kind) is tuple and isinstance(x, Tensor):
        return "A carry keeps its shape: begin with that shape in init, or let a TensorArray grow."
    return "Return leaves of the same kind as in init."


def first_without_rows(leaves: Sequence[Any], rows: int) -> int | None:
    """The first tensor of rank 1 or more, or array by its elements, that has not `rows` leading rows."""
    for i, x in enumerate(leaves):
        has_shape = isinstance(x, Tensor) or is_packed(x)
        shape = x.shape if has_shape else x.element_shape if isinstance(x, TensorArray) else None
        # A 0-d tensor is shared by all rows; the elements of an array never are.
        if shape is None or (isinstance(x, Tensor) and not shape):
            continue
        if not shape or shape[0] not in (rows, None):
            return i
    return None


def need_rows(leaves: Sequence[Any], rows: int, why: str, say: Callable[[int], str]) -> None:
    """Raises unless every leaf has `rows` leading rows, or is shared by all; `say` gives the path of one."""
    if (i := first_without_rows(leaves, rows)) is not None:
        raise WrongValue(
            f"{why} {rows} rows, but {say(i)} is {describe(leaves[i])}; "
            f"give it {rows} leading rows, or make it 0-d where all rows share it"
        )


def dtype_of_number(x: Any) -> torch.dtype:
    """The dtype of the tensor that Python numbers like `x` become."""
    return torch.tensor(x, device="cpu").dtype
