"""scan and while_loop beside plain PyTorch, JAX and Equinox: time, peak memory, gradients, checkpoints' budget.

    python profiling/loops.py                      # about 12 minutes on two cores
    python profiling/loops.py --jax-python PYTHON  # with the peers of peers/README.md, run by that Python
    python profiling/loops.py --only lstm decoder  # these workloads anew, the others stay as they are

Gradients come first: if one variant's differ from the plain loop's, nothing is timed and the exit status is 1.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import loop_overhead
import torch
from pages import names, tables
from plain_loops import loop_peers
from plain_loops import loop_workloads as workloads
from plain_loops import loops_report as report
from plain_loops.workloads import differentiated, gradients, leaves
from running import harness
from running.script import Script

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "quick": {"W2": (8,), "W3": (8,), "W4": (24,), "W5": (12,)},
    "short": {"W4": (1000,), "W2": (512,), "W5": (1024,)},
    "usual": {"W4": (100, 1000, 10000), "W2": (128, 512, 2048), "W3": (256, 1024), "W5": (1024, 4096)},
}
CHECK = {"W2": 128, "W3": 256, "W4": 1000, "W5": 256}  # steps, in float64; fewer in the quick set
SHORT = {  # variants of the short set
    "W4": ("while_loop", "while_loop_32", "plain", "eqx_32"),
    "W2": ("scan", "list_unbind", "lax_scan"),
    "W5": ("while_loop_compact", "masked"),
}
REPEATS = {"quick": 1, "short": 3, "usual": 5}  # timed runs after one warm-up
BARE = 200  # steps of a bare loop
BARE_REPEATS = {"quick": 1, "short": 10, "usual": 30}
WARM = 500  # steps after which a loop has touched all that any length needs, its residuals apart


# ---- which cells ----


def chosen(args: Namespace) -> dict[str, tuple[int, ...]]:
    sizes = SIZES[args.set]
    return {workload: Ts for workload, Ts in sizes.items() if not args.only or workload in args.only}


def variants(args: Namespace, workload: str) -> Sequence[str]:
    everything = (*workloads.VARIANTS[workload], *workloads.PEERS[workload])
    return SHORT[workload] if args.set == "short" else everything


def checks(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "check", "workload": w, "T": Ts[0] if args.set == "quick" else CHECK[w], "variants": variants(args, w)}
        for w, Ts in chosen(args).items()
    ]


def cells(args: Namespace) -> list[harness.Cell]:
    """Variants of one size stand side by side, so that what is compared is measured within a minute."""
    found: list[harness.Cell] = []
    for workload, Ts in chosen(args).items():
        for T in Ts:
            for kind in tables.UNITS:
                if (kind, workload, T) == ("time", "W4", Ts[-1]):
                    found += [
                        {"kind": "bare", "workload": "W4", "way": way, "repeats": BARE_REPEATS[args.set]}
                        for way in ("forward", "both")
                    ]
                found += [
                    {"kind": kind, "workload": workload, "T": T, "variant": variant}
                    | ({"repeats": REPEATS[args.set]} if kind == "time" else {})
                    for variant in variants(args, workload)
                ]
            if workload == "W4":
                found.append({"kind": "count", "workload": "W4", "T": T})
    return found


# ---- what a process of its own does ----


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    kinds = {
        "time": time_cell,
        "memory": memory_cell,
        "check": check_cell,
        "count": count_cell,
        "bare": bare_cell,
    }
    if cell["kind"] not in kinds:
        raise ValueError(f"kind is {cell['kind']!r}; expected one of {', '.join(kinds)}")
    return kinds[cell["kind"]](cell)


def warm_up(workload: str, variant: str, T: int) -> None:
    gradients(workloads.VARIANTS[workload][variant], leaves(workload, min(T, WARM)))


def time_cell(cell: harness.Cell) -> dict[str, Any]:
    workload, variant, T = cell["workload"], cell["variant"], cell["T"]
    loop, d = workloads.VARIANTS[workload][variant], leaves(workload, T)
    briefly = variant in workloads.FLAT
    if briefly:
        warm_up(workload, variant, T)
    warmups = 0 if briefly else 1
    return harness.time_run(lambda: loop(d), differentiated(d), warmups, cell["repeats"])


def memory_cell(cell: harness.Cell) -> dict[str, Any]:
    workload, variant, T = cell["workload"], cell["variant"], cell["T"]
    loop, d = workloads.VARIANTS[workload][variant], leaves(workload, T)
    inputs = differentiated(d)
    return harness.peak_of(lambda: loop(d), inputs, warm_up=lambda: warm_up(workload, variant, T))


def check_cell(cell: harness.Cell) -> dict[str, Any]:
    """How far losses and gradients lie from the plain loop's, in float64."""
    workload, T = cell["workload"], cell["T"]
    return loop_peers.compare(workload, T, workloads.VARIANTS[workload], workloads.PLAIN[workload], cell["variants"])


def count_cell(cell: harness.Cell) -> dict[str, Any]:
    """K -> how often the body ran, and the plain advances of the schedule."""
    return {
        str(K): {
            "calls": workloads.w4_body_calls(cell["T"], K),
            "advances": loop_overhead.planned_advances(cell["T"], K, known=False),
        }
        for K in workloads.CHECKPOINTS
    }


def bare_cell(cell: harness.Cell) -> dict[str, Any]:
    d = leaves("W4", BARE)

    def loss(count: int) -> torch.Tensor:
        return (workloads.w4_steps(d, d["x0"], count) ** 2).sum()

    return {"step_s": loop_overhead.bare_steps(loss, differentiated(d), BARE, cell["way"], cell["repeats"])}


def options(parser: ArgumentParser) -> None:
    names.add_only(parser, workloads.VARIANTS)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=report.section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    disagreements=lambda entries: tables.disagreements(entries, report.LABELS, report.GRADIENTS_AGREE),
    targets=report.targets,
    draw=report.draw,
    peers=[loop_peers.JAX],
    options=options,
    group=lambda cell: cell["workload"],
    titles=report.TITLES,
    summary=report.summary,
    settings=lambda args: {"repeats": REPEATS[args.set]},
    # The loop of unknown length contracts: its gradients fade into denormal numbers, which are many times slower.
    # XLA has none either.
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
