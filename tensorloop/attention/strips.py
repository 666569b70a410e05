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

# Rows of at most SHORT tokens, FEW or more of about equal length (by STEP), are padded and computed together. One row
# alone costs about 120 us of Python and dispatch, forward and backward; padding a bucket costs about 600 us, and then
# each row of 5 tokens 30 us, of 30 tokens 150 us (float32, 4 heads of 64, one thread).
SHORT, STEP, FEW = 32, 8, 6


class Span(NamedTuple):
    """Some batch entries, some tokens (a slice, or their numbers (L,) in ascending order), some heads: x[index]."""

    batch: slice
    tokens: slice | Tensor
    heads: slice

    def take(self, x: Tensor) -> Tensor:
        """(G, L, H', D), a view where the tokens are a slice."""
        return x[self.batch, self.tokens, self.heads]

    take_padded = take

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

    def take(self, x: Tensor) -> Tensor:
        """(G, L, heads, D), a copy; no row may be empty. What is behind an end is the row's own: finite if that is."""
        return x[0].index_select(0, self.slots).unflatten(0, self.shape)

    def take_padded(self, x: Tensor) -> Tensor:
        """The same with zeros behind the ends; rows may be empty. Differentiable."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return padded.index_copy(0, self.places, x[0].index_select(0, self.tokens)).unflatten(0, self.shape)

    def put_(self, buffer: Tensor, part: Tensor) -> None:
        """Writes what belongs to tokens of `part` (G, L, heads, D); no other strip has them."""
        buffer[0].index_copy_(0, self.tokens, self.of_tokens(part).to(buffer.dtype))

    add_ = put_

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


class Task(NamedTuple):
    """What to compute, for all sizes at once."""

    scale: float
    causal: bool = False
    q_offsets: list[int] | None = None  # of packed tensors: B + 1 numbers, as plain ints
    k_offsets: list[int] | None = None
    blocks: Any = None  # a BlockMask, or None

    @property
    def overlaps(self) -> bool:
        """Whether a key may be in several strips, so that their gradients meet."""
        return self.blocks is not None


def cut(task: Task, q: Tensor, k: Tensor) -> Iterable[Strip]:
    """The strips of a task without a block mask; empty ones, whose output is 0, are left out."""
    if task.q_offsets is not None and task.k_offsets is not None:
        return _cut_packed(task.q_offsets, task.k_offsets, task.causal, q.device)
    if not q.shape[0] * q.shape[1] * k.shape[1]:
        return ()
    return (Strip(None, None, task.causal),)


def shorten(parts: Iterable[Strip], q: Tensor, k: Tensor, weights: int) -> Iterator[Strip]:
    """The same work in strips of at most about `weights` attention weights each, or of one query."""
    everything = (slice(0, q.shape[0]), slice(None))
    for strip in parts:
        place_q = Span(everything[0], slice(0, q.shape[1]), everything[1]) if strip.q is None else strip.q
        place_k = Span(everything[0], slice(0, k.shape[1]), everything[1]) if strip.k is None else strip.k
        if not isinstance(place_q, Span) or not isinstance(place_k, Span) or strip.mask is not None:
            yield strip
            continue
        assert isinstance(place_q.tokens, slice)
        assert isinstance(place_k.tokens, slice)
        begin, end, first_key = place_q.tokens.start, place_q.tokens.stop, place_k.tokens.start
        size = max(1, weights // (q.shape[0] * q.shape[2] * max(place_k.tokens.stop - first_key, 1)))
        for start in range(begin, end, size):
            stop = min(start + size, end)
            last_key = min(place_k.tokens.stop, first_key + stop - begin) if strip.causal else place_k.tokens.stop
            some_q = place_q._replace(tokens=slice(start, stop))
            yield Strip(some_q, place_k._replace(tokens=slice(first_key, last_key)), strip.causal, start - begin)


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
    return Bucket(slots.to(device), places.to(device), tokens.to(device), (len(rows), length))


def make_row_mask(
    offsets: Sequence[int], rows: Sequence[int], n: int, m: int, causal: bool, device: torch.device
) -> Tensor:
    """(G, 1, n or 1, m) bool: which keys of rows that were padded to m are tokens, and not later than the query."""
    lens = torch.tensor([offsets[b + 1] - offsets[b] for b in rows], dtype=torch.int64, device=device)
    mask = (torch.arange(m, device=device) < lens[:, None])[:, None, None]
    return mask & torch.ones(n, m, dtype=torch.bool, device=device).tril() if causal else mask


def _cut_packed(q_offsets: list[int], k_offsets: list[int], causal: bool, device: torch.device) -> Iterator[Strip]:
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for b in range(len(q_offsets) - 1):
        n, m = q_offsets[b + 1] - q_offsets[b], k_offsets[b + 1] - k_offsets[b]
        if not n or not m:
            continue
        if max(n, m) <= SHORT:
            short[-(-n // STEP), -(-m // STEP)].append(b)
        else:
            yield Strip(_take_row(q_offsets, b), _take_row(k_offsets, b), causal)
    for (n, m), rows in short.items():
        if len(rows) < FEW:
            yield from (Strip(_take_row(q_offsets, b), _take_row(k_offsets, b), causal) for b in rows)
            continue
        of_q = fill_bucket(q_offsets, rows, device, n * STEP)
        if causal and q_offsets == k_offsets:  # the padding comes after all that a query sees: no mask is needed
            yield Strip(of_q, of_q, causal)
            continue
        of_k = fill_bucket(k_offsets, rows, device, m * STEP)
        yield Strip(
            of_q, of_k, mask=partial(make_row_mask, k_offsets, rows, of_q.shape[1], of_k.shape[1], causal, device)
        )


def _take_row(offsets: Sequence[int], b: int) -> Span:
    return Span(slice(0, 1), slice(offsets[b], offsets[b + 1]), slice(None))
