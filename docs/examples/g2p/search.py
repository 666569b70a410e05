"""Beam search over pronunciations: the step of training and of greedy decoding, K hypotheses of each word at once.

There is no maximum length here either. The scores are log-probabilities, so a hypothesis only loses by going on; the
search of a word is over when nothing that still runs can reach its list of the best. As the end grows ever more likely
(see ``model.py``), that comes.
"""

import torch

from docs.examples.g2p.model import G2P, Masks
from tensorloop import PackedTensor
from tensorloop.beam import Hypotheses, beam_search


def search(
    model: G2P,
    letters: PackedTensor,
    beam: int,
    n_best: int | None = None,
    *,
    masks: Masks | None = None,
    gold: PackedTensor | None = None,
    checkpoints: int | None = None,
) -> Hypotheses:
    """The n best pronunciations of each word, best first, with their log-probabilities; n is ``beam`` by default.

    letters (B, S*) int64. The scores are differentiable, through the decoder and the encoder. ``masks`` are dropout's,
    (B, F): the hypotheses of a word share its masks, so they differ by what they say and not by noise. ``gold``
    (B, T*), without ends, is followed beside the search and returned in the list. ``checkpoints`` as in `while_loop`.
    Raises RuntimeError for a model in training mode without ``masks``, and FloatingPointError as ``G2P.write`` does.
    """
    if model.training and masks is None:
        raise RuntimeError("search: model is in training mode, where dropout is random; give masks, or call eval()")
    context, carry = model.encode(letters, masks)
    return beam_search(
        model.write,
        carry,
        batch_size=len(letters.lens),
        beam_size=beam,
        n_best=n_best,
        bos_id=model.config.bos_id,
        eos_id=model.config.eos_id,
        context=context,
        gold=gold,
        checkpoints=checkpoints,
    )


@torch.no_grad()
def best(model: G2P, letters: PackedTensor, beam: int) -> list[list[int]]:
    """The best pronunciation of each word: phone ids, without eos. A word's phones do not depend on its batch."""
    return [row.tolist() for row in search(model, letters, beam, 1).tokens.unbind()]
