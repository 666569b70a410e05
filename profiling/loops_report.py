"""What loops.py makes of its figures: targets, tables, a picture."""

from pathlib import Path
from typing import Any

import harness
import loop_overhead
import loop_workloads as workloads
import plots
import tensor_array_report as shared

LABELS = {
    "W2": {
        "scan": "tl.scan",
        "scan_sqrt": "tl.scan, K = √T",
        "list_unbind": "plain loop, xs.unbind(0)",
        "list_index": "plain loop, xs[t]",
        "lax_scan": "lax.scan",
        "eqx_scan": "Equinox scan, about √(2T) checkpoints",
    },
    "W3": {
        "scan": "tl.scan",
        "scan_32": "tl.scan, K=32",
        "cat": "plain loop, torch.cat",
        "eqx_buffers": "Equinox while_loop, buffers",
    },
    "W4": {
        "while_loop": "tl.while_loop",
        **{f"while_loop_{K}": f"tl.while_loop, K={K}" for K in workloads.CHECKPOINTS},
        "plain": "plain loop",
        "segments": "plain, √N checkpointed segments, told N",
        **{f"eqx_{K}": f"Equinox while_loop, K={K}" for K in workloads.CHECKPOINTS},
        "lax_scan": "lax.scan, told N",
    },
    "W5": {
        "while_loop": "tl.while_loop",
        "while_loop_compact": "tl.while_loop, compact",
        "masked": "plain loop, masked",
        "sorted": "plain loop, rows sorted, told lengths",
    },
}
TITLES = {
    "W4": "W4: a loop of unknown length",
    "W2": "W2: an LSTM",
    "W3": "W3: a cache that trains",
    "W5": "W5: rows that stop on their own",
}
# Curves of the picture, with their colours and markers; Equinox's other K lie where ours do.
CURVES = {
    "while_loop": ("tl.while_loop", 0),
    "while_loop_8": ("tl.while_loop, K=8", 5),
    "while_loop_32": ("tl.while_loop, K=32", 2),
    "plain": ("plain loop", 1),
    "segments": ("plain, √N segments", 3),
    "eqx_32": ("Equinox, K=32", 4),
    "lax_scan": ("lax.scan, told N", 6),
}
GRADIENTS_AGREE = 1e-10  # relative, float64; frameworks round differently
MB = 1e6

Result = dict[str, Any]


def ours(variant: str) -> bool:
    return variant.startswith(("scan", "while_loop"))


def against(result: Result, kind: str, workload: str, T: int, variant: str, *peers: str) -> float | None:
    """The ratio to the best of the peers."""
    values = [shared.value(result, kind, workload, T, peer) for peer in peers]
    measured = [x for x in values if x is not None]
    return shared.ratio(shared.value(result, kind, workload, T, variant), min(measured, default=None))


def first(result: Result, **wanted: Any) -> harness.Entry | None:
    return next((e for e in result["entries"] if wanted.items() <= e["cell"].items()), None)


# ---- the budget of a checkpointed loop ----


def counted(result: Result, N: int, K: int) -> dict[str, int] | None:
    entry = first(result, kind="count", T=N)
    return entry["raw"][0].get(str(K)) if entry else None


def budget_ms(result: Result, N: int, K: int) -> float | None:
    """What the schedule's plain advances and N steps with backward cost in bare loops."""
    count = counted(result, N, K)
    advance, step = (harness.median(first(result, kind="bare", way=way), "step_s") for way in ("forward", "both"))
    if count is None or advance is None or step is None:
        return None
    return 1e3 * (count["advances"] * advance + N * step)


def over_budget(result: Result, N: int, K: int) -> float | None:
    return shared.ratio(shared.value(result, "time", "W4", N, f"while_loop_{K}"), budget_ms(result, N, K))


def miscounted(result: Result) -> float | None:
    """The most by which body calls differ from the schedule's advances and the steps themselves."""
    differences = [
        abs(count["calls"] - count["advances"] - N)
        for N in shared.sizes(result, "W4")
        for K in workloads.CHECKPOINTS
        if (count := counted(result, N, K))
    ]
    return max(differences, default=None)


# ---- targets ----


def targets(result: Result) -> list[dict[str, Any]]:
    """What was promised, what came out, and whether it holds (None: not measured)."""
    growth = shared.value(result, "memory", "W4", 10000, "while_loop_32")
    rows = [
        ("W4, N=10000, K=32: peak memory, MB", None if growth is None else growth * 2**20 / MB, 40),
        ("W4, N=10000, K=32: time / budget", over_budget(result, 10000, 32), 1.2),
        ("W4: body calls beyond the schedule's, any N and K", miscounted(result), 0),
    ]
    plain = "list_unbind", "list_index"
    for T in (128, 512, 2048):
        rows.append((f"W2, T={T}: time / best plain loop", against(result, "time", "W2", T, "scan", *plain), 1.05))
        memory = against(result, "memory", "W2", T, "scan", *plain)
        rows.append((f"W2, T={T}: peak memory / best plain loop", memory, 1.01))
    check = first(result, kind="check", workload="W3")
    for variant in ("scan", "scan_32"):
        apart = check["raw"][0].get(variant, {}).get("gradient") if check else None
        rows.append((f"W3, {LABELS['W3'][variant]}: gradients from torch.cat's, float64", apart, GRADIENTS_AGREE))
    for variant in ("while_loop", "while_loop_compact"):
        label = LABELS["W5"][variant]
        long, short = (shared.value(result, "memory", "W5", T, variant) for T in (4096, 1024))
        rows.append((f"W5, {label}: peak memory at T=4096 / at T=1024", shared.ratio(long, short), 4.4))
        memory = against(result, "memory", "W5", 4096, variant, "masked")
        rows.append((f"W5, T=4096, {label}: peak memory / plain loop", memory, 1))
    time = against(result, "time", "W5", 4096, "while_loop_compact", "masked")
    rows.append(("W5, T=4096, compact: time / plain loop", time, 0.75))
    return [
        {"target": name, "value": x, "at_most": bound, "met": None if x is None else x <= bound}
        for name, x, bound in rows
    ]


def disagreements(entries: list[harness.Entry]) -> list[str]:
    """Losses or gradients that are not the plain loop's, and checks that failed, a line each."""
    wrong = []
    for entry in entries:
        workload = entry["cell"]["workload"]
        where = f"{workload}, T={entry['cell']['T']}"
        answers = entry["raw"][0]
        if "error" in answers:
            wrong.append(f"{where}: {answers['error']}")
            continue
        for variant, apart in answers.items():
            label = f"{where}, {LABELS[workload][variant]}"
            if "error" in apart:
                wrong.append(f"{label}: {apart['error']}")
            elif "absent" not in apart:
                wrong += [
                    f"{label}: {what} {x:.1e} from the plain loop's"
                    for what, x in apart.items()
                    if not x <= GRADIENTS_AGREE  # so that NaN is caught
                ]
    return wrong


# ---- tables ----


def cell_text(result: Result, kind: str, workload: str, T: int, variant: str) -> str:
    entry = shared.find(result, kind, workload, T, variant)
    for word, text in (("error", "error"), ("absent", "not installed")):
        if entry and any(word in raw for raw in entry["raw"]):
            return text
    plain = shared.value(result, kind, workload, T, workloads.PLAIN[workload])
    return shared.with_ratio(shared.value(result, kind, workload, T, variant), plain, shared.UNITS[kind][2])


def workload_table(result: Result, kind: str, workload: str) -> str:
    Ts = shared.sizes(result, workload)
    letter = "N" if workload == "W4" else "T"
    rows = [
        [label, *(cell_text(result, kind, workload, T, variant) for T in Ts)]
        for variant, label in LABELS[workload].items()
    ]
    what = {"time": "forward + backward", "memory": "peak memory"}[kind]
    return harness.table([what, *(f"{letter}={T:,}" for T in Ts)], rows)


def budget_table(result: Result) -> str:
    rows = []
    for N in shared.sizes(result, "W4"):
        for K in workloads.CHECKPOINTS:
            count = counted(result, N, K) or {}
            time = shared.value(result, "time", "W4", N, f"while_loop_{K}")
            figures = [
                *(f"{count[key]:,}" if key in count else "-" for key in ("advances", "calls")),
                shared.figure(budget_ms(result, N, K), "ms"),
                shared.with_ratio(time, budget_ms(result, N, K), "ms"),
            ]
            rows.append([f"N={N:,}, K={K}", *figures])
    return harness.table(["W4", "plain advances", "body calls", "budget", "measured"], rows)


def check_table(result: Result) -> str:
    rows = [
        [f"{entry['cell']['workload']}, T={entry['cell']['T']}", LABELS[entry["cell"]["workload"]][variant], *figures]
        for entry in shared.of_kind(result, "check")
        for variant, apart in entry["raw"][0].items()
        for figures in [
            ["not installed"] * 2 if "absent" in apart else [shared.figure(apart[x]) for x in ("loss", "gradient")]
        ]
    ]
    return harness.table(["loop", "code", "loss", "gradient"], rows, text_columns=2)


def overhead_table(result: Result) -> str:
    keeps = {"all": "every step", "checkpoints": "K=32"}
    ways = {"forward": "forward", "both": "forward + backward"}
    rows = [
        [f"tl.{loop}", kept_text, way_text, *(microseconds(harness.median(entry, key)) for key in keys)]
        for loop in loop_overhead.LOOPS
        for entry in [first(result, kind="overhead", loop=loop)]
        for kept, kept_text in keeps.items()
        for way, way_text in ways.items()
        for keys in [[f"{kept} {way} {what}" for what in ("ours", "bare", "over")]]
    ]
    return harness.table(["loop", "keeps", "way", "us a step", "bare loops", "beyond them"], rows, text_columns=3)


def microseconds(x: float | None) -> str:
    return "-" if x is None else f"{x:.1f}"


def circumstances(result: Result) -> str:
    peers = result["about"]["peers"]
    text = ", ".join(f"{name} {version}" for name, version in peers.items()) or "JAX and Equinox not installed"
    return f"{shared.circumstances(result)} {text}."


def benchmarks(result: Result, picture: str) -> str:
    """All tables, each under the command that made it."""
    made = shared.command(result)
    parts = [circumstances(result), f"![Time and peak memory of loops]({picture})", made]
    parts += ["### Loops: targets", made, shared.target_table(result)]
    for workload, title in TITLES.items():
        made_it = shared.command({"about": result.get("again", {}).get(workload, result["about"])})
        note = f"{made_it} In brackets: relative to {LABELS[workload][workloads.PLAIN[workload]]}."
        parts += [f"### {title}", note, workload_table(result, "time", workload)]
        parts += [note, workload_table(result, "memory", workload)]
        if workload == "W4":
            parts += [
                f"{made} The budget: what the schedule's plain advances, and N steps with their backward, cost in a "
                "bare loop of 200 steps. In brackets: relative to it.",
                budget_table(result),
            ]
    parts += [
        "### Loops: losses and gradients",
        f"{made} Relative differences from the plain loop that the ratios are taken against, in float64.",
        check_table(result),
        "### Loops: the cost of a step",
        f"{made} Microseconds a step of a loop of {first_length(result)} steps whose body turns four vectors of two "
        "numbers. Bare loops: the same body calls in Python loops, plain advances without gradient.",
        overhead_table(result),
    ]
    return "\n\n".join(parts)


def first_length(result: Result) -> int:
    return next(shared.of_kind(result, "overhead"))["cell"]["T"]


# ---- picture ----


def draw(result: Result, path: Path) -> None:
    """Above, W4's time and memory over N; below, how the other loops compare with the plain one."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    canvas = pyplot.figure(figsize=(14, 10.5), layout="constrained")
    upper, lower = canvas.subfigures(2, 1, squeeze=False, hspace=0.06)[:, 0]
    for axes, (kind, (_, _, unit)) in zip(upper.subplots(1, 2), shared.UNITS.items(), strict=True):
        what = {"time": "forward + backward", "memory": "peak memory"}[kind]
        plots.curves(axes, curves(result, kind), f"{what} ({unit})", TITLES["W4"], steps="N (steps)", base=10)
    for axes, kind in zip(lower.subplots(1, 2), shared.UNITS, strict=True):
        what = {"time": "Forward + backward", "memory": "Peak memory"}[kind]
        plots.ratios(axes, ratio_groups(result, kind), f"{what}, relative to the plain loop")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=120)
    pyplot.close(canvas)


def curves(result: Result, kind: str) -> list[plots.Curve]:
    lines = []
    for variant, (label, style) in CURVES.items():
        points = [(N, shared.value(result, kind, "W4", N, variant)) for N in shared.sizes(result, "W4")]
        kept = [(N, v) for N, v in points if v is not None and v > 0]
        if kept:
            Ns, values = zip(*kept, strict=True)
            lines.append(plots.Curve(label, Ns, values, style, ours(variant)))
    return lines


def ratio_groups(result: Result, kind: str) -> dict[str, list[plots.Ratio]]:
    """Title -> the variants at the largest size, without the plain loop that is 1."""
    groups = {}
    for workload in ("W2", "W3", "W5"):
        T = shared.sizes(result, workload)[-1]
        found = [
            plots.Ratio(label, ratio, ours(variant))
            for variant, label in LABELS[workload].items()
            if variant != workloads.PLAIN[workload]
            and (ratio := against(result, kind, workload, T, variant, workloads.PLAIN[workload]))
        ]
        if found:
            groups[f"{TITLES[workload]}, T={T:,}"] = found
    return groups
