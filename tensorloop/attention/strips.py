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
from tensorloop.kernels.sight import Sight

# Rows of at most SHORT tokens, FEW or more of about equal length (by STEP), are padded and computed together. One row
# alone costs about 120 us of Python and dispatch, forward and backward; padding a bucket costs about 600 us, and then
# each row of 5 tokens 30 us, of 30 tokens 150 us (float32, 4 heads of 64, one thread). Where scores or weights are
# changed, a strip is more operations, and rows of up to SHORT_SCORED tokens are better off together.
SHORT, SHORT_SCORED, STEP, FEW = 32, 64, 8, 6
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


def find_hidden(strip: Strip, shape: Sequence[int], device: torch.device) -> Tensor | None:
    """(G or 1, heads or 1, L or 1, S) bool: what queries of scores (..., L, S) do not see; None where they see all."""
    hidden = None
    if strip.causal:
        hidden = torch.ones(shape, dtype=torch.bool, device=device).triu(strip.first + 1)[None, None]
    if strip.mask is not None:
        hidden = ~strip.mask() if hidden is None else hidden | ~strip.mask()
    return hidden


# -- the keys that queries may see by their positions, among so many


def _low(sight: Sight, i: int) -> int:
    """The first key that the query at position i sees."""
    low = max(0, i - sight.window + 1) if sight.window else 0
    return low if sight.left is None else max(low, (i // sight.chunk - sight.left) * sight.chunk)


def _high(sight: Sight, i: int, keys: int) -> int:
    """One past the last key that it sees, but for `causal`."""
    return min(keys, (i // sight.chunk + 1) * sight.chunk) if sight.chunk else keys


def _keys(sight: Sight, first: int, stop: int, keys: int) -> tuple[int, int]:
    """The range of positions outside of which none of these queries sees anything; it rises with them."""
    high = _high(sight, stop - 1, keys)
    return _low(sight, first), min(high, stop) if sight.causal else high


def _see_all(sight: Sight, first: int, stop: int, low: int, high: int) -> bool:
    """Whether all queries from `first` on, before `stop`, see all keys from `low` on, before `high`."""
    late = sight.causal and high > first + 1
    return _low(sight, stop - 1) <= low and _high(sight, first, high) >= high and not late


def _queries(sight: Sight, weights: int, keys: int) -> int:
    """How many queries to compute together: as many as each sees keys, for what is too much then is but half."""
    reach = keys if sight.left is None else min(keys, (sight.left + 1) * sight.chunk)
    reach = min(reach, sight.window) if sight.window else reach
    size = max(1, min(max(reach, _TOGETHER), weights // max(reach, 1)))
    return size if not sight.chunk or size < sight.chunk else size - size % sight.chunk


def cut(sight: Sight, q: Tensor, k: Tensor) -> Iterable[Strip]:
    """The strips of what is seen without a block mask; empty ones, whose output is 0, are left out."""
    if sight.offsets is not None:
        return _cut_packed(sight, *sight.offsets, q.shape[2], q.device)
    if not q.shape[0] * q.shape[1] * k.shape[1]:
        return ()
    return (Strip(None, None, sight.causal),)


def shorten(parts: Iterable[Strip], sight: Sight, q: Tensor, k: Tensor, weights: int) -> Iterator[Strip]:
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
        size = size if not sight.near else _queries(sight, weights // (q.shape[0] * q.shape[2]), most)
        for start in range(bases[0], end, size):
            stop = min(start + size, end)
            first, low, high = start - bases[0], *_keys(sight, start - bases[0], stop - bases[0], most)
            if low >= high:
                continue
            some_q = place_q._replace(tokens=slice(start, stop))
            some_k = place_k._replace(tokens=slice(bases[1] + low, bases[1] + high))
            cut_here = Strip(some_q, some_k, sight.causal and not sight.near, first, row=strip.row, bases=bases)
            if sight.near and not _see_all(sight, first, stop - bases[0], low, high):
                places = (first, stop - bases[0]), (low, high)
                cut_here = cut_here._replace(mask=partial(make_span_mask, sight, *places, q.device))
            yield cut_here


def make_span_mask(sight: Sight, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Tensor:
    """(1, 1, L, S) bool: what queries in one range of positions see of keys in another."""
    i, j = (torch.arange(*places, device=device) for places in (queries, keys))
    return sight.sees(i[:, None], j)[None, None]


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


def make_row_mask(sight: Sight, offsets: Sequence[int], rows: Sequence[int], n: int, m: int, device: Any) -> Tensor:
    """(G, 1, n or 1, m) bool: which keys of rows that were padded to m are tokens, and seen by their positions."""
    lens = torch.tensor([offsets[b + 1] - offsets[b] for b in rows], dtype=torch.int64, device="cpu")
    lens = upload(lens, device)
    j = torch.arange(m, device=device)
    mask = (j < lens[:, None])[:, None, None]
    return mask & sight.sees(torch.arange(n, device=device)[:, None], j) if sight.causal or sight.near else mask


def _cut_packed(
    sight: Sight, q_offsets: list[int], k_offsets: list[int], heads: int, device: torch.device
) -> Iterator[Strip]:
    on_host = device.type == "cpu"
    limit = (SHORT_SCORED if sight.scored else SHORT) if on_host else SHORT_ON_DEVICE
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for b in range(len(q_offsets) - 1):
        n, m = q_offsets[b + 1] - q_offsets[b], k_offsets[b + 1] - k_offsets[b]
        if not n or not m:
            continue
        if max(n, m) <= limit:
            short[(-(-n // STEP), -(-m // STEP)) if on_host else (_doubled(n), _doubled(m))].append(b)
        else:
            yield _take_row(q_offsets, k_offsets, b, sight.causal)
    for (n, m), rows in short.items():
        widths = (n * STEP, m * STEP) if on_host else (None, None)
        most = len(rows) if on_host else max(1, _PADDED_WEIGHTS // (heads * n * m))
        for start in range(0, len(rows), most):
            yield from _cut_together(sight, q_offsets, k_offsets, rows[start : start + most], widths, device)


def _doubled(n: int) -> int:
    return max(LEAST, 1 << (n - 1).bit_length())


def _cut_together(
    sight: Sight,
    q_offsets: list[int],
    k_offsets: list[int],
    rows: list[int],
    widths: tuple[int | None, int | None],
    device: torch.device,
) -> Iterator[Strip]:
    """A strip of rows padded to these widths, or a strip for each where they are few."""
    if len(rows) < (FEW if device.type == "cpu" else 2):
        yield from (_take_row(q_offsets, k_offsets, b, sight.causal) for b in rows)
        return
    of_q = fill_bucket(q_offsets, rows, device, widths[0])
    if sight.causal and not sight.near and q_offsets == k_offsets:
        yield Strip(of_q, of_q, True)  # the padding comes after all that a query sees: no mask is needed
        return
    of_k = fill_bucket(k_offsets, rows, device, widths[1])
    sizes = of_q.shape[1], of_k.shape[1]
    yield Strip(of_q, of_k, mask=partial(make_row_mask, sight, k_offsets, rows, *sizes, device))


def _take_row(q_offsets: Sequence[int], k_offsets: Sequence[int], b: int, causal: bool) -> Strip:
    of_q, of_k = (Span(slice(0, 1), slice(x[b], x[b + 1]), slice(None)) for x in (q_offsets, k_offsets))
    return Strip(of_q, of_k, causal, row=b, bases=(q_offsets[b], k_offsets[b]))
