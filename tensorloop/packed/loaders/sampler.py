"""Batches by their number of entries, for a DataLoader: rows of like lengths together, ranks with like costs."""

import math
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import accumulate, cycle
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import saved
from tensorloop.packed.rows.dim import Dim, as_dim

_POOL = 32  # steps' worth of entries that are sorted together
_EVEN = 1.005  # a step whose costliest batch costs at most this many times the mean needs nothing better
_TRIES = 4  # sizes of a step that are compared where none is even

_Step = list[list[int]]  # a batch for each rank


@saved("_lens", "_most", "_rows", "_shuffle", "_seed", "_drop", "_place", "_epoch", "_costs", "_history")
class BatchSampler(Sampler[list[int]]):
    """The `batch_sampler` of a DataLoader: batches that have at most `max_entries` entries together.

    Shuffled examples are in random order, sorted by length within pools of some 32 batches of each process, so that a
    batch has rows of like lengths; then the steps are put in random order. Call `set_epoch` before every epoch, or all
    are alike; the number of batches may differ from one to the next.

    In several processes each gets as many batches as the others, no example in two of them, and batches of like costs
    and lengths at the same step: what comes next in the order is dealt to the processes, so that none waits long for
    another. Where examples run out in the last step, it gets some of the steps before; where that does not go, as each
    batch has one example, some are repeated.

    `state_dict` says in the midst of an epoch what was handed out; the rest may go to another number of processes.

    Args:
        lens: the number of entries of each example of the data set: (n,) ints, an int64 tensor, or a `Dim`.
        max_entries: int, the most entries of a batch, over all its examples.
        max_rows: int, the most examples of a batch; None for no limit.
        shuffle: bool, default True, by `seed` and the epoch. False keeps the examples in their order, and in several
            processes the steps.
        seed: int, default 0; the same in all processes.
        drop_last: bool, default False. True leaves out the batches of the last step, which nothing was left to fill.
        rank: int, which process this is; None asks torch.distributed.
        world_size: int, how many processes there are; None asks torch.distributed.
        cost: a function from lens, (n,) int64 on the CPU, to what each example costs, (n,) real and >= 0, in any unit;
            a batch costs the sum. It is called once, and gives the same in all processes. None: the lengths. For a
            transformer of width d, `lambda n: 6 * d * n + n * n` counts its layers and its attention.

    Cost: a plan of the whole epoch, O(n log n) time and n ints, once an epoch: some seconds for a million examples.

    Raises:
        TypeError: lengths or sizes that are no ints, a cost that is no function or gives no real tensor.
        ValueError: an example longer than `max_entries`, a negative length, a rank that is not there; a cost that is
            negative or not finite, or not one for each example.

    Example:
        >>> sampler = tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, shuffle=False)
        >>> list(sampler)
        [[0], [1, 2], [3, 4]]
        >>> [list(tl.packed.BatchSampler([4, 1, 3, 2], 6, shuffle=False, rank=r, world_size=2)) for r in (0, 1)]
        [[[0, 1]], [[2, 3]]]
    """

    # As given: who loads it may be another process, of another number of them.
    _place: tuple[int | None, int | None] = None, None

    @named("packed.BatchSampler")
    def __init__(
        self,
        lens: Tensor | Sequence[int] | Dim,
        max_entries: int,
        *,
        max_rows: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        cost: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._lens = as_dim(lens)._host_lens
        self._most = arguments.at_least(1, max_entries, "max_entries")
        self._rows = None if max_rows is None else arguments.at_least(1, max_rows, "max_rows")
        self._shuffle, self._seed, self._drop = bool(shuffle), arguments.as_int(seed, "seed"), bool(drop_last)
        self._place = rank, world_size
        self._rank, self._processes = _find_place(rank, world_size)
        too_long = (self._lens > self._most).nonzero()
        if len(too_long):
            i = int(too_long[0])
            raise WrongValue(
                f"lens[{i}] is {int(self._lens[i])}, more than max_entries, {self._most}; leave such examples out, or "
                "allow more entries"
            )
        self._costs = _find_costs(cost, self._lens)
        self._start(0, [(self._processes, 0)])

    @classmethod
    def __restored__(cls, lens: Any, *rest: Any) -> Self:
        most, rows, shuffle, seed, drop, place, epoch, costs, history = rest
        options = {"shuffle": shuffle, "seed": seed, "drop_last": drop, "rank": place[0], "world_size": place[1]}
        made = cls(lens, most, max_rows=rows, cost=lambda _: costs, **options)
        made.load_state_dict({"epoch": epoch, "history": history, **made._kind()})
        return made

    @named("packed.BatchSampler.set_epoch")
    def set_epoch(self, epoch: int) -> None:
        """Gives another order from here on, the same in all processes that name the same epoch.

        The present epoch again changes nothing: after `load_state_dict` its rest is what comes.

        Args:
            epoch: int, the number of the epoch.
        """
        if (epoch := arguments.as_int(epoch, "epoch")) != self._epoch:
            self._start(epoch, [(self._processes, 0)])

    @named("packed.BatchSampler.state_dict")
    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Says what was handed out in this epoch, for `load_state_dict` in as many processes or in others.

        It is the same in all processes that have taken as many steps, so one may save it for all.

        Args:
            steps: int, how many batches of this process were trained on in this epoch, since it began or since the last
                `load_state_dict`. None: those that the latest iteration has handed out. A DataLoader with workers
                fetches ahead, so with one give the number.

        Returns:
            dict of strings to ints, bools, None and lists of ints, which `torch.load(weights_only=True)` and JSON take.

        Cost: small; the plan of the epoch, where there is none yet.

        Raises:
            TypeError: steps that are no int.
            ValueError: fewer steps than 0, or more than there were batches.

        Example:
            >>> sampler = tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, shuffle=False)
            >>> next(iter(sampler)), sampler.state_dict()["history"]
            ([0], [[1, 1]])
        """
        done = self._handed[0] if steps is None else arguments.at_least(0, steps, "steps")
        if done > (batches := len(self._plan())):
            raise WrongValue(
                f"steps must be at most {batches}, the batches of epoch {self._epoch} since it began or a state was "
                f"loaded, got {done}; count from there"
            )
        *before, (ranks, skipped) = self._history
        history = [[n, taken] for n, taken in (*before, (ranks, skipped + done)) if taken]
        return {"epoch": self._epoch, "history": history, **self._kind()}

    @named("packed.BatchSampler.load_state_dict")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on in the epoch of a state: what was not handed out comes, each once, in any number of processes.

        In as many processes as before, the same batches come as would have. In others the rest is planned anew. Then
        `len` is of the rest, and `set_epoch` begins the next epoch, of all examples.

        Args:
            state: dict, what `state_dict` gave, of a sampler with the same lens, cost and sizes.

        Cost: a plan of an epoch, and one more for each time that the number of processes changed in it.

        Raises:
            TypeError: what no `state_dict` gave.
            ValueError: a state of another data set, seed or size, or of more steps than there are.

        Example:
            >>> alone = tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, shuffle=False)
            >>> first = tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, shuffle=False, rank=0, world_size=2)
            >>> next(iter(first))
            [0]
            >>> alone.load_state_dict(first.state_dict())  # the other process had [1, 2]
            >>> list(alone)
            [[3, 4]]
        """
        epoch, history = _read_state(state, self._kind())
        if not history or history[-1][0] != self._processes:
            history.append((self._processes, 0))
        plan = self._replay(epoch, history)  # may refuse, so before anything changes
        self._start(epoch, history)
        self._planned = plan

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this process, lists of places in the data set."""
        plan, handed = self._plan(), [0]
        self._handed = handed  # an iteration that is still going on counts its own

        def batches() -> Iterator[list[int]]:
            for batch in plan:
                handed[0] += 1
                yield list(batch)

        return batches()

    def __len__(self) -> int:
        """The number of batches of this process, the same for all of them, in the present epoch or its rest."""
        return len(self._plan())

    def _start(self, epoch: int, history: list[tuple[int, int]]) -> None:
        self._epoch, self._history = epoch, history  # pairs of how many ranks there were, and how many steps they took
        self._handed = [0]
        self._planned: list[list[int]] | None = None

    def _kind(self) -> dict[str, Any]:
        """Returns what a plan depends on, but for the epoch and its history."""
        return {
            "examples": len(self._lens),
            "lens_checksum": zlib.crc32(self._lens.numpy().tobytes()),
            "cost_checksum": zlib.crc32(self._costs.numpy().tobytes()),
            "max_entries": self._most,
            "max_rows": self._rows,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop,
        }

    def _plan(self) -> list[list[int]]:
        if self._planned is None:
            self._planned = self._replay(self._epoch, self._history)
        return self._planned

    def _replay(self, epoch: int, history: list[tuple[int, int]]) -> list[list[int]]:
        """The batches of this rank after a history, which is planned again: each time what the ones before left."""
        left, rest = torch.arange(len(self._lens), device="cpu"), list[_Step]()
        for ranks, taken in history:
            steps = self._plan_steps(epoch, left, ranks)
            if taken > len(steps):
                raise WrongValue(
                    f"state['history'] has {taken} steps of {ranks} ranks, where at most {len(steps)} were left; give "
                    "it as state_dict() did"
                )
            gone = [i for step in steps[:taken] for batch in step for i in batch]
            left, rest = left[~torch.isin(left, torch.tensor(gone, dtype=torch.int64, device="cpu"))], steps[taken:]
        return [step[self._rank] for step in rest]

    def _plan_steps(self, epoch: int, left: Tensor, ranks: int) -> list[_Step]:
        """How so many ranks share the examples that are left."""
        generator = torch.Generator().manual_seed(self._seed + epoch)
        if self._shuffle:
            left = left[_mix(self._lens[left], self._most * ranks * _POOL, generator)]
        steps = _Dealer(self._lens[left].tolist(), self._costs[left].tolist(), ranks, self._most, self._rows).deal()
        steps = steps[:-1] if self._drop else _make_round(steps, ranks)
        if self._shuffle:
            steps = [steps[i] for i in torch.randperm(len(steps), generator=generator, device="cpu").tolist()]
        examples = left.tolist()
        return [[[examples[place] for place in batch] for batch in step] for step in steps]


def _find_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise WrongType("rank and world_size go together; leave out both, or give both")
    if rank is None or world_size is None:
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
    processes, place = arguments.at_least(1, world_size, "world_size"), arguments.as_int(rank, "rank")
    if not 0 <= place < processes:
        raise WrongValue(f"rank must be from 0 to {processes - 1}, got {place}")
    return place, processes


def _find_costs(cost: Any, lens: Tensor) -> Tensor:
    """The cost of each example, (n,) float64 on the CPU."""
    if cost is not None and not callable(cost):
        raise WrongType(f"cost must be a function from lens to costs, got {arguments.describe(cost)}")
    costs: Any = lens if cost is None else cost(lens.clone())
    if not isinstance(costs, Tensor) or costs.is_complex():
        raise WrongType(f"cost must give a real tensor, got {arguments.describe(costs)}")
    if costs.shape != lens.shape:
        raise WrongValue(f"cost must give one number for each example, ({len(lens)},), got shape {tuple(costs.shape)}")
    costs = costs.detach().to("cpu", torch.float64)
    bad = (~((costs >= 0) & costs.isfinite())).nonzero()
    if len(bad):
        i = int(bad[0])
        raise WrongValue(f"cost gives {float(costs[i])} for lens[{i}], {int(lens[i])}; make it finite and at least 0")
    return costs


def _read_state(state: Any, kind: dict[str, Any]) -> tuple[int, list[tuple[int, int]]]:
    """Epoch and history of a state for a sampler of this kind."""
    if not isinstance(state, Mapping):
        raise WrongType(f"state must be a dict that state_dict() gave, got {arguments.describe(state)}")
    if odd := {*state} ^ {"epoch", "history", *kind}:
        names = ", ".join(sorted(map(repr, odd)))
        raise WrongType(f"state must be a dict that state_dict() gave, got one that lacks, or has too many, {names}")
    epoch, history = arguments.as_int(state["epoch"], "state['epoch']"), state["history"]
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise WrongType(
            "state['history'] must be a list of [ranks, steps], ints of at least 1 and 0, as state_dict() gave it, got "
            f"{arguments.describe(history)}"
        )
    if other := [f"{name} ({state[name]!r}, here {here!r})" for name, here in kind.items() if state[name] != here]:
        raise WrongValue(
            f"state is of a sampler with another {', '.join(other)}; make this one with the arguments of that, or "
            "begin the epoch anew without the state"
        )
    return epoch, [(ranks, taken) for ranks, taken in history]


def _is_pair(x: Any) -> bool:
    return isinstance(x, list | tuple) and [type(n) for n in x] == [int, int] and x[0] >= 1 and x[1] >= 0


def _mix(lens: Tensor, pool: int, generator: torch.Generator) -> Tensor:
    """A random order, sorted by length in pools of so many entries: up and down in turn, as batches span their ends."""
    order = torch.randperm(len(lens), generator=generator, device="cpu")
    mixed = lens[order]
    pools = torch.div(mixed.cumsum(0), pool, rounding_mode="floor")
    by_length = torch.argsort(torch.where(pools % 2 == 0, mixed, -mixed), stable=True)
    return order[by_length][torch.argsort(pools[by_length], stable=True)]


@dataclass(frozen=True)
class _Dealer:
    """Deals places 0 to n - 1 in steps, to ranks of like costs; each batch has at most so many entries and rows."""

    lens: list[int]
    costs: list[float]
    ranks: int
    most: int
    rows: int | None

    def deal(self) -> list[_Step]:
        """The steps, in order; the last has no batch for each rank where fewer examples were left."""
        ends, steps, at = [0, *accumulate(self.lens)], list[_Step](), 0
        while at < len(self.lens):
            n = bisect_right(ends, ends[at] + self.ranks * self.most) - 1 - at
            step = self._take(at, n if self.rows is None else min(n, self.ranks * self.rows))
            steps.append(sorted(sorted(batch) for batch in step))
            at += sum(map(len, step))
        return steps

    def _take(self, at: int, most: int) -> _Step:
        """A step of what comes next: of `most` examples, or fewer where those do not fit or cannot be dealt evenly."""
        best, least, tries = _Step(), math.inf, 0
        # Sorted examples are nearly equal, so that as many for each rank as for the others are dealt most evenly.
        for n in (most, *range((most - 1) // self.ranks * self.ranks, 0, -self.ranks)):
            if not (step := self._share(range(at, at + n))):
                continue
            loads = [self._load(batch) for batch in step]
            uneven = max(loads) * self.ranks / (sum(loads) or math.inf)
            if uneven < least:
                best, least = step, uneven
            tries += 1
            if least <= _EVEN or tries == _TRIES or at + n == len(self.lens):
                break
        return best

    def _share(self, places: range) -> _Step:
        """The costliest first, each to the rank that has least and room for it; no batches if one finds no room."""
        step, room = [list[int]() for _ in range(self.ranks)], [self.most] * self.ranks
        heap = [(0.0, 0, rank) for rank in range(self.ranks)]  # load, rows: without costs, ranks have like rows
        for i in sorted(places, key=lambda i: (self.costs[i], self.lens[i]), reverse=True):
            full: list[tuple[float, int, int]] = []
            while heap and self.lens[i] > room[heap[0][2]]:
                full.append(heappop(heap))
            if not heap:
                return []
            load, rows, rank = heap[0]
            step[rank].append(i)
            room[rank] -= self.lens[i]
            if rows + 1 == self.rows:
                heappop(heap)
            else:
                heapreplace(heap, (load + self.costs[i], rows + 1, rank))
            for entry in full:  # a shorter one may fit
                heappush(heap, entry)
        step = [batch for batch in step if batch]
        for _ in step:
            if not self._swap(step):
                break
        return step

    def _swap(self, step: _Step) -> bool:
        """Exchanges two examples of the costliest batch and one of the cheapest, if the step is uneven and they fit."""
        loads = [self._load(batch) for batch in step]
        high = max(range(len(step)), key=loads.__getitem__)
        if loads[high] * len(step) <= _EVEN * sum(loads):
            return False
        for low in sorted(range(len(step)), key=loads.__getitem__):
            gap = loads[high] - loads[low]
            rooms = [self.most - sum(self.lens[i] for i in step[side]) for side in (high, low)]
            fitting = (
                (abs(gap - 2 * (self.costs[i] - self.costs[j])), i, j)
                for i in step[high]
                for j in step[low]
                if 0 < self.costs[i] - self.costs[j] < gap and -rooms[0] <= self.lens[i] - self.lens[j] <= rooms[1]
            )
            if best := min(fitting, default=None):
                _, i, j = best
                step[high][step[high].index(i)], step[low][step[low].index(j)] = j, i
                return True
        return False

    def _load(self, batch: list[int]) -> float:
        return sum(self.costs[i] for i in batch)


def _make_round(steps: list[_Step], ranks: int) -> list[_Step]:
    """The last step gets a batch for each rank: an example of a batch before; if all have one, such come again."""
    for step in reversed(steps):
        while len(steps[-1]) < ranks and len(largest := max(step, key=len)) > 1:
            steps[-1].append([largest.pop()])
    again = cycle([list(batch) for step in steps for batch in step])
    return steps and [*steps[:-1], steps[-1] + [next(again) for _ in range(ranks - len(steps[-1]))]]
