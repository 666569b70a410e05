"""A step of minimum risk on a trained model of the example g2p: through the search, and by second passes.

A second pass scores what a search without gradient has found, by forced decoding: on packed rows with `tl.scan`, as the
example trains by cross entropy, or padded, with `torch.cat` for the past, as one writes it in plain PyTorch.
"""

import gc
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tensorloop as tl
from docs.examples.g2p import data
from docs.examples.g2p.checkpoint import load_model
from docs.examples.g2p.model import Carry, Context, attend
from docs.examples.g2p.risk import nearest
from docs.examples.g2p.search import search
from tensorloop.beam import Hypotheses

WORDS, BEAMS, ALPHA = 64, 4, 1.0
KNOWN = 2000  # words of the training lexicon that the batch is drawn from
WARM_UPS = 2


def digest(path: Path) -> str:
    """Which model it was, without its path."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


class Words:
    """The model and a batch of words, drawn at random from those that it was trained on."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.model, vocabulary = load_model(path)
        self.model.to(dtype).requires_grad_(True)
        self.parameters = list(self.model.parameters())
        train, _ = data.split_dev(data.read_lexicon(data.TRAIN_FILE), data.DEV_WORDS)
        examples = data.Examples(data.sample(train, KNOWN), vocabulary)
        chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:WORDS]
        self.letters, _ = examples.batch(chosen)
        self.references = examples.references(chosen)

    def loss(self, hyps: Hypotheses, scores: Tensor) -> Tensor:
        return tl.minimum_risk(scores, nearest(hyps, *self.references), ALPHA)

    def through_search(self) -> Tensor:
        hyps = search(self.model, self.letters, BEAMS)
        return self.loss(hyps, hyps.scores)

    def second_pass(self, forced: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Searches without a gradient, and scores what was found, with the end of each."""
        with torch.no_grad():
            hyps = search(self.model, self.letters, BEAMS)
        end = torch.tensor([self.model.config.eos_id])
        scores = forced([torch.cat([row, end]) for row in hyps.tokens.unbind()])
        return self.loss(hyps, scores.view(-1, BEAMS))

    def begin(self) -> tuple[Context, Carry]:
        """Of every word BEAMS rows."""
        context, carry = self.model.encode(self.letters)
        memory, mask, lens, h, c, h2, c2, feed = (
            x.repeat_interleave(BEAMS, 0)
            for x in (context.memory, context.mask, context.lens, *carry.lower, *carry.upper, carry.feed)
        )
        return Context(memory, mask, lens, None), Carry((h, c), (h2, c2), feed, tl.TensorArray().append(h2))

    def packed(self, rows: list[Tensor]) -> Tensor:
        """Log-probabilities of rows (B * K, T*): (B * K,)"""
        context, carry = self.begin()
        phones = tl.PackedTensor.from_list(rows)
        time = phones.dims[0]
        given = phones.values.roll(1).index_fill_(0, phones.offsets[:-1], self.model.config.bos_id)

        def read_on(carry: Carry, tokens: Tensor, context: Context) -> tuple[Carry, Tensor]:
            carry = self.model.step(carry, tokens, context)
            return carry, carry.feed

        _, readouts = tl.scan(read_on, carry, tl.PackedTensor(given, time), context=context)
        scores = self.model.scores(readouts, tl.PackedTensor(phones.positions, time) - context.lens[:, None])
        return tl.PackedTensor(scores.values.gather(1, phones.values[:, None])[:, 0], time).sum(1)

    def padded(self, rows: list[Tensor]) -> Tensor:
        """The same in plain PyTorch."""
        context, carry = self.begin()
        model, lower, upper, feed = self.model, carry.lower, carry.upper, carry.feed
        lens = torch.tensor([len(row) for row in rows])
        tokens = torch.nn.utils.rnn.pad_sequence(rows)  # (T, B * K)
        given = torch.cat([torch.full_like(tokens[:1], model.config.bos_id), tokens[:-1]])
        past, memory, found = upper[0][None], context.memory.movedim(-2, 0), []
        for t in range(len(tokens)):
            lower = model.lower(feed, lower, model.token_gates(given[t]))
            upper = model.upper(lower[0], upper)
            to_letters, to_past = model.queries(upper[0]).chunk(2, -1)
            seen = attend(to_letters, memory, context.mask), attend(to_past, past)
            feed = torch.tanh(model.readout(torch.cat((upper[0], *seen), -1)))
            past = torch.cat([past, upper[0][None]])
            scores = model.scores(feed, t - context.lens)
            found.append(scores.gather(1, tokens[t, :, None])[:, 0])
        return (torch.stack(found) * (torch.arange(len(tokens))[:, None] < lens)).sum(0)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "search": self.through_search,
            "packed": lambda: self.second_pass(self.packed),
            "padded": lambda: self.second_pass(self.padded),
        }


def timed(words: Words, runs: int) -> dict[str, Any]:
    """CPU seconds of forward and backward of each way, in one thread; they take turns, so other work hits all alike."""
    torch.set_num_threads(1)
    ways = words.ways()
    found: dict[str, list[float]] = {f"{way}_s": [] for way in ways}
    for number in range(WARM_UPS + runs):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            gc.collect()
            start = time.process_time()
            torch.autograd.grad(ways[way](), words.parameters)
            found[f"{way}_s"].append(time.process_time() - start)
    return {key: spent[WARM_UPS:] for key, spent in found.items()}
