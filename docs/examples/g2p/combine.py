"""Several opinions of one word: models that write from either end, and an n-gram model of chunks.

Each model's beam search proposes its n best pronunciations of a word. Then all score what any proposed: the models by
teacher forcing, the n-grams by the best cut into chunks. The highest sum wins. That two that begin at other ends mend
each other is of Liu et al. 2016, a network with n-grams of letters and phones of Rao et al. 2015.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from docs.examples.g2p.chunks import Chunks, Pair
from docs.examples.g2p.data import Lexicon, Phones, Vocabulary, pack, word_batches
from docs.examples.g2p.model import G2P
from docs.examples.g2p.ngrams import NGrams
from docs.examples.g2p.scoring import n_best
from tensorloop import PackedTensor

NO_CUT = -100.0  # log-probability of what cannot be cut into chunks: below all that can
WEIGHTS = tuple(n / 10 for n in range(11))  # of the n-grams, beside 1 for the models' mean

Progress = Callable[[list[list[int]]], Iterable[list[int]]]


class JointNGrams:
    """log p of words with their pronunciations, by n-grams of chunks."""

    def __init__(
        self,
        lexicon: Lexicon,
        vocabulary: Vocabulary,
        order: int = 6,
        progress: Callable[[range], Iterable[int]] = lambda rounds: rounds,
    ) -> None:
        pairs = [(word, phones) for word, entries in lexicon.items() for phones in entries]
        self.chunks = Chunks.learn(pairs, vocabulary, progress=progress)
        cut = self.chunks.cut(pairs)
        self.ngrams = NGrams(cut.chunks[cut.whole.nonzero()[:, 0]], len(self.chunks), order)

    def log_probs(self, pairs: Sequence[Pair]) -> Tensor:
        """(N,) float64, of words with their phones."""
        cut = self.chunks.cut(pairs)
        return torch.where(cut.whole, self.ngrams.log_probs(cut.chunks).sum(1), NO_CUT)


@torch.no_grad()
def log_probs(model: G2P, vocabulary: Vocabulary, pairs: Sequence[Pair], batch_size: int = 1024) -> Tensor:
    """(N,) float64, of phones given their words, by teacher forcing."""
    found = torch.empty(len(pairs), dtype=torch.float64)
    for rows in word_batches([word for word, _ in pairs], batch_size):
        letters = pack([vocabulary.encode_word(pairs[i][0]) for i in rows])
        given = [pairs[i][1][::-1] if model.config.backwards else pairs[i][1] for i in rows]
        phones = pack([[*vocabulary.encode_phones(one), vocabulary.eos_id] for one in given])
        scores = model(letters, phones).values.gather(1, phones.values[:, None])[:, 0]
        found[rows] = PackedTensor(scores, phones.dims[0]).sum(1).double()
    return found


@dataclass(frozen=True)
class Opinions:
    """What was proposed for some words, and each opinion of it. Proposals of one word are neighbours."""

    pairs: list[Pair]
    models: Tensor  # (M, N): log-probabilities by each model
    ngrams: Tensor | None  # (N,)

    @classmethod
    def of(
        cls,
        words: Sequence[str],
        models: Sequence[G2P],
        vocabulary: Vocabulary,
        ngrams: JointNGrams | None,
        beam: int,
        progress: Progress = lambda batches: batches,
    ) -> "Opinions":
        """The ``beam`` best of each model, scored by all."""
        proposed: dict[str, dict[Phones, None]] = {word: {} for word in words}
        for rows in progress(list(word_batches(words, 256))):
            for model in models:
                for word, found in n_best(model, vocabulary, [words[i] for i in rows], beam, beam).items():
                    proposed[word].update((phones, None) for _, phones in found)
        pairs = [(word, phones) for word, some in proposed.items() for phones in some]
        scores = torch.stack([log_probs(model, vocabulary, pairs) for model in models])
        return cls(pairs, scores, None if ngrams is None else ngrams.log_probs(pairs))

    def best(self, weight: float = 0.0) -> dict[str, Phones]:
        """The pronunciation of each word with the highest mean of the models, and ``weight`` of the n-grams."""
        total = self.models.mean(0)
        if weight and self.ngrams is not None:
            total = total + weight * self.ngrams
        return self._highest(total)

    def best_of(self, model: int) -> dict[str, Phones]:
        """The pronunciations that one model has the highest log-probability of."""
        return self._highest(self.models[model])

    def _highest(self, scores: Tensor) -> dict[str, Phones]:
        found: dict[str, tuple[float, Phones]] = {}
        for (word, phones), one in zip(self.pairs, scores.tolist(), strict=True):
            if word not in found or one > found[word][0]:
                found[word] = one, phones
        return {word: phones for word, (_, phones) in found.items()}
