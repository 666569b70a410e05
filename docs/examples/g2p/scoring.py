"""Phone and word error rates, with the reference of the fewest edits for every word."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from docs.examples.g2p.data import Lexicon, Phones, Vocabulary, pack, word_batches
from docs.examples.g2p.model import G2P, greedy
from docs.examples.g2p.search import best, search


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """The fewest insertions, deletions and substitutions from a to b (Levenshtein 1966). O(|a| |b|)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


@dataclass(frozen=True)
class Score:
    """Counts over a set of words; the rates are in percent."""

    words: int
    wrong_words: int
    phones: int
    edits: int

    @property
    def per(self) -> float:
        return 100 * self.edits / self.phones

    @property
    def wer(self) -> float:
        return 100 * self.wrong_words / self.words

    def __str__(self) -> str:
        return f"PER {self.per:.2f} %  WER {self.wer:.2f} %  ({self.words} words, {self.phones} phones)"


def score(predicted: Mapping[str, Phones], lexicon: Lexicon) -> Score:
    """Score one pronunciation a word against all references: the one with the fewest edits counts.

    Among references with equally few edits the first of the lexicon gives the length. Raises ValueError if the
    two do not hold the same words, or none.
    """
    if not lexicon or predicted.keys() != lexicon.keys():
        raise ValueError(
            f"score: predicted must hold the lexicon's {len(lexicon)} words, at least one, and no others; "
            f"it holds {len(predicted)}"
        )
    phones = edits = wrong = 0
    for word, references in lexicon.items():
        fewest, length = min(
            ((edit_distance(predicted[word], reference), len(reference)) for reference in references),
            key=lambda pair: pair[0],
        )
        phones, edits, wrong = phones + length, edits + fewest, wrong + (fewest > 0)
    return Score(len(lexicon), wrong, phones, edits)


def spoken(model: G2P, vocabulary: Vocabulary, ids: Sequence[int]) -> Phones:
    """The phones that a model wrote as these ids, first phone first."""
    return vocabulary.decode_phones(ids[::-1] if model.config.backwards else ids)


def pronounce(
    model: G2P,
    vocabulary: Vocabulary,
    words: Sequence[str],
    batch_size: int = 256,
    progress: Callable[[list[list[int]]], Iterable[list[int]]] = lambda batches: batches,
    beam: int | None = None,
) -> dict[str, Phones]:
    """Pronunciations of words, in their order: greedy ones, or the best of a search with so many hypotheses.

    ``progress`` may wrap the list of batches.
    """
    ids = [vocabulary.encode_word(word) for word in words]
    found: dict[str, Phones] = dict.fromkeys(words, ())
    for positions in progress(list(word_batches(words, batch_size))):
        letters = pack([ids[i] for i in positions])
        rows = greedy(model, letters) if beam is None else best(model, letters, beam)
        found.update((words[i], spoken(model, vocabulary, row)) for i, row in zip(positions, rows, strict=True))
    return found


def n_best(
    model: G2P, vocabulary: Vocabulary, words: Sequence[str], beam: int, n: int
) -> dict[str, list[tuple[float, Phones]]]:
    """The n best pronunciations of each word with their log-probabilities, best first."""
    letters = pack([vocabulary.encode_word(word) for word in words])
    with torch.no_grad():
        hyps = search(model, letters, beam, n)
    rows = [spoken(model, vocabulary, row.tolist()) for row in hyps.tokens.unbind()]
    found: dict[str, list[tuple[float, Phones]]] = {}
    for b, (word, scores, valid) in enumerate(zip(words, hyps.scores.tolist(), hyps.valid.tolist(), strict=True)):
        found[word] = [(scores[j], rows[b * n + j]) for j in range(n) if valid[j]]
    return found
