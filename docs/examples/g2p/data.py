"""Reading CMUdict, its vocabularies, the development split and batches of similar length."""

import gzip
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tensorloop import PackedTensor

DATA_DIR = Path(__file__).parent / "data"
TRAIN_FILE = DATA_DIR / "g014b2b.train.gz"
TEST_FILE = DATA_DIR / "g014b2b.test.gz"
DEV_WORDS = 2670

Phones = tuple[str, ...]
Lexicon = dict[str, list[Phones]]


class DataError(ValueError):
    """A data file that cannot be read, or a word the model has no symbols for."""


def read_lexicon(path: str | Path) -> Lexicon:
    """Read ``WORD<TAB>PHONE PHONE ...`` lines, gzipped or plain, into word -> pronunciations.

    Order is the file's. Raises DataError with file and line number for a line that does not parse.
    """
    path = Path(path)
    lexicon: Lexicon = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        word, tab, phones = line.partition("\t")
        pronunciation = tuple(phones.split())
        if not tab or not pronunciation or not word or word != "".join(word.split()) or "\t" in phones:
            raise DataError(f"{path}:{number}: expected WORD<TAB>PHONE PHONE ..., got {line!r}")
        lexicon.setdefault(word, []).append(pronunciation)
    if not lexicon:
        raise DataError(f"{path}: holds no words")
    return lexicon


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except OSError as error:  # BadGzipFile is one of them
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: the gzip file is cut short or damaged ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error})") from error


def hash_order(words: Sequence[str]) -> list[str]:
    """The words in the order of their SHA-256: a shuffle that is the same everywhere and for ever."""
    return sorted(words, key=lambda word: hashlib.sha256(word.encode("utf-8")).digest())


def take(lexicon: Lexicon, words: Sequence[str]) -> Lexicon:
    """The part of a lexicon that these words make up, with all their pronunciations."""
    return {word: lexicon[word] for word in words}


def split_dev(lexicon: Lexicon, n_dev: int = DEV_WORDS) -> tuple[Lexicon, Lexicon]:
    """Split by word into (train, dev): the n_dev words whose hash comes first are dev.

    A word's pronunciations all land on one side. Raises ValueError if nothing would be left to train on.
    """
    if not 0 < n_dev < len(lexicon):
        raise ValueError(f"split_dev: n_dev must be in 1..{len(lexicon) - 1} for {len(lexicon)} words, got {n_dev}")
    order = hash_order(list(lexicon))
    dev = set(order[:n_dev])
    return take(lexicon, [word for word in lexicon if word not in dev]), take(lexicon, order[:n_dev])


def sample(lexicon: Lexicon, limit: int | None) -> Lexicon:
    """The first ``limit`` words in hash order (all of them for None): a fixed sample, no shuffle needed."""
    if limit is None or limit >= len(lexicon):
        return lexicon
    if limit < 1:
        raise ValueError(f"sample: limit must be at least 1, got {limit}")
    return take(lexicon, hash_order(list(lexicon))[:limit])


@dataclass(frozen=True)
class Vocabulary:
    """Symbols and their ids. The end of a word is the id after the last phone, the start the one after it."""

    letters: tuple[str, ...]
    phones: tuple[str, ...]

    @classmethod
    def of(cls, lexicon: Lexicon) -> "Vocabulary":
        """All letters and phones of a lexicon, sorted."""
        letters = {letter for word in lexicon for letter in word}
        phones = {phone for entries in lexicon.values() for entry in entries for phone in entry}
        return cls(tuple(sorted(letters)), tuple(sorted(phones)))

    @property
    def eos_id(self) -> int:
        return len(self.phones)

    @property
    def bos_id(self) -> int:
        return len(self.phones) + 1

    def encode_word(self, word: str) -> list[int]:
        """Letter ids of a word. Raises DataError for an empty word or one with unknown characters."""
        if not word:
            raise DataError("the word is empty: give at least one letter")
        unknown = sorted(set(word) - set(self.letters))
        if unknown:
            raise DataError(f"{word!r} has characters never seen in training: {''.join(unknown)!r}")
        return [self.letters.index(letter) for letter in word]

    def encode_phones(self, phones: Phones) -> list[int]:
        """Phone ids of a pronunciation. Raises DataError for an unknown phone."""
        unknown = sorted(set(phones) - set(self.phones))
        if unknown:
            raise DataError(f"phones never seen in training: {' '.join(unknown)}")
        return [self.phones.index(phone) for phone in phones]

    def decode_phones(self, ids: Sequence[int]) -> Phones:
        """Phones of a list of ids without start and end."""
        return tuple(self.phones[i] for i in ids)


def pack(rows: Sequence[Sequence[int]]) -> PackedTensor:
    """Ids of B words as one packed tensor (B, S*), int64."""
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return PackedTensor(torch.tensor([i for row in rows for i in row], dtype=torch.int64), lens)


class Examples:
    """Every (word, pronunciation) pair of a lexicon as ids, dealt out in batches of similar length.

    ``backwards``: the last phone first.
    """

    def __init__(self, lexicon: Lexicon, vocabulary: Vocabulary, backwards: bool = False) -> None:
        pairs = [(word, phones) for word, entries in lexicon.items() for phones in entries]
        self._letters = pack([vocabulary.encode_word(word) for word, _ in pairs])
        spoken = [vocabulary.encode_phones(phones[::-1] if backwards else phones) for _, phones in pairs]
        self._phones = pack([[*ids, vocabulary.eos_id] for ids in spoken])
        self._size = self._letters.lens * (self._phones.max_len + 1) + self._phones.lens
        self._spoken = pack(spoken)
        counts = torch.tensor([len(entries) for entries in lexicon.values()])
        self._alternatives = counts.repeat_interleave(counts)
        self._first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # of the examples of the same word

    def __len__(self) -> int:
        return len(self._size)

    def order(self, batch_size: int, seed: int) -> list[Tensor]:
        """Indices of one epoch's batches: sorted by letters and phones; ties and batches shuffled by seed."""
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(len(self), generator=generator)
        by_size = shuffled[torch.sort(self._size[shuffled], stable=True).indices]
        batches = by_size.split(batch_size)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def phones(self, indices: Tensor) -> int:
        """How many phones and ends these examples have: what a batch's mean is taken over."""
        return int(self._phones.lens[indices].sum())

    def batch(self, indices: Tensor) -> tuple[PackedTensor, PackedTensor]:
        """Of these examples the letters (B, S*) and the phones (B, T*), each row's end its last."""
        return self._letters[indices], self._phones[indices]

    def gold(self, indices: Tensor) -> PackedTensor:
        """The phones of these examples (B, T*), without ends."""
        return self._spoken[indices]

    def references(self, indices: Tensor) -> tuple[PackedTensor, Tensor]:
        """All pronunciations of these examples' words (R, T*), without ends, and how many each has (B,)."""
        counts = self._alternatives[indices]
        ranges = PackedTensor(self._first[indices].repeat_interleave(counts), counts)
        return self._spoken[ranges.values + ranges.positions], counts


def word_batches(words: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """Positions of the words, shortest first, batch by batch: rows that end together."""
    order = sorted(range(len(words)), key=lambda i: len(words[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
