"""Compiled loops beside eager ones, lax.scan, Equinox's checkpointed scan, torch's modules and its scan operator.

    python profiling/compiled.py                       # 3 rounds, about half an hour
    python profiling/compiled.py --jax-python PYTHON   # a Python that has JAX and Equinox: see peers/README.md
    python profiling/compiled.py --only lstm_small crf # these workloads anew, the others stay as they are

Forward + backward in float32. Values and gradients come first, in float64: where a compiled loop's or a peer's differ
from the eager loop's, nothing is timed.
"""

import contextlib
import os
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from compiled_loops import compiled_report as report
from compiled_loops.compiled_workloads import leaves, loss_of
from pages import names
from plain_loops import loop_peers, workloads
from running import harness
from running.script import Peer, Script
from torch import Tensor

from tensorloop.compiler.targets.cpu.native_core import NativeCore
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.run import program
from tensorloop.loop.compiled.run.plan import plans

JAX = Peer("jax", ("jax", "equinox"), lambda cell: loop_peers.is_of(cell, ("lax_", "eqx_")), report.PEER)
SHORT = ("W2s", "RNNs", "rk4", "crf", "kalman")
RUNS = {"quick": 1, "short": 5, "usual": 10}
CHECKED = 24  # steps, in float64
AGREE = 1e-9  # a score's or a filter's gradient is a sum over many steps
MEMORY = {"W2s": 1024, "W2": 512, "W4": 10000}


# ---- which cells ----


def chosen(args: Namespace) -> list[str]:
    return args.only or list(SHORT if args.set == "short" else report.TITLES)


def sizes(args: Namespace, workload: str) -> list[tuple[int, int]]:
    """(T, threads) of each row."""
    if args.set == "quick":
        return [(CHECKED, 1)]
    if args.set == "short":
        return [report.SIZES[workload][0]]
    return list(report.SIZES[workload])


def cells(args: Namespace) -> list[harness.Cell]:
    found: list[harness.Cell] = []
    for w in chosen(args):
        for T, threads in sizes(args, w):
            cell = {"workload": w, "T": T, "threads": threads, "repeats": RUNS[args.set]}
            slow = ("torch_scan",) if args.set in ("short", "quick") else ()
            found += [cell | {"kind": "time", "variant": way} for way in report.ways(w) if way not in slow]
        if w in MEMORY and args.set == "usual":
            cell = {"kind": "memory", "workload": w, "T": MEMORY[w], "threads": 2}
            found += [cell | {"variant": way} for way in report.MEMORY_WAYS if way in report.ways(w)]
    if "W2s" in chosen(args):
        T = CHECKED if args.set == "quick" else 1024
        found.append({"kind": "parts", "workload": "W2s", "T": T, "threads": 1, "variant": "parts"})
        found.append({"kind": "plan", "workload": "W2s", "T": CHECKED, "threads": 1, "variant": "plan"})
    return found


def checks(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "check", "workload": w, "T": CHECKED, "variants": [way for way in report.ways(w) if comparable(way)]}
        for w in chosen(args)
    ]


def comparable(way: str) -> bool:
    """Whether a way has our weights, and is there in float64."""
    return not way.startswith(("nn_", "torch_")) and way != "eager"


# ---- what a process of its own does ----


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    torch.set_num_threads(cell.get("threads", 1))
    warnings.simplefilter("ignore", front.NotCompiledWarning)  # the time of such a loop says so in its results
    kinds = {"check": check_cell, "time": time_cell, "memory": memory_cell, "parts": parts_cell, "plan": plan_cell}
    return kinds[cell["kind"]](cell)


def check_cell(cell: harness.Cell) -> dict[str, Any]:
    """How far values and gradients lie from the eager loop's."""
    w, T = cell["workload"], cell["T"]
    d = leaves(w, T, torch.float64)
    expected = gradients(loss_of(w, "eager", d, T), d)
    apart: dict[str, Any] = {}
    for way in cell["variants"]:
        if loop_peers.is_of({"variant": way}, ("lax_", "eqx_")):
            found = loop_peers.gradients_of(JAX, {"workload": w, "variant": way, "T": T, "threads": 1})
        else:
            found = gradients(loss_of(w, way, d, T), d)
        apart[way] = max(workloads.apart(found, expected).values()) if isinstance(found, tuple) else found
    return apart


def gradients(loss: Callable[[], Tensor], d: workloads.Leaves) -> workloads.Gradients:
    """The loss, and its gradients by name; zeros where a leaf gets none."""
    total = loss()
    names = [name for name, x in d.items() if x.requires_grad]
    grads = torch.autograd.grad(total, [d[name] for name in names], allow_unused=True)
    return total.item(), {
        name: torch.zeros_like(d[name]) if g is None else g for name, g in zip(names, grads, strict=True)
    }


def differing(checks: list[harness.Entry]) -> list[str]:
    """A line for each way whose numbers are others; a peer that is missing or fails has none."""
    found = []
    for entry in checks:
        for way, apart in entry["raw"][0].items():
            known = isinstance(apart, float)
            # Not the other way round, so that NaN is caught.
            if way == "error" or (known and not apart <= AGREE):
                found.append(f"{entry['cell']['workload']} {way}: {apart}")
    return found


def time_cell(cell: harness.Cell) -> dict[str, Any]:
    w, way, T = cell["workload"], cell["variant"], cell["T"]
    d = leaves(w, T)
    loss, inputs = loss_of(w, way, d, T), workloads.differentiated(d)

    def run() -> None:
        torch.autograd.grad(loss(), inputs, allow_unused=True)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = time.perf_counter()
        run()  # tracing, partition and compiling, in a process that has done none of them
        first = time.perf_counter() - start
        total = harness.seconds(run, cell["repeats"])
    reasons = [str(w.message) for w in told if issubclass(w.category, front.NotCompiledWarning)]
    return {"first_s": [first], "total_s": total} | ({"not_compiled": reasons[0]} if reasons else {})


def memory_cell(cell: harness.Cell) -> dict[str, Any]:
    w, way, T = cell["workload"], cell["variant"], cell["T"]
    d = leaves(w, T)
    return harness.peak_of(loss_of(w, way, d, T), workloads.differentiated(d))


# ---- the parts of a call ----


def parts_cell(cell: harness.Cell) -> dict[str, Any]:
    """Seconds of each part of forward + backward: loops, products over all steps, key, all; and of the key alone."""
    w, T = cell["workload"], cell["T"]
    d = leaves(w, T)
    loss, inputs = loss_of(w, "compiled", d, T), workloads.differentiated(d)
    torch.autograd.grad(loss(), inputs)
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for owner, name, part in [
            (front, "look", "key"),
            (front, "plan_of", "key"),
            (program.Program, "__call__", "programs"),
            (NativeCore, "__call__", "loops"),
        ]:
            stack.enter_context(watched(owner, name, part, spent))
        found: dict[str, list[float]] = {"loops": [], "products": [], "key": [], "all": []}
        for _ in range(30):
            spent.clear()
            start = time.perf_counter()
            torch.autograd.grad(loss(), inputs)
            found["all"].append(time.perf_counter() - start)
            found["loops"].append(spent["loops"])
            found["products"].append(spent["programs"] - spent["loops"])
            found["key"].append(spent["key"])
    found["key_alone"] = keys_alone(loss)
    return {f"{name}_s": seconds for name, seconds in found.items()}


def keys_alone(loss: Callable[[], Any]) -> list[float]:
    """Seconds of a key after another, of the loop that `loss` runs: nothing between them takes the caches."""
    calls, look = [], front.look

    def noted(*args: Any) -> Any:
        calls.append(args)
        return look(*args)

    front.look = noted
    try:
        loss()
    finally:
        front.look = look
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        front.plan_of(look(*calls[0]))
        seconds.append(time.perf_counter() - start)
    return seconds


@contextlib.contextmanager
def watched(owner: Any, name: str, part: str, spent: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds that a function takes."""
    plain = getattr(owner, name)

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*args, **options)
        finally:
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def plan_cell(cell: harness.Cell) -> dict[str, Any]:
    """Seconds to make the plan of a body: the first of a process, a new one, and one whose code is on disk."""
    w, T = cell["workload"], cell["T"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for name, workload in (("first_s", "RNNs"), ("new_s", w), ("kept_s", w)):
            plans.clear()
            d = leaves(workload, T)
            loss = loss_of(workload, "compiled", d, T)
            start = time.perf_counter()
            torch.autograd.grad(loss(), workloads.differentiated(d))
            found[name] = [time.perf_counter() - start]
    return found


def options(parser: ArgumentParser) -> None:
    names.add_only(parser, report.TITLES)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=report.section,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    disagreements=differing,
    targets=report.targets,
    draw=report.draw,
    peers=[JAX],
    options=options,
    group=lambda cell: cell["workload"],
    titles=report.TITLES,
    summary=report.summary,
    settings=lambda args: {"runs": RUNS[args.set]},
    # The loop of unknown length contracts: its gradients fade into denormal numbers, which are many times slower.
    # XLA has none either.
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
