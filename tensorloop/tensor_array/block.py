"""The memory behind an array: one allocation of slots, and the part of it that was handed out.

Slots are written through `data`; what is handed out is cut from `views`, the same memory under a version counter of
its own. So our writes never disturb a tensor that autograd saved, and a user's change of a view is seen (by autograd in
backward, by `check` here). A slot that a handed-out view covers (`exported`) is never written again in this block: an
overwrite moves to a copy first.
"""

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch.grad_modes import plain_mode
from tensorloop._torch.versions import read_version
from tensorloop.tensor_array.keys import Key, take


class Block:
    """One allocation of slots, shared by the arrays that were copied from one another."""

    __slots__ = (
        *("copies", "data", "device", "element_shape", "expected", "exported", "owned", "used", "viewed", "views"),
        "zero",
    )

    def __init__(self, data: Tensor, used: int, *, owned: bool = True) -> None:
        self.data = data
        self.device, self.element_shape = data.device, tuple(data.shape[1:])
        self.owned = owned
        self.copies = False  # whether runs are read as copies, so that nothing is ever exported
        self.used = used  # slots begun by any array on this block; the free tail is the taker's
        self.exported = (0, 0)  # slots covered by views handed out, or read by nodes
        self.viewed = 0  # one past the last of those that views cover
        with plain_mode():
            # A tensor given to `unstack` is the user's: same counter, so that a change of it is seen.
            self.views = data.data if owned else data
            self.zero = data.new_zeros(())  # what tokens are expanded from
        self.expected = read_version(self.views)

    def check(self) -> None:
        """Raises if somebody changed the values through a view, or the tensor that was unstacked."""
        if read_version(self.views) != self.expected:
            what = "a slice or stack() read from the array" if self.owned else "the tensor given to unstack()"
            raise Misuse(f"{what} was changed in place; clone() it before changing it")

    def export(self, start: int, stop: int) -> None:
        if start == stop or self.copies:
            return
        self.viewed = max(self.viewed, stop)
        low, high = self.exported
        self.exported = (min(low, start), max(high, stop)) if high > low else (start, stop)

    def read(self, key: Key) -> Tensor:
        """A view of a run of slots, a copy of anything else."""
        if isinstance(key, slice):
            return self.views[key].clone() if self.copies else self.views[key]
        out = take(self.data, key)
        is_view = isinstance(key, int) or (isinstance(key, Tensor) and key.dim() == 0)
        return out.clone() if is_view else out


class LiveBlock:
    """The block of a buffer that only grows, for nodes that read it in backward: none keeps one that it has outgrown.

    Where the buffer forgets its last slots, those that nodes have read are kept here. Nodes cannot hold the buffer
    itself, which holds them by its token.
    """

    __slots__ = ("__weakref__", "block", "solid", "tail")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.solid: int | None = None  # how many slots are still those of the block, None for all
        self.tail: Tensor | None = None  # those behind

    def slots(self, stop: int, start: int = 0) -> Tensor:
        """Slots [start, stop); not to be changed."""
        block, solid = self.block, self.solid
        if read_version(block.views) != block.expected:
            block.check()
        if solid is None or stop <= solid:
            return block.data[start:stop]
        assert self.tail is not None
        tail = self.tail[max(start - solid, 0) : stop - solid]
        return torch.cat([block.data[start:solid], tail]) if start < solid else tail

    def as_block(self, stop: int) -> Block:
        """A block whose first slots are these, for a node that reads it."""
        return self.block if self.tail is None else Block(self.slots(stop), stop)

    def forget(self, kept: int, filled: int) -> None:
        """The buffer keeps so many of the slots that it has filled: keeps the others, which it may write again."""
        with plain_mode():
            gone = self.block.data[kept : filled if self.solid is None else self.solid].clone()
            self.tail = gone if self.tail is None else torch.cat([gone, self.tail])
        self.solid = kept


def allocate(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for this shape, with the dtype and device of `like`; a plain tensor in every mode."""
    with plain_mode():
        return torch.empty(shape, dtype=like.dtype, device=like.device)
