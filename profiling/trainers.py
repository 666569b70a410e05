"""What trainers of language models run, beside padded rows and `generate`: time in turns, bytes counted.

    python profiling/trainers.py             # some 30 minutes
    python profiling/trainers.py --short     # a toy GRPO step

Models are Llamas of four layers of width 128, 4 heads on 2; that of the GRPO step and of the long rollout has two
layers of width 32. One thread. A time is a whole step, forward and backward, a median of turns in one process; a ratio
the median of the turns' ratios. Bytes are those kept for backward, or, of the vocabulary and the long rollout, the most
alive at a time beside weights.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import plots, sentences
from running import harness
from running.script import Result, Script, Target
from whole_models import hf_trainers as trainers

MIB = 2**20
# Row -> what the peer's way is called, ours, and what measures them.
ROWS: dict[str, tuple[str, str, Callable[[], dict[str, float]]]] = {
    "log-probabilities of 8 completions, 256 + 16 tokens": (
        "padded", "prompt once", lambda: trainers.score_group(16),
    ),
    "log-probabilities of 8 completions, 256 + 256 tokens": (
        "padded", "prompt once", lambda: trainers.score_group(256),
    ),
    "rollout of 8 continuations, 256 + 16 tokens": ("repeated", "prompt once", lambda: trainers.roll_group(16)),
    "rollout of 8 continuations, 256 + 256 tokens": ("repeated", "prompt once", lambda: trainers.roll_group(256, 3)),
    "log-probabilities and entropies, 4,000 tokens of 32,000": ("whole", "512 rows", trainers.score_vocabulary),
    "toy GRPO step, 3 x 8 x 12 tokens, two updates": ("generate, padded", "rollout, packed", trainers.grpo),
}  # fmt: skip
GRPO = list(ROWS)[-1]
LONG = "rollout of 100,000 tokens, trained in pieces of 500"


def cells(args: Namespace) -> list[harness.Cell]:
    rows = {"quick": (), "short": (GRPO,), "usual": (*ROWS, LONG)}[args.set]
    return [{"kind": "train", "what": what} | ({"limit_s": 3600} if what == LONG else {}) for what in rows]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    return trainers.roll_long() if cell["what"] == LONG else ROWS[cell["what"]][2]()


def value(result: Result, what: str, key: str) -> float | None:
    return harness.figure(result, key, kind="train", what=what)


def held(result: Result, what: str, way: str) -> float | None:
    return value(result, what, f"bytes, {way}") or value(result, what, f"peak, {way}")


def targets(result: Result) -> list[Target]:
    found = [Target(f"{GRPO}: seconds, ours : padded", value(result, GRPO, "ratio, rollout, packed"), 1.0)]
    early, last = (value(result, LONG, key) for key in ("early", "last"))
    grown = None if early is None or last is None else last / early
    return [*found, Target("100,000 tokens: bytes, last piece : third", grown, 1.01)]


def summary(result: Result) -> list[str]:
    ratios = {f"{theirs}, {what}": value(result, what, f"ratio, {ours}") for what, (theirs, ours, _) in ROWS.items()}
    text = sentences.winners(ratios)
    early, last, spent = (value(result, LONG, key) for key in ("early", "last", "seconds"))
    if early and last and spent:
        text.append(
            f"A {LONG} through a rolling window of {trainers.WINDOW} tokens and {trainers.SINKS} sinks, takes at most "
            f"{harness.digits(early / MIB)} MiB in its third piece, {harness.digits(last / MIB)} MiB in its last, and "
            f"{harness.digits(spent / trainers.LONG * 1000)} ms a token."
        )
    return text


def section(result: Result, picture: str) -> str:
    rows = []
    for what, (theirs, ours, _) in ROWS.items():
        seconds = (value(result, what, key) for key in (f"s, {theirs}", f"s, {ours}", f"ratio, {ours}"))
        bytes_held = (held(result, what, way) for way in (theirs, ours))
        shown = ["-" if x is None else harness.digits(x) for x in seconds]
        rows.append([what, theirs, *shown, *("-" if x is None else harness.digits(x / MIB) for x in bytes_held)])
    header = ["what", "beside", "theirs, s", "ours, s", "ratio", "theirs, MiB", "ours, MiB"]
    return "\n\n".join([harness.table(header, rows, 2), f"![Time and bytes beside padded rows]({picture})"])


def draw(result: Result, path: Path) -> None:
    """Bars of our share of the peer's time and bytes."""
    with plots.drawing(path, (8, 3.4)) as drawn:
        axes = drawn.subplots()
        for number, what in enumerate(ROWS):
            theirs, ours, _ = ROWS[what]
            kept = [held(result, what, way) for way in (theirs, ours)]
            shares = [
                value(result, what, f"ratio, {ours}"), kept[1] / kept[0] if kept[0] and kept[1] else None
            ]  # fmt: skip
            for k, share in enumerate(shares):
                if share is not None:
                    bar = axes.barh(number + 0.36 * (k - 0.5), share, height=0.34, color=plots.COLOURS[k])
                    axes.bar_label(bar, fmt="%.2f", padding=3)
        axes.axvline(1, color="#999999", linewidth=0.8)
        axes.set_yticks(range(len(ROWS)), list(ROWS), fontsize=8.5)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("tensorloop / alternative: seconds above, bytes below")
        axes.spines[["top", "right"]].set_visible(False)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    targets=targets,
    draw=draw,
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
