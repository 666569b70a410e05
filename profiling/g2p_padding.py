"""The example g2p on packed words and on padded ones: CPU seconds of an epoch of training, in one thread.

    python profiling/g2p_padding.py                               # both sizes, both orders, 2 rounds: some 7 minutes
    python profiling/g2p_padding.py --size small --order random   # one row of the table, the others as they are

Losses and gradients come first, in float64: if they differ by more than 1e-10, nothing is timed and the status is 1.
Then both kinds train in one process, a batch each in turn, on batches that stand for all lengths of an epoch. Each has
its own weights and optimizer, and both draw the same dropout. On the clock are making the batch, loss, backward,
clipping and the optimizer. It counts the CPU's time, so that other work on the machine shows less. The table goes
between the markers of docs/examples/g2p/README.md.
"""

import gc
import math
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from running import harness
from running.script import Result, Script
from torch import Tensor
from torch.nn import functional as F
from whole_models.g2p_padded import PaddedExamples, mean_loss

from docs.examples.g2p import data
from docs.examples.g2p.cli import DEMO_WORDS, SIZES
from docs.examples.g2p.model import G2P, Config, Masks
from docs.examples.g2p.train import Settings

ORDERS = {"length": "of similar length", "random": "in random order"}
LIMITS = {"small": DEMO_WORDS, "full": None}  # words of the training file
BATCHES = {("small", "length"): 60, ("full", "length"): 40, ("small", "random"): 30, ("full", "random"): 20}
FEW = {"quick": {"limit": 1000, "batches": 2}, "short": {"limit": 6000, "batches": 6}}
APART = 1e-10


class Deal(NamedTuple):
    """One batch of an epoch."""

    indices: Tensor
    phones: int  # with the ends
    steps: int  # phones of the longest word

    @property
    def slots(self) -> int:
        """Phones and padding."""
        return self.steps * len(self.indices)


Loss = Callable[[G2P, Tensor, Masks, float], Tensor]  # of the model, indices of examples, dropout, label smoothing


def padded(examples: data.Examples) -> Loss:
    rows = PaddedExamples(examples)
    return lambda model, indices, masks, smoothing: mean_loss(model, rows.batch(indices), masks, smoothing)


def packed(examples: data.Examples) -> Loss:
    def loss(model: G2P, indices: Tensor, masks: Masks, smoothing: float) -> Tensor:
        letters, phones = examples.batch(indices)
        return F.cross_entropy(model(letters, phones, masks).values, phones.values, label_smoothing=smoothing)

    return loss


WAYS = {"padded": padded, "packed": packed}


class Run:
    """Weights, always the same at first, and their training."""

    def __init__(self, loss: Loss, settings: Settings, vocabulary: data.Vocabulary) -> None:
        torch.manual_seed(settings.seed)
        sizes = (len(vocabulary.letters), len(vocabulary.phones), settings.embed, settings.hidden)
        self._loss, self._settings = loss, settings
        self.model = G2P(Config(*sizes, settings.dropout)).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, fused=True)

    def loss(self, indices: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return self._loss(self.model, indices, self.model.masks(len(indices)), self._settings.label_smoothing)

    def train_on(self, indices: Tensor, seed: int) -> tuple[float, float]:
        """CPU seconds and the loss; garbage of the other kind is not on the clock."""
        gc.collect()
        start = time.process_time()
        loss = self.loss(indices, seed)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip)
        self._optimizer.step()
        value = loss.item()
        del loss
        return time.process_time() - start, value


@cache
def words(limit: int | None) -> tuple[data.Examples, data.Vocabulary]:
    lexicon = data.read_lexicon(data.TRAIN_FILE)
    train, _ = data.split_dev(lexicon)
    vocabulary = data.Vocabulary.of(lexicon)
    return data.Examples(data.sample(train, limit), vocabulary), vocabulary


def epoch(examples: data.Examples, order: str, batch_size: int) -> list[Deal]:
    if order == "length":
        batches = examples.order(batch_size, seed=0)
    else:
        batches = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).split(batch_size)
    lens = [examples.batch(indices)[1].lens for indices in batches]
    return [Deal(indices, int(n.sum()), int(n.max())) for indices, n in zip(batches, lens, strict=True)]


def extremes(deals: Sequence[Deal]) -> list[Deal]:
    """The batch with the least padding, and the one with the most."""
    by_padding = sorted(deals, key=lambda deal: deal.phones / deal.slots)
    return [by_padding[-1], by_padding[0]]


def spread(deals: Sequence[Deal], n: int) -> list[Deal]:
    """n batches that stand for all of them, in the order of the epoch: every so-maniest by steps and padding."""
    ranked = sorted(range(len(deals)), key=lambda i: (deals[i].steps, deals[i].slots - deals[i].phones))
    n = min(n, len(deals))
    return [deals[i] for i in sorted(ranked[(2 * k + 1) * len(deals) // (2 * n)] for k in range(n))]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    torch.set_num_threads(1)
    settings, (examples, vocabulary) = SIZES[cell["size"]], words(cell["limit"])
    runs = {way: Run(loss_of(examples), settings, vocabulary) for way, loss_of in WAYS.items()}
    deals = epoch(examples, cell["order"], settings.batch_size)
    if cell["kind"] == "check":
        return {"apart": max(apart(runs, deal) for deal in extremes(deals))}
    return {"words_a_batch": settings.batch_size, **timed(runs, deals, cell["batches"])}


def apart(runs: dict[str, Run], deal: Deal) -> float:
    """The largest relative distance between the losses, and between the gradients of each weight, in float64."""
    found = {}
    for way, run in runs.items():
        run.model.double()
        loss = run.loss(deal.indices, seed=0)
        found[way] = [loss.detach(), *torch.autograd.grad(loss, list(run.model.parameters()))]
    pairs = zip(found["packed"], found["padded"], strict=True)
    distances = [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]
    return math.inf if any(map(math.isnan, distances)) else max(distances)


def timed(runs: dict[str, Run], deals: Sequence[Deal], n: int) -> dict[str, Any]:
    chosen = spread(deals, n)
    for deal in extremes(deals):  # to warm up
        for run in runs.values():
            run.train_on(deal.indices, seed=0)
    spent: dict[str, list[float]] = {way: [] for way in runs}
    losses: dict[str, list[float]] = {way: [] for way in runs}
    for number, deal in enumerate(chosen):
        for way in list(runs)[:: 1 if number % 2 else -1]:
            cpu, loss = runs[way].train_on(deal.indices, seed=number)
            spent[way].append(cpu)
            losses[way].append(loss)
    return {
        "batches_an_epoch": len(deals),
        "without_padding": sum(deal.phones == deal.slots for deal in deals),
        "padding": 1 - sum(deal.phones for deal in deals) / sum(deal.slots for deal in deals),
        "losses_apart": max(abs(x - y) / y for x, y in zip(losses["packed"], losses["padded"], strict=True)),
        "ragged": [deal.phones < deal.slots for deal in chosen],
        **{f"{way}_s": found for way, found in spent.items()},
    }


# -- the report


def entry_of(result: Result, size: str, order: str) -> harness.Entry | None:
    here = {"size": size, "order": order}.items()
    return next((entry for entry in result["entries"] if here <= entry["cell"].items()), None)


def seconds(entry: harness.Entry, way: str, ragged: bool | None = None) -> float:
    """Of an epoch: each measured batch's median over the rounds. `ragged`: of such batches alone, unscaled."""
    raws = [raw for raw in entry["raw"] if "error" not in raw]
    medians = [statistics.median(spent) for spent in zip(*(raw[f"{way}_s"] for raw in raws), strict=True)]
    if ragged is not None:
        return sum(s for s, is_ragged in zip(medians, raws[0]["ragged"], strict=True) if is_ragged == ragged)
    return sum(medians) * raws[0]["batches_an_epoch"] / len(medians)


def row(result: Result, size: str, order: str) -> list[str] | None:
    """A line of the table; None for what was not measured."""
    entry = entry_of(result, size, order)
    if entry is None:
        return None
    limit = entry["cell"]["limit"]
    title = f"{ORDERS[order]}, `--size {size}`, {'all' if limit is None else f'{limit:,}'} words"
    raw = next((raw for raw in entry["raw"] if "error" not in raw), None)
    if raw is None:
        return [title, *5 * ["error"]]
    found = [seconds(entry, way) for way in WAYS]
    times = [f"{x:.0f}" if x >= 100 else f"{x:.1f}" for x in found]
    return [title, str(raw["words_a_batch"]), f"{100 * raw['padding']:.0f} %", *times, f"{found[1] / found[0]:.2f}"]


def notes(result: Result) -> list[str]:
    """How batches without padding do, and ragged ones, where the epoch has both."""
    lines = []
    for size in SIZES:
        entry = entry_of(result, size, "length")
        raw = next((raw for raw in entry["raw"] if "error" not in raw), None) if entry else None
        if entry is None or raw is None or len(set(raw["ragged"])) < 2:
            continue
        even, ragged = (seconds(entry, "packed", r) / seconds(entry, "padded", r) for r in (False, True))
        lines.append(
            f"`--size {size}`, similar length: in {raw['without_padding']} of the {raw['batches_an_epoch']} batches "
            f"all words have equally many phones. Packed : padded is {even:.2f} in those, {ragged:.2f} in the others."
        )
    return lines


def section(result: Result, picture: str) -> str:
    header = ["batches", "words a batch", "padding among the phones", "padded", "packed", "packed : padded"]
    rows = [found for order in ORDERS for size in SIZES if (found := row(result, size, order))]
    lines = notes(result)
    apart = [raw["losses_apart"] for entry in result["entries"] for raw in entry["raw"] if "error" not in raw]
    if apart:
        lines.append(f"The losses of the two differ by {max(apart):.0e} at most, in float32.")
    return "\n".join([harness.table(header, rows), "", *(f"- {line}" for line in lines)])


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(SIZES), help="of the model and its batches (default: both)")
    parser.add_argument("--order", choices=list(ORDERS), help="of the words (default: both)")
    parser.add_argument("--limit", type=int, help="words of the training file (default: 24000 for small, else all)")
    parser.add_argument("--batches", type=int, help="batches to measure (default: 20 to 60, by row)")


def cells(args: Namespace) -> list[harness.Cell]:
    few = FEW.get(args.set, {})
    return [
        {
            "kind": "time",
            "size": size,
            "order": order,
            "limit": args.limit or few.get("limit", LIMITS[size]),
            "batches": args.batches or few.get("batches", n),
        }
        for (size, order), n in BATCHES.items()
        if args.size in (None, size) and args.order in (None, order)
        if args.set != "short" or size == "small"
    ]


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 2},
    checks=lambda args: [cell | {"kind": "check", "at_most": APART} for cell in cells(args)],
    page=("docs/examples/g2p/README.md", "packing"),
    options=options,
    group=lambda cell: f"{cell['size']}, {cell['order']}",
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
