"""What `memory.saved_residuals` and `memory.track` cost a step, in processor time of one thread.

A step is forward, backward and the optimizer; saved_residuals watches forward alone and is held against that. The ways
of a step take turns in one process, so that whatever else the machine does hits all of them alike. `empty mode` is a
dispatch mode that does nothing but run the operation: what any tool written as one costs at the least.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from tensorloop._dispatch import OperationMode
from tensorloop.memory import saved_residuals, track

BOUNDS = {"saved_residuals": 3.0, "track": 1.5}
WARM_UPS = 2
STEPS = {
    "LSTM": "LSTM cells, B=32, H=256, T=128, SGD",
    "transformer": "transformer, 4 layers, B=16, T=64, D=128, Adam",
    "wide transformer": "transformer, 2 layers, B=16, T=128, D=512, Adam",
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


def report(entries: list[harness.Entry], about: dict[str, Any]) -> str:
    rows, missed = [], []
    for entry in entries:
        ms = {way: 1e3 * (harness.median(entry, way) or float("nan")) for way in entry["raw"][0]}
        ratios = {way: ms[way] / ms["forward" if way == "saved_residuals" else "step"] for way in ms}
        missed += [f"{way}, {entry['cell']['step']}" for way, bound in BOUNDS.items() if not ratios[way] <= bound]
        shown = [f"{ms[way]:.0f} ms, {ratios[way]:.2f}x" for way in ("saved_residuals", "empty mode", "track")]
        name = STEPS[entry["cell"]["step"]]
        rows.append([name, f"{ms['forward']:.0f} ms", shown[0], f"{ms['step']:.0f} ms", *shown[1:]])
    header = ["", "forward", "saved_residuals", "step", "empty mode", "track"]
    bounds = ", ".join(f"{way} at most {bound}x" for way, bound in BOUNDS.items())
    where = f"{about['machine']['processor']}, {about['machine']['cores']} cores; torch {about['versions']['torch']}"
    return "\n".join(
        [
            harness.table(header, rows),
            "",
            f"Bounds: {bounds}: {'missed by ' + '; '.join(missed) if missed else 'reached'}.",
            f"Made by `{about['command']}`. Processor time of one thread, medians of {about['runs']} runs and "
            f"{about['rounds']} processes. {where}; {about['date']}; load of the machine at the start: "
            f"{about['load_at_start']}.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes for each step (3)")
    parser.add_argument("--runs", type=int, default=9, help="runs of each way in a process (9)")
    parser.add_argument("--step", choices=STEPS, action="append", help="one step alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one process a step, three runs")
    parser.add_argument("--out", type=Path, help="keeps every value, as JSON")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cell:
        harness.answer(run_cell, options.cell)
        return 0
    rounds, runs = (1, 3) if options.quick else (options.rounds, options.runs)
    about = harness.about(rounds, runs=runs)
    cells = [{"kind": "step", "step": name, "runs": runs} for name in options.step or STEPS]
    entries = harness.measure(Path(__file__), cells, rounds)
    if options.out:
        options.out.write_text(json.dumps({"about": about, "entries": entries}, indent=1) + "\n")
    if failures := harness.failures(entries):
        print("\n".join(failures))
        return 1
    print(report(entries, about))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
