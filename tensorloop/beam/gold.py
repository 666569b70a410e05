"""Gold hypotheses: followed to their end beside those of the search, one a row, at a place behind them."""

import torch
from torch import Tensor

from tensorloop.beam.batch import Batch


class Gold:
    """How far they have come, and where the search has them too. `size` counts the hypotheses of the search."""

    sum: Tensor  # (B,), of log-probabilities

    def __init__(self, tokens: Tensor, lens: Tensor, end: int, size: int) -> None:
        """`tokens` (B, T), with eos behind the end; `lens` (B,); `end`: by which of the eos_ids they end."""
        self.tokens, self.lens, self.end, self.size = tokens, lens, end, size
        self.same = torch.ones(len(lens), size, dtype=torch.bool, device=lens.device)  # so far, at each place
        self.place = torch.full_like(lens, -1)  # of the one that the search has; -1 for none

    @property
    def largest(self) -> int:
        """The largest token."""
        return int(self.tokens.max()) if len(self.tokens) else 0

    def is_over(self, t: int) -> Tensor:
        """(B,) bool: the rows whose gold hypothesis has ended before step t, or cannot be."""
        return (t > self.lens) | (self.sum == -torch.inf)

    def follow(
        self, t: int, keys: tuple[Tensor, Tensor], parents: Tensor, tokens: Tensor, log_probs: Tensor, batch: Batch
    ) -> None:
        """Step t, whose decisions (B, size + 1) are completed. `keys`: (B, size) before and after it.

        `log_probs`: (b, V) of the gold hypotheses in the batch.
        """
        k, (before, after) = self.size, keys
        column = self.tokens[:, min(t, self.tokens.shape[1] - 1)]  # the last one is eos
        same = self.same & (before > -torch.inf)
        found, place = same.max(1)
        self.place = torch.where(found & (self.lens == t), place, self.place)
        self.same = same.gather(1, parents[:, :k]) & (tokens[:, :k] == column[:, None])
        taken = batch.widen(log_probs.gather(1, batch.select(column)[:, None])[:, 0], 0.0)
        self.sum = self.sum + taken.masked_fill(self.is_over(t), 0)
        # What is over goes on as one that is not, so that step_fn sees nothing that cannot be.
        runs = after.amax(1) > -torch.inf
        for decided, gold in ((parents, torch.full_like(column, k)), (tokens, column)):
            decided[:, :k] = torch.where(runs[:, None], decided[:, :k], gold[:, None])
            decided[:, k] = torch.where(runs & self.is_over(t + 1), decided[:, 0], gold)

    def join(self, sums: Tensor, t: int) -> Tensor:
        """(B, size + 1): the sums of the search, and those of gold hypotheses that run on after step t."""
        return torch.cat([sums, self.sum.masked_fill(self.is_over(t + 1), -torch.inf)[:, None]], 1)
