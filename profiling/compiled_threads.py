"""Compiled loops on two threads beside one, on quiet cores and beside a program that keeps one of two cores busy.

    python profiling/compiled_threads.py               # about five minutes on two cores
    python profiling/compiled_threads.py --only W2s gru

Forward + backward in float32. Each loop is called 20 times on two threads, as long as it has to notice whether a team
pays; then nine calls on two threads and nine on one are timed in turns. What is shown is the ratio of the medians: how
much longer a loop takes than on one thread, with all that torch does around it.
"""

import statistics
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from typing import Any

import compiled_report
import harness
import torch
import workloads
from compiled_workloads import leaves, loss_of
from script import Result, Script, Target, target_table

from tensorloop.loop.compiled import front

THREADS = 2
NOTICED, TIMED = 20, 9  # calls
BOUND = 1.3
BUSY = "while True: pass"
SHORT = ("W2s", "W2")


def steps(workload: str) -> int:
    return 1000 if workload == "W4" else max(T for T, _ in compiled_report.SIZES[workload])


def cells(args: Namespace) -> list[harness.Cell]:
    chosen = args.only or (SHORT if args.set in ("short", "quick") else list(compiled_report.TITLES))
    T = 24 if args.set == "quick" else None
    return [
        {"kind": "threads", "workload": w, "T": T or steps(w), "variant": beside, "quick": args.set == "quick"}
        for w in chosen
        for beside in ("quiet", "busy")
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    warnings.simplefilter("ignore", front.NotCompiledWarning)
    other = subprocess.Popen([sys.executable, "-c", BUSY]) if cell["variant"] == "busy" else None
    try:
        return turns(cell["workload"], cell["T"], *((2, 2) if cell["quick"] else (NOTICED, TIMED)))
    finally:
        if other is not None:
            other.kill()
            other.wait()


def turns(workload: str, T: int, noticed: int, timed: int) -> dict[str, list[float]]:
    """Seconds of calls on two threads and on one, in turns."""
    d = leaves(workload, T)
    loss, inputs = loss_of(workload, "compiled", d, T), workloads.differentiated(d)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        torch.autograd.grad(loss(), inputs, allow_unused=True)
        return time.perf_counter() - start

    seconds(1)
    for _ in range(noticed):
        seconds(THREADS)
    found = [(seconds(THREADS), seconds(1)) for _ in range(timed)]
    return {"two_s": [two for two, _ in found], "one_s": [one for _, one in found]}


def ratio(raw: list[dict[str, Any]]) -> float | None:
    """The median of the rounds' ratios of medians."""
    found = [statistics.median(r["two_s"]) / statistics.median(r["one_s"]) for r in raw if "two_s" in r]
    return statistics.median(found) if found else None


def targets(result: Result) -> list[Target]:
    busy = [e for e in result["entries"] if e["cell"]["variant"] == "busy"]
    return [
        Target(f"{compiled_report.TITLES[e['cell']['workload']]}: two threads to one, busy", ratio(e["raw"]), BOUND)
        for e in busy
    ]


def section(result: Result, picture: str) -> str:
    rows = []
    for w in dict.fromkeys(e["cell"]["workload"] for e in result["entries"]):
        of = {e["cell"]["variant"]: e["raw"] for e in result["entries"] if e["cell"]["workload"] == w}
        one = [statistics.median(r["one_s"]) * 1e3 for r in of["quiet"] if "one_s" in r]
        quiet, busy = ratio(of["quiet"]), ratio(of["busy"])
        words = ["-" if x is None else f"{x:.2f}" for x in (quiet, busy)]
        rows.append([compiled_report.TITLES[w], f"{statistics.median(one):.1f}" if one else "-", *words])
    head = ["loop", "ms on one thread", "two threads : one, quiet", "beside a busy program"]
    table = harness.table(head, rows)
    return f"{table}\n\n{target_table([Target(**target) for target in result['targets']])}"


def options(parser: ArgumentParser) -> None:
    names = ", ".join(compiled_report.TITLES)
    parser.add_argument("--only", nargs="+", choices=list(compiled_report.TITLES), metavar="NAME", help=names)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    page=("docs/benchmarks/compiled.md", "threads"),
    targets=targets,
    options=options,
    group=lambda cell: cell["workload"],
    settings=lambda args: {"noticed": NOTICED, "timed": TIMED},
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
