"""Compiled loops on two threads beside one, on quiet cores and beside a program that keeps one of two cores busy.

    python profiling/compiled_threads.py               # about five minutes on two cores
    python profiling/compiled_threads.py --only lstm_small gru

Forward + backward in float32. Each loop is called 20 times on two threads, as long as it has to notice whether a team
pays; then nine calls on two threads and nine on one are timed in turns. Shown is the ratio of the medians: how much
longer a loop takes than on one thread, forward and backward. In the last column the loss around it has two threads as
well: PyTorch's own operations, which then wait for each other, and whose threads look for work for a while.
"""

import contextlib
import statistics
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

import torch
from compiled_loops import compiled_report
from compiled_loops.compiled_workloads import leaves, loss_of
from pages import names
from plain_loops import workloads
from running import harness
from running.script import Result, Script, Target

from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.run import looped

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
    """Seconds of calls on one thread, of those whose loop has two, and of those that have two throughout."""
    d = leaves(workload, T)
    loss, inputs = loss_of(workload, "compiled", d, T), workloads.differentiated(d)
    spent = [0.0]

    def seconds(around: int, inside: int) -> tuple[float, float]:
        """Of the loop alone, and of all, on so many threads around the loop and in it."""
        torch.set_num_threads(around)
        spent[0], start = 0.0, time.perf_counter()
        with on_threads(inside, front, "run", spent), on_threads(inside, looped.Looped, "backward", spent):
            torch.autograd.grad(loss(), inputs, allow_unused=True)
        return spent[0], time.perf_counter() - start

    found: dict[str, list[float]] = {"one": [], "one_all": [], "two": [], "two_all": []}
    seconds(1, 1)
    for around in (1, THREADS):  # a loss on two threads leaves them behind, looking for work: each has its turns
        for _ in range(noticed):
            seconds(around, THREADS)
        for _ in range(timed):
            two, one = seconds(around, THREADS), seconds(1, 1)
            found["two" if around == 1 else "two_all"].append(two[around - 1])
            found["one" if around == 1 else "one_all"].append(one[around - 1])
    return {f"{name}_s": column for name, column in found.items()}


@contextlib.contextmanager
def on_threads(count: int, owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """A function has so many threads of torch's, and adds up the seconds that it takes."""
    plain, kept = getattr(owner, name), vars(owner)[name]

    def timed(*args: Any, **options: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        start = time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            spent[0] += time.perf_counter() - start
            torch.set_num_threads(before)

    setattr(owner, name, staticmethod(timed) if isinstance(kept, staticmethod) else timed)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def ratio(raw: list[dict[str, Any]], what: str = "") -> float | None:
    """The median of the rounds' ratios of medians."""
    found = [statistics.median(r[f"two{what}_s"]) / statistics.median(r[f"one{what}_s"]) for r in raw if "two_s" in r]
    return statistics.median(found) if found else None


def targets(result: Result) -> list[Target]:
    busy = [e for e in result["entries"] if e["cell"]["variant"] == "busy"]
    return [
        Target(f"{compiled_report.TITLES[e['cell']['workload']]}: two threads to one, busy", ratio(e["raw"]), BOUND)
        for e in busy
    ]


def summary(result: Result) -> list[str]:
    of = {side: [e for e in result["entries"] if e["cell"]["variant"] == side] for side in ("quiet", "busy")}
    found = {side: [x for e in entries if (x := ratio(e["raw"]))] for side, entries in of.items()}
    if not all(found.values()):
        return []
    (quiet, busy), n = found.values(), len(found["quiet"])
    return [
        f"On quiet cores a second thread shortens {sum(x < 0.95 for x in quiet)} of {n} loops, to "
        f"{min(quiet):.2f} of the time at best. Beside a busy program two threads take at most {max(busy):.2f} times "
        "as long as one."
    ]


def section(result: Result, picture: str) -> str:
    rows = []
    for w in dict.fromkeys(e["cell"]["workload"] for e in result["entries"]):
        of = {e["cell"]["variant"]: e["raw"] for e in result["entries"] if e["cell"]["workload"] == w}
        one = [statistics.median(r["one_s"]) * 1e3 for r in of["quiet"] if "one_s" in r]
        ratios = ratio(of["quiet"]), ratio(of["busy"]), ratio(of["busy"], "_all")
        words = ["-" if x is None else f"{x:.2f}" for x in ratios]
        rows.append([compiled_report.TITLES[w], f"{statistics.median(one):.1f}" if one else "-", *words])
    head = ["loop", "ms on one thread", "two threads : one, quiet", "beside a busy program", "with the loss"]
    return harness.table(head, rows)


def options(parser: ArgumentParser) -> None:
    names.add_only(parser, compiled_report.TITLES)


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
    titles=compiled_report.TITLES,
    summary=summary,
    settings=lambda args: {"noticed": NOTICED, "timed": TIMED},
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
