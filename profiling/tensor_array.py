"""TensorArray beside plain PyTorch: time, peak memory, gradients, and the microseconds of single operations.

    python profiling/tensor_array.py                   # --short: under 5 minutes
    python profiling/tensor_array.py --full            # every size, 3 rounds
    python profiling/tensor_array.py --report          # tables and picture again, from the results there are

Gradients come first: if one variant's differ from another's, nothing is timed and the exit status is 1.
Results go to profiling/results/tensor_array.json, the picture to docs/images/, the tables between the markers
of docs/benchmarks.md and README.md. With `--out elsewhere.json` all of it goes beside that file, and the
documents stay as they are.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import micro
import tensor_array_report as report
import workloads

NAME = "tensor_array"
DEFAULT_OUT = harness.results(NAME)

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "tiny": {"W3": (8,)},
    "short": {"W1": (1000, 4000, 10000), "W3": (256, 1024), "ring": (256, 4096)},
    "full": {"W1": (1000, 4000, 10000), "W3": (128, 256, 512, 1024), "ring": (256, 1024, 4096)},
}
ROUNDS = {"tiny": 1, "short": 1, "full": 3}
RUNS = {"tiny": (1, 1), "short": (1, 3), "full": (2, 5)}  # warm-ups and timed runs of a process


# Beyond these sizes a single run takes half a minute to a minute, for a curve that is plain by then.
LARGEST = {("W1", "inplace_unbind"): 4000, ("W1", "cat"): 4000}


def variants(size: str, workload: str, T: int) -> list[str]:
    """All that finish at this size, or ours and the named peer."""
    names = list(workloads.VARIANTS[workload])[: 2 if size == "tiny" else None]
    return [name for name in names if LARGEST.get((workload, name), T) >= T]


def check_cells(size: str) -> list[harness.Cell]:
    return [
        {
            "kind": "check",
            "workload": workload,
            "T": T,
            "peer": workloads.peer_of(workload),
            "variants": variants(size, workload, T),
        }
        for workload, Ts in SIZES[size].items()
        for T in Ts
    ]


def measured_cells(size: str) -> list[harness.Cell]:
    """Variants of one size stand side by side, so that what is compared is measured within seconds."""
    warmups, repeats = RUNS[size]
    cells: list[harness.Cell] = [
        {"kind": kind, "workload": workload, "T": T, "variant": variant}
        | ({"warmups": warmups, "repeats": repeats} if kind == "time" else {})
        for workload, Ts in SIZES[size].items()
        for T in Ts
        for kind in ("time", "memory")
        for variant in variants(size, workload, T)
    ]
    operations = list(micro.OPERATIONS)[: 1 if size == "tiny" else None]
    return [*cells, *({"kind": "micro", "operation": name} for name in operations), {"kind": "pieces"}]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    kind = cell["kind"]
    if kind == "micro":
        return micro.operation_costs(cell["operation"])
    if kind == "pieces":
        return micro.piece_costs()
    if kind == "check":
        return workloads.differences(cell["workload"], cell["T"], cell["variants"])
    if kind not in ("time", "memory"):
        raise ValueError(f"kind is {kind!r}; expected time, memory, check, micro or pieces")
    d = workloads.leaves(cell["workload"], cell["T"])
    loop = workloads.VARIANTS[cell["workload"]][cell["variant"]]
    if kind == "memory":
        return harness.peak_of(lambda: loop(d), list(d.values()))
    return harness.time_run(lambda: loop(d), list(d.values()), cell["warmups"], cell["repeats"])


def measure(size: str, rounds: int) -> report.Result | None:
    """Everything, or None where gradients disagree."""
    script = Path(__file__).resolve()
    warmups, repeats = RUNS[size]
    about = harness.about(rounds, size=size, warmups=warmups, repeats=repeats)
    checks = harness.measure(script, check_cells(size), 1)
    wrong = report.disagreements(checks)
    if wrong:
        print("losses or gradients disagree, so nothing is timed:", *wrong, sep="\n  ", file=sys.stderr)
        return None
    entries = checks + harness.measure(script, measured_cells(size), rounds)
    result: report.Result = {"about": about, "entries": entries}
    result["targets"] = report.targets(result)
    return result


def publish(result: report.Result, out: Path) -> None:
    pages = [
        ("docs/benchmarks.md", NAME, lambda picture: report.benchmarks(result, picture)),
        ("README.md", "figures", lambda picture: report.readme_figures(result, picture)),
    ]
    harness.publish(NAME, out, lambda path: report.draw(result, path), pages)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    for name, what in (
        ("short", "the least and the greatest sizes (default)"),
        ("full", "all sizes"),
        ("tiny", "one cell of each kind, in seconds: for the tests"),
    ):
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=what)
    size.add_argument("--report", action="store_true", help="measure nothing: tables and picture from --out")
    parser.add_argument("--rounds", type=int, help="times that every cell is measured (default: by size)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the file of results, JSON")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # JSON: what a process of its own is to do
    parser.set_defaults(size="short")
    args = parser.parse_args(given)
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; expected 1 or more")
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
        result = measure(args.size, args.rounds or ROUNDS[args.size])
        if result is None:
            return 1
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    publish(result, args.out)
    for line in harness.failures(result["entries"]):
        print("no figure:", line, file=sys.stderr)
    print(report.benchmarks(result, args.out.with_suffix(".png").name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
