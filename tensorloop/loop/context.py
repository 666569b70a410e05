"""The context of a loop: what its functions get besides the carry, and what is left of it where rows leave the batch.

A packed tensor of the context is a leaf like a tensor: rows are taken out of it by one gather.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.errors import Misuse
from tensorloop._torch import transforms
from tensorloop._torch.versions import Versions
from tensorloop.loop import stopped_rows
from tensorloop.loop.carry import need_rows
from tensorloop.packed.table.base import Packed, any_packed, is_packed


class Context:
    """A tree that no step changes."""

    __slots__ = ("arguments", "leaves", "paths", "tree")

    def __init__(self, context: Any) -> None:
        self.tree: pytree.Tree | None = None
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        if context is not None:
            self.tree, leaves = pytree.taken_apart(hide_packed(context))
            self.leaves = [_shown(x) for x in leaves]
            self.paths = self.tree.paths
        self.arguments = self.arguments_of(self.leaves)

    def arguments_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """A context of these leaves as further arguments of a function: none, or one."""
        return () if self.tree is None else (self.tree.unflatten(leaves),)

    def need_rows(self, rows: int, why: str) -> None:
        """Raises unless every leaf has so many rows, or is shared by all."""
        need_rows(self.leaves, rows, why, lambda i: f"context{self.paths[i]}")


class CutContext:
    """A context that rows leave: as it was given, and again after each cut."""

    def __init__(self, context: Context, compact: bool) -> None:
        self.context = context
        self.leaves = [alias(x) for x in context.leaves] if compact else context.leaves
        self._arguments = [context.arguments_of(self.leaves)]
        self._versions = _versions(self.leaves if compact else [])

    def after(self, cuts: int) -> tuple[Any, ...]:
        """The arguments of a step after so many cuts."""
        return self._arguments[cuts]

    def cut(self, cut: stopped_rows.RowCut, *, copies: bool) -> None:
        """Rows leave. `copies`: whether arrays are copied at once."""
        self.check_unchanged()
        # Each from the caller's, none from another: a replay that follows one must not meet the next.
        given = self.context.leaves
        self.leaves = (
            stopped_rows.select_kept(given, cut) if copies else stopped_rows.pick_rows(given, cut, self.leaves)
        )
        self._arguments.append(self.context.arguments_of(self.leaves))
        self._versions = _versions(self.leaves)

    def check_unchanged(self) -> None:
        """Refuses changes of a context that rows leave: the next cut would take its rows from the caller's again."""
        if (i := self._versions.changed()) is not None:
            raise Misuse(
                f"context{self.context.paths[i]}, or a tensor that it shares memory with, was changed in "
                f"place during the loop, while rows that stop leave it; put what changes in the carry"
            )


class _Hidden:
    """A packed tensor that no tree function looks into."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed


def hide_packed(tree: Any) -> Any:
    """A tree in which packed tensors are leaves."""
    if not any_packed(tree):
        return tree
    return pytree.mapped(lambda x: _Hidden(x) if is_packed(x) else x, tree, is_packed)


def _shown(leaf: Any) -> Any:
    return leaf.packed if type(leaf) is _Hidden else leaf


def packed_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, packed tensors among them."""
    return [(path, _shown(x)) for path, x in pytree.leaves_with_paths(hide_packed(tree))]


def values_of(leaf: Any) -> Tensor | None:
    """The tensor that has a leaf's numbers by row; None for what has none, and for arrays."""
    x = leaf.values if is_packed(leaf) else leaf
    return x if isinstance(x, Tensor) and x.dim() else None


def alias(leaf: Any) -> Any:
    """A view of all of a leaf, for what has numbers."""
    if is_packed(leaf):
        return leaf._with(leaf.values.view_as(leaf.values))
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf


def _versions(leaves: Sequence[Any]) -> Versions:
    """Returns the versions of the tensors that have rows."""
    return Versions(None if (values := values_of(x)) is None else transforms.numbers(values) for x in leaves)
