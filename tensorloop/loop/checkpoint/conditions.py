"""The conditions of a checkpointed loop. They look and do not change: replays follow what they said, and ask no more.

Whether they did is seen by versions. A batch norm's statistics change without one, so their values are compared.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse
from tensorloop._torch.versions import read_version, version_of
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.snapshots import State, as_leaves, copied, same_bits
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import store_of


class Conditions:
    """`cond_fn` and `until` of a loop, asked while its first sweep runs."""

    def __init__(self, loop: Loop, captures: Captures) -> None:
        self.loop, self.captures = loop, captures
        self.given: tuple[Any, Any] = (None, None)  # a state, and the leaves made of it

    def leaves_of(self, state: State) -> Any:
        """The leaves of a state: those that `cond_fn` has seen, if it was asked about it."""
        known, self.given = self.given, (None, None)
        return known[1] if known[0] is state else as_leaves(state)

    def ask(self, state: State) -> bool:
        """Whether there is another step. Captured arrays are the caller's meanwhile: a cut takes rows of a context."""
        loop, arrays = self.loop, self.captures.arrays.values()
        for captured in arrays:
            captured.leave()
        try:
            if loop.cond is None:
                self.loop = loop.ask([])
                return self.loop.going
            if loop.taken:
                leaves = as_leaves(state)
                self.given = state, leaves  # the next step gets the same
            else:  # the first state is the caller's
                leaves = as_leaves(copied(state))
            marks, buffers = _marks(leaves[0]), self._buffers()
            self.loop = loop.ask(leaves[0])  # another from here on, where rows stop on their own
            if buffers or _marks(leaves[0]) != marks:
                self._check("cond_fn", loop.taken, leaves[0], marks, buffers)
            return self.loop.going
        finally:
            for captured in arrays:
                captured.enter()

    def ask_until(self, t: int, state: State) -> None:
        """Asks `until`, which the loop has, after step t."""
        marks, buffers = _marks(state), self._buffers()
        self.loop.ask_until(t, state)
        self._check("until", t, state, marks, buffers)

    def _buffers(self) -> list[tuple[Tensor, Any, Tensor | None]]:
        """Buffers that the body changes too: how they are marked, and their values where a change leaves no mark."""
        writes = self.captures.writes
        if not (writes.changed or writes.fresh):
            return []
        return [(x, _mark(x), x.clone() if unseen else None) for x, unseen in writes.tensors()]

    def _check(
        self, what: str, t: int, leaves: Sequence[Any], marks: list[Any], buffers: Sequence[tuple[Tensor, Any, Any]]
    ) -> None:
        """Raises where the carry, or a buffer, was changed in place since it was marked."""
        if (now := _marks(leaves)) != marks:
            i = next(i for i, mark in enumerate(marks) if now[i] != mark)
            done = "wrote to" if isinstance(leaves[i], TensorArray) else "changed"
            raise Misuse(
                f"{what} {done} carry{self.loop.carry.tree.paths[i]} in place at step {t}; with checkpoints it "
                f"may only look, as a replay does not ask it again: change a copy, or let the body make that change"
            )
        for x, mark, values in buffers:
            if _mark(x) != mark or (values is not None and not same_bits(x, values)):
                raise Misuse(
                    f"{what} changed {describe(x)}, which the body uses, in place at step {t} (as a batch "
                    f"norm in training mode does); with checkpoints it may only look, as a replay does not ask it "
                    f"again: call eval() for it, or let the body alone make that change"
                )


def _marks(leaves: Sequence[Any]) -> list[Any]:
    """Returns a mark for each leaf; it changes when the leaf is changed in place. Called twice a step."""
    try:
        return [*map(read_version, leaves)]
    except (AttributeError, RuntimeError):  # numbers, arrays; tensors made in inference mode
        return [_mark(x) for x in leaves]


def _mark(x: Any) -> Any:
    if isinstance(x, Tensor):
        return version_of(x)
    if isinstance(x, TensorArray) and (store := store_of(x)) is not None:
        undo = getattr(store, "undo", None)
        return store.length, getattr(store, "overwritten", None), None if undo is None else len(undo.entries)
    return 0
