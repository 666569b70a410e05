"""Both block masks of a report, side by side."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST = 1024  # cells of a picture along an axis; where there are more blocks, several share one


def draw(report: Any, path: str | Path | None) -> Any:
    """A figure of a `Report`; a dark cell has blocks that are computed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Report.picture needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 6))
    sides = figure.subplots(1, 2, sharex=True, sharey=True)
    names = ("before", f"after: {report.method}")
    sizes = tuple(-(-n // report.block_size) for n in report.shape)
    for axes, table, numbers, name in zip(sides, report.tables, (report.before, report.after), names, strict=True):
        axes.imshow(
            _cells(table, sizes).numpy(),
            cmap="Greys",
            vmin=0,
            interpolation="nearest",
            extent=(0, sizes[1], sizes[0], 0),
        )
        axes.set_title(f"{name}\n{numbers.blocks:,} of {sizes[0] * sizes[1]:,} blocks, {numbers.full:,} full")
        axes.set_xlabel("blocks of keys")
    sides[0].set_ylabel(f"blocks of {report.block_size} queries")
    figure.suptitle(f"at least {report.bound:,} blocks in any order ({report.bound_by})", y=0.99, fontsize=10)
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.08, top=0.85, wspace=0.06)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _cells(table: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> Tensor:
    """(rows, columns) float: 1 where a cell has a block, more than half of it for a few among many."""
    step = [max(1, -(-n // _MOST)) for n in sizes]
    cells = torch.zeros([max(1, -(-n // s)) for n, s in zip(sizes, step, strict=True)], device="cpu")
    at = tuple(x.long() // s for x, s in zip(table, step, strict=True))
    cells.index_put_(at, torch.ones(len(at[0]), device="cpu"), accumulate=True)
    return cells.clamp(max=1)
