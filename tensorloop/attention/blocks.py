"""Block masks cut into strips: blocks of queries that meet about as many blocks of keys are computed together.

A strip is a batch of G blocks of queries with the keys that each of them meets, gathered; where one meets fewer than
another of its strip, keys behind its own are hidden. The heads of all batch entries lie side by side in it, so the mask
is made once for all of them.

A `mask_mod` may have an attribute `sees`: a function of positions of queries (G, L) and keys (G, S), each key of a row
of them at most once where it is allowed at all, that gives (G, L, S) bool at once; a mask that is a graph knows its
pairs, and need not be asked about each. -1 among the keys is no position.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.attention.strips import Strip
from tensorloop.kernels.sight import Sight

_PAIRS = 1 << 18  # of queries and keys in a strip: what their mask takes in bytes, and its numbers four times
_SPARE = 8  # blocks of queries are computed together until the keys of one are this part fewer than those of another


class Gathered(NamedTuple):
    """Tokens of a batch by their numbers, which come in runs of `run` from its multiples on."""

    batch: slice
    numbers: Tensor  # (G, L) int64
    heads: slice
    run: int

    def take(self, x: Tensor) -> Tensor:
        """(G, L, B heads, D), a copy."""
        part = x[self.batch, :, self.heads]
        entries, tokens, heads, width = part.shape
        runs, step = self._runs(tokens)
        if entries == 1:
            found = part[0].unflatten(0, (-1, step)).index_select(0, runs)
        else:
            found = part.unflatten(1, (-1, step)).index_select(1, runs).movedim(0, 2)
        return found.reshape(*self.numbers.shape, entries * heads, width)

    take_padded = take

    def positions(self, base: int, device: torch.device) -> Tensor:
        """(G, L) int64, counted from the token of number `base`."""
        return self.numbers - base

    def entries(self, row: int | None, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """The batch entries and the heads, (1, B heads) each, of a tensor of this shape."""
        rows, heads = (
            torch.arange(n, device=device)[some] for n, some in ((shape[0], self.batch), (shape[2], self.heads))
        )
        rows = rows if row is None else rows.new_tensor([row])
        return rows.repeat_interleave(len(heads))[None], heads.repeat(len(rows))[None]

    def put_(self, buffer: Tensor, part: Tensor) -> None:
        """Writes `part` (G, L, B heads, D) to the place where `take` reads."""
        into, runs, source = self._target(buffer, part)
        into.index_copy_(1, runs, source)

    def add_(self, buffer: Tensor, part: Tensor) -> None:
        """Adds `part` (G, L, B heads, D) at the place where `take` reads."""
        into, runs, source = self._target(buffer, part)
        if len(into) == 1:  # along the first dim torch adds run by run, along others number by number
            into[0].index_add_(0, runs, source[0])
        else:
            into.index_add_(1, runs, source)

    def _target(self, buffer: Tensor, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        into = buffer[self.batch, :, self.heads]
        entries, tokens, heads, width = into.shape
        runs, step = self._runs(tokens)
        source = part.to(buffer.dtype).reshape(len(runs), step, entries, heads, width).movedim(2, 0)
        return into.unflatten(1, (-1, step)), runs, source

    def _runs(self, tokens: int) -> tuple[Tensor, int]:
        """The numbers of runs, and how long they are; single tokens where these are no whole number of runs."""
        if self.run == 1 or tokens % self.run:
            return self.numbers.flatten(), 1
        return self.numbers.flatten()[:: self.run] // self.run, self.run


class BlockTable:
    """The tables of a BlockMask, on the CPU, cut at `width` keys."""

    def __init__(self, blocks: Any, width: int) -> None:
        self.mod, self.width = blocks.mask_mod, width
        self.q_size, self.k_size = blocks.BLOCK_SIZE
        self.batch, self.heads = blocks.kv_num_blocks.shape[:2]
        self._tables = [(blocks.kv_num_blocks.cpu(), blocks.kv_indices.cpu(), 0)]
        if blocks.full_kv_num_blocks is not None:
            self._tables.append((blocks.full_kv_num_blocks.cpu(), blocks.full_kv_indices.cpu(), 1))

    def listed(self, b: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each block of queries how many blocks of keys it meets, which, ascending, and whether they are full."""
        far = 2 * (-(-self.width // self.k_size))  # behind all
        codes = []
        for every, numbers, full in self._tables:
            counts = every[b, h][:, None]
            numbers = numbers[b, h, :, : int(counts.max())] if len(counts) else numbers[b, h]  # tables may be N x N
            there = (torch.arange(numbers.shape[1], device="cpu") < counts) & (numbers * self.k_size < self.width)
            codes.append(torch.where(there, 2 * numbers.long() + full, far))
        ordered = torch.cat(codes, 1).sort(1).values
        counts = (ordered < far).sum(1)
        return counts, ordered // 2, ordered % 2 == 1

    def dense(self, n: int, device: torch.device) -> Tensor:
        """(batch, heads, n, width) bool: all of it."""
        sees = torch.zeros(self.batch, self.heads, n, self.width, dtype=torch.bool, device=device)
        for b, h in product(range(self.batch), range(self.heads)):
            for some in self.groups(b, h, n):
                allowed = some.mask(self.mod, device)
                g, i, j = allowed[:, 0].nonzero().unbind(1)
                sees[b, h, some.queries.to(device)[g, i], some.keys.to(device)[g, j]] = True
        return sees

    def groups(self, b: int, h: int, n: int) -> "Iterator[BlockGroup]":
        """Blocks of n queries that are computed together, those with most keys first; without those that have none."""
        counts, numbers, full = self.listed(b, h)
        whole, rest = divmod(n, self.q_size)
        order = counts[:whole].argsort(descending=True, stable=True)
        sizes = counts[order].tolist()
        start = 0
        while start < whole and sizes[start]:
            most = max(1, _PAIRS // (self.q_size * self.k_size * sizes[start]))
            stop = start + 1
            while stop < min(whole, start + most) and sizes[stop] >= max(1, sizes[start] - sizes[start] // _SPARE):
                stop += 1
            yield self._group(b, h, order[start:stop], self.q_size, sizes[start], numbers, full)
            start = stop
        if rest and len(counts) > whole and counts[whole]:
            last = torch.tensor([whole], device="cpu")
            yield self._group(b, h, last, rest, int(counts[whole]), numbers, full)

    def _group(
        self, b: int, h: int, rows: Tensor, length: int, most: int, numbers: Tensor, full: Tensor
    ) -> "BlockGroup":
        queries = rows[:, None] * self.q_size + torch.arange(length, device="cpu")
        blocks, steps = numbers[rows, :most], torch.arange(self.k_size, device="cpu")
        there = blocks * self.k_size < self.width
        keys = (torch.where(there, blocks, blocks[:, :1])[..., None] * self.k_size + steps).flatten(1)
        inside = there.repeat_interleave(self.k_size, 1) & (keys < self.width)
        sure = full[rows, :most].repeat_interleave(self.k_size, 1) & inside
        return BlockGroup(b, h, queries, keys.clamp(max=self.width - 1), inside, sure)


class BlockGroup(NamedTuple):
    """Some blocks of queries, and the keys of all blocks that each meets."""

    b: int
    h: int
    queries: Tensor  # (G, L) int64
    keys: Tensor  # (G, S) int64; of those that are not `inside`, any other
    inside: Tensor  # (G, S) bool
    sure: Tensor  # (G, S) bool: those in full blocks, of which `mask_mod` is not asked

    def mask(self, mod: Any, device: torch.device) -> Tensor:
        """(G, 1, L, S) bool."""
        queries, keys, inside, sure = (x.to(device) for x in self[2:])
        if hasattr(mod, "sees") and device.type == "cpu":
            allowed = mod.sees(queries, torch.where(inside, keys, -1))
        else:
            batch, head = (torch.tensor(x, device=device) for x in self[:2])
            by_key = torch.vmap(mod, (None, None, None, 0))
            by_query = torch.vmap(by_key, (None, None, 0, None))
            allowed = torch.vmap(by_query, (None, None, 0, 0))(batch, head, queries, keys)
        return ((allowed | sure[:, None]) & inside[:, None])[:, None]


def cut_blocks(sight: Sight, q: Tensor, k: Tensor) -> Iterator[Strip]:
    """The strips of what a block mask shows; queries without keys, whose output is 0, are left out."""
    if sight.offsets is None:
        if q.shape[0] * q.shape[1] * k.shape[1]:
            yield from _cut_rows(sight.blocks, q, k, (0, q.shape[1]), (0, k.shape[1]), None)
        return
    for b in range(len(sight.offsets[0]) - 1):
        of_q, of_k = (offsets[b : b + 2] for offsets in sight.offsets)
        if of_q[1] > of_q[0] and of_k[1] > of_k[0]:
            yield from _cut_rows(sight.blocks, q, k, of_q, of_k, b)


def _cut_rows(
    blocks: Any, q: Tensor, k: Tensor, of_q: Sequence[int], of_k: Sequence[int], row: int | None
) -> Iterator[Strip]:
    """The strips of the queries and keys between two numbers: a row of a packed tensor, or every batch entry."""
    table = BlockTable(blocks, of_k[1] - of_k[0])
    everything, shared, device = slice(None), q.shape[2] // k.shape[2], q.device
    q_run = table.q_size if of_q[0] % table.q_size == 0 else 1
    # The last block of keys is read beyond the row where this is no multiple of it: there are other rows' keys.
    k_run = table.k_size if of_k[0] % table.k_size == of_k[1] % table.k_size == 0 else 1
    for b, h in product(range(table.batch) if row is None else [row if table.batch > 1 else 0], range(table.heads)):
        batch = slice(0, 1) if row is not None else everything if table.batch == 1 else slice(b, b + 1)
        heads = (everything,) * 2 if table.heads == 1 else (slice(h, h + 1), slice(h // shared, h // shared + 1))
        for some in table.groups(b, h, of_q[1] - of_q[0]):
            run = q_run if some.queries.shape[1] == table.q_size else 1  # the last queries are less than a block
            queries = Gathered(batch, (some.queries + of_q[0]).to(device), heads[0], run)
            keys = Gathered(batch, (some.keys + of_k[0]).to(device), heads[1], k_run)
            mask = None if some.sure.all() else partial(some.mask, table.mod, device)
            yield Strip(queries, keys, mask=mask, row=row, bases=(of_q[0], of_k[0]))
