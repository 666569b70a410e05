"""What a scan collects: the outputs of all steps, stacked along one dim."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.errors import Misuse, WrongType
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import plain_mode
from tensorloop._torch.shards import is_sharded
from tensorloop._torch.versions import read_version
from tensorloop.loop.carry import describe, dtype_of_number
from tensorloop.packed.table.base import any_packed
from tensorloop.tensor_array.array import TensorArray

_NUMBERS = (bool, int, float, complex)
CHUNK = 64  # slices that are made at once


class Views:
    """Slices of a tensor along a dim, made some at a time."""

    __slots__ = ("_dim", "_number", "_some", "_x", "backwards")

    def __init__(self, x: Tensor, dim: int, backwards: bool = False) -> None:
        self._x, self._dim, self.backwards = x, dim, backwards
        self._number, self._some = -1, ()

    def at(self, i: int) -> Tensor:
        """Slice i, or i from the end where they come backwards."""
        i = self._x.shape[self._dim] - 1 - i if self.backwards else i
        number, place = divmod(i, CHUNK)
        if number != self._number:
            size = min(CHUNK, self._x.shape[self._dim] - number * CHUNK)
            self._number, self._some = number, self._x.narrow(self._dim, number * CHUNK, size).unbind(self._dim)
        return self._some[place]


class Outputs:
    """The ys of a loop. The first step decides their structure, kinds and shapes."""

    __slots__ = ("columns", "dim", "kinds", "length", "stacked", "tree")

    def __init__(self, dim: int, length: int | None) -> None:
        self.dim, self.length = dim, length
        self.tree: pytree.Tree | None = None
        self.columns: list[Any] = []
        self.kinds: list[Any] = []
        self.stacked: list[Tensor | None] = []  # of a loop that was one node: its outputs

    def add(self, y: Any, step: int) -> None:
        """Takes the output of the next step."""
        leaves = self.leaves_of(y, step)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.append(leaf)

    def extend(self, ys: list[Any]) -> None:
        """Takes outputs of next steps away from a list: none carries a gradient, nor is changed by a later step."""
        if ys and (tree := self.tree) is not None:
            leaves = zip(*map(tree.flatten, ys), strict=True)  # pyright: ignore[reportArgumentType]
            for column, values in zip(self.columns, leaves, strict=False):
                column.extend(values)
            ys.clear()

    def leaves_of(self, y: Any, step: int) -> list[Any]:
        """The leaves of an output, checked against those of the first."""
        if self.tree is None:
            return self._begin(y, step)
        tree, leaves = self.tree, self.tree.flatten(y)
        if leaves is None:
            raise WrongType(
                f"the body returned a y of another structure at step {step}:\n"
                f"  - {pytree.structure(tree.unflatten([None] * tree.size))}\n  + {pytree.structure(y)}\n"
                f"Return the same containers at every step."
            )
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=True)):
            if self.kind_of(leaf, tree.paths[i], step) != kind:
                was = kind.__name__ if isinstance(kind, type) else _said(kind)
                raise WrongType(
                    f"y{tree.paths[i]} changed at step {step}:\n  - {was}\n  + {describe(leaf)}\n"
                    f"The outputs of all steps are stacked, so they must be alike; put what grows in a TensorArray "
                    f"in the carry."
                )
        return leaves

    def kind_of(self, leaf: Any, path: str, step: int) -> Any:
        """Returns what must be the same of a leaf at every step."""
        return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else type(leaf)

    def _begin(self, y: Any, step: int) -> list[Any]:
        no_packed(y)
        self.tree, leaves = pytree.taken_apart(y)
        for path, leaf in zip(self.tree.paths, leaves, strict=True):
            self.columns.append(self._column(path, leaf))
            self.kinds.append(self.kind_of(leaf, path, step))
        return leaves

    def _tensors(self, path: str) -> Any:
        return Column(path, self.dim, self.length)

    def _column(self, path: str, leaf: Any) -> "Values | Column":
        if isinstance(leaf, Tensor):
            return self._tensors(path)
        if leaf is None or type(leaf) in _NUMBERS:
            return Values(leaf)
        is_array = isinstance(leaf, TensorArray)
        raise WrongType(
            f"y{path} is {describe(leaf)}; expected tensors, numbers or None"
            + ("; carry the array instead: it is in the carry that the loop returns" if is_array else "")
            + ("; wrap it with torch.as_tensor" if hasattr(leaf, "__array__") and not is_array else "")
        )

    def of_no_steps(self, ys: Any) -> Any:
        """The ys of a loop that took no step."""
        return ys

    def joined(self, values: Sequence[Tensor], reverse: bool) -> Tensor:
        """The outputs of all steps as one tensor."""
        return torch.stack(list(values[::-1] if reverse else values), place(self.dim, values[0].dim()))

    def parts(self, ys: Tensor, reverse: bool) -> Callable[[int], Tensor]:
        """The view of ys, or of its gradient, that belongs to a step."""
        return Views(ys, place(self.dim, ys.dim() - 1), reverse).at

    def stack(self, reverse: bool) -> Any:
        """ys: each leaf stacked over the steps, in index order."""
        assert self.tree is not None
        stacked, self.stacked = self.stacked or [None] * len(self.columns), []
        leaves = [c.stack(reverse) if x is None else x for c, x in zip(self.columns, stacked, strict=True)]
        return self.tree.unflatten(leaves)


def _said(kind: tuple[Any, ...]) -> str:
    """The kind of a tensor as `describe` says it of one."""
    shape, dtype, device = kind
    return f"Tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} {device}"


class Values:
    """Numbers, which become a (T,) tensor, or None."""

    def __init__(self, first: Any) -> None:
        self.first = first
        self.values: list[Any] = []

    def append(self, value: Any) -> None:
        self.values.append(value)

    def extend(self, values: Sequence[Any]) -> None:
        self.values.extend(values)

    def stack(self, reverse: bool) -> Tensor | None:
        if self.first is None:
            return None
        values = self.values[::-1] if reverse else self.values
        return torch.tensor(values, dtype=dtype_of_number(self.first))


class Column:
    """One tensor of each step. What needs no gradient is copied at once; the rest waits and is checked when stacked."""

    __slots__ = ("copied", "copies", "dim", "length", "path", "versions", "waiting")

    def __init__(self, path: str, dim: int, length: int | None) -> None:
        self.path, self.dim, self.length = path, dim, length
        self.copies: Tensor | None = None  # (slots, *F), of which the first `copied` are filled
        self.copied = 0
        self.waiting: list[Tensor] = []
        self.versions: list[int | None] = []

    def append(self, y: Tensor) -> None:
        if (
            here.looks
            or (y.requires_grad and torch.is_grad_enabled())
            or transforms.maybe_level() is not None
            or transforms.has_tangent(y)
        ):
            self._spill()
            kept = transforms.maybe_level() is None and not y.is_inference() and not here.looks
            self.waiting.append(y if kept else y.clone())
            self.versions.append(read_version(y) if kept else None)
        elif self.waiting or (type(y) is not Tensor and is_sharded(y)):  # torch stacks the parts of each rank
            self.waiting.append(y.detach().clone())
            self.versions.append(None)
        else:
            self._room(y)[self.copied].copy_(y.detach())
            self.copied += 1

    def extend(self, ys: Sequence[Tensor]) -> None:
        """Copies outputs that carry no gradient."""
        if type(ys[0]) is not Tensor and is_sharded(ys[0]):
            for y in ys:
                self.append(y.detach())
            return
        end = self.copied + len(ys)
        torch.stack([*map(Tensor.detach, ys)], out=self._room(ys[0], len(ys))[self.copied : end])
        self.copied = end

    def first(self) -> Tensor:
        """The output of the first step, in memory of its own or as autograd has it."""
        return self.waiting[0] if self.copies is None else self.copies[0].clone()

    def _room(self, y: Tensor, more: int = 1) -> Tensor:
        """The copies, with room for some more."""
        old = self.copies
        if old is not None and self.copied + more <= len(old):
            return old
        with plain_mode():
            room = self.length if old is None and self.length else max(2 * self.copied, self.copied + more, 4)
            self.copies = torch.empty((room, *y.shape), dtype=y.dtype, device=y.device)
            if old is not None:
                self.copies[: self.copied].copy_(old[: self.copied])
        return self.copies

    def _spill(self) -> None:
        """From the first y with a gradient on, a list: autograd stacks it without a second copy."""
        if self.copies is not None:
            self.waiting = list(self.copies[: self.copied].unbind(0))
            self.versions = [None] * self.copied
            self.copies = None

    def stack(self, reverse: bool) -> Tensor:
        if self.copies is not None:
            out = self.copies[: self.copied]
            out = out.flip(0) if reverse else out
            return out.movedim(0, place(self.dim, out.dim() - 1))
        check_unchanged(self.waiting, self.versions, self.path)
        values = self.waiting[::-1] if reverse else self.waiting
        return torch.stack(values, place(self.dim, values[0].dim()))


def check_unchanged(ys: Sequence[Tensor], versions: Sequence[int | None], path: str) -> None:
    """Raises where an output that waits to be joined was changed in place meanwhile."""
    for step, (y, version) in enumerate(zip(ys, versions, strict=True)):
        if version is not None and read_version(y) != version:
            raise Misuse(f"y{path}: the output of step {step} was changed in place at a later step; return y.clone()")


def no_packed(y: Any) -> None:
    """Raises where an output is packed: stacked values would no longer be those of its rows."""
    if any_packed(y):
        raise WrongType("y holds a PackedTensor, which does not stack; return its .values, or y.pad()")


def place(dim: int, rank: int) -> int:
    """Where the steps go in the stack of outputs of this rank: at `dim`, or last where they have fewer dims."""
    return min(dim, rank) if dim >= 0 else max(dim + rank + 1, 0)
