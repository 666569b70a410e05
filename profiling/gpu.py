"""Loops on a GPU: compiled and eager ones beside torch's modules, torch.compile and lax.scan; counts without a GPU.

    python profiling/gpu.py                        # a machine with a CUDA device: all of it in one process
    python profiling/gpu.py --jax-python PYTHON    # a Python whose JAX has the device, too
    python profiling/gpu.py --counts               # any machine with g++, a quarter of an hour: launches and waits
    python profiling/gpu.py --counts --resume      # the rest, where that was stopped
    python profiling/gpu.py --quick --rehearse     # the same: what a device would time, to see that it runs
    python profiling/gpu.py first-day              # the first half hour on a device: gpu_first_day/command.py

Forward + backward in float32, the device waited for at the end of each run. Losses and gradients come first, in
float64: where a compiled loop's differ from the eager loop's, nothing is timed. Counts are those of the pretended
device of tests/device, on which every operation of torch is one launch.
"""

import os
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiled_loops import compiled_report, gpu_counts
from compiled_loops.gpu_workloads import HEADS, leaves, loss_of
from gpu_first_day import command
from pages import names
from plain_loops import loop_peers, workloads
from running import harness
from running.script import Peer, Result, Script

from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.run.plan import plans

TITLES = {
    **{name: compiled_report.TITLES[name] for name in ("W1", "W2s", "W2", "W3", "W4", "RNNs", "RNN", "rk4", "ln_rnn")},
    **{name: compiled_report.TITLES[name] for name in ("memory", "crf", "viterbi", "gru", "min_gru", "kalman", "adam")},
    **{f"heads{size}": f"LSTM of {768 // size} heads of {size}, B=16" for size in HEADS},
}
STEPS = {"W1": 10000, "W2s": 1024, "RNNs": 1024, "W3": 1024, "W4": 1000, **{f"heads{size}": 1024 for size in HEADS}}
COUNTED = "counts "  # begins the groups of what is counted, which may be of a machine without a GPU
CHECKED = 24
AGREE = 1e-9
WAYS = {
    "compiled": "compiled",
    "kernels": "compiled, kernels",
    "eager": "eager",
    "step": "eager, torch.compile of the body",
    "lax_scan": "lax.scan",
    "nn_lstm": "nn.LSTM",
    "nn_gru": "nn.GRU",
}
JAX = Peer("jax", ("jax", "equinox"), lambda cell: loop_peers.is_of(cell, ("lax_",)), compiled_report.PEER)


def ways(workload: str) -> list[str]:
    """Those that there are of a workload."""
    left_out = {"nn_lstm", "nn_gru"} - {{"W2s": "nn_lstm", "W2": "nn_lstm", "gru": "nn_gru"}.get(workload)}
    left_out |= {"lax_scan"} if workload.startswith("heads") else set()
    left_out |= {"step"} if workload in ("W3", "W4") else set()  # arrays, and a loop whose condition is in its carry
    return [way for way in WAYS if way not in left_out]


def chosen(args: Namespace) -> list[str]:
    return args.only or (["RNNs"] if args.set == "quick" else list(TITLES))


def counts_alone(args: Namespace) -> bool:
    return args.counts or (args.set == "quick" and not args.rehearse and not torch.cuda.is_available())


def cells(args: Namespace) -> list[harness.Cell]:
    found: list[harness.Cell] = []
    for w in chosen(args):
        if counts_alone(args):
            found.append({"kind": "counts", "workload": w})
        else:
            cell = {"kind": "time", "workload": w, "T": CHECKED if args.set == "quick" else STEPS.get(w, 512)}
            cell |= {"threads": 1, "repeats": 10} | rehearsed(args)
            # Nothing compiles for the pretended device but this library.
            found += [cell | {"variant": way} for way in ways(w) if not (args.rehearse and way in ("step", "lax_scan"))]
    return found


def rehearsed(args: Namespace) -> harness.Cell:
    """What a cell says where no device is there, and its times say nothing."""
    if not args.rehearse:
        return {}
    if args.set != "quick":
        sys.exit("--rehearse is for --quick: a pretended device has no times to keep")
    return {"pretended": True, "repeats": 1}


def checks(args: Namespace) -> list[harness.Cell]:
    if counts_alone(args):
        return []
    ours = ("compiled", "kernels")
    more = {"at_most": AGREE} | rehearsed(args)
    return [{"kind": "check", "workload": w, "variant": v} | more for w in chosen(args) for v in ours]


# ---- what a process of its own does ----


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    if cell["kind"] == "counts":
        return counts_cell(cell)
    if why := gpu_counts.pretend() if cell.get("pretended") else "" if torch.cuda.is_available() else "no CUDA device":
        return {"absent": why}
    torch.set_default_device("cuda")
    plans.clear()  # cells follow one another in a process
    warnings.simplefilter("ignore", front.NotCompiledWarning)  # the time of such a loop says so in its results
    os.environ["TENSORLOOP_PTX"] = "1" if cell["variant"] == "kernels" else "0"
    return check_cell(cell) if cell["kind"] == "check" else time_cell(cell)


def counts_cell(cell: harness.Cell) -> dict[str, Any]:
    """In one more process: a pretended device stays in the one in which it has begun."""
    command = [sys.executable, str(Path(gpu_counts.__file__)), cell["workload"]]
    path = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "profiling")])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    return gpu_counts.answer_in(done.stdout, harness.last_line(done.stderr))


def check_cell(cell: harness.Cell) -> dict[str, Any]:
    """How far loss and gradients of the compiled loop lie from the eager loop's."""
    d = leaves(cell["workload"], CHECKED, torch.float64)
    found, expected = [gradients(loss_of(cell["workload"], way, d, CHECKED), d) for way in ("compiled", "eager")]
    return {"apart": max(workloads.apart(found, expected).values())}


def gradients(loss: Callable[[], torch.Tensor], d: workloads.Leaves) -> workloads.Gradients:
    """The loss, and its gradients by name, on the CPU."""
    total, names = loss(), [name for name, x in d.items() if x.requires_grad]
    grads = torch.autograd.grad(total, [d[name] for name in names], allow_unused=True)
    pairs = zip(names, grads, strict=True)
    return total.item(), {name: (torch.zeros_like(d[name]) if g is None else g).cpu() for name, g in pairs}


def time_cell(cell: harness.Cell) -> dict[str, Any]:
    w, T = cell["workload"], cell["T"]
    d = leaves(w, T, torch.float32)
    loss, inputs = loss_of(w, cell["variant"], d, T), workloads.differentiated(d)

    def run() -> None:
        torch.autograd.grad(loss(), inputs, allow_unused=True)
        torch.cuda.synchronize()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        total = harness.seconds(run, cell["repeats"])
    reasons = [str(w.message) for w in told if issubclass(w.category, front.NotCompiledWarning)]
    return {"first_s": [first], "total_s": total} | ({"not_compiled": reasons[0]} if reasons else {})


# ---- what the page says ----


def section(result: Result, picture: str) -> str:
    kinds = {entry["cell"]["kind"] for entry in result["entries"]}
    return "\n\n".join([*(times(result) if "time" in kinds else ()), *(counts(result) if "counts" in kinds else ())])


def times(result: Result) -> list[str]:
    rows = []
    # What has been counted stands in the same results.
    steps_of = {e["cell"]["workload"]: e["cell"]["T"] for e in result["entries"] if e["cell"]["kind"] == "time"}
    for w, steps in steps_of.items():
        found = [harness.milliseconds(result, "total_s", kind="time", workload=w, variant=way) for way in WAYS]
        rows.append([f"{TITLES[w]}, T={steps:,}", *("-" if x is None else harness.digits(x) for x in found)])
    text = "Milliseconds of forward + backward on the device, float32, medians of 10 runs. "
    return [text + "Columns of other libraries have their own kernels.", harness.table(["", *WAYS.values()], rows)]


def counts(result: Result) -> list[str]:
    rows, left, failed = [], dict[str, list[str]](), list[str]()
    for w, said in ((e["cell"]["workload"], e["raw"][0]) for e in result["entries"] if e["cell"]["kind"] == "counts"):
        row = [TITLES[w]]
        if refused := said.get("refused"):
            count, _, why = refused.partition(": ")
            left.setdefault(why, []).append(f"{TITLES[w]} ({count.partition(', of')[0]})")
        failed += [f"- {TITLES[w]}: {said[key]}" for key in said if key.endswith("error")]
        for way in gpu_counts.WAYS:
            of = partial(harness.figure, result, kind="counts", workload=w)
            figures = [of(f"{way}_{key}") for key in ("short_launches", "long_launches", "short_waits", "long_waits")]
            row += (
                ["-", "-"]
                if None in figures
                else [" / ".join(f"{x:g}" for x in pair if x is not None) for pair in (figures[:2], figures[2:])]
            )
        rows.append(row)
    text = (
        f"Launches and waits of one forward + backward, of {gpu_counts.SHORT} / {gpu_counts.LONG} steps in each row, "
        "once the plan is made. They were counted on a pretended device: what a launch takes is for a GPU to say."
    )
    heads = [f"{name}: {what}" for name in gpu_counts.WAYS.values() for what in ("launches", "waits")]
    found = [text, harness.table(["", *heads], rows)]
    if left:
        notes = [f"- {'; '.join(loops)}: {why}." for why, loops in left.items()]
        found.append(
            "Run as graphs where kernels are asked for, so that the last two columns are theirs:\n\n" + "\n".join(notes)
        )
    return [*found, *(["Not counted:\n\n" + "\n".join(failed)] if failed else [])]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--counts", action="store_true", help="launches and waits, on a pretended device")
    parser.add_argument("--rehearse", action="store_true", help="with --quick: the timed runs, on a pretended device")
    names.add_only(parser, TITLES)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    peers=[JAX],
    options=options,
    group=lambda cell: f"{COUNTED}{cell['workload']}" if cell["kind"] == "counts" else cell["workload"],
    beside=lambda group, cells: group.startswith(COUNTED) != (cells[0]["kind"] == "counts"),
    together=lambda cell: cell["kind"] != "counts",
    titles=TITLES | {f"{COUNTED}{name}": f"{title}, counted" for name, title in TITLES.items()},
)

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[2:]) if sys.argv[1:2] == ["first-day"] else SCRIPT.main())
