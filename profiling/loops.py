"""scan and while_loop beside plain PyTorch, JAX and Equinox: time, peak memory, gradients, cost of a step.

    python profiling/loops.py                      # about 12 minutes on two cores
    python profiling/loops.py --jax-python PYTHON  # with the peers of peers/README.md, run by that Python
    python profiling/loops.py --only W5 W2         # these workloads anew, beside the other results there are
    python profiling/loops.py --report             # tables and picture again, from the results there are

Without `--jax-python`, the environment variable JAX_PYTHON names it; where neither is set, or that Python lacks JAX
or Equinox, their cells say "not installed". Gradients come first: if one variant's differ from the plain loop's,
nothing is timed and the exit status is 1. Results go to profiling/results/loops.json, the picture to docs/images/,
the tables between the markers of docs/benchmarks.md. With `--out elsewhere.json` all of it goes beside that file,
and the documents stay as they are.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import loop_overhead
import loop_workloads as workloads
import loops_report as report
import numpy as np
import torch

from tensorloop import schedule

NAME = "loops"
DEFAULT_OUT = harness.results(NAME)
JAX_SCRIPT = Path(__file__).resolve().parent / "peers" / "jax_loops.py"
JAX_PYTHON = "JAX_PYTHON"  # environment variable

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "quick": {"W2": (8,), "W3": (8,), "W4": (24,), "W5": (12,)},
    "whole": {"W4": (100, 1000, 10000), "W2": (128, 512, 2048), "W3": (256, 1024), "W5": (1024, 4096)},
}
CHECK = {"quick": SIZES["quick"], "whole": {"W2": (128,), "W3": (256,), "W4": (1000,), "W5": (256,)}}  # in float64
REPEATS = {"quick": 1, "whole": 5}  # timed runs after one warm-up
BARE = 200  # steps of a bare loop
BARE_REPEATS = {"quick": 1, "whole": 30}
OVERHEAD = {"quick": 20, "whole": 1000}  # steps of a loop whose body does next to nothing
OVERHEAD_CHECKPOINTS = 32
WARM = 500  # steps after which a loop has touched all that any length needs, its residuals apart


# ---- which cells ----


def check_cells(size: str) -> list[harness.Cell]:
    return [{"kind": "check", "workload": w, "T": T} for w, Ts in CHECK[size].items() for T in Ts]


def measured_cells(size: str) -> list[harness.Cell]:
    """Variants of one size stand side by side, so that what is compared is measured within a minute."""
    cells: list[harness.Cell] = []
    for workload, Ts in SIZES[size].items():
        for T in Ts:
            for kind in ("time", "memory"):
                if (kind, workload, T) == ("time", "W4", Ts[-1]):
                    cells += [
                        {"kind": "bare", "workload": "W4", "way": way, "repeats": BARE_REPEATS[size]}
                        for way in ("forward", "both")
                    ]
                cells += [
                    {"kind": kind, "workload": workload, "T": T, "variant": variant}
                    | ({"repeats": REPEATS[size]} if kind == "time" else {})
                    for variant in (*workloads.VARIANTS[workload], *workloads.PEERS[workload])
                ]
    counts = [{"kind": "count", "T": T} for T in SIZES[size]["W4"]]
    overheads = [{"kind": "overhead", "loop": loop, "T": OVERHEAD[size]} for loop in loop_overhead.LOOPS]
    return [*cells, *counts, *overheads]


# ---- what a process of its own does ----


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    kinds = {
        "time": time_cell,
        "memory": memory_cell,
        "check": check_cell,
        "count": count_cell,
        "bare": bare_cell,
        "overhead": overhead_cell,
    }
    if cell["kind"] not in kinds:
        raise ValueError(f"kind is {cell['kind']!r}; expected one of {', '.join(kinds)}")
    return kinds[cell["kind"]](cell)


def warm_up(workload: str, variant: str, T: int) -> None:
    workloads.gradients(workload, variant, workloads.leaves(workload, min(T, WARM)))


def time_cell(cell: harness.Cell) -> dict[str, Any]:
    workload, variant, T = cell["workload"], cell["variant"], cell["T"]
    loop, d = workloads.VARIANTS[workload][variant], workloads.leaves(workload, T)
    briefly = variant in workloads.FLAT
    if briefly:
        warm_up(workload, variant, T)
    warmups = 0 if briefly else 1
    return harness.time_run(lambda: loop(d), workloads.differentiated(d), warmups, cell["repeats"])


def memory_cell(cell: harness.Cell) -> dict[str, Any]:
    workload, variant, T = cell["workload"], cell["variant"], cell["T"]
    loop, d = workloads.VARIANTS[workload][variant], workloads.leaves(workload, T)
    inputs = workloads.differentiated(d)
    return harness.peak_of(lambda: loop(d), inputs, warm_up=lambda: warm_up(workload, variant, T))


def check_cell(cell: harness.Cell) -> dict[str, Any]:
    """How far losses and gradients lie from the plain loop's, in float64."""
    workload, T = cell["workload"], cell["T"]
    d = workloads.leaves(workload, T, torch.float64)
    right = workloads.gradients(workload, workloads.PLAIN[workload], d)
    found: dict[str, Any] = {}
    for variant in workloads.VARIANTS[workload]:
        try:
            found[variant] = workloads.apart(workloads.gradients(workload, variant, d), right)
        except Exception as error:
            found[variant] = {"error": f"{type(error).__name__}: {error}"[:500]}
    for variant in workloads.PEERS[workload]:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "gradients.npz")
            answer = run_peer({"kind": "gradients", "workload": workload, "variant": variant, "T": T, "out": out})
            if "loss" in answer:
                answer = workloads.apart((answer["loss"], dict(np.load(out))), right)
        found[variant] = answer
    return found


def planned_advances(steps: int, checkpoints: int, known: bool) -> int:
    """Plain advances that the schedule needs for a loop of so many steps, the first sweep's among them."""
    plan = schedule.of(checkpoints, steps if known else None)
    return schedule.advances(plan, steps, known)


def count_cell(cell: harness.Cell) -> dict[str, Any]:
    """K -> how often the body ran, and the plain advances of the schedule."""
    return {
        str(K): {
            "calls": workloads.w4_body_calls(cell["T"], K),
            "advances": planned_advances(cell["T"], K, known=False),
        }
        for K in workloads.CHECKPOINTS
    }


def bare_cell(cell: harness.Cell) -> dict[str, Any]:
    d = workloads.leaves("W4", BARE)

    def loss(count: int) -> torch.Tensor:
        return (workloads.w4_steps(d, d["x0"], count) ** 2).sum()

    return {"step_s": loop_overhead.bare_steps(loss, workloads.differentiated(d), BARE, cell["way"], cell["repeats"])}


def overhead_cell(cell: harness.Cell) -> dict[str, Any]:
    advances = planned_advances(cell["T"], OVERHEAD_CHECKPOINTS, known=cell["loop"] == "scan")
    return loop_overhead.costs(cell["loop"], cell["T"], OVERHEAD_CHECKPOINTS, advances)


# ---- peers ----


def run_peer(cell: harness.Cell) -> dict[str, Any]:
    python = os.environ.get(JAX_PYTHON)
    if not python:
        return {"absent": "not installed"}
    return harness.spawn(JAX_SCRIPT, cell | {"threads": harness.THREADS, "slow": harness.SLOW}, python)


def process(script: Path, cell: harness.Cell) -> dict[str, Any]:
    """A cell in the Python that its variant needs."""
    peers = {variant for variants in workloads.PEERS.values() for variant in variants}
    return run_peer(cell) if cell.get("variant") in peers else harness.spawn(script, cell)


def find_peers(python: str | None) -> dict[str, str]:
    """The peers' versions; where they are missing, nothing, and their cells will say so."""
    os.environ.pop(JAX_PYTHON, None)
    if not python:
        return {}
    found = {"error": "no such file"}
    if Path(python).is_file():
        found = harness.spawn(JAX_SCRIPT, {"kind": "versions"}, python)
    if "error" in found:
        print(f"JAX and Equinox are left out: {python}: {found['error']}", file=sys.stderr)
        return {}
    os.environ[JAX_PYTHON] = python  # processes of cells inherit it
    return found


# ---- the whole ----


def measure(size: str, rounds: int, python: str | None, only: Sequence[str] = ()) -> report.Result | None:
    """Everything, or what belongs to the workloads `only`; None where gradients disagree."""
    script = Path(__file__).resolve()
    peers = find_peers(python)
    about = harness.about(rounds, size=size, repeats=REPEATS[size], peers=peers)
    if python:  # a path of one machine has no place in the documents
        about["command"] = about["command"].replace(python, "PYTHON")
    if about["load_at_start"] > 1:
        print(f"the machine's load is {about['load_at_start']}: somebody else is at work on it", file=sys.stderr)

    def wanted(cells: list[harness.Cell]) -> list[harness.Cell]:
        return [cell for cell in cells if not only or cell.get("workload") in only]

    checks = harness.measure(script, wanted(check_cells(size)), 1, process)
    wrong = report.disagreements(checks)
    if wrong:
        print("losses or gradients disagree, so nothing is timed:", *wrong, sep="\n  ", file=sys.stderr)
        return None
    return {"about": about, "entries": checks + harness.measure(script, wanted(measured_cells(size)), rounds, process)}


def renewed(old: report.Result, new: report.Result, only: Sequence[str]) -> report.Result:
    """Old results, those of the workloads `only` exchanged for new ones."""
    entries = [entry for entry in old["entries"] if entry["cell"].get("workload") not in only]
    again = old.get("again", {}) | dict.fromkeys(only, new["about"])
    return {"about": old["about"], "again": again, "entries": entries + new["entries"]}


def publish(result: report.Result, out: Path) -> None:
    pages = [("docs/benchmarks.md", NAME, lambda picture: report.benchmarks(result, picture))]
    harness.publish(NAME, out, lambda path: report.draw(result, path), pages)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="a few steps of everything: for the tests"
    )
    size.add_argument("--only", nargs="+", choices=[*workloads.VARIANTS], default=(), help="measure these anew")
    size.add_argument("--report", action="store_true", help="measure nothing: tables and picture from --out")
    parser.add_argument("--rounds", type=int, default=1, help="times that every cell is measured (default: 1)")
    parser.add_argument("--jax-python", default=os.environ.get(JAX_PYTHON), help="a Python with jax and equinox")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the file of results, JSON")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # JSON: what a process of its own is to do
    parser.set_defaults(size="whole")
    args = parser.parse_args(given)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; expected 1 or more")
    args.out = args.out.resolve()
    if args.size == "quick" and args.out == DEFAULT_OUT:
        parser.error("--quick needs --out: its figures are no benchmarks and stay out of the documents")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    if args.cell:
        # W4 contracts: its gradients fade into denormal numbers, which are many times slower. XLA has none either.
        torch.set_flush_denormal(True)
        harness.answer(run_cell, args.cell)
        return 0
    if args.report:
        result = json.loads(args.out.read_text())
    else:
        result = measure(args.size, args.rounds, args.jax_python, args.only)
        if result is None:
            return 1
        if args.only:
            result = renewed(json.loads(args.out.read_text()), result, args.only)
        result["targets"] = report.targets(result)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    publish(result, args.out)
    for line in harness.failures(result["entries"]):
        print("no figure:", line, file=sys.stderr)
    print(report.benchmarks(result, args.out.with_suffix(".png").name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
