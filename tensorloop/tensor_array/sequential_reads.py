"""Single rows of an unstacked tensor, a chunk at a time: one operation for many reads in order."""

import torch
from torch import Tensor

from tensorloop._torch import transforms

# Rows are taken out together, this many at a time: one operation, not all copies at once.
CHUNK = 64


class UnstackedRows:
    """Single rows of an unstacked tensor as copies, a chunk at a time while they are read in order."""

    __slots__ = ("chunks", "first", "recorded", "rows", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.recorded = values.requires_grad
        self.chunks: tuple[Tensor, ...] = ()
        self.rows: list[Tensor | None] = []  # of the chunk at hand; None once handed out
        self.first = 0

    def read(self, i: int) -> Tensor | None:
        """Row i, or None where it has to be read alone: out of order, again, or without gradient."""
        if self.recorded and not torch.is_grad_enabled():
            return None
        k = i - self.first
        if not 0 <= k < len(self.rows):
            if not self._take_chunk(i):
                return None
            k = i - self.first
        row, self.rows[k] = self.rows[k], None
        return row

    def _take_chunk(self, i: int) -> bool:
        """Makes the chunk of row i the one at hand, if i is where a reader in order enters it."""
        in_order = i % CHUNK in (0, CHUNK - 1) or i == len(self.values) - 1
        if not in_order or not _plain():
            return False
        self.rows = list(transforms.unbind_copy(self.chunk(i)))
        self.first = i // CHUNK * CHUNK
        return True

    def chunk(self, i: int) -> Tensor:
        """The chunk of row i, one piece of one split: their gradients meet in one tensor."""
        if not self.chunks:
            self.chunks = self.values.split(CHUNK)
        return self.chunks[i // CHUNK]


class PickedRows(UnstackedRows):
    """Reads some rows `ids` of each slot: of its other rows nothing is copied."""

    __slots__ = ("fresh", "ids", "of")

    def __init__(self, of: UnstackedRows, ids: Tensor) -> None:
        super().__init__(of.values)
        self.of, self.ids, self.fresh = of, ids, True

    def _take_chunk(self, i: int) -> bool:
        in_order = self.fresh or i % CHUNK in (0, CHUNK - 1) or i == len(self.values) - 1
        if not in_order or not _plain():
            return False
        self.fresh = False  # a reader in order may come in anywhere, once
        chunk, self.first = self.of.chunk(i), i // CHUNK * CHUNK
        if i % CHUNK != CHUNK - 1:  # it goes forward
            chunk, self.first = chunk[i - self.first :], i
        self.rows = list(chunk.index_select(1, self.ids).unbind(0))  # views of what nobody else has
        return True


def _plain() -> bool:
    return not torch.is_inference_mode_enabled() and transforms.maybe_level() is None
