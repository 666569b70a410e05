"""One batch through both models: the losses, the bytes that are kept for backward, the time."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tensorloop as tl
from docs.examples.speech import padded
from docs.examples.speech.data import Row
from docs.examples.speech.train import Model


def losses_of(model: Model, rows: list[Row]) -> dict[str, Callable[[], Tensor]]:
    frames, labels = (tl.PackedTensor.from_list(list(part)) for part in zip(*rows, strict=True))
    wide, long = frames.pad(), labels.pad()
    return {
        "packed": lambda: model.loss(frames, labels),
        "padded": lambda: padded.loss(model, wide, frames.lens, long, labels.lens),
    }


def report(model: Model, rows: list[Row], rounds: int) -> list[str]:
    model.train()
    ways = losses_of(model, rows)
    lens = [len(frames) for frames, _ in rows]
    kept = {name: tl.memory.saved_residuals(loss).bytes for name, loss in ways.items()}
    taken = seconds(model, ways, rounds)
    lines = [f"{len(rows)} rows of {min(lens)} to {max(lens)} frames: {sum(lens)} in {len(rows) * max(lens)} padded"]
    for name in ways:
        lines.append(f"{name}: {kept[name] / 2**20:.1f} MiB kept for backward, {1e3 * taken[name]:.0f} ms")
    ratios = (of["packed"] / of["padded"] for of in (kept, taken))
    return [*lines, "packed / padded: {:.2f} of the bytes, {:.2f} of the time".format(*ratios)]


def seconds(model: Model, ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Medians of forward and backward, one after the other in each round; the first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, loss in ways.items():
            started = time.perf_counter()
            torch.autograd.grad(loss(), list(model.parameters()))
            found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[1:]) for name, times in found.items()}
