"""Minimum risk: the edits that a beam search is expected to make, as a loss.

Cross entropy makes the dictionary's phones likely, one at a time, after the true ones. What counts is how many phones
are wrong in what a search finds by itself. The risk of a hypothesis is its edit distance to the nearest pronunciation
of the word, a constant; the loss is the mean risk of the list under the model's own probabilities (Shen et al. 2016),
and its gradient moves probability from hypotheses with more edits to those with fewer. It flows through the scores of
the search itself: nothing is scored a second time.

That moves probability within the list only. Some cross entropy keeps it there, of the word's gold pronunciation, which
is followed beside the search and so has its score from the same pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from docs.examples.g2p.model import G2P, Masks
from docs.examples.g2p.search import search
from tensorloop import PackedTensor
from tensorloop.beam import Hypotheses
from tensorloop.risk import edit_distance, minimum_risk


class Losses(NamedTuple):
    """Sums over the rows of a batch, of which the first two have gradients."""

    risk: Tensor  # expected, by the probabilities that ``alpha`` makes of the scores
    entropy: Tensor  # -log p of the gold pronunciations
    edits: Tensor  # of the best hypotheses


def nearest(hyps: Hypotheses, references: PackedTensor, counts: Tensor) -> Tensor:
    """Edits (B, n) from each hypothesis to the nearest of its word's references; row b has counts[b] of them."""
    rows = torch.arange(len(counts)).repeat_interleave(hyps.n_best)
    pairs, first = counts[rows], (counts.cumsum(0) - counts)[rows]
    meets = PackedTensor(first.repeat_interleave(pairs), pairs)
    edits = edit_distance(hyps.tokens[meets.row_ids], references[meets.values + meets.positions])
    return PackedTensor(edits, pairs).amin(1).view(hyps.lens.shape)


def losses(
    model: G2P,
    letters: PackedTensor,
    gold: PackedTensor,
    references: tuple[PackedTensor, Tensor],
    masks: Masks | None,
    beam: int,
    alpha: float = 1.0,
    per_phone: bool = False,
) -> Losses:
    """The expected risk of a search, and the cross entropy of gold, summed over the batch.

    letters (B, S*) int64; gold (B, T*) without ends; references as ``Examples.references`` has them. ``per_phone``
    divides the edits of a word by the phones of its gold pronunciation.
    """
    hyps = search(model, letters, beam, masks=masks, gold=gold)
    assert hyps.gold is not None
    edits = nearest(hyps, *references)
    risks = edits / gold.lens[:, None] if per_phone else edits
    risk = minimum_risk(hyps.scores, risks, alpha, reduction="sum")
    return Losses(risk, -hyps.scores.gather(1, hyps.gold[:, None]).sum(), edits[:, 0].sum())
