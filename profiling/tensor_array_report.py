"""What tensor_array.py makes of its figures: targets, tables, a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import micro
import plots
import workloads

LABELS = {
    "tensor_array": "TensorArray",
    "list": "Python list",
    "list_unbind": "list + stack, xs.unbind(0)",
    "list_index": "list + stack, xs[t]",
    "inplace": "ys[t] = x",
    "inplace_unbind": "ys[t] = x, xs.unbind(0)",
    "inplace_index": "ys[t] = x, xs[t]",
    "inplace_clone": "ys[t] = x, read + clone",
    "cat": "torch.cat",
    "cat_batch_first": "torch.cat, batch first",
    "stack": "torch.stack each step",
    "index": "tensor, xs[t]",
    "slice": "tensor, xs[:t]",
    "unbind": "tensor, xs.unbind(0)",
}
# Colours and markers: the same for code of the same kind, different within each workload.
STYLES = {
    "tensor_array": 0,
    "cat": 1,
    "list": 2,
    "list_unbind": 2,
    "list_index": 3,
    "stack": 3,
    "inplace_index": 4,
    "inplace_clone": 4,
    "inplace_unbind": 5,
    "cat_batch_first": 5,
}
TITLES = {
    "W1": "W1: slice by slice",
    "W3": "W3: a cache that trains",
    "ring": "ring: a memory of 64 slots",
}
UNITS = {"time": ("total_s", 1e-3, "ms"), "memory": ("peak_bytes", 2**20, "MiB")}  # key, divided by, shown in
GRADIENTS_AGREE = 1e-12  # relative, float64

Result = dict[str, Any]


def find(result: Result, kind: str, workload: str, T: int, variant: str) -> harness.Entry | None:
    wanted = {"kind": kind, "workload": workload, "T": T, "variant": variant}
    return next((e for e in result["entries"] if wanted.items() <= e["cell"].items()), None)


def value(result: Result, kind: str, workload: str, T: int, variant: str) -> float | None:
    """The median of a time cell in ms, of a memory cell in MiB; None where it was not measured or failed."""
    key, divisor, _ = UNITS[kind]
    median = harness.median(find(result, kind, workload, T, variant), key)
    return None if median is None else median / divisor


def of_kind(result: Result, kind: str) -> Iterator[harness.Entry]:
    return (entry for entry in result["entries"] if entry["cell"]["kind"] == kind)


def sizes(result: Result, workload: str) -> list[int]:
    return sorted({e["cell"]["T"] for e in of_kind(result, "time") if e["cell"]["workload"] == workload})


def measured_workloads(result: Result) -> list[str]:
    return [workload for workload in workloads.VARIANTS if sizes(result, workload)]


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


# ---- targets ----


def targets(result: Result) -> list[dict[str, Any]]:
    """What was promised, what came out, and whether it holds (None: not measured)."""

    def ours(kind: str, workload: str, T: int) -> float | None:
        return value(result, kind, workload, T, "tensor_array")

    def against(kind: str, workload: str, T: int, peer: str) -> float | None:
        return ratio(ours(kind, workload, T), value(result, kind, workload, T, peer))

    apart = next(
        (
            e["raw"][0].get("tensor_array", {}).get("gradient")
            for e in of_kind(result, "check")
            if (e["cell"]["workload"], e["cell"]["T"]) == ("W3", 1024)
        ),
        None,
    )
    rows = [
        ("W3, T=1024: peak memory / torch.cat", against("memory", "W3", 1024, "cat"), 1 / 20),
        ("W3, T=1024: time / torch.cat", against("time", "W3", 1024, "cat"), 0.7),
        ("W3, T=1024: gradients from torch.cat's, relative, float64", apart, GRADIENTS_AGREE),
        ("W1: time at T=10000 / at T=1000", ratio(ours("time", "W1", 10000), ours("time", "W1", 1000)), 12),
        ("W1, T=10000: time / list + stack + unbind", against("time", "W1", 10000, "list_unbind"), 1.25),
    ]
    return [
        {"target": name, "value": x, "at_most": bound, "met": None if x is None else x <= bound}
        for name, x, bound in rows
    ]


def disagreements(entries: list[harness.Entry]) -> list[str]:
    """Losses or gradients that are not those of the named peer, and checks that failed, a line each."""
    wrong = []
    for entry in entries:
        where = f"{entry['cell']['workload']}, T={entry['cell']['T']}"
        for variant, apart in entry["raw"][0].items():
            if variant == "error":
                wrong.append(f"{where}: {apart}")
            else:
                wrong += [
                    f"{where}, {LABELS[variant]}: {what} {x:.1e} from {LABELS[entry['cell']['peer']]}'s"
                    for what, x in apart.items()
                    if not x <= GRADIENTS_AGREE  # so that NaN is caught
                ]
    return wrong


# ---- tables ----


def figure(x: float | None, unit: str = "") -> str:
    """Three significant digits, without an exponent where the number is of an ordinary size."""
    if x is None:
        return "-"
    text = f"{x:.3g}" if x < 1000 and (x >= 1e-3 or x == 0) else f"{x:,.0f}" if x >= 1000 else f"{x:.1e}"
    return f"{text} {unit}".strip()


def with_ratio(x: float | None, peer: float | None, unit: str) -> str:
    relative = ratio(x, peer)
    return figure(x, unit) if relative is None else f"{figure(x, unit)} ({figure(relative)}x)"


def cell_text(result: Result, kind: str, workload: str, T: int, variant: str) -> str:
    entry = find(result, kind, workload, T, variant)
    if entry and any("error" in raw for raw in entry["raw"]):
        return "error"
    peer = value(result, kind, workload, T, workloads.peer_of(workload))
    return with_ratio(value(result, kind, workload, T, variant), peer, UNITS[kind][2])


def variants(result: Result, workload: str) -> list[str]:
    found = (e["cell"]["variant"] for e in of_kind(result, "time") if e["cell"]["workload"] == workload)
    return list(dict.fromkeys(found))


def workload_table(result: Result, kind: str, workload: str) -> str:
    Ts = sizes(result, workload)
    rows = [
        [LABELS[variant], *(cell_text(result, kind, workload, T, variant) for T in Ts)]
        for variant in variants(result, workload)
    ]
    what = {"time": "forward + backward", "memory": "peak"}[kind]
    return harness.table([what, *(f"T={T}" for T in Ts)], rows)


def check_table(result: Result) -> str:
    rows = [
        [
            f"{e['cell']['workload']}, T={e['cell']['T']}",
            LABELS[variant],
            figure(x["loss"]),
            figure(x["gradient"]),
        ]
        for e in of_kind(result, "check")
        for variant, x in e["raw"][0].items()
    ]
    return harness.table(["loop", "code", "loss", "gradient"], rows, text_columns=2)


def target_table(result: Result) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [[t["target"], figure(t["value"]), figure(t["at_most"]), words[t["met"]]] for t in result["targets"]]
    return harness.table(["target", "measured", "at most", ""], rows)


def micro_table(result: Result) -> str:
    rows = []
    for entry in of_kind(result, "micro"):
        operation = entry["cell"]["operation"]
        for variant in micro.OPERATIONS[operation]:
            both = [harness.median(entry, f"{variant} {way}") for way in ("forward", "backward")]
            total = None if None in both else sum(x for x in both if x is not None)
            rows.append([operation, LABELS[variant], *(figure(x) for x in [*both, total])])
    return harness.table(["operation", "code", "forward, us", "backward, us", "both, us"], rows, text_columns=2)


def piece_table(result: Result) -> str:
    (entry,) = of_kind(result, "pieces")
    rows = [[name, figure(harness.median(entry, name))] for name in entry["raw"][0]]
    return harness.table(["piece", "us"], rows)


def breakdown_table(result: Result) -> str:
    (entry,) = of_kind(result, "pieces")
    pieces = {name: harness.median(entry, name) or 0.0 for name in entry["raw"][0]}
    rows = []
    for measured in of_kind(result, "micro"):
        operation = measured["cell"]["operation"]
        for way in ("forward", "backward"):
            whole = harness.median(measured, f"tensor_array {way}")
            if whole is not None:
                parts = list(micro.breakdown(operation, way, pieces).values())
                rows.append([f"{operation}, {way}", *(f"{x:.1f}" for x in [whole, *parts, whole - sum(parts)])])
    return harness.table(["us", "measured", *micro.GROUPS, "rest"], rows)


def command(result: Result) -> str:
    return f"Made by `{result['about']['command']}`."


def circumstances(result: Result) -> str:
    about = result["about"]
    machine, versions = about["machine"], about["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {about['threads']} threads; "
        f"torch {versions['torch']}, Python {versions['python']}, tensorloop {versions['tensorloop']}; "
        f"{about['date']}; rounds: {about['rounds']}; load of the machine at the start: {about['load_at_start']}."
    )


def benchmarks(result: Result, picture: str) -> str:
    """All tables, each under the command that made it."""
    made = command(result)
    parts = [circumstances(result), f"![Time and peak memory over T]({picture})", made]
    parts += ["### Targets", made, target_table(result)]
    for workload in measured_workloads(result):
        note = f"{made} In brackets: relative to {LABELS[workloads.peer_of(workload)]}."
        parts.append(f"### {TITLES[workload]}")
        parts += [note, workload_table(result, "time", workload)]
        parts += [note, workload_table(result, "memory", workload)]
    parts += [
        "### Losses and gradients",
        f"{made} Relative differences from the peer that the ratios are taken against, in float64.",
        check_table(result),
        "### Single operations",
        f"{made} Elements (8, 64), float32; prefixes of at most {micro.SMALL} slots.",
        micro_table(result),
        "### Where the microseconds go",
        f"{made} Pieces timed alone:",
        piece_table(result),
        f"{made} What TensorArray's operations need of them at the least, and the rest: attribute access, "
        "the autograd engine, bookkeeping. It is below 0 where less is done than the account has.",
        breakdown_table(result),
    ]
    return "\n\n".join(parts)


def readme_figures(result: Result, picture: str) -> str:
    """The largest size of each workload, with every peer."""
    rows = []
    for workload in measured_workloads(result):
        T = sizes(result, workload)[-1]
        for variant in variants(result, workload):
            texts = [cell_text(result, kind, workload, T, variant) for kind in UNITS]
            rows.append([f"{TITLES[workload]}, T={T}", LABELS[variant], *texts])
    table = harness.table(["loop", "code", "forward + backward", "peak memory"], rows, text_columns=2)
    peers = ", ".join(f"{LABELS[workloads.peer_of(w)]} ({w})" for w in measured_workloads(result))
    return "\n\n".join(
        [
            f"![Time and peak memory over the number of steps, TensorArray and plain PyTorch]({picture})",
            table,
            f"{command(result)} In brackets: relative to {peers}. {circumstances(result)}",
        ]
    )


# ---- picture ----


def draw(result: Result, path: Path) -> None:
    """Time above, peak memory below, a column for each workload."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = measured_workloads(result)
    canvas, grid = pyplot.subplots(2, len(shown), figsize=(5.2 * len(shown), 7), squeeze=False)
    for column, workload in enumerate(shown):
        for row, (kind, (_, _, unit)) in enumerate(UNITS.items()):
            lines = []
            for variant in variants(result, workload):
                points = [(T, value(result, kind, workload, T, variant)) for T in sizes(result, workload)]
                kept = [(T, v) for T, v in points if v is not None and v > 0]
                if kept:
                    Ts, values = zip(*kept, strict=True)
                    ours = variant == "tensor_array"
                    lines.append(plots.Curve(LABELS[variant], Ts, values, STYLES[variant], ours))
            what = {"time": "forward + backward", "memory": "peak memory"}[kind]
            plots.curves(grid[row, column], lines, f"{what} ({unit})", TITLES[workload])
    canvas.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=130)
    pyplot.close(canvas)
