"""Training by a clock or a number of updates, and the share of labels that are wrong."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

import tensorloop as tl
from docs.examples.speech import search
from docs.examples.speech.data import Row, batches
from docs.examples.speech.model import Conformer
from docs.examples.speech.transducer import Transducer

Model = Conformer | Transducer
Decode = Callable[[tl.PackedTensor], tl.PackedTensor]  # what a model gives to labels (B, U*)

PEAK, WARMUP = 2e-3, 0.1  # the highest learning rate, and the share of the run that leads to it
CLIP = 5.0


class Budget(NamedTuple):
    """A run is over when either is spent."""

    minutes: float = math.inf
    updates: int | None = None

    def share(self, started: float, updates: int) -> float:
        of_updates = updates / self.updates if self.updates else 0.0
        return max(of_updates, (time.monotonic() - started) / 60 / self.minutes)


def train(model: Model, rows: list[Row], budget: Budget, *, max_frames: int = 4000, seed: int = 0) -> list[float]:
    """The loss of each update."""
    adam = torch.optim.AdamW(model.parameters(), PEAK, betas=(0.9, 0.98), fused=True)
    model.train()
    losses, started = [], time.monotonic()
    with tqdm(total=100, desc="train", bar_format="{l_bar}{bar}| {elapsed}{postfix}") as bar:
        for frames, labels in epochs(batches(rows, max_frames, seed)):
            share = budget.share(started, len(losses))
            bar.update(min(100, round(100 * share)) - bar.n)
            if share >= 1:
                return losses
            losses.append(update(model, adam, frames, labels, rate(share)))
            bar.set_postfix(update=len(losses), loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        loader.batch_sampler.set_epoch(epoch)  # pyright: ignore
        yield from loader
        epoch += 1


def update(model: Model, adam: torch.optim.Optimizer, frames: Any, labels: Any, rate: float) -> float:
    for group in adam.param_groups:
        group["lr"] = rate
    loss = model.loss(frames, labels)
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    adam.step()
    return loss.item()


def rate(share: float) -> float:
    """Up in a line, down in half a cosine."""
    if share < WARMUP:
        return PEAK * max(share / WARMUP, 0.01)
    return PEAK * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP))) / 2


@torch.no_grad()
def wrong(model: Model, rows: list[Row], decode: Decode, max_frames: int = 4000) -> float:
    """Edits that the decoded labels need, for each label that was said."""
    model.eval()
    edits, said = torch.zeros(()), 0
    for frames, labels in batches(rows, max_frames):
        edits += tl.edit_distance(decode(model(frames)), labels).sum()
        said += len(labels.values)
    return float(edits) / said


def greedy(model: Model) -> Decode:
    return model.greedy if isinstance(model, Transducer) else search.greedy


def by_beam(model: Model, size: int) -> Decode:
    if isinstance(model, Transducer):
        return lambda encoded: model.beam(encoded, size).tokens
    return lambda log_probs: search.beam(log_probs, size).tokens
