"""Edit distances in torch operations, on any device: all pairs at once, one diagonal of their tables after the other.

Where all edits cost 1, one row of the tables after the other: see `_distances`.

`a` (N,) and `b` (M,) int64 are rows of tokens, cut by `a_offsets` (R+1,) and `b_offsets` (S+1,); R is a multiple of S,
and row r of a meets row r // (R / S) of b. D[i, j] is what the first i tokens of the one cost against the first j of
the other:

    D[i, j] = min(D[i-1, j-1] + substitution, D[i-1, j] + insertion, D[i, j-1] + deletion)

An insertion is a token that only a has, a deletion one that only b has. `substitution` is a number, and a match free,
or a table (V, V) with the cost of each token of a (row) against each of b.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.kernels.eager.rows import pad_rows

MATCH, SUBSTITUTION, INSERTION, DELETION = range(4)
_GAINS = 1 << 24  # numbers that are made at a time for rows of the tables


def edit_distance(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> Tensor:
    """(R,) int64: the fewest edits."""
    pairs = _padded(a, a_offsets, b, b_offsets)
    return _distances(pairs)


def edit_cost(
    a: Tensor,
    a_offsets: Tensor,
    b: Tensor,
    b_offsets: Tensor,
    insertion: float,
    deletion: float,
    substitution: float | Tensor,
) -> Tensor:
    """(R,) float64: the least cost of edits. Tokens must be rows of the table, where there is one."""
    pairs = _padded(a, a_offsets, b, b_offsets)
    return _ends(pairs, _diagonals(pairs, insertion, deletion, _double(substitution, a), _double(torch.inf, a)))


def edit_paths(
    a: Tensor,
    a_offsets: Tensor,
    b: Tensor,
    b_offsets: Tensor,
    insertion: float,
    deletion: float,
    substitution: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """(N, 3), (R,) int64: (what, place in the row of a, place in that of b) by pair, in order; how many a pair.

    A place is -1 where there is none. Of paths that cost the same it is the one that, from the ends of both rows
    backwards, takes a match or substitution where it can, else an insertion, else a deletion.
    """
    pairs = _padded(a, a_offsets, b, b_offsets)
    substitution = _double(substitution, a)
    tables = torch.stack(list(_diagonals(pairs, insertion, deletion, substitution, _double(torch.inf, a))))
    rows = torch.arange(len(pairs.a), device=a.device)
    i, j = pairs.a_lens, pairs.b_lens
    steps = []
    for _ in range(len(tables) - 1):
        left, up = (i - 1).clamp(min=0), (j - 1).clamp(min=0)
        here = tables[i + j, rows, i]
        x, y = pairs.a[rows, left], pairs.b[rows, up]
        over = tables[left + up, rows, left] + _substitutions(x, y, substitution)
        met = (i > 0) & (j > 0) & (over == here)
        only_a = ~met & (i > 0) & (tables[left + j, rows, left] + insertion == here)
        only_b = ~met & ~only_a & (j > 0)
        what = torch.where(met, torch.where(x == y, MATCH, SUBSTITUTION), -1)
        what = what.masked_fill(only_a, INSERTION).masked_fill(only_b, DELETION)
        steps.append(torch.stack([what, torch.where(only_b, -1, i - 1), torch.where(only_a, -1, j - 1)], 1))
        i, j = i - (met | only_a).long(), j - (met | only_b).long()
    forward = torch.stack(steps[::-1], 1)  # (R, steps, 3): what lies before the start of a path is -1
    kept = forward[..., 0] >= 0
    return forward[kept], kept.sum(1)


class _Pairs(NamedTuple):
    """Rows that meet: (R, I) and (R, J), at least one column each, with their lengths (R,)."""

    a: Tensor
    b: Tensor
    a_lens: Tensor
    b_lens: Tensor


def _padded(a: Tensor, a_offsets: Tensor, b: Tensor, b_offsets: Tensor) -> _Pairs:
    a_lens, b_lens = a_offsets.diff(), b_offsets.diff()
    rows, others = len(a_lens), len(b_lens)
    partner = torch.arange(rows, device=a.device) // (rows // others if rows else 1)
    on_host = torch.cat([a_lens, b_lens]).cpu().split([rows, others])  # all that a device is waited for
    wide_a, wide_b = (int(lens.max()) if len(lens) else 0 for lens in on_host)
    padded_a = pad_rows(a.unsqueeze(1), a_offsets, max(wide_a, 1), 0).squeeze(2)
    padded_b = pad_rows(b.unsqueeze(1), b_offsets, max(wide_b, 1), 0).squeeze(2)
    return _Pairs(padded_a, padded_b[partner], a_lens, b_lens[partner])


def _distances(pairs: _Pairs) -> Tensor:
    """(R,): D at the ends of both rows, where every edit costs 1.

    What is held of row i is G[j] = D[i, j] - i - j, which is at most 0 and does not rise: it is the least of what is
    above, of what is diagonally above, less 1 or for a match 2, and, by a running minimum, of what is to the left.
    Behind the end of a row of a nothing is gained, so that G stays what it was there.
    """
    (rows, length), width = pairs.a.shape, pairs.b.shape[1]
    gained = torch.zeros(rows, width + 1, dtype=torch.int64, device=pairs.a.device)
    size = max(1, _GAINS // max(rows * width, 1))
    for start in range(0, length, size):
        here = torch.arange(start, min(start + size, length), device=pairs.a.device)
        match = pairs.a[:, start : start + size, None] == pairs.b[:, None]
        gains = (-1 - match.long()) * (here < pairs.a_lens[:, None])[:, :, None]
        for gain in gains.unbind(1):
            over = torch.minimum(gained[:, :-1] + gain, gained[:, 1:])
            gained[:, 1:] = over.cummin(1).values
    return pairs.a_lens + pairs.b_lens + gained.gather(1, pairs.b_lens.unsqueeze(1)).squeeze(1)


def _double(x: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64, device=like.device)


def _substitutions(x: Tensor, y: Tensor, substitution: Tensor) -> Tensor:
    """`substitution` is a table, or the one number for tokens that differ."""
    return substitution[x, y] if substitution.dim() else torch.where(x == y, 0, substitution)


def _diagonals(pairs: _Pairs, insertion: float, deletion: float, substitution: Tensor, far: Tensor) -> Iterator[Tensor]:
    """For d = 0, 1, ..., I + J: (R, I+1), entry i is D[i, d - i].

    Where d - i is negative it is far; where it is past the end of the row of b it is a number that nothing within the
    table depends on.
    """
    rows, width = pairs.a.shape
    last = far.expand(rows, width + 1)
    current = last.clone()
    current[:, 0] = 0
    yield current
    columns = torch.arange(width, device=pairs.a.device)
    for d in range(1, width + pairs.b.shape[1] + 1):
        facing = pairs.b.index_select(1, (d - 2 - columns).clamp(0, pairs.b.shape[1] - 1))
        over = last[:, :-1] + _substitutions(pairs.a, facing, substitution)
        last, current = current, current + deletion
        current[:, 1:] = current[:, 1:].minimum(last[:, :-1] + insertion).minimum(over)
        yield current


def _ends(pairs: _Pairs, diagonals: Iterator[Tensor]) -> Tensor:
    """(R,): D at the ends of both rows."""
    found = None
    for d, diagonal in enumerate(diagonals):
        here = diagonal.gather(1, pairs.a_lens.unsqueeze(1)).squeeze(1)
        found = here if found is None else torch.where(pairs.a_lens + pairs.b_lens == d, here, found)
    assert found is not None
    return found
