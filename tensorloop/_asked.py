"""The conditions of a checkpointed loop. They look and do not change: replays follow what they said, and ask no more.

Whether they did is seen by versions. A batch norm's statistics change without one, so their values are compared.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import _modes
from tensorloop._captures import Captures
from tensorloop._checks import describe
from tensorloop._snapshots import Kept, State, fed
from tensorloop._steps import Loop
from tensorloop.tensor_array import TensorArray


class Conditions:
    """`cond_fn` and `until` of a loop, asked while its first sweep runs."""

    def __init__(self, loop: Loop, captures: Captures) -> None:
        self.loop, self.captures = loop, captures
        self.fed: tuple[Any, Any] = (None, None)  # a state, and the leaves made of it

    def leaves_of(self, state: State) -> Any:
        """The leaves of a state: those that `cond_fn` has seen, if it was asked about it."""
        known, self.fed = self.fed, (None, None)
        return known[1] if known[0] is state else fed(state)

    def goes_on(self, state: State) -> bool:
        """Whether there is another step. Captured arrays are the caller's meanwhile: a cut takes rows of a context."""
        loop, arrays = self.loop, self.captures.arrays.values()
        for captured in arrays:
            captured.leave()
        try:
            if loop.cond is None:
                return loop.goes_on(loop.taken, [])
            if loop.taken:
                leaves = fed(state)
                self.fed = state, leaves  # the next step gets the same
            else:  # the first state is the caller's
                leaves = fed([Kept(x.values.clone(), x.recorded) if type(x) is Kept else x for x in state])
            before = _Marks(leaves[0], self.captures)
            going = loop.goes_on(loop.taken, leaves[0])
            before.check(loop, "cond_fn", loop.taken)
            return going
        finally:
            for captured in arrays:
                captured.enter()

    def asks_until(self, t: int, state: State) -> None:
        """Asks `until` after step t."""
        if self.loop.until is not None:
            before = _Marks(state, self.captures)
            self.loop.asks_until(t, state)
            before.check(self.loop, "until", t)


class _Marks:
    """What shows that a carry, or a buffer that the body changes too, was changed in place."""

    __slots__ = ("buffers", "leaves")

    def __init__(self, leaves: Sequence[Any], captures: Captures) -> None:
        self.leaves = [(x, _mark(x)) for x in leaves]
        self.buffers = [(x, _mark(x), x.clone() if unseen else None) for x, unseen in captures.written_to()]

    def check(self, loop: Loop, what: str, t: int) -> None:
        for path, (x, mark) in zip(loop.carry.tree.paths, self.leaves, strict=False):
            if _mark(x) != mark:
                done = "wrote to" if isinstance(x, TensorArray) else "changed"
                raise RuntimeError(
                    f"{loop.name}: {what} {done} carry{path} in place at step {t}; with checkpoints it may only look, "
                    f"as a replay does not ask it again: change a copy, or let the body make that change"
                )
        for x, mark, values in self.buffers:
            if _mark(x) != mark or (values is not None and not same_bits(x, values)):
                raise RuntimeError(
                    f"{loop.name}: {what} changed {describe(x)}, which the body uses, in place at step {t} (as a batch "
                    f"norm in training mode does); with checkpoints it may only look, as a replay does not ask it "
                    f"again: call eval() for it, or let the body alone make that change"
                )


def _mark(x: Any) -> Any:
    if isinstance(x, Tensor):
        return None if x.is_inference() else x._version
    if isinstance(x, TensorArray) and x._store is not None:
        tape = getattr(x._store, "tape", None)
        return x._store.length, getattr(x._store, "overwritten", None), None if tape is None else len(tape.log)
    return 0


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one kind are equal bit by bit, so that NaN equals itself."""
    if _modes.is_fake(x):
        return True
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
