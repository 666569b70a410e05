"""Beam search beside Hugging Face's `generate`, a loop that reorders by copying, and training by a second pass.

    python profiling/beam.py                        # some 15 minutes
    python profiling/beam.py --quick                # every cell once, few steps: to see that it runs
    python profiling/beam.py --report               # tables and picture again, from the results there are
    python profiling/beam.py --hf-python PATH       # a Python that has transformers, numba and torch of this version

What all ways find comes first: tokens and scores of both searches, and gradients in float64 of what is trained. Where
they differ, nothing is timed. Bytes are counted (`tensorloop.memory`): what is alive at the end of the forward pass.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import beam_models as models
import harness
import plots
import torch

from tensorloop import memory

NAME = "beam"
STEPS, T = [64, 256], [16, 32, 64, 128]
SPEED = {64: 1.6, 256: 1.3}  # times Hugging Face's tokens a second, at least
OUTSIDE = 0.07  # of the time is not the model's, at most
HELD, WANTED, QUARTER, STEP = 206, 150, 0.25, 0.6
DECODERS = {"gru": "a GRU decoder", "attends": "a decoder that attends to its past"}
WAYS = {
    "copies": "a loop that copies",
    "search": "beam_search",
    "lean": "beam_search, linear_log_softmax",
    "checkpoints": "beam_search, checkpoints",
}


def checkpoints_of(steps: int) -> int:
    """Few enough that what they keep is not what counts."""
    return max(2, round(steps**0.5 / 2))


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    return {"speed": speed, "held": held, "step": step, "check": check}[cell["kind"]](cell)


def speed(cell: harness.Cell) -> dict[str, Any]:
    steps = cell["steps"]
    model = models.gpt2(steps)
    ours = models.Stepper(model)
    found: dict[str, Any] = {"total_s": [], "model_s": []}
    with torch.no_grad():
        for _ in range(cell["runs"] + 1):
            clock = models.Clock()
            run = models.generate if cell["way"] == "HF" else models.searched
            begun = time.perf_counter()
            run(model if cell["way"] == "HF" else ours, steps, clock)
            found["total_s"].append(time.perf_counter() - begun)
            found["model_s"].append(clock.seconds)
    return {name: times[1:] for name, times in found.items()}


def loss(cell: harness.Cell, model: models.Recurrent) -> torch.Tensor:
    if cell["way"] == "copies":
        return models.by_hand(model, cell["T"])
    return models.by_search(model, cell["T"], checkpoints_of(cell["T"]) if cell["way"] == "checkpoints" else None)


def held(cell: harness.Cell) -> dict[str, Any]:
    model = models.Recurrent(torch.float32, cell["decoder"] == "attends", cell["way"] == "lean")
    times = harness.time_run(lambda: loss(cell, model), list(model.parameters()), 1, cell["runs"])
    return {"held_bytes": memory.saved_bytes(lambda: loss(cell, model)), **times}


def step(cell: harness.Cell) -> dict[str, Any]:
    model = models.Short()
    run = model.through_search if cell["way"] == "through the search" else model.second_pass
    return harness.time_run(run, list(model.parameters()), 3, cell["runs"])


def check(cell: harness.Cell) -> dict[str, Any]:
    """How far what the ways find is apart, relative to the largest number."""
    if cell["what"] == "speed":
        model = models.gpt2(cell["steps"])
        with torch.no_grad():
            (tokens, scores), (same, ours) = (
                models.generate(model, cell["steps"], models.Clock()),
                models.searched(models.Stepper(model), cell["steps"], models.Clock()),
            )
        apart = float((scores - ours).abs().max() / scores.abs().max())
        return {"apart": apart if torch.equal(tokens, same) else 1.0}
    if cell["what"] == "step":
        short = models.Short()
        return {"apart": apart_by([short.through_search(), short.second_pass()], list(short.parameters()))}
    model = models.Recurrent(torch.float64, cell["what"] == "attends")
    losses = []
    for way in WAYS:
        model.lean = way == "lean"
        losses.append(loss({"way": way, "T": 9}, model))
    return {"apart": apart_by(losses, list(model.parameters()))}


def apart_by(losses: list[torch.Tensor], leaves: list[torch.Tensor]) -> float:
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    apart = max(float((x - losses[0]).detach().abs() / losses[0].detach().abs()) for x in losses)
    for found in grads[1:]:
        for x, y in zip(found, grads[0], strict=True):
            apart = max(apart, float((x - y).abs().max() / y.abs().max()))
    return apart


CHECKS = {"speed": 1e-5, "gru": 1e-10, "attends": 1e-10, "step": 1e-5}


def cells(quick: bool) -> list[harness.Cell]:
    runs = 1 if quick else 5
    found: list[harness.Cell] = []
    for steps in [8] if quick else STEPS:
        found += [{"kind": "speed", "way": way, "steps": steps, "runs": runs} for way in ("search", "HF")]
    for decoder in DECODERS:
        found += [
            {"kind": "held", "decoder": decoder, "way": way, "T": t, "runs": runs}
            for t in ([4] if quick else T)
            for way in WAYS
        ]
    found += [
        {"kind": "step", "way": way, "runs": 1 if quick else 20} for way in ("through the search", "a second pass")
    ]
    return found


def measure(quick: bool, rounds: int, hf_python: str | None) -> dict[str, Any]:
    script = Path(__file__).resolve()

    def process(script: Path, cell: harness.Cell) -> dict[str, Any]:
        if cell["kind"] != "speed" and cell.get("what") != "speed":
            return harness.spawn(script, cell)
        return harness.spawn(script, cell, hf_python) if hf_python else {"error": "transformers is not installed"}

    checked = harness.measure(script, [{"kind": "check", "what": what, "steps": 12} for what in CHECKS], 1, process)
    for entry in checked:
        apart, what = entry["raw"][0].get("apart"), entry["cell"]["what"]
        if apart is None or apart > CHECKS[what]:
            print(f"{what}: {entry['raw'][0]}", file=sys.stderr)
            if apart is not None:
                raise SystemExit(1)
    about = harness.about(rounds, rows=models.ROWS, beams=models.BEAMS, words=models.WORDS, hidden=models.HIDDEN)
    return {"about": about, "checks": checked, "entries": harness.measure(script, cells(quick), rounds, process)}


def benchmarks(result: dict[str, Any], picture: str) -> str:
    """The section of the document."""
    about = result["about"]
    lines = [
        f"{about['threads']} threads, median of {about['rounds']} rounds on {about['machine']['processor']}; "
        f"torch {about['versions']['torch']}, {about['date']}. B = {models.ROWS}, K = {models.BEAMS}, a vocabulary "
        f"of {models.WORDS}. Made by `{about['command']}`.",
        "",
        f"**Search.** A transformer of {models.LAYERS} layers of width {models.WIDTH} with random weights, the same in "
        "both. Both searches return the same tokens. *Outside* is the share of the time that is not the model's.",
        "",
        harness.table(["tokens", "way", "time", "tokens / s", "outside", "against HF"], speeds(result), 2),
        "",
        "**Training.** Bytes alive at the end of the forward pass, counted, and the time of forward and backward "
        f"(H = {models.HIDDEN}). With checkpoints sqrt(T) / 2 carries are kept.",
        "",
        harness.table(["decoder", "way", *(f"T = {t}" for t in T)], helds(result), 2),
        "",
        f"**A step of minimum risk**, {models.Short.ROWS} rows, {models.Short.BEAMS} hypotheses each that end on their "
        "own:",
        "",
        harness.table(["way", "forward", "forward + backward"], trained(result)),
        "",
        *(f"- {line}" for line in targets(result)),
        "",
        f"![Bytes held over T]({picture})",
    ]
    return "\n".join(lines)


def speeds(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for steps in STEPS:
        for way, title in (("search", "**`beam_search`**"), ("HF", "`generate`")):
            total, model = (
                harness.figure(result, key, kind="speed", way=way, steps=steps) for key in ("total_s", "model_s")
            )
            other = harness.figure(result, "total_s", kind="speed", way="HF", steps=steps)
            if not total or not model or not other:
                lines.append([str(steps), title, "error", "", "", ""])
                continue
            rate = f"{models.ROWS * steps / total:,.0f}"
            lines.append(
                [str(steps), title, f"{total:.2f} s", rate, f"{1 - model / total:.1%}", f"{other / total:.2f}x"]
            )
    return lines


def helds(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for decoder, title in DECODERS.items():
        for way, name in WAYS.items():
            row = []
            for t in T:
                held, total = (
                    harness.figure(result, key, kind="held", decoder=decoder, way=way, T=t)
                    for key in ("held_bytes", "total_s")
                )
                row.append(f"{held / 2**20:.1f} MiB, {total:.2f} s" if held and total else "error")
            lines.append([title if way == "copies" else "", name, *row])
    return lines


def trained(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for way in ("through the search", "a second pass"):
        forward, total = (harness.figure(result, key, kind="step", way=way) for key in ("forward_s", "total_s"))
        lines.append([way, *(f"{x * 1e3:.1f} ms" if x else "error" for x in (forward, total))])
    return lines


def targets(result: dict[str, Any]) -> list[str]:
    """What was to be reached, and whether it was."""
    lines = []

    def line(text: str, found: float | None, most: float, unit: str = "", least: bool = False) -> None:
        if found is not None:
            reached = found >= most if least else found <= most
            bound = "at least" if least else "at most"
            lines.append(f"{text}: {bound} {most:g}{unit}: {found:.3g}{unit}, {'reached' if reached else 'missed'}.")

    for steps in STEPS:
        ours, other = (
            harness.figure(result, "total_s", kind="speed", way=way, steps=steps) for way in ("search", "HF")
        )
        model = harness.figure(result, "model_s", kind="speed", way="search", steps=steps)
        if ours and other and model:
            line(f"{steps} tokens, against `generate`", other / ours, SPEED[steps], "x", least=True)
            line(f"{steps} tokens, share of the time outside the model", 1 - model / ours, OUTSIDE)
    last = T[-1]
    for decoder, title in DECODERS.items():
        _, ours, lean, kept = (
            harness.figure(result, "held_bytes", kind="held", decoder=decoder, way=w, T=last) for w in WAYS
        )
        if ours and lean and kept:
            if decoder == "gru":
                line(f"{title}, T={last}, held", ours / 2**20, HELD, " MiB")
                line(f"{title}, T={last}, with linear_log_softmax", lean / 2**20, WANTED, " MiB")
            line(f"{title}, T={last}, held with checkpoints against without", kept / ours, QUARTER)
    ways = ("through the search", "a second pass")
    one, two = (harness.figure(result, "total_s", kind="step", way=way) for way in ways)
    if one and two:
        line("a step of minimum risk, time against search and second pass", one / two, STEP)
    return lines


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    drawn, both = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for axes, (decoder, title) in zip(both, DECODERS.items(), strict=True):
        lines = []
        for style, (way, name) in enumerate(WAYS.items()):
            held = [harness.figure(result, "held_bytes", kind="held", decoder=decoder, way=way, T=t) for t in T]
            points = [(t, x / 2**20) for t, x in zip(T, held, strict=True) if x]
            if points:
                ours = way != "copies"
                lines.append(plots.Curve(name, [t for t, _ in points], [x for _, x in points], style, ours))
        plots.curves(axes, lines, "MiB held after forward", title)
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few steps")
    parser.add_argument("--rounds", type=int, default=3, help="how often every cell is measured; %(default)s")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables and picture from --out")
    parser.add_argument("--out", type=Path, default=harness.results(NAME), help="the file of results, JSON")
    parser.add_argument("--hf-python", default=os.environ.get("HF_PYTHON"), help="a Python with transformers")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # JSON: what a process of its own is to do
    args = parser.parse_args(given)
    args.out = args.out.resolve()
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    if args.cell:
        harness.answer(run_cell, args.cell)
        return 0
    if args.report:
        result = json.loads(args.out.read_text())
    else:
        result = measure(args.quick, 1 if args.quick else args.rounds, args.hf_python)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    page = ("docs/benchmarks.md", NAME, lambda picture: benchmarks(result, picture))
    harness.publish(NAME, args.out, lambda path: draw(result, path), [page])
    for line in harness.failures(result["entries"]):
        print("no figure:", line, file=sys.stderr)
    print(benchmarks(result, args.out.with_suffix(".png").name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
