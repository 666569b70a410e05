"""Batches by their number of entries, for a DataLoader: rows of like lengths together, one plan for all processes."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import saved
from tensorloop.packed.rows.dim import Dim, as_dim

_POOL = 32  # batches' worth of entries that are sorted together


@saved("_lens", "_most", "_rows", "_shuffle", "_seed", "_drop", "_place", "_epoch")
class BatchSampler(Sampler[list[int]]):
    """The `batch_sampler` of a DataLoader: batches that have at most `max_entries` entries together.

    Shuffled examples are in random order, sorted by length within pools of some 32 batches, so that a batch has rows of
    like lengths; then batches are put in random order. Call `set_epoch` before every epoch, or all are alike; the
    number of batches may differ from one to the next.
    In several processes each gets as many batches as the others, no example in two of them, and batches of like lengths
    at the same step. For this some batches are divided; where that does not go, as each has one example, some are
    repeated.

    Args:
        lens: the number of entries of each example of the data set: ints, an int64 tensor, or a `Dim`.
        max_entries: int, the most entries of a batch, over all its examples.
        max_rows: int, the most examples of a batch; None for no limit.
        shuffle: bool, default True, by `seed` and the epoch. False keeps the examples in their order.
        seed: int, default 0; the same in all processes.
        drop_last: bool, default False. True leaves out the last batch, which nothing was left to fill, and those that
            do not go round.
        rank: int, which process this is; None asks torch.distributed.
        world_size: int, how many processes there are; None asks torch.distributed.

    Cost: a plan of the whole epoch, O(n log n) time and n ints, once an epoch.

    Raises:
        TypeError: lengths or sizes that are no ints.
        ValueError: an example longer than `max_entries`, a negative length, a rank that is not there.

    Example:
        >>> sampler = tl.packed.BatchSampler([5, 2, 4, 3, 1], max_entries=6, shuffle=False)
        >>> list(sampler)
        [[0], [1, 2], [3, 4]]
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
    ) -> None:
        self._lens = as_dim(lens)._host_lens
        self._most = arguments.at_least(1, max_entries, "max_entries")
        self._rows = None if max_rows is None else arguments.at_least(1, max_rows, "max_rows")
        self._shuffle, self._seed, self._drop = bool(shuffle), arguments.as_int(seed, "seed"), bool(drop_last)
        self._rank, self._processes = _find_place(rank, world_size)
        self._place = rank, world_size
        self._epoch = 0
        self._planned: tuple[int, list[list[int]]] | None = None
        too_long = (self._lens > self._most).nonzero()
        if len(too_long):
            i = int(too_long[0])
            raise WrongValue(
                f"lens[{i}] is {int(self._lens[i])}, more than max_entries, {self._most}; leave such examples out, or "
                "allow more entries"
            )

    @classmethod
    def __restored__(
        cls, lens: Any, most: int, rows: Any, shuffle: bool, seed: int, drop: bool, place: Any, epoch: int
    ) -> Self:
        options = {"shuffle": shuffle, "seed": seed, "drop_last": drop, "rank": place[0], "world_size": place[1]}
        made = cls(lens, most, max_rows=rows, **options)
        made.set_epoch(epoch)
        return made

    @named("packed.BatchSampler.set_epoch")
    def set_epoch(self, epoch: int) -> None:
        """Gives another order from here on, the same in all processes that name the same epoch.

        Args:
            epoch: int, the number of the epoch.
        """
        self._epoch = arguments.as_int(epoch, "epoch")

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this process, lists of places in the data set."""
        return iter([list(batch) for batch in self._plan()])

    def __len__(self) -> int:
        """The number of batches of this process, the same for all of them, in the present epoch."""
        return len(self._plan())

    def _plan(self) -> list[list[int]]:
        if self._planned is None or self._planned[0] != self._epoch:
            self._planned = self._epoch, self._make_plan()
        return self._planned[1]

    def _make_plan(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = (
            _mix(self._lens, self._most * _POOL, generator)
            if self._shuffle
            else torch.arange(len(self._lens), device="cpu")
        )
        batches = _fill(order.tolist(), self._lens[order].tolist(), self._most, self._rows)
        n = self._processes
        if self._drop:
            batches = batches[:-1]
            batches = batches[: len(batches) // n * n]
        else:
            batches = _make_round(batches, n)
        if not self._shuffle:
            return batches[self._rank :: n]
        # What stands beside each other is of like length: such are taken at the same step.
        steps = torch.randperm(len(batches) // n, generator=generator, device="cpu").tolist()
        return [batches[step * n + self._rank] for step in steps]


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


def _mix(lens: Tensor, pool: int, generator: torch.Generator) -> Tensor:
    """A random order, sorted by length in pools of so many entries: up and down in turn, as batches span their ends."""
    order = torch.randperm(len(lens), generator=generator, device="cpu")
    mixed = lens[order]
    pools = torch.div(mixed.cumsum(0), pool, rounding_mode="floor")
    by_length = torch.argsort(torch.where(pools % 2 == 0, mixed, -mixed), stable=True)
    return order[by_length][torch.argsort(pools[by_length], stable=True)]


def _fill(order: list[int], lens: list[int], most: int, rows: int | None) -> list[list[int]]:
    """Examples in order, a new batch where one is full."""
    batches: list[list[int]] = []
    room = -1
    for example, n in zip(order, lens, strict=True):
        if n > room or (rows is not None and len(batches[-1]) == rows):
            batches.append([])
            room = most
        batches[-1].append(example)
        room -= n
    return batches


def _make_round(batches: list[list[int]], n: int) -> list[list[int]]:
    """As many batches as go round n processes: the largest are divided, where they are; else the first come again."""
    missing = -len(batches) % n
    while missing:
        i = max(range(len(batches)), key=lambda i: len(batches[i]))
        if len(batches[i]) < 2:
            break
        half = len(batches[i]) // 2
        batches[i : i + 1] = [batches[i][:half], batches[i][half:]]
        missing -= 1
    return batches + [list(batches[i % len(batches)]) for i in range(missing)]
