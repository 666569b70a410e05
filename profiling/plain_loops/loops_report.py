"""What loops.py makes of its figures: targets, tables, a picture."""

from pathlib import Path

from pages import names, plots, sentences, tables
from plain_loops import loop_workloads as workloads
from running import harness
from running.script import Result, Target

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
TITLES = {key: names.heading(key) for key in ("W4", "W2", "W3", "W5")}
UNKNOWN, LSTM, DECODER, ROWS = (TITLES[key].split(", B=")[0] for key in TITLES)  # in targets
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
# Ways that keep the same: every step, or as many checkpoints.
RIVALS = {
    "W2": {"scan": ("list_unbind", "list_index", "lax_scan"), "scan_sqrt": ("eqx_scan",)},
    "W3": {"scan": ("cat",), "scan_32": ("eqx_buffers",)},
    "W4": {
        "while_loop": ("plain", "lax_scan"),
        **{f"while_loop_{K}": (f"eqx_{K}",) for K in workloads.CHECKPOINTS},
    },
    "W5": {"while_loop_compact": ("masked", "sorted")},
}
GRADIENTS_AGREE = 1e-10  # relative, float64; frameworks round differently
MB = 1e6
SHORT_NAMES = {"time": "time", "memory": "peak memory"}


def ours(variant: str) -> bool:
    return variant.startswith(("scan", "while_loop"))


def against(result: Result, kind: str, workload: str, T: int, variant: str, *peers: str) -> float | None:
    """The ratio to the best of the peers."""
    values = [tables.value(result, kind, workload, T, peer) for peer in peers]
    measured = [x for x in values if x is not None]
    return tables.ratio(tables.value(result, kind, workload, T, variant), min(measured, default=None))


# ---- the budget of a checkpointed loop ----


def counted(result: Result, N: int, K: int) -> dict[str, int] | None:
    entry = tables.first(result, kind="count", T=N)
    return entry["raw"][0].get(str(K)) if entry and entry["raw"] else None


def budget_ms(result: Result, N: int, K: int) -> float | None:
    """What the schedule's plain advances and N steps with backward cost in bare loops."""
    count = counted(result, N, K)
    advance, step = (
        harness.median(tables.first(result, kind="bare", way=way), "step_s") for way in ("forward", "both")
    )
    if count is None or advance is None or step is None:
        return None
    return 1e3 * (count["advances"] * advance + N * step)


def over_budget(result: Result, N: int, K: int) -> float | None:
    return tables.ratio(tables.value(result, "time", "W4", N, f"while_loop_{K}"), budget_ms(result, N, K))


def miscounted(result: Result) -> float | None:
    """The most by which body calls differ from the schedule's advances and the steps themselves."""
    differences = [
        abs(count["calls"] - count["advances"] - N)
        for N in tables.sizes(result, "W4")
        for K in workloads.CHECKPOINTS
        if (count := counted(result, N, K))
    ]
    return max(differences, default=None)


# ---- targets ----


def targets(result: Result) -> list[Target]:
    """At the sizes that were measured; a bound holds for the size that it was set for, others are figures beside it."""
    found = []
    for N in tables.sizes(result, "W4")[-1:]:
        growth = tables.value(result, "memory", "W4", N, "while_loop_32")
        megabytes = None if growth is None else growth * 2**20 / MB
        most = (40, 1.2) if N == 10000 else (None, None)
        found.append(Target(f"{UNKNOWN}, N={N:,}, K=32: peak memory", megabytes, most[0], unit="MB"))
        found.append(Target(f"{UNKNOWN}, N={N:,}, K=32: time / budget", over_budget(result, N, 32), most[1]))
        found.append(Target(f"{UNKNOWN}: body calls beyond the schedule's, any N and K", miscounted(result), 0))
    plain = "list_unbind", "list_index"
    for T in tables.sizes(result, "W2"):
        for kind, bound in (("time", 1.05), ("memory", 1.01)):
            what = f"{LSTM}, T={T:,}: {SHORT_NAMES[kind]} / best plain loop"
            found.append(Target(what, against(result, kind, "W2", T, "scan", *plain), bound))
    for check in (entry["raw"][0] for entry in result["checks"] if entry["cell"]["workload"] == "W3"):
        for variant in ("scan", "scan_32"):
            what = f"{DECODER}, {LABELS['W3'][variant]}: gradients from torch.cat's, float64"
            found.append(Target(what, check.get(variant, {}).get("gradient"), GRADIENTS_AGREE))
    return [*found, *targets_of_rows(result)]


def targets_of_rows(result: Result) -> list[Target]:
    """Those of rows that stop on their own."""
    found, Ts = [], tables.sizes(result, "W5")
    for T in Ts[-1:]:
        most = (1, 0.75) if T == 4096 else (None, None)
        for variant in ("while_loop", "while_loop_compact"):
            label = LABELS["W5"][variant]
            if Ts[0] < T:
                long, short = (tables.value(result, "memory", "W5", t, variant) for t in (T, Ts[0]))
                what = f"{ROWS}, {label}: peak memory at T={T:,} / at T={Ts[0]:,}"
                found.append(Target(what, tables.ratio(long, short), 1.1 * T / Ts[0]))
            memory = against(result, "memory", "W5", T, variant, "masked")
            found.append(Target(f"{ROWS}, T={T:,}, {label}: peak memory / plain loop", memory, most[0]))
        time = against(result, "time", "W5", T, "while_loop_compact", "masked")
        found.append(Target(f"{ROWS}, T={T:,}, compact: time / plain loop", time, most[1]))
    return found


# ---- tables ----


def budget_table(result: Result) -> str:
    rows = []
    for N in tables.sizes(result, "W4"):
        for K in workloads.CHECKPOINTS:
            count = counted(result, N, K) or {}
            time = tables.value(result, "time", "W4", N, f"while_loop_{K}")
            figures = [
                *(f"{count[key]:,}" if key in count else "-" for key in ("advances", "calls")),
                harness.digits(budget_ms(result, N, K), "ms"),
                tables.with_ratio(time, budget_ms(result, N, K), "ms"),
            ]
            rows.append([f"N={N:,}, K={K}", *figures])
    return harness.table(["", "plain advances", "body calls", "budget", "measured"], rows)


def summary(result: Result) -> list[str]:
    """What 32 checkpoints hold of the longest loop, then where a peer is faster or smaller."""
    text: list[str] = []
    for N in tables.sizes(result, "W4")[-1:]:
        kept, plain = (tables.value(result, "memory", "W4", N, way) for way in ("while_loop_32", "plain"))
        slower = against(result, "time", "W4", N, "while_loop_32", "plain")
        if kept and plain and slower:
            text.append(
                f"{UNKNOWN}, {N:,} steps, peaks at {harness.digits(kept, 'MiB')} with 32 checkpoints and at "
                f"{harness.digits(plain, 'MiB')} as a plain loop. With checkpoints it takes "
                f"{sentences.times(slower)} times as long."
            )
    found: list[str] = []
    for kind in tables.UNITS:
        ratios = {}
        for workload, ways in RIVALS.items():
            for T in tables.sizes(result, workload)[-1:]:
                for way, peers in ways.items():
                    for peer in peers:
                        name = f"{LABELS[workload][peer]} beside {LABELS[workload][way]}, {tables.title(workload)}"
                        ratios[name] = against(result, kind, workload, T, way, peer)
        found += sentences.winners(ratios, kind)
    return [*text, *found]


def section(result: Result, picture: str) -> str:
    parts = [f"![Time and peak memory of loops]({picture})"]
    for workload in measured(result):
        plain = workloads.PLAIN[workload]
        parts += [f"### {TITLES[workload]}", f"In brackets: relative to {LABELS[workload][plain]}."]
        letter = "N" if workload == "W4" else "T"
        parts += [tables.over_T(result, kind, workload, LABELS, plain, letter) for kind in tables.UNITS]
        if workload == "W4":
            parts += [
                "The budget: what the schedule's plain advances, and N steps with their backward, cost in a bare loop "
                "of 200 steps. In brackets: relative to it.",
                budget_table(result),
            ]
    parts += [
        "### Losses and gradients",
        "Relative differences from the plain loop that the ratios are taken against, in float64.",
        tables.checked(result, LABELS),
    ]
    return "\n\n".join(parts)


def measured(result: Result) -> list[str]:
    return [workload for workload in TITLES if tables.sizes(result, workload)]


# ---- picture ----


def draw(result: Result, path: Path) -> None:
    """Above, time and memory of the loop of unknown length; below, the other loops beside plain ones."""
    with plots.drawing(path, (14, 10.5)) as drawn:
        upper, lower = drawn.subfigures(2, 1, squeeze=False, hspace=0.06)[:, 0]
        for axes, (kind, (_, _, unit)) in zip(upper.subplots(1, 2), tables.UNITS.items(), strict=True):
            lines = tables.curves(result, kind, "W4", CURVES, ours)
            plots.curves(axes, lines, f"{tables.WHAT[kind]} ({unit})", TITLES["W4"], steps="N (steps)", base=10)
        for axes, kind in zip(lower.subplots(1, 2), tables.UNITS, strict=True):
            plots.ratios(axes, ratio_groups(result, kind), f"{tables.WHAT[kind]}, relative to the plain loop")


def ratio_groups(result: Result, kind: str) -> dict[str, list[plots.Ratio]]:
    """Title -> the variants at the largest size, without the plain loop that is 1."""
    groups = {}
    for workload in measured(result):
        T, plain = tables.sizes(result, workload)[-1], workloads.PLAIN[workload]
        found = [
            plots.Ratio(label, ratio, ours(variant))
            for variant, label in LABELS[workload].items()
            if workload != "W4" and variant != plain and (ratio := against(result, kind, workload, T, variant, plain))
        ]
        if found:
            groups[f"{TITLES[workload]}, T={T:,}"] = found
    return groups
