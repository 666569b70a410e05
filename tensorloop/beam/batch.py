"""Which rows of a search are in its batch: those that stop leave it, where it is compact."""

from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop._common.ranking import widened


class Batch(NamedTuple):
    """The rows `ids` of so many, in rising order; all of them where None."""

    ids: Tensor | None
    rows: int

    @property
    def left(self) -> int:
        """How many rows are left in the batch."""
        return self.rows if self.ids is None else len(self.ids)

    def select(self, x: Tensor, dim: int = 0) -> Tensor:
        """Selects the rows in the batch from those of a tensor that has all rows."""
        return x if self.ids is None else x.index_select(dim, self.ids)

    def widen(self, x: Tensor, fill: float = -torch.inf) -> Tensor:
        """All rows, with `fill` in those that are not in the batch."""
        return x if self.ids is None else widened(x, self.ids, self.rows, fill)

    def find(self, row: int) -> int:
        """Where a row is in the batch."""
        return row if self.ids is None else int((self.ids == row).nonzero()[0, 0])

    def name(self, place: int) -> int:
        """Which row is at a place of the batch."""
        return place if self.ids is None else int(self.ids[place])
