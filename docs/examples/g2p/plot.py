"""The learning curve as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from docs.examples.g2p.checkpoint import write_atomically


def learning_curve(history: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw training loss and development error rates by epoch into a PNG file."""
    epochs = [entry["epoch"] for entry in history]
    figure = Figure(figsize=(9, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, errors = figure.subplots(1, 2)
    loss.plot(epochs, [entry["loss"] for entry in history], marker=".", color="tab:blue")
    loss.set(title="Training loss (cross entropy, smoothed labels)", ylabel="nats a phone")
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
    errors.legend()
    for axes in (loss, errors):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, lambda file: file.write(picture.getvalue()))
