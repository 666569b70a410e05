"""The ended hypotheses that a search keeps: the n best of each row, as (key, sum, step, place).

An end that comes later must be strictly better to take a place, so that a row may stop as soon as nothing better can
come.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tensorloop.kernels import find


class Verdict(NamedTuple):
    """The outcome of a step: a field is True if it is so in any of the rows that search."""

    spoilt: bool  # there is no hypothesis any more, or one whose key is NaN or inf
    ended: bool  # by the rule "exact" or "first_n" the row is over, or since nothing runs on
    undecided: bool = False  # `ranked` does not say which ones run on


class Pool:
    """B rows of n places, the best first, of equal ones the earlier."""

    def __init__(self, n: int, keys: Tensor, sums: Tensor) -> None:
        """With nothing in it, for keys and sums like these, (B, K)."""
        rows = len(keys)
        self.keys = keys.new_full((rows, n), -torch.inf)
        self.sums = sums.new_full((rows, n), -torch.inf)
        # (step * K + place) * E + which of the E eos_ids
        self.ends = torch.zeros(rows, n, dtype=torch.int64, device=keys.device)
        # (B,) of the last step: the best that one which runs can still reach, and the best key that was not taken.
        self.most, self.left_out = keys.new_full((2, rows), torch.inf)

    @property
    def worst(self) -> Tensor:
        """(B,): the n-th key; -inf where there are fewer."""
        return self.keys[:, -1]

    def take(
        self,
        ends: tuple[Tensor, Tensor],
        runs: tuple[Tensor, Tensor],
        searching: Tensor,
        t: int,
        rule: str,
        ranked: Tensor | None = None,
    ) -> Verdict:
        """Takes ends of step t, keys and sums (B, K * E). `runs`: keys (B, K), and bounds on what they can reach.

        `ranked` (B, K + 1): the best keys of all, where it is still to be told whether these say who runs on.
        """
        (keys, sums), (running, bounds) = ends, runs
        dtype = self.keys.dtype
        keys, bounds = (x if x.dtype is dtype else x.to(dtype) for x in (keys, bounds))
        take = find("beam_pool", self.keys, keys, bounds)
        if (more := keys.shape[1] - running.shape[1]) > 0:  # several eos_ids: as many that run as there are ends
            running, bounds = (F.pad(x, (0, more), value=-torch.inf) for x in (running, bounds))
        pool = self.keys, self.sums, self.ends, self.most, self.left_out
        said = take((keys, sums), (running, bounds), pool, searching, t, rule, ranked)
        return Verdict(spoilt=bool(said & 1), ended=bool(said & 2), undecided=bool(said & 4))

    def measure_gap(self, most: Tensor) -> Tensor:
        """(B,) float64: by how much the best to come, `most`, can be above the n-th."""
        return torch.where(most == -torch.inf, -torch.inf, (most - self.worst).double())

    def locate(self, size: int, many: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, n) each: after which step the hypotheses ended, at which of `size` places, by which of `many` eos_ids."""
        place = self.ends.div(many, rounding_mode="floor")
        step = place.div(size, rounding_mode="floor")
        return step, place - step * size, self.ends - place * many
