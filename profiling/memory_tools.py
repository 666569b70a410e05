"""What `memory.saved_residuals` and `memory.track` cost a step, in processor time of one thread.

    python profiling/memory_tools.py             # some 3 minutes
    python profiling/memory_tools.py --report    # the table again, from the results there are

A step is forward, backward and the optimizer; saved_residuals watches forward alone and is held against that. The ways
of a step take turns in one process, so that whatever else the machine does hits all of them alike. `empty mode` is a
dispatch mode that does nothing but run the operation: what any tool written as one costs at the least.
"""

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from running import harness
from running.script import Result, Script, Target
from torch import Tensor, nn

from tensorloop._torch.dispatch import OperationMode
from tensorloop.memory import saved_residuals, track

BOUNDS = {"saved_residuals": ("forward", 3.0), "track": ("step", 1.5)}  # times what, at most
WATCHED = {"saved_residuals": "forward pass", "track": "training step"}
SHOWN = {"saved_residuals": "forward", "empty mode": "step", "track": "step"}
RUNS = {"quick": 3, "short": 5, "usual": 9}
WARM_UPS = 2
STEPS = {
    "LSTM": "LSTM cells, B=32, H=256, T=128, SGD",
    "transformer": "transformer, 4 layers, B=16, T=64, D=128, Adam",
    "wide transformer": "wide transformer, 2 layers, B=16, T=128, D=512, Adam",
}


class EmptyMode(OperationMode):
    """Runs every operation and does nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def lstm() -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    T, B, H = 128, 32, 256
    cell, xs = nn.LSTMCell(H, H), torch.randn(T, B, H)

    def forward() -> Tensor:
        h = c = xs.new_zeros(B, H)
        loss = xs.new_zeros(())
        for x in xs:
            h, c = cell(x, (h, c))
            loss = loss + h.pow(2).mean()
        return loss

    return forward, torch.optim.SGD(cell.parameters(), 1e-3)


def transformer(layers: int, T: int, D: int) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    layer = nn.TransformerEncoderLayer(D, 4, 4 * D, batch_first=True)
    model, x = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(16, T, D)
    return lambda: model(x).pow(2).mean(), torch.optim.Adam(model.parameters())


def of_name(name: str) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    if name == "LSTM":
        return lstm()
    return transformer(4, 64, 128) if name == "transformer" else transformer(2, 128, 512)


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    forward, optimizer = of_name(cell["step"])

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    def tracked() -> None:
        with track():
            step()

    def in_empty_mode() -> None:
        with EmptyMode():
            step()

    ways = {
        "forward": forward,
        "saved_residuals": lambda: saved_residuals(forward),
        "step": step,
        "empty mode": in_empty_mode,
        "track": tracked,
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UPS + cell["runs"]):
        for way, run in ways.items():
            start = time.process_time()
            run()
            spent[way].append(time.process_time() - start)
    return {way: statistics.median(values[WARM_UPS:]) for way, values in spent.items()}


def cells(args: Namespace) -> list[harness.Cell]:
    return [{"kind": "step", "step": name, "runs": RUNS[args.set]} for name in STEPS]


def times(result: Result, step: str, way: str) -> tuple[float | None, float | None]:
    """Milliseconds, and as many times what it is held against."""
    found, plain = (harness.figure(result, key, kind="step", step=step) for key in (way, SHOWN[way]))
    return (found * 1e3, found / plain) if found and plain else (None, None)


def summary(result: Result) -> list[str]:
    found = {way: [x for step in STEPS if (x := times(result, step, way)[1])] for way in BOUNDS}
    if not all(found.values()):
        return []
    ranges = [
        f"`{way}` makes a {WATCHED[way]} take {min(x):.2f} to {max(x):.2f} times as long" for way, x in found.items()
    ]
    return [f"{'; '.join(ranges)}. Loops of small operations pay the most."]


def section(result: Result, picture: str) -> str:
    rows = []
    for step, name in STEPS.items():
        shown = []
        for way in SHOWN:
            spent, ratio = times(result, step, way)
            shown.append(f"{spent:.0f} ms, {ratio:.2f}x" if spent and ratio else "error")
        plain = [harness.milliseconds(result, key, kind="step", step=step) for key in ("forward", "step")]
        forward, whole = (f"{x:.0f} ms" if x else "error" for x in plain)
        rows.append([name, forward, shown[0], whole, *shown[1:]])
    text = (
        "Processor time of one thread: forward without and with `saved_residuals`; a step (forward, backward, "
        "optimizer), under a dispatch mode that does nothing, and under `track`."
    )
    return f"{text}\n\n{harness.table(['', 'forward', 'saved_residuals', 'step', 'empty mode', 'track'], rows)}"


def targets(result: Result) -> list[Target]:
    return [
        Target(f"{way}, {name.split(',')[0]}: time / {plain}", times(result, step, way)[1], bound)
        for way, (plain, bound) in BOUNDS.items()
        for step, name in STEPS.items()
    ]


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 3},
    targets=targets,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
