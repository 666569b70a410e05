"""Who descends from whom: from the hypotheses of one step back to their ancestors in every earlier one.

State t is what step t begins with. S_t[j, b, k] is the place that the ancestor of hypothesis k had in state j. From one
step to the next all of S changes, S_{t+1}[j] = S_t[j, b, parents_t]; but where all hypotheses of a row share an
ancestor, nothing changes any more. So S is held once: its first `shared[t]` states, the same for all k, are final, and
for the few states after them S_t is made again from the parents when a backward pass asks. O(T) bytes in all, mostly
one for each place, as a graph keeps them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop.beam.batch import Batch
from tensorloop.kernels import find


class Paths(NamedTuple):
    """The ancestors of the hypotheses of state t, for rows in the batch."""

    shared: Tensor  # (c, B): in states 0 to c - 1, where one ancestor is that of all K
    own: Tensor  # (t + 1 - c, B, K): in states c to t

    def join(self, first: int) -> Tensor:
        """(t + 1 - first, B, K) int64: the ancestors in states from `first` on."""
        c, size = len(self.shared), self.own.shape[2]
        if first >= c:
            return self.own[first - c :].long()
        return torch.cat([self.shared[first:, :, None].expand(-1, -1, size), self.own]).long()


def pick_dtype(count: int) -> torch.dtype:
    """The dtype of fewest bytes that holds the numbers below `count`."""
    return next((x for x in (torch.uint8, torch.int16, torch.int32) if count <= torch.iinfo(x).max + 1), torch.int64)


def as_index(places: Tensor, count: int) -> Tensor:
    """`places` among `count`, as an index of int32 where that will do: what an index_select keeps for backward."""
    return places.int() if count <= torch.iinfo(torch.int32).max else places


class Ancestry:
    """S of one search. It keeps parents of its own: a graph that holds an ancestry holds nothing else of the search."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.state = 0
        self.shared = [0]
        self.first = torch.arange(size, dtype=pick_dtype(size), device=device).expand(1, rows, size)
        self.table = self.first.clone()  # (room, B, K), of which state + 1 are in use
        self.parents: list[Tensor] = []  # (B, K) of each step
        self.last: tuple[int, int, Paths] | None = None
        self._found: tuple[Any, tuple[Tensor, Tensor]] | None = None  # what `find` was last asked, and gave

    def follow(self, t: int, parents: Sequence[Tensor], batch: Batch) -> None:
        """Goes on to state t. `parents`: (B, K) of each of the steps done; only rows in the batch still matter."""
        while self.state < t:
            self._advance(parents[self.state], batch.ids)

    def trace(self, t: int, batch: Batch) -> Paths:
        """The paths that end in state t, of the rows in the batch. Not to be changed."""
        with scope.library_code(), torch.no_grad():
            rows = batch.left
            if self.last is None or self.last[:2] != (t, rows):
                self.last = t, rows, self._read(t, batch)
            return self.last[2]

    def find(self, t: int, batch: Batch, births: list[int]) -> tuple[Tensor, Tensor]:
        """Whose entries are seen in slots born in these steps; kept, as all layers of a model ask the same."""
        asked = t, batch.left, births
        if self._found is None or self._found[0] != asked:
            paths = self.trace(t, batch)
            c = len(paths.shared)
            split = bisect_left(births, c)
            states = _select_born(paths.shared, births[:split], 0), _select_born(paths.own, births[split:], c)
            self._found = asked, (states[0].contiguous(), states[1].contiguous())
        return self._found[1]

    def forget(self) -> None:
        """Lets go of what was asked last."""
        self.last = self._found = None

    def _read(self, t: int, batch: Batch) -> Paths:
        c = self.shared[t]
        own = batch.select(self.table[c : t + 1], 1).clone() if t == self.state else self._retrace(c, t, batch)
        return Paths(batch.select(self.table[:c, :, 0], 1), own)

    def _advance(self, parents: Tensor, ids: Tensor | None) -> None:
        """S of the next state, and how much of it is final."""
        t, c = self.state + 1, self.shared[-1]
        if t == len(self.table):
            self.table = torch.cat([self.table, torch.empty_like(self.table)])
        self.parents.append(self.table.new_empty(self.table.shape[1:]))
        go_on = find("beam_ancestors", self.table)
        self.shared.append(go_on(self.table, self.parents[-1], parents, ids, c, t))
        self.state = t

    def _retrace(self, c: int, t: int, batch: Batch) -> Tensor:
        """The own states from c to t, as the parents say."""
        place = batch.select(self.first, 1)[0]
        own = [place]
        for j in range(t - 1, c - 1, -1):
            place = batch.select(self.parents[j]).gather(1, place.long())
            own.append(place)
        return torch.stack(own[::-1])


class Family(NamedTuple):
    """The hypotheses of one step: how each came about."""

    ancestry: Ancestry
    t: int
    batch: Batch
    rows: int  # in the batch
    size: int

    def find_states(self, births: list[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Whose entries the hypotheses of now see in slots [start, stop), which were born in steps `births`.

        (n, B) for the slots of which all hypotheses of a row see the same, then (m, B, K) for the others.
        """
        return self.ancestry.find(self.t, self.batch, births[start:stop])

    def find_places(self, births: list[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Where the entries of `find_states` lie, as places in flat slots [start, stop)."""
        shared, own = self.find_states(births, start, stop)
        first = torch.arange((stop - start) * self.rows, device=own.device).view(-1, self.rows) * self.size
        return shared + first[: len(shared)], own + first[len(shared) :, :, None]


def _select_born(states: Tensor, births: list[int], first: int) -> Tensor:
    """The states of these steps; the first one there is is that of step `first`."""
    if not births:
        return states[:0]
    start, stop = births[0], births[0] + len(births)
    if births == list(range(start, stop)):
        return states[start - first : stop - first]
    return states[torch.tensor(births, device=states.device) - first]
