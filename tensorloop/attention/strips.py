"""Attention cut into strips: which rows of queries meet which rows of keys, so that nothing N x N is ever made.

Tensors here are (B, T, heads, D), padded or whole batches; packed ones come as (1, N, heads, D) with offsets. A *strip*
is a set of query rows together with all the keys that any of them sees, so its softmax needs no other strip:

    padded            one strip, the batch as it is
    packed            a strip for each long row, as views; short rows of about equal length padded into one strip
    block mask        blocks of queries with as many key blocks: `blocks.py`
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.uploads import upload, upload_together

# Rows of at most SHORT tokens, FEW or more of about equal length (by STEP), are padded and computed together. One row
# alone costs about 120 us of Python and dispatch, forward and backward; padding a bucket costs about 600 us, and then
# each row of 5 tokens 30 us, of 30 tokens 150 us (float32, 4 heads of 64, one thread).
SHORT, STEP, FEW = 32, 8, 6
# On a device a strip is some 50 launches, whose time is that of far more padding: rows of at most SHORT_ON_DEVICE
# tokens are computed together where the next power of two is the same, that of LEAST for all shorter ones, as many as
# make so many weights.
SHORT_ON_DEVICE, LEAST, _PADDED_WEIGHTS = 1024, 64, 1 << 22
_TOGETHER = 64  # queries, of which each sees few keys: a call of the kernel costs as much as the weights of 64 and 64


class Span(NamedTuple):
    """Some batch entries, some tokens (a slice, or their numbers (L,) in ascending order), some heads: x[index]."""

    batch: slice
    tokens: slice | Tensor
    heads: slice

    def take(self, x: Tensor) -> Tensor:
        """(G, L, H', D), a view where the tokens are a slice."""
        return x[self.batch, self.tokens, self.heads]

    take_padded = take

    def positions(self, base: int, device: torch.device) -> Tensor:
        """(1, L) int64, counted from the token of number `base`."""
        tokens = self.tokens
        found = torch.arange(tokens.start, tokens.stop, device=device) if isinstance(tokens, slice) else tokens
        return found[None] - base

    def entries(self, row: int | None, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """The batch entries (G, 1) and the heads (1, H') of a tensor of this shape."""
        rows = (
            torch.arange(shape[0], device=device)[self.batch] if row is None else torch.full((1,), row, device=device)
        )
        return rows[:, None], torch.arange(shape[2], device=device)[None, self.heads]

    def put_(self, buffer: Tensor, part: Tensor) -> None:
        """Writes `part` (G, L, H', D) to the place where `take` reads."""
        buffer[self.batch, self.tokens, self.heads] = part.to(buffer.dtype)

    def add_(self, buffer: Tensor, part: Tensor) -> None:
        """Adds `part` (G, L, H', D) at the place where `take` reads."""
        if isinstance(self.tokens, slice):
            buffer[self.batch, self.tokens, self.heads] += part
        else:
            buffer[self.batch, :, self.heads].index_add_(1, self.tokens, part.to(buffer.dtype))


class Bucket(NamedTuple):
    """Rows of a packed tensor (1, N, heads, D), padded to (G, L, heads, D)."""

    slots: Tensor  # (G * L,) int64: the number of the token in each place; behind a row's end, of its last one
    places: Tensor  # (n,) int64: the places that are not behind an end
    tokens: Tensor  # (n,) int64: the numbers of the tokens there
    shape: tuple[int, int]
    rows: list[int]

    def take(self, x: Tensor) -> Tensor:
        """(G, L, heads, D), a copy; no row may be empty. What is behind an end is the row's own: finite if that is."""
        return x[0].index_select(0, self.slots).unflatten(0, self.shape)

    def take_padded(self, x: Tensor) -> Tensor:
        """A padded copy (G, L, heads, D) with zeros behind the ends; rows may be empty. Differentiable."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return padded.index_copy(0, self.places, x[0].index_select(0, self.tokens)).unflatten(0, self.shape)

    def put_(self, buffer: Tensor, part: Tensor) -> None:
        """Writes what belongs to tokens of `part` (G, L, heads, D); no other strip has them."""
        buffer[0].index_copy_(0, self.tokens, self.of_tokens(part).to(buffer.dtype))

    add_ = put_

    def positions(self, base: int, device: torch.device) -> Tensor:
        """(G, L) int64; behind a row's end that of its last token."""
        found = self.slots.unflatten(0, self.shape)
        return found - found[:, :1]

    def entries(self, row: int | None, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows (G, 1) and the heads (1, H)."""
        rows = upload(torch.tensor(self.rows, device="cpu"), device)
        return rows[:, None], torch.arange(shape[2], device=device)[None]

    def of_tokens(self, part: Tensor) -> Tensor:
        """(n, heads, D) of (G, L, heads, D)."""
        return part.flatten(0, 1).index_select(0, self.places)


class Strip(NamedTuple):
    """Queries and the keys they meet; a place of None is all there is."""

    q: Any  # a Span, a Bucket, one of `blocks.Gathered`, or None
    k: Any
    causal: bool = False
    first: int = 0  # the position of the first query, where causal
    mask: Callable[[], Tensor] | None = None  # gives (G or 1, heads or 1, L or 1, S) bool, true where a query sees
    row: int | None = None  # of packed tensors
    bases: tuple[int, int] = (0, 0)  # the numbers of the tokens at position 0, of queries and of keys


class Near(NamedTuple):
    """What a query sees by numbers: the keys of some positions before its own, or those of some chunks."""

    window: int = 0  # so many positions, its own the last, and all behind; 0 for all
    chunk: int = 0  # positions in chunks of this size: none of a later chunk; 0 for one chunk
    left: int | None = None  # nor of one that is more chunks before; None for all

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether queries at positions i see keys at positions j, which broadcast: bool."""
        seen = j > i - self.window if self.window else torch.ones_like(j <= i)
        if self.chunk:
            behind = i // self.chunk - j // self.chunk
            seen = seen & (behind >= 0)
            seen = seen if self.left is None else seen & (behind <= self.left)
        return seen

    def low(self, i: int) -> int:
        """The first key that the query at position i sees."""
        low = max(0, i - self.window + 1) if self.window else 0
        return low if self.left is None else max(low, (i // self.chunk - self.left) * self.chunk)

    def high(self, i: int, keys: int) -> int:
        """One past the last key that it sees."""
        return min(keys, (i // self.chunk + 1) * self.chunk) if self.chunk else keys

    def keys(self, first: int, stop: int, keys: int) -> tuple[int, int]:
        """The range of positions, among so many keys, outside of which queries see nothing; these rise with them."""
        return self.low(first), self.high(stop - 1, keys)

    def whole(self, first: int, stop: int, low: int, high: int, causal: bool) -> bool:
        """Whether all queries from `first` on, before `stop`, see all keys from `low` on, before `high`."""
        return self.low(stop - 1) <= low and self.high(first, high) >= high and not (causal and high > first + 1)

    def queries(self, weights: int, keys: int) -> int:
        """How many queries to compute together: as many as each sees keys, for what is too much then is but half."""
        reach = keys if self.left is None else min(keys, (self.left + 1) * self.chunk)
        reach = min(reach, self.window) if self.window else reach
        size = max(1, min(max(reach, _TOGETHER), weights // max(reach, 1)))
        return size if not self.chunk or size < self.chunk else size - size % self.chunk


class Task(NamedTuple):
    """What to compute, for all sizes at once."""

    scale: float
    causal: bool = False
    q_offsets: list[int] | None = None  # of packed tensors: B + 1 numbers, as plain ints
    k_offsets: list[int] | None = None
    blocks: Any = None  # a BlockMask, or None
    near: Near | None = None
    scoring: Any = None  # what else is done to scores, a `scores.Scoring`, or None
    sinks: Tensor | None = None  # (heads,): logits that every query of a head sees beside its keys

    @property
    def overlaps(self) -> bool:
        """Whether a key may be in several strips, so that their gradients meet."""
        return self.blocks is not None or self.near is not None or self.scoring is not None

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether queries at positions i see keys at positions j, which broadcast: bool."""
        seen = j <= i if self.causal else torch.ones_like(j <= i)
        return seen if self.near is None else seen & self.near.sees(i, j)

    def keys(self, first: int, stop: int, keys: int) -> tuple[int, int]:
        """The range of positions, among so many keys, outside of which none of these queries sees anything."""
        low, high = (0, keys) if self.near is None else self.near.keys(first, stop, keys)
        return low, min(high, stop) if self.causal else high


def cut(task: Task, q: Tensor, k: Tensor) -> Iterable[Strip]:
    """The strips of a task without a block mask; empty ones, whose output is 0, are left out."""
    if task.q_offsets is not None and task.k_offsets is not None:
        return _cut_packed(task, task.q_offsets, task.k_offsets, q.shape[2], q.device)
    if not q.shape[0] * q.shape[1] * k.shape[1]:
        return ()
    return (Strip(None, None, task.causal),)


def shorten(parts: Iterable[Strip], task: Task, q: Tensor, k: Tensor, weights: int) -> Iterator[Strip]:
    """Cuts strips so that each has at most about `weights` attention weights, or one query."""
    everything = (slice(0, q.shape[0]), slice(None))
    for strip in parts:
        place_q = Span(everything[0], slice(0, q.shape[1]), everything[1]) if strip.q is None else strip.q
        place_k = Span(everything[0], slice(0, k.shape[1]), everything[1]) if strip.k is None else strip.k
        if not isinstance(place_q, Span) or not isinstance(place_k, Span) or strip.mask is not None:
            yield strip
            continue
        assert isinstance(place_q.tokens, slice)
        assert isinstance(place_k.tokens, slice)
        bases, end, keys = (place_q.tokens.start, place_k.tokens.start), place_q.tokens.stop, place_k.tokens
        most = keys.stop - keys.start
        size = max(1, weights // (q.shape[0] * q.shape[2] * max(most, 1)))
        size = size if task.near is None else task.near.queries(weights // (q.shape[0] * q.shape[2]), most)
        for start in range(bases[0], end, size):
            stop = min(start + size, end)
            first, low, high = start - bases[0], *task.keys(start - bases[0], stop - bases[0], most)
            if low >= high:
                continue
            some_q = place_q._replace(tokens=slice(start, stop))
            some_k = place_k._replace(tokens=slice(bases[1] + low, bases[1] + high))
            cut_here = Strip(some_q, some_k, task.causal and task.near is None, first, row=strip.row, bases=bases)
            if task.near is not None and not task.near.whole(first, stop - bases[0], low, high, task.causal):
                places = (first, stop - bases[0]), (low, high)
                cut_here = cut_here._replace(mask=partial(_make_span_mask, task, *places, q.device))
            yield cut_here


def _make_span_mask(task: Task, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor:
    """(1, 1, L, S) bool"""
    i, j = (torch.arange(*places, device=device) for places in (queries, keys))
    return task.sees(i[:, None], j)[None, None]


def fill_bucket(offsets: Sequence[int], rows: Iterable[int], device: torch.device, width: int | None = None) -> Bucket:
    """The given rows of a packed tensor, padded to the longest one or to `width`."""
    rows = list(rows)
    # Worked out on the CPU, whatever the default device.
    lens = torch.tensor([offsets[b + 1] - offsets[b] for b in rows], dtype=torch.int64, device="cpu")
    starts = torch.tensor([offsets[b] for b in rows], dtype=torch.int64, device="cpu")
    length = int(lens.max()) if width is None and rows else width or 0
    steps = torch.arange(length, device="cpu")
    places = (steps < lens[:, None]).flatten().nonzero().flatten()
    slots = (starts[:, None] + steps.minimum(lens[:, None] - 1)).flatten()
    tokens = slots[places]
    slots, places, tokens = upload_together([slots, places, tokens], device)
    return Bucket(slots, places, tokens, (len(rows), length), rows)


def make_row_mask(task: Task, offsets: Sequence[int], rows: Sequence[int], n: int, m: int, device: Any) -> Tensor:
    """(G, 1, n or 1, m) bool: which keys of rows that were padded to m are tokens, and seen by their positions."""
    lens = torch.tensor([offsets[b + 1] - offsets[b] for b in rows], dtype=torch.int64, device="cpu")
    lens = upload(lens, device)
    j = torch.arange(m, device=device)
    mask = (j < lens[:, None])[:, None, None]
    return mask & task.sees(torch.arange(n, device=device)[:, None], j) if task.causal or task.near else mask


def _cut_packed(
    task: Task, q_offsets: list[int], k_offsets: list[int], heads: int, device: torch.device
) -> Iterator[Strip]:
    on_host = device.type == "cpu"
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for b in range(len(q_offsets) - 1):
        n, m = q_offsets[b + 1] - q_offsets[b], k_offsets[b + 1] - k_offsets[b]
        if not n or not m:
            continue
        if max(n, m) <= (SHORT if on_host else SHORT_ON_DEVICE):
            short[(-(-n // STEP), -(-m // STEP)) if on_host else (_doubled(n), _doubled(m))].append(b)
        else:
            yield _take_row(q_offsets, k_offsets, b, task.causal)
    for (n, m), rows in short.items():
        widths = (n * STEP, m * STEP) if on_host else (None, None)
        most = len(rows) if on_host else max(1, _PADDED_WEIGHTS // (heads * n * m))
        for start in range(0, len(rows), most):
            yield from _cut_together(task, q_offsets, k_offsets, rows[start : start + most], widths, device)


def _doubled(n: int) -> int:
    return max(LEAST, 1 << (n - 1).bit_length())


def _cut_together(
    task: Task,
    q_offsets: list[int],
    k_offsets: list[int],
    rows: list[int],
    widths: tuple[int | None, int | None],
    device: torch.device,
) -> Iterator[Strip]:
    """A strip of rows padded to these widths, or a strip for each where they are few."""
    if len(rows) < (FEW if device.type == "cpu" else 2):
        yield from (_take_row(q_offsets, k_offsets, b, task.causal) for b in rows)
        return
    of_q = fill_bucket(q_offsets, rows, device, widths[0])
    if task.causal and not task.near and q_offsets == k_offsets:
        yield Strip(of_q, of_q, True)  # the padding comes after all that a query sees: no mask is needed
        return
    of_k = fill_bucket(k_offsets, rows, device, widths[1])
    sizes = of_q.shape[1], of_k.shape[1]
    yield Strip(of_q, of_k, mask=partial(make_row_mask, task, k_offsets, rows, *sizes, device))


def _take_row(q_offsets: Sequence[int], k_offsets: Sequence[int], b: int, causal: bool) -> Strip:
    of_q, of_k = (Span(slice(0, 1), slice(x[b], x[b + 1]), slice(None)) for x in (q_offsets, k_offsets))
    return Strip(of_q, of_k, causal, row=b, bases=(q_offsets[b], k_offsets[b]))
