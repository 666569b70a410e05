"""Who descends from whom: from the hypotheses of one step back to their ancestors in every earlier one.

State t is what step t begins with. S_t[j, b, k] is the place that the ancestor of hypothesis k had in state j. From one
step to the next all of S changes, S_{t+1}[j] = S_t[j, b, parents_t]; but where all hypotheses of a row share an
ancestor, nothing changes any more. So S is held once: its first `shared[t]` states, the same for all k, are final, and
for the few states after them S_t is made again from the parents when a backward pass asks. O(T) bytes in all.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop import _active


class Paths(NamedTuple):
    """The ancestors of the hypotheses of state t, for rows in the batch."""

    shared: Tensor  # (c, B): in states 0 to c - 1, where one ancestor is that of all K
    own: Tensor  # (t + 1 - c, B, K): in states c to t

    def whole(self, first: int = 0) -> Tensor:
        """(t + 1 - first, B, K): the ancestors in states from `first` on."""
        c, size = len(self.shared), self.own.shape[2]
        if first >= c:
            return self.own[first - c :]
        return torch.cat([self.shared[first:, :, None].expand(-1, -1, size), self.own])


class Lineage:
    """S of one search. `log` has `parents` (T, B, K) of the steps done."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.state = 0
        self.shared = [0]
        first = torch.arange(log.size, device=log.device).expand(1, log.rows, log.size)
        self.table = first.clone()  # (room, B, K), of which state + 1 are in use
        self.last: tuple[int, int, Paths] | None = None

    def at(self, t: int, ids: Tensor | None) -> Paths:
        """The paths that end in state t, of the rows `ids` (all of them where None). Not to be changed."""
        with _active.quietly(), torch.no_grad():
            rows = self.log.rows if ids is None else len(ids)
            if self.last is None or self.last[:2] != (t, rows):
                self.last = t, rows, self._found(t, ids)
            return self.last[2]

    def _found(self, t: int, ids: Tensor | None) -> Paths:
        while self.state < t:
            self._advance(ids)
        c = self.shared[t]
        own = _rows(self.table[c : t + 1], ids).clone() if t == self.state else self._again(c, t, ids)
        return Paths(_rows(self.table[:c, :, 0], ids), own)

    def _advance(self, ids: Tensor | None) -> None:
        """S of the next state, and how much of it is final."""
        t, c = self.state + 1, self.shared[-1]
        if t == len(self.table):
            self.table = torch.cat([self.table, torch.empty_like(self.table)])
        table, parents = self.table, self.log.parents[t - 1]
        table[c:t] = table[c:t].gather(2, parents.expand(t - c, -1, -1))
        table[t] = torch.arange(self.log.size, device=self.log.device)
        recent = _rows(table[c:t], ids)
        self.shared.append(c + int((recent == recent[:, :, :1]).all(2).all(1).sum()))
        self.state = t

    def _again(self, c: int, t: int, ids: Tensor | None) -> Tensor:
        parents = self.log.parents
        place = _rows(torch.arange(self.log.size, device=self.log.device).expand(1, self.log.rows, -1), ids)[0]
        own = [place]
        for j in range(t - 1, c - 1, -1):
            place = _rows(parents[j : j + 1], ids)[0].gather(1, place)
            own.append(place)
        return torch.stack(own[::-1])


def _rows(x: Tensor, ids: Tensor | None) -> Tensor:
    """The rows `ids` of (n, B, ...)."""
    return x if ids is None else x.index_select(1, ids)
