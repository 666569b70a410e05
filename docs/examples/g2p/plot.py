"""The learning curve as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from docs.examples.g2p.checkpoint import write_atomically

TITLES = {
    "loss": ("Training loss (cross entropy, smoothed labels)", "nats a phone"),
    "risk": ("Expected risk in training", "edits"),
}


def learning_curve(history: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw training losses and development error rates by epoch into a PNG file; a risk phase has a panel more.

    A loss of one epoch alone is no curve, and has no panel.
    """
    epochs = [entry["epoch"] for entry in history]
    risks = [entry for entry in history if "risk" in entry]
    losses = [entry for entry in history if "loss" in entry and "risk" not in entry]
    shown = [kind for kind in ("loss", "risk") if len(losses if kind == "loss" else risks) > 1]
    figure = Figure(figsize=(4.5 * (1 + len(shown)), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    *left, errors = figure.subplots(1, 1 + len(shown), squeeze=False)[0]
    for axes, kind in zip(left, shown, strict=True):
        entries = losses if kind == "loss" else risks
        axes.plot([e["epoch"] for e in entries], [e[kind] for e in entries], marker=".", color="tab:blue")
        axes.set(title=TITLES[kind][0], ylabel=TITLES[kind][1])
    for key, label, colour in (
        ("dev_wer", "words (WER)", "tab:red"),
        ("dev_per", "phones (PER)", "tab:green"),
    ):
        values = [entry[key] for entry in history]
        errors.plot(epochs, values, marker=".", color=colour, label=f"{label}: {values[-1]:.2f} % at the end")
    errors.set(title="Errors on the development words", ylabel="%", yscale="log")
    ticks = [tick for tick in (2, 5, 10, 20, 30, 50, 100) if tick > 0.7 * min(e["dev_per"] for e in history)]
    errors.set_yticks(ticks, [str(tick) for tick in ticks])
    errors.minorticks_off()
    if risks and losses:
        errors.axvline(losses[-1]["epoch"], color="gray", linestyle=":", label="the risk phase begins")
    errors.legend()
    for axes in (*left, errors):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, lambda file: file.write(picture.getvalue()))
