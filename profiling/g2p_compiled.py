"""The example g2p with its decoder's loop compiled and without: CPU seconds of an epoch of training, in one thread.

    python profiling/g2p_compiled.py               # both sizes: some 10 minutes

Gradients come first, in float64: if they differ by more than 1e-9, nothing is timed and the status is 1. Then both ways
train on the same batches in turns, in one process, each with weights of its own. A batch of new sizes is run once
before: making its plan is a figure of its own. It counts the CPU's time, so that other work on the machine shows less.
The table goes between the markers of docs/examples/g2p/README.md.
"""

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

import g2p_padding as padding
import torch
from running import harness
from running.script import Result, Script
from torch import Tensor
from torch.nn import functional as F

from docs.examples.g2p import data
from docs.examples.g2p.model import G2P, Masks

WAYS = {"eager": False, "compiled": "strict"}
BATCHES = {"quick": 2, "short": 6, "usual": 24}
TURNS = {"quick": 1, "short": 2, "usual": 3}
APART = 1e-9


def loss_of(examples: data.Examples, compile: Any) -> padding.Loss:
    def loss(model: G2P, indices: Tensor, masks: Masks, smoothing: float) -> Tensor:
        letters, phones = examples.batch(indices)
        found = model(letters, phones, masks, compile)
        return F.cross_entropy(found.values, phones.values, label_smoothing=smoothing)

    return loss


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    torch.set_num_threads(1)
    settings, (examples, vocabulary) = padding.SIZES[cell["size"]], padding.words(cell["limit"])
    runs = {way: padding.Run(loss_of(examples, how), settings, vocabulary) for way, how in WAYS.items()}
    deals = padding.epoch(examples, "length", settings.batch_size)
    if cell["kind"] == "check":
        pair = {"packed": runs["compiled"], "padded": runs["eager"]}
        return {"apart": max(padding.apart(pair, deal) for deal in padding.extremes(deals))}
    shapes = len({shape_of(examples, deal) for deal in deals})
    return {"batches_an_epoch": len(deals), "shapes": shapes, **timed(runs, examples, deals, cell)}


def shape_of(examples: data.Examples, deal: padding.Deal) -> tuple[int, int]:
    """What a plan is for: so many rows and letters."""
    return len(deal.indices), examples.batch(deal.indices)[0].max_len


def timed(
    runs: dict[str, padding.Run], examples: data.Examples, deals: list[padding.Deal], cell: harness.Cell
) -> dict[str, Any]:
    spent: dict[str, list[float]] = {way: [] for way in runs}
    making, seen, apart = [], set(), 0.0
    for number, deal in enumerate(padding.spread(deals, cell["batches"])):
        start = time.process_time()
        runs["compiled"].loss(deal.indices, seed=number).backward()
        first = time.process_time() - start
        turns: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(cell["turns"]):
            found = {way: run.train_on(deal.indices, seed=number) for way, run in runs.items()}
            for way, (cpu, _) in found.items():
                turns[way].append(cpu)
            eager, compiled = (loss for _, loss in found.values())
            apart = max(apart, abs(eager - compiled) / eager)
        for way, seconds in turns.items():
            spent[way].append(statistics.median(seconds))
        if (shape := shape_of(examples, deal)) not in seen:
            seen.add(shape)
            making.append(first - spent["compiled"][-1])
    return {"making_s": making, "losses_apart": apart, **{f"{way}_s": found for way, found in spent.items()}}


# -- the report


def row(entry: harness.Entry) -> list[str]:
    cell = entry["cell"]
    title = f"`--size {cell['size']}`, {'all' if cell['limit'] is None else cell['limit']} words"
    raw = next((raw for raw in entry["raw"] if "error" not in raw), None)
    if raw is None:
        return [title, *["error"] * 5]
    scale = raw["batches_an_epoch"] / len(raw["eager_s"])
    eager, compiled = (sum(raw[f"{way}_s"]) * scale for way in WAYS)
    making = statistics.mean(raw["making_s"]) * raw["shapes"]
    times = [harness.digits(x) for x in (eager, compiled)]
    return [title, *times, f"{compiled / eager:.2f}", f"{raw['shapes']}, {making:.0f} s", f"{raw['losses_apart']:.0e}"]


def section(result: Result, picture: str) -> str:
    header = ["", "eager", "compiled", "compiled : eager", "plans of an epoch, made once", "losses apart"]
    return harness.table(header, [row(entry) for entry in result["entries"]])


def cells(args: Namespace) -> list[harness.Cell]:
    few = padding.FEW.get(args.set, {})
    return [
        {"kind": "time", "size": size, "limit": args.limit or few.get("limit", limit),
         "batches": BATCHES[args.set], "turns": TURNS[args.set]}
        for size, limit in padding.LIMITS.items()
        if args.size in (None, size)
    ]  # fmt: skip


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--size", choices=list(padding.SIZES), help="of the model and its batches (default: both)")
    parser.add_argument("--limit", type=int, help="words of the training file (default: 24000 for small, else all)")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=lambda args: [cell | {"kind": "check", "at_most": APART} for cell in cells(args)],
    page=("docs/examples/g2p/README.md", "compiled"),
    options=options,
    group=lambda cell: cell["size"],
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
