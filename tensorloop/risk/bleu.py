"""BLEU of single sentences, in torch operations: n-grams get numbers, are counted by row, and compared between rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue, named
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.risk.token_rows import Pairs, TokenRows, pair_rows

_NAME = "sentence_bleu"
_SMOOTHING = ("add_one", "exp", "none")


@named(_NAME)
@called_eagerly
def sentence_bleu(a: TokenRows, b: TokenRows, *, max_n: int = 4, smoothing: str = "add_one") -> Tensor:
    """Gives the BLEU of each row of a against its row of b, smoothed for single sentences; 1 - BLEU is a risk.

    It is min(1, exp(1 - |b| / |a|)) times the geometric mean of p_1 ... p_n, n = max_n, where p_k is the share of the
    k-grams of a that b has too, each counted at most as often as there.

    Args:
        a: R rows of tokens, the hypotheses, packed (R, T*) of any integer dtype, or a list of rows.
        b: S rows of tokens, the references, as `a`; R is a multiple of S, and each reference serves R / S consecutive
            rows.
        max_n: int, at least 1, default 4: the length of the longest k-grams.
        smoothing: what is done about a p_k of 0, which makes all of it 0. "add_one" (default): one more match and one
            more k-gram for k > 1 (Lin & Och 2004); an `a` too short for a k-gram has p_k = 1. "exp": the first p_k of 0
            is 1/2 match in its place, the next 1/4, and so on, as the mteval-v13a script and sacrebleu's default; 0
            without any match. "none": nothing. In the last two, k-grams that `a` is too short for are left out of the
            mean.

    Returns:
        (R,) float64 in [0, 1], 1 where the rows are equal. An empty row of a has 0 whatever the smoothing, 1 if that of
        b is empty too.

    Gradient: none; the result is a constant.
    Cost: O(N log N) time and O(N) bytes for N tokens, times max_n; any device, which is waited for.

    Raises:
        TypeError: not rows of integers.
        ValueError: rows as for `edit_distance`; max_n below 1, an unknown smoothing.

    Source: Papineni et al. 2002.

    Example:
        >>> tl.sentence_bleu([[1, 2, 3, 4], [5]], [[1, 2, 3, 4], [6]])
        tensor([1., 0.], dtype=torch.float64)
    """
    max_n = arguments.as_int(max_n, "max_n")
    if max_n < 1:
        raise WrongValue(f"max_n is {max_n}; n-grams have at least one token")
    if smoothing not in _SMOOTHING:
        raise WrongValue(f"smoothing is {smoothing!r}; there are {', '.join(map(repr, _SMOOTHING))}")
    pairs = pair_rows(a, b)
    lens = pairs.a.lens
    others = pairs.b.lens[torch.arange(len(lens), device=lens.device) // pairs.each]
    orders = torch.arange(max_n, device=lens.device).unsqueeze(1)
    matches, totals = torch.stack(list(_count_matches(pairs, max_n))), (lens - orders).clamp(min=0)
    precisions, counted = _compute_precisions(matches, totals, smoothing)
    logs = torch.where(counted, precisions.log(), 0).sum(0) / counted.sum(0).clamp(min=1)
    brevity = (1 - others / lens.clamp(min=1).double()).clamp(max=0)
    both_empty = (lens == 0) & (others == 0)
    return torch.where(lens > 0, (logs + brevity).exp() * matches.any(0), both_empty.double())


def _compute_precisions(matches: Tensor, totals: Tensor, smoothing: str) -> tuple[Tensor, Tensor]:
    """p_k (max_n, R), and which of them count."""
    hits = matches.double()
    if smoothing == "add_one":
        more = (torch.arange(len(totals), device=totals.device) > 0).long().unsqueeze(1)
        hits, totals = hits + more, totals + more
    elif smoothing == "exp":
        missed = (matches == 0) & (totals > 0)
        hits = torch.where(missed, 0.5 ** missed.cumsum(0), hits)
    return hits / totals, totals > 0


def _count_matches(pairs: Pairs, max_n: int) -> Iterator[Tensor]:
    """(R,) for k = 1 to max_n: the k-grams of a row of a that are in its row of b, each as often as in both."""
    tokens, size = _number(torch.cat([pairs.a.values, pairs.b.values]))
    row = torch.cat([pairs.a.row_ids, pairs.b.row_ids])
    lens = torch.cat([x.lens.index_select(0, x.row_ids) for x in (pairs.a, pairs.b)])
    left = lens - torch.cat([pairs.a.positions, pairs.b.positions])  # tokens from here to the end of the row
    starts, grams, ids = torch.arange(len(tokens), device=tokens.device), tokens, size
    for k in range(1, max_n + 1):
        if k > 1:  # a k-gram is the (k-1)-gram that starts there, and one token more
            fits = left[starts] >= k
            starts = starts[fits]
            grams, ids = _number(grams[fits] * size + tokens[starts + k - 1])
        yield _count_clipped(row[starts], grams, ids, starts < len(pairs.a.values), pairs)


def _number(x: Tensor) -> tuple[Tensor, int]:
    """Equal numbers as equal ids from 0, and how many there are."""
    distinct, ids = torch.unique(x, return_inverse=True)
    return ids, len(distinct)


def _count_clipped(row: Tensor, grams: Tensor, ids: int, of_a: Tensor, pairs: Pairs) -> Tensor:
    """(R,): over the distinct n-grams of each row of a, the smaller of the counts in it and in its row of b."""
    keys = row * ids + grams
    mine, counts = torch.unique(keys[of_a], return_counts=True)
    theirs, limits = torch.unique(keys[~of_a], return_counts=True)
    found = torch.zeros(len(pairs.a.lens), dtype=torch.int64, device=keys.device)
    if not len(mine) or not len(theirs):
        return found
    rows = mine // ids
    wanted = rows // pairs.each * ids + mine % ids
    place = torch.searchsorted(theirs, wanted).clamp(max=len(theirs) - 1)
    clipped = torch.where(theirs[place] == wanted, counts.minimum(limits[place]), 0)
    return found.index_add_(0, rows, clipped)
