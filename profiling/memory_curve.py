"""Peak memory over T: every loop in tensorloop, in plain PyTorch, JAX, Equinox and TensorFlow, with the power of T.

    python profiling/memory_curve.py                                             # some 15 minutes
    python profiling/memory_curve.py --jax-python PYTHON --tf-python PYTHON      # with the peers of peers/README.md
    python profiling/memory_curve.py --only decoder                              # a loop anew, the others stay

The figure is the growth of resident memory over one warm forward and backward, at its highest. Its *exponent* is the
slope of a line through log bytes over log T: 1 is linear. What memory is there in any case, a MiB or two, makes small
exponents smaller. Gradients come first: if one way's differ from the plain loop's, nothing is measured.
"""

import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import loops
import torch
from pages import plots, sentences, tables
from pages.names import add_only
from plain_loops import loop_peers, loop_workloads, loops_report, tensor_array_report, workloads
from plain_loops.workloads import Loop
from running import harness
from running.script import Result, Script, Target

WAYS: dict[str, dict[str, Loop]] = {
    "W1": workloads.VARIANTS["W1"],
    "W2": loop_workloads.VARIANTS["W2"],
    "W3": workloads.VARIANTS["W3"] | loop_workloads.VARIANTS["W3"],
    "W4": loop_workloads.VARIANTS["W4"],
    "W5": loop_workloads.VARIANTS["W5"],
}
PEERS = {
    "W1": ("lax_scan", "tf_array"),
    "W2": (*loop_workloads.PEERS["W2"], "tf_array"),
    "W3": (*loop_workloads.PEERS["W3"], "lax_scan", "tf_gather", "tf_stack"),
    "W4": loop_workloads.PEERS["W4"],
    "W5": ("lax_scan",),
}
PLAIN = {"W1": "list_unbind", **loop_workloads.PLAIN}  # whose gradients are the right ones, and what ratios are against
OURS = {"W1": "tensor_array", "W2": "scan", "W3": "tensor_array", "W4": "while_loop_32", "W5": "while_loop_compact"}
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "quick": {"W1": (20, 40), "W2": (4, 8), "W3": (8, 16), "W4": (40, 80), "W5": (8, 16)},
    "short": {"W1": (1000, 4000), "W3": (128, 512), "W4": (100, 1000)},
    "usual": {
        "W1": (1000, 4000, 10000),
        "W2": (128, 512, 2048),
        "W3": (128, 256, 512, 1024),
        "W4": (100, 1000, 10000),
        "W5": (256, 1024, 4096),
    },
}
SHORT = {  # ways of the short set
    "W1": ("tensor_array", "list_unbind", "inplace_index"),
    "W3": ("tensor_array", "scan_32", "cat", "lax_scan", "eqx_buffers", "tf_gather"),
    "W4": ("while_loop_32", "plain", "eqx_32"),
}
CHECK = {"W1": 200, "W2": 32, "W3": 64, "W4": 200, "W5": 64}  # steps, in float64
# Beyond these sizes a way needs minutes, or all the memory there is, for a curve that is plain by then.
LARGEST = {
    ("W1", "inplace_unbind"): 4000,
    ("W1", "cat"): 4000,
    ("W2", "list_index"): 512,
    ("W3", "lax_scan"): 512,
    ("W3", "tf_gather"): 512,
    ("W3", "tf_stack"): 512,
}
LINEAR = (
    1.2  # the exponent, at most; the decoder's body keeps its attention weights, T numbers in step T, beside the arrays
)
FLAT = 0.1
AGREE = 1e-10  # relative, float64; frameworks round differently

TITLES = {"W1": tensor_array_report.TITLES["W1"], **loops_report.TITLES}
TENSORFLOW = {
    "tf_array": "TensorFlow TensorArray",
    "tf_gather": "TensorFlow TensorArray, gather",
    "tf_stack": "TensorFlow TensorArray, stack",
}
CARRIED = {"lax_scan": "lax.scan, cache in the carry"}
LABELS: dict[str, dict[str, str]] = {
    "W1": tensor_array_report.LABELS | {"lax_scan": "lax.scan"} | TENSORFLOW,
    "W2": loops_report.LABELS["W2"] | TENSORFLOW,
    "W3": tensor_array_report.LABELS | loops_report.LABELS["W3"] | CARRIED | TENSORFLOW,
    "W4": loops_report.LABELS["W4"],
    "W5": loops_report.LABELS["W5"] | {"lax_scan": "lax.scan, masked"},
}
# Curves of the picture with their styles; what lies on another curve is left out, the tables have all.
CURVES: dict[str, tuple[str, ...]] = {
    "W1": ("tensor_array", "list_unbind", "inplace_index", "lax_scan", "tf_array"),
    "W2": ("scan", "list_unbind", "scan_sqrt", "lax_scan", "tf_array", "eqx_scan"),
    "W3": ("tensor_array", "cat", "scan_32", "lax_scan", "tf_gather", "eqx_buffers"),
    "W4": ("while_loop", "plain", "while_loop_32", "lax_scan", "segments", "eqx_32"),
    "W5": ("while_loop", "masked", "while_loop_compact", "lax_scan", "sorted"),
}


def names(args: Namespace, workload: str) -> list[str]:
    return list(SHORT[workload] if args.set == "short" else (*WAYS[workload], *PEERS[workload]))


def chosen(args: Namespace) -> dict[str, tuple[int, ...]]:
    return {w: Ts for w, Ts in SIZES[args.set].items() if not args.only or w in args.only}


def checks(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "check", "workload": w, "T": Ts[0] if args.set == "quick" else CHECK[w], "variants": names(args, w)}
        for w, Ts in chosen(args).items()
    ]


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "memory", "workload": workload, "T": T, "variant": variant}
        for workload, Ts in chosen(args).items()
        for T in Ts
        for variant in names(args, workload)
        if LARGEST.get((workload, variant), T) >= T
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    workload, T = cell["workload"], cell["T"]
    if cell["kind"] == "check":
        return loop_peers.compare(workload, T, WAYS[workload], PLAIN[workload], cell["variants"])
    loop, d = WAYS[workload][cell["variant"]], workloads.leaves(workload, T)
    few = workloads.leaves(workload, min(T, loops.WARM))
    return harness.peak_of(lambda: loop(d), workloads.differentiated(d), warm_up=lambda: workloads.gradients(loop, few))


def exponent(result: Result, workload: str, variant: str) -> float | None:
    """The slope of log bytes over log T; None where fewer than two sizes have a figure."""
    found = [(T, tables.value(result, "memory", workload, T, variant)) for T in tables.sizes(result, workload)]
    points = [(math.log(T), math.log(x)) for T, x in found if x and x > 0]
    if len(points) < 2:
        return None
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def over_T(result: Result, workload: str) -> str:
    """A line for each way: its peaks, and the power of T."""
    Ts, plain, letter = tables.sizes(result, workload), PLAIN[workload], "N" if workload == "W4" else "T"
    rows = []
    for variant in tables.variants(result, workload):
        power = exponent(result, workload, variant)
        figures = [tables.cell_text(result, "memory", workload, T, variant, plain) for T in Ts]
        label = LABELS[workload][variant]
        rows.append([f"**{label}**" if is_ours(variant) else label, *figures, "-" if power is None else f"{power:.2f}"])
    return harness.table(["peak memory", *(f"{letter}={T:,}" for T in Ts), "exponent"], rows)


def is_ours(variant: str) -> bool:
    return variant == "tensor_array" or loops_report.ours(variant)


def measured(result: Result) -> list[str]:
    return [workload for workload in WAYS if tables.sizes(result, workload)]


def section(result: Result, picture: str) -> str:
    parts = [f"![Peak memory over T]({picture})"]
    for workload in measured(result):
        note = f"In brackets: relative to {LABELS[workload][PLAIN[workload]]}."
        parts += [f"### {TITLES[workload]}", note, over_T(result, workload)]
    return "\n\n".join([*parts, "Losses and gradients agree, in float64:", tables.checked(result, LABELS)])


def summary(result: Result) -> list[str]:
    """The decoder beside torch.cat, then every way of ours beside every peer, at the longest size of both."""
    text, ratios = [], {}
    for T in tables.sizes(result, "W3")[-1:]:
        ours, cat = (tables.value(result, "memory", "W3", T, way) for way in ("tensor_array", "cat"))
        if ours and cat:
            peaks = [harness.digits(x, "MiB") for x in (ours, cat)]
            title = loops_report.DECODER
            text.append(f"{title}, T={T:,}, peaks at {peaks[0]} with a TensorArray and at {peaks[1]} with torch.cat.")
    for workload in measured(result):
        way = OURS[workload]
        for peer in tables.variants(result, workload):
            sizes = [T for T in tables.sizes(result, workload) if tables.value(result, "memory", workload, T, peer)]
            if sizes and not is_ours(peer):
                values = [tables.value(result, "memory", workload, sizes[-1], name) for name in (way, peer)]
                name = f"{LABELS[workload][peer]} beside {LABELS[workload][way]}, {tables.title(workload)}"
                ratios[name] = tables.ratio(*values)
    return [*text, *sentences.winners(ratios, "memory")]


def targets(result: Result) -> list[Target]:
    """Ours grows with T at most, and not at all where checkpoints hold what there is to hold."""
    found = []
    for workload in measured(result):
        variant = OURS[workload]
        power, bound = exponent(result, workload, variant), FLAT if workload == "W4" else LINEAR
        found.append(Target(f"{TITLES[workload]}, {LABELS[workload][variant]}: exponent of peak memory", power, bound))
    return found


def draw(result: Result, path: Path) -> None:
    shown = measured(result)
    rows = (len(shown) + 1) // 2
    with plots.drawing(path, (14, 4.2 * rows)) as drawn:
        drawn.suptitle("Peak memory; beside each name the power of T, or N, that it follows", x=0.01, ha="left")
        grid = drawn.subplots(rows, 2, squeeze=False).flatten()
        for axes, workload in zip(grid, shown, strict=False):
            powers = {v: exponent(result, workload, v) for v in CURVES[workload]}
            curves = {
                variant: (LABELS[workload][variant] + ("" if power is None else f": {power:.2f}"), style)
                for style, (variant, power) in enumerate(powers.items())
            }
            lines = tables.curves(result, "memory", workload, curves, is_ours)
            letter, base = "N" if workload == "W4" else "T", 10 if workload in ("W1", "W4") else 2
            plots.curves(axes, lines, "peak memory (MiB)", TITLES[workload], steps=f"{letter} (steps)", base=base)
        for axes in grid[len(shown) :]:
            axes.set_visible(False)


def options(parser: ArgumentParser) -> None:
    add_only(parser, WAYS)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    disagreements=lambda entries: tables.disagreements(entries, LABELS, AGREE),
    targets=targets,
    draw=draw,
    peers=loop_peers.PEERS,
    options=options,
    group=lambda cell: cell["workload"],
    titles=TITLES,
    summary=summary,
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
