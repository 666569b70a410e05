"""TensorArray beside plain PyTorch: time, peak memory, gradients, and the microseconds of single operations.

    python profiling/tensor_array.py                   # the least and the greatest sizes: under 5 minutes
    python profiling/tensor_array.py --full            # every size, 3 rounds

Gradients come first: if one variant's differ from another's, nothing is timed and the exit status is 1.
"""

import sys
from argparse import Namespace
from typing import Any

import torch
from pages import tables
from plain_loops import micro, workloads
from plain_loops import tensor_array_report as report
from running import harness
from running.script import Script

SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "quick": {"W3": (8,)},
    "short": {"W1": (1000, 10000), "W3": (1024,)},
    "usual": {"W1": (1000, 4000, 10000), "W3": (256, 1024), "ring": (256, 4096)},
    "full": {"W1": (1000, 4000, 10000), "W3": (128, 256, 512, 1024), "ring": (256, 1024, 4096)},
}
RUNS = {"quick": (1, 1), "short": (1, 3), "usual": (1, 3), "full": (2, 5)}  # warm-ups and timed runs of a process
CHECK = SIZES | {"short": {"W1": (1000,), "W3": (256,)}}  # in float64, where torch.cat needs gigabytes for a W3 of 1024
BRIEF = ("quick", "short")  # sets of ours and the named peer alone


# Beyond these sizes a single run takes half a minute to a minute, for a curve that is plain by then.
LARGEST = {("W1", "inplace_unbind"): 4000, ("W1", "cat"): 4000}


def variants(name: str, workload: str, T: int) -> list[str]:
    """All that finish at this size, or ours and the named peer."""
    names = list(workloads.VARIANTS[workload])[: 2 if name in BRIEF else None]
    return [name for name in names if LARGEST.get((workload, name), T) >= T]


def checks(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "check", "workload": workload, "T": T, "variants": variants(args.set, workload, T)}
        for workload, Ts in CHECK[args.set].items()
        for T in Ts
    ]


def cells(args: Namespace) -> list[harness.Cell]:
    """Variants of one size stand side by side, so that what is compared is measured within seconds."""
    warmups, repeats = RUNS[args.set]
    found: list[harness.Cell] = [
        {"kind": kind, "workload": workload, "T": T, "variant": variant}
        | ({"warmups": warmups, "repeats": repeats} if kind == "time" else {})
        for workload, Ts in SIZES[args.set].items()
        for T in Ts
        for kind in ("time", "memory")
        for variant in variants(args.set, workload, T)
    ]
    operations = list(micro.OPERATIONS)[: 1 if args.set == "quick" else None]
    found += [{"kind": "micro", "operation": name} for name in operations]
    rows = {"quick": micro.ROWS[:1], "short": ()}.get(args.set, micro.ROWS)
    return [*found, *({"kind": "rows", "rows": n, "numbers": numbers} for n, numbers in rows), {"kind": "pieces"}]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    kind = cell["kind"]
    if kind == "micro":
        return micro.operation_costs(cell["operation"])
    if kind == "rows":
        return micro.row_costs(cell["rows"], cell["numbers"])
    if kind == "pieces":
        return micro.piece_costs()
    if kind == "check":
        d = workloads.leaves(cell["workload"], cell["T"], torch.float64)
        loops = workloads.VARIANTS[cell["workload"]]
        right = workloads.gradients(loops[workloads.peer_of(cell["workload"])], d)
        return workloads.compare({variant: loops[variant] for variant in cell["variants"]}, right, d)
    if kind not in ("time", "memory"):
        raise ValueError(f"kind is {kind!r}; expected time, memory, check, micro, rows or pieces")
    d = workloads.leaves(cell["workload"], cell["T"])
    loop = workloads.VARIANTS[cell["workload"]][cell["variant"]]
    if kind == "memory":
        return harness.peak_of(lambda: loop(d), list(d.values()))
    return harness.time_run(lambda: loop(d), list(d.values()), cell["warmups"], cell["repeats"])


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=report.section,
    rounds={"quick": 1, "short": 1, "usual": 1, "full": 3},
    checks=checks,
    disagreements=lambda entries: tables.disagreements(entries, report.LABELS_OF, report.GRADIENTS_AGREE),
    targets=report.targets,
    draw=report.draw,
    summary=report.summary,
    settings=lambda args: dict(zip(("warmups", "repeats"), RUNS[args.set], strict=True)),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
