"""What tensor_array.py makes of its figures: targets, tables, a picture."""

from pathlib import Path

from pages import names, plots, sentences, tables
from plain_loops import micro, workloads
from running import harness
from running.script import Result, Target

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
TITLES = {key: names.heading(key) for key in ("W1", "W3", "ring")}
SLICES, DECODER = "Slice by slice", TITLES["W3"].split(", B=")[0]  # in targets
GRADIENTS_AGREE = 1e-12  # relative, float64
LABELS_OF = dict.fromkeys(TITLES, LABELS)


def measured_workloads(result: Result) -> list[str]:
    return [workload for workload in workloads.VARIANTS if tables.sizes(result, workload)]


# ---- targets ----


def targets(result: Result) -> list[Target]:
    def ours(kind: str, workload: str, T: int) -> float | None:
        return tables.value(result, kind, workload, T, "tensor_array")

    def against(kind: str, workload: str, T: int, peer: str) -> float | None:
        return tables.ratio(ours(kind, workload, T), tables.value(result, kind, workload, T, peer))

    apart = next(
        (
            e["raw"][0].get("tensor_array", {}).get("gradient")
            for e in result["checks"]
            if (e["cell"]["workload"], e["cell"]["T"]) == ("W3", 1024)
        ),
        None,
    )
    growth = tables.ratio(ours("time", "W1", 10000), ours("time", "W1", 1000))
    return [
        Target(f"{DECODER}, T=1,024: peak memory / torch.cat", against("memory", "W3", 1024, "cat"), 1 / 20),
        Target(f"{DECODER}, T=1,024: time / torch.cat", against("time", "W3", 1024, "cat"), 0.7),
        Target(f"{DECODER}, T=1,024: gradients from torch.cat's, relative, float64", apart, GRADIENTS_AGREE),
        Target(f"{SLICES}: time at T=10,000 / at T=1,000", growth, 12),
        Target(f"{SLICES}, T=10,000: time / list + stack + unbind", against("time", "W1", 10000, "list_unbind"), 1.25),
    ]


# ---- tables ----


def micro_table(result: Result) -> str:
    rows = []
    for entry in tables.of_kind(result, "micro"):
        operation = entry["cell"]["operation"]
        for variant in micro.OPERATIONS[operation]:
            both = [harness.median(entry, f"{variant} {way}") for way in ("forward", "backward")]
            total = None if None in both else sum(x for x in both if x is not None)
            rows.append([operation, LABELS[variant], *(harness.digits(x) for x in [*both, total])])
    return harness.table(["operation", "code", "forward, us", "backward, us", "both, us"], rows, text_columns=2)


def row_table(result: Result) -> str:
    """Rows at slots of their own: a write, and what the kernel makes of a loop of them."""
    lines = []
    for entry in tables.of_kind(result, "rows"):
        write, loop = (
            [harness.median(entry, f"{way} {what}") for way in ("torch", "kernel")] for what in ("write", "loop")
        )
        size = f"{entry['cell']['rows']}, {entry['cell']['numbers']}"
        lines.append([size, *(harness.digits(x) for x in [*write, tables.ratio(loop[1], loop[0])])])
    return harness.table(["rows, numbers in each", "torch, us", "kernel, us", "loop: kernel / torch"], lines)


def pieces_of(result: Result) -> dict[str, float]:
    """Microseconds of each piece; none where they were not measured."""
    entry = next(tables.of_kind(result, "pieces"), None)
    raws = entry["raw"][:1] if entry else []
    return {name: harness.median(entry, name) or 0.0 for raw in raws if "error" not in raw for name in raw}


def piece_table(result: Result) -> str:
    return harness.table(["piece", "us"], [[name, harness.digits(us)] for name, us in pieces_of(result).items()])


def breakdown_table(result: Result) -> str:
    pieces, rows = pieces_of(result), []
    for measured in tables.of_kind(result, "micro"):
        operation = measured["cell"]["operation"]
        for way in ("forward", "backward"):
            whole = harness.median(measured, f"tensor_array {way}")
            if whole is not None and pieces:
                parts = list(micro.breakdown(operation, way, pieces).values())
                rows.append([f"{operation}, {way}", *(f"{x:.1f}" for x in [whole, *parts, whole - sum(parts)])])
    return harness.table(["us", "measured", *micro.GROUPS, "rest"], rows)


def summary(result: Result) -> list[str]:
    """The decoder beside torch.cat, then where a peer is faster or smaller at the longest size that both have."""
    text: list[str] = []
    for T in tables.sizes(result, "W3")[-1:]:
        (time, cat), (memory, copies) = (
            [tables.value(result, kind, "W3", T, way) for way in ("tensor_array", "cat")] for kind in ("time", "memory")
        )
        if time and cat and memory and copies:
            text.append(
                f"{DECODER}, T={T:,}, is {sentences.speed(time / cat, 'torch.cat')} with a TensorArray, and takes "
                f"{sentences.share(memory / copies)} of its peak memory."
            )
    found: list[str] = []
    for kind in tables.UNITS:
        ratios = {}
        for workload in measured_workloads(result):
            for peer in tables.variants(result, workload)[1:]:
                sizes = [T for T in tables.sizes(result, workload) if tables.value(result, kind, workload, T, peer)]
                if sizes:
                    pair = (tables.value(result, kind, workload, sizes[-1], way) for way in ("tensor_array", peer))
                    ratios[f"{LABELS[peer]}, {tables.title(workload)}"] = tables.ratio(*pair)
        found += sentences.winners(ratios, kind)
    return [*text, *found]


def section(result: Result, picture: str) -> str:
    parts = [f"![Time and peak memory over T]({picture})"]
    for workload in measured_workloads(result):
        peer = workloads.peer_of(workload)
        parts += [f"### {TITLES[workload]}", f"In brackets: relative to {LABELS[peer]}."]
        parts += [tables.over_T(result, kind, workload, LABELS_OF, peer) for kind in tables.UNITS]
    if next(tables.of_kind(result, "rows"), None):
        parts += [
            "### Rows at slots of their own",
            f"`write_rows` by the kernel and by torch operations, {micro.ROW_SLOTS} slots, float32; the loop writes as "
            "often as there are slots, forward and backward.",
            row_table(result),
        ]
    parts += [
        "### Losses and gradients",
        "Relative differences from the peer that the ratios are taken against, in float64.",
        tables.checked(result, LABELS_OF),
        "### Single operations",
        f"Elements (8, 64), float32; prefixes of at most {micro.SMALL} slots.",
        micro_table(result),
        "### Where the microseconds go",
        "Pieces timed alone:",
        piece_table(result),
        "What TensorArray's operations need of them at the least, and the rest: attribute access, the autograd engine, "
        "bookkeeping. It is below 0 where less is done than the account has.",
        breakdown_table(result),
    ]
    return "\n\n".join(parts)


def draw(result: Result, path: Path) -> None:
    """Time above, peak memory below, a column for each workload."""
    shown = measured_workloads(result)
    with plots.drawing(path, (5.6 * len(shown), 7.5)) as drawn:
        grid = drawn.subplots(2, len(shown), squeeze=False)
        for column, workload in enumerate(shown):
            names = {variant: (LABELS[variant], STYLES[variant]) for variant in tables.variants(result, workload)}
            for row, (kind, (_, _, unit)) in enumerate(tables.UNITS.items()):
                lines = tables.curves(result, kind, workload, names, lambda variant: variant == "tensor_array")
                plots.curves(grid[row, column], lines, f"{tables.WHAT[kind]} ({unit})", TITLES[workload])
