"""Words of CMUdict as they sound, with their phones: those to train on, and others to check on."""

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import tensorloop as tl
from docs.examples.g2p.data import TRAIN_FILE, Lexicon, Vocabulary, read_lexicon, sample, split_dev
from docs.examples.speech import sound

Row = tuple[Tensor, Tensor]  # frames (T, MELS) and labels (S,), 1 ... phones


class Words(NamedTuple):
    train: list[Row]
    dev: list[Row]
    phones: tuple[str, ...]  # label i is phones[i - 1]; 0 is the blank

    def written(self, labels: Iterable[int]) -> str:
        return " ".join(self.phones[i - 1] for i in labels)


def make_words(
    words: int,
    dev_words: int,
    *,
    voice: bool,
    seed: int = 0,
    most: int = 3,
    progress: Callable[[list[Any]], Iterable[Any]] = lambda rows: rows,
) -> Words:
    """So many utterances to train on, of 1 to `most` words each, and others of single words that are not among them."""
    lexicon = read_lexicon(TRAIN_FILE)
    vocabulary = Vocabulary.of(lexicon)
    train, dev = split_dev(lexicon)
    draw = random.Random(seed)

    def rows(part: Lexicon, most: int) -> list[Row]:
        texts, left = [], [word for word in part if word.isalpha()]
        while left:
            n = draw.randint(1, most)
            texts.append(left[:n])
            left = left[n:]
        labels = [[i + 1 for word in text for i in vocabulary.encode_phones(part[word][0])] for text in texts]
        both = progress(list(zip(texts, labels, strict=True)))
        sounds = (sound.spoken(" ".join(t), draw) if voice else sound.toned(said, draw) for t, said in both)
        tensors = (torch.tensor(said, dtype=torch.int64) for said in labels)
        return list(zip(sound.frames_of(sounds), tensors, strict=True))

    return Words(rows(sample(train, words), most), rows(sample(dev, dev_words), 1), vocabulary.phones)


def batches(rows: list[Row], max_frames: int, seed: int | None = None) -> DataLoader[Any]:
    """Packed (B, T*, MELS) and (B, S*), of so many frames at most; shuffled anew each epoch where a seed is given."""
    lens = [len(frames) for frames, _ in rows]
    sampler = tl.packed.BatchSampler(lens, max_frames, shuffle=seed is not None, seed=seed or 0)
    return DataLoader(rows, batch_sampler=sampler, collate_fn=tl.packed.collate)  # pyright: ignore[reportArgumentType]
