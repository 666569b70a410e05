"""Words and their phones cut into chunks: one or two letters beside up to two phones, as X|K S, SH|SH or E|.

Which chunks there are, and how likely each is, comes from a lexicon by expectation maximisation (many-to-many
alignment, Jiampojamarn et al. 2007). The log-probability of a word with its phones is a sum over all ways to cut them,
a scan over the letters. Its gradient says how often each chunk is expected; and with the greatest of all ways in the
place of their sum, the gradient marks the chunks of the best one. So no backward algorithm is written, and no
backpointers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from docs.examples.g2p.data import DataError, Phones, Vocabulary, pack
from tensorloop import PackedTensor, scan

# Letters and phones of each kind of chunk. Two letters for two phones are two chunks, two letters for none as well.
KINDS = ((1, 0), (1, 1), (1, 2), (2, 1))
NEVER = -1e30  # finite: the gradient of what is added to it stays a number
UNSEEN = -25.0  # the log-probability of a chunk that the lexicon has no place for

Pair = tuple[str, Phones]


class Cut(NamedTuple):
    """The chunks of the best cut of each pair."""

    chunks: PackedTensor  # (B, C*): the id of each; that of an unseen one is the number of those seen
    whole: Tensor  # (B,) bool: whether there is a way to cut the pair; its row has no chunks otherwise


class _Batch(NamedTuple):
    rows: list[int]  # which pairs these are
    codes: PackedTensor  # (B, S*, kind, P + 1): of the chunk that ends at this letter and phone; -1 for none
    phones: Tensor  # (B,): how many


class Chunks:
    """The chunks of a lexicon with their log-probabilities."""

    def __init__(self, vocabulary: Vocabulary, codes: Tensor, log_probs: Tensor) -> None:
        self.vocabulary, self.codes, self.log_probs = vocabulary, codes, log_probs

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def learn(
        cls,
        pairs: Sequence[Pair],
        vocabulary: Vocabulary,
        rounds: int = 10,
        progress: Callable[[range], Iterable[int]] = lambda rounds: rounds,
    ) -> "Chunks":
        """From pairs of words and pronunciations; in each round the probability of all of them grows."""
        batches = list(_batches(pairs, vocabulary))
        codes = torch.cat([batch.codes.values.unique() for batch in batches]).unique()
        codes = codes[codes >= 0]
        ids = [_look_up(codes, batch.codes.values) for batch in batches]
        log_probs = torch.zeros(len(codes), dtype=torch.float64)
        for _ in progress(range(rounds)):
            table = torch.cat((log_probs, log_probs.new_tensor([NEVER, NEVER]))).requires_grad_()
            for batch, places in zip(batches, ids, strict=True):
                total = _of_all(batch, table[places], lambda ways: ways.logsumexp(0))
                total[total > NEVER / 2].sum().backward()
            if table.grad is None or not table.grad.any():
                raise DataError("no word of the lexicon can be cut into chunks: too few letters for the phones")
            counts = table.grad[:-2]
            log_probs = torch.log(counts / counts.sum()).clamp(min=NEVER)
        return cls(vocabulary, codes, log_probs.clamp(min=UNSEEN))

    def cut(self, pairs: Sequence[Pair]) -> Cut:
        """The best way to cut each pair."""
        table = torch.cat((self.log_probs, self.log_probs.new_tensor([UNSEEN, NEVER])))
        chunks: list[list[int]] = [[] for _ in pairs]
        whole = torch.zeros(len(pairs), dtype=torch.bool)
        for batch in _batches(pairs, self.vocabulary):
            places = _look_up(self.codes, batch.codes.values)
            scores = table[places].requires_grad_()
            best = _of_all(batch, scores, lambda ways: ways.max(0).values)
            (marks,) = torch.autograd.grad(best.sum(), scores)
            whole[batch.rows] = best > NEVER / 2
            marked = marks.nonzero(as_tuple=True)
            for row, chunk in zip(batch.codes.row_ids[marked[0]].tolist(), places[marked].tolist(), strict=True):
                if whole[batch.rows[row]]:
                    chunks[batch.rows[row]].append(chunk)
        return Cut(pack(chunks), whole)


def _of_all(batch: _Batch, scores: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """All ways to cut each pair, (B,), put together by ``add``; scores (N, kind, P + 1) of the chunks."""
    start = scores.new_full((len(batch.phones), scores.shape[-1]), NEVER)
    before = start.index_fill(1, torch.tensor([0]), 0.0)

    def read(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
        """Ways up to the letter before, and the one before that, (B, P + 1) by phones: those up to this letter."""
        ways = []
        for kind, (letters, phones) in enumerate(KINDS):
            past = carry[letters - 1]
            past = torch.cat((start[: len(past), :phones], past[:, : past.shape[1] - phones]), 1)
            ways.append(past + x[:, kind])
        return (add(torch.stack(ways)), carry[0]), None

    (ways, _), _ = scan(read, (before, start), PackedTensor(scores, batch.codes.dims[0]))
    return ways.gather(1, batch.phones[:, None])[:, 0].clamp(min=NEVER)


def _batches(pairs: Sequence[Pair], vocabulary: Vocabulary, batch_size: int = 2048) -> Iterable[_Batch]:
    order = sorted(range(len(pairs)), key=lambda i: (len(pairs[i][0]), len(pairs[i][1])))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        letters = pack([vocabulary.encode_word(pairs[i][0]) for i in rows])
        phones = pack([vocabulary.encode_phones(pairs[i][1]) for i in rows])
        yield _Batch(rows, _codes(letters, phones, vocabulary), phones.lens)


def _codes(letters: PackedTensor, phones: PackedTensor, vocabulary: Vocabulary) -> PackedTensor:
    """A number for what each chunk holds, (B, S*, kind, P + 1); -1 where it does not lie within the pair."""
    one = letters.values + 1
    two = torch.where(letters.positions > 0, one.roll(1) * (len(vocabulary.letters) + 1), 0)
    ends = torch.nn.functional.pad(phones.pad(-1) + 1, (1, 0))  # (B, P + 1): the phone that ends here, 0 for none
    base = len(vocabulary.phones) + 1
    by_phones = (torch.zeros_like(ends), ends, ends.roll(1, 1) * base + ends)
    reach, inside = torch.arange(ends.shape[1]), torch.arange(ends.shape[1]) <= phones.lens[:, None]
    kinds = []
    for n_letters, n_phones in KINDS:
        left = one if n_letters == 1 else two + one
        fits = (inside & (reach >= n_phones))[letters.row_ids] & (letters.positions >= n_letters - 1)[:, None]
        kinds.append(torch.where(fits, left[:, None] * base**2 + by_phones[n_phones][letters.row_ids], -1))
    return PackedTensor(torch.stack(kinds, 1), letters.dims[0])


def _look_up(codes: Tensor, wanted: Tensor) -> Tensor:
    """The places of what is wanted in sorted ``codes``: their number for what is not there, one more for -1."""
    places = torch.searchsorted(codes, wanted).clamp(max=max(len(codes) - 1, 0))
    places = torch.where(codes[places] == wanted, places, len(codes))
    return torch.where(wanted < 0, len(codes) + 1, places)
