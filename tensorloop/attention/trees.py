"""Packed rows that share their first tokens, cut into strips: a tree has a stem, and branches behind it.

A token of the stem sees the stem up to itself; one of a branch sees the stem and its own branch, as if that were all
behind the stem. The tokens of a tree stand one after another, the stem first, and every stem is there once: a strip has
some queries of a branch and copies the keys that they see for as long as it is computed. Branches that are short beside
their stem are computed together, with a mask that keeps them apart.

Other names: prefix sharing, cascade attention (Ye et al. 2024), Hydragen (Juravsky et al. 2024, 2402.05099).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.attention.strips import Span, Strip, make_span_mask
from tensorloop.kernels.sight import Sight

_FEW = 128  # queries: so many are computed together whatever their stem
_NEAR = 64  # and at least so many where a window lets each see few keys


class TokenTree(NamedTuple):
    """Describes where the tokens of a tree stand among N."""

    start: int
    stem: int  # tokens that all branches see
    branches: Sequence[int]  # tokens of each

    @property
    def size(self) -> int:
        """All of its tokens."""
        return self.stem + sum(self.branches)


def see_trees(sight: Sight, count: int, device: torch.device) -> Tensor:
    """(1, 1, N, N) bool: what each token sees."""
    sees = torch.zeros(count, count, dtype=torch.bool, device=device)
    for tree in sight.trees:
        tokens = slice(tree.start, tree.start + tree.size)
        sees[tokens, tokens] = _see_tree(sight, tree, 0, device)[0, 0]
    return sees[None, None]


def cut_trees(sight: Sight, most: int, flash: bool, device: torch.device) -> Iterator[Strip]:
    """Strips of at most about `most` weights of a head, or of one query; a stem is one strip where `flash` takes it."""
    for tree in sight.trees:
        start, stem, branches = tree
        total, ends = sum(branches), list(accumulate(branches, initial=start + stem))
        own = stem * stem if flash and not sight.window else most
        yield from _cut_branch(sight, (start, 0), (start, stem), own, device)
        if len(branches) > 1 and 0 < total <= max(stem, _FEW) and total * tree.size <= most:
            mask = partial(_see_tree, sight, tree, stem, device)
            yield Strip(_span(start + stem, start + tree.size), _span(start, start + tree.size), mask=mask, row=0)
            continue
        for begin, length in zip(ends, branches, strict=False):
            yield from _cut_branch(sight, (start, stem), (begin, length), most, device)


def _span(start: int, stop: int) -> Span:
    return Span(slice(0, 1), slice(start, stop), slice(None))


def _cut_branch(
    sight: Sight, stem: tuple[int, int], branch: tuple[int, int], most: int, device: torch.device
) -> Iterator[Strip]:
    """The strips of a branch behind a stem, (its first token, how many) each."""
    (start, before), (begin, length) = stem, branch
    size = max(1, most // max(before + length, 1))
    size = min(size, max(sight.window, _NEAR)) if sight.window else size
    for i in range(0, length, size):
        stop = min(i + size, length)
        low = max(0, before + i - sight.window + 1) if sight.window else 0  # the first position that is seen
        own = begin + max(0, low - before), begin + stop
        keys = _span(*own)
        if low < before and start + before == begin:
            keys = _span(start + low, own[1])
        elif low < before:
            places = (torch.arange(*x, device=device) for x in ((start + low, start + before), own))
            keys = keys._replace(tokens=torch.cat(list(places)))
        queries = _span(begin + i, begin + stop)
        if before == i == sight.window == 0:
            yield Strip(queries, keys, True, row=0)
            continue
        places = (before + i, before + stop), (low, before + stop)
        yield Strip(queries, keys, mask=partial(make_span_mask, sight, *places, device), row=0)


def _see_tree(sight: Sight, tree: TokenTree, first: int, device: torch.device) -> Tensor:
    """(1, 1, L, S) bool: what the tokens of a tree from `first` on see of it."""
    lens = torch.tensor([tree.stem, *tree.branches], device=device)
    branch = torch.arange(len(lens), device=device).repeat_interleave(lens)
    at = torch.arange(len(branch), device=device)
    at = torch.where(branch == 0, at, at - (lens.cumsum(0) - lens)[branch] + tree.stem)
    sees = sight.sees(at[first:, None], at) & ((branch == 0) | (branch == branch[first:, None]))
    return sees[None, None]
