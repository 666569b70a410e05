"""The headline of docs/benchmarks/README.md, its picture and nothing measured: from the results of the other scripts.

    python profiling/benchmarks_page.py    # after a script has measured anew

Each sentence has figures of one script's stored results. Where those are missing, the sentence is, too; where a peer
wins, the sentence about it stands among those of the peers.
"""

import html
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pages import captions
from running import harness

PAGE, MARKER = "docs/benchmarks/README.md", "headline"
PICTURE = "docs/images/benchmarks.svg"
MIB = 2**20
OURS, THEIRS = "#3987e5", "#8a8a85"
LEFT, WIDTH, ROW, TOP = 20, 600, 40, 66  # of the picture, in pixels


class Fact(NamedTuple):
    """One comparison: what ours takes and what a peer takes."""

    script: str
    what: str
    peer: str
    ours: float | None
    theirs: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.ours and self.theirs else None


def beside(script: str, what: str, peer: str, figures: Sequence[float | None], unit: str) -> Fact:
    ours, theirs = figures
    return Fact(script, what, peer, ours, theirs, unit)


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {"entries": []}


def facts(folder: Path) -> list[Fact]:
    """The comparisons of the headline and the picture, as far as they were measured."""
    found = [*compiled(folder), *memory(folder), *unknown_length(folder), *search(folder), *packed(folder)]
    return [fact for fact in found if fact.ratio]


def compiled(folder: Path) -> list[Fact]:
    results = read(folder, "compiled")
    small = {"kind": "time", "workload": "W2s", "T": 1024, "threads": 1}
    peers = {"eager": "the eager loop", "lax_scan": "lax.scan", "nn_lstm": "nn.LSTM"}

    def of(way: str) -> float | None:
        return harness.milliseconds(results, "total_s", variant=way, **small)

    found = [
        Fact("compiled", "compiled LSTM (B=4, H=32, T=1,024)", name, of("compiled"), of(way), "ms")
        for way, name in peers.items()
    ]
    kept = [mib(results, kind="memory", workload="W2s", variant=way) for way in ("compiled_k32", "eqx_k32")]
    return [*found, beside("compiled", "memory of the compiled LSTM with 32 checkpoints", "Equinox", kept, "MiB")]


def mib(results: dict[str, Any], **cell: Any) -> float | None:
    value = harness.figure(results, "peak_bytes", **cell)
    return value and value / MIB


def memory(folder: Path) -> list[Fact]:
    results = read(folder, "memory_curve")
    kept = [mib(results, workload="W3", T=1024, variant=way) for way in ("tensor_array", "cat")]
    return [beside("memory_curve", "memory of a decoder that attends to 1,024 past steps", "torch.cat", kept, "MiB")]


def unknown_length(folder: Path) -> list[Fact]:
    results, loop = read(folder, "loops"), {"workload": "W4", "T": 10000}
    ways = ("while_loop_32", "plain")
    kept = [mib(results, kind="memory", variant=way, **loop) for way in ways]
    times = [harness.milliseconds(results, "total_s", kind="time", variant=way, **loop) for way in ways]
    what = "of a loop of unknown length, 10,000 steps, 32 checkpoints"
    return [
        beside("loops", f"memory {what}", "a plain loop", kept, "MiB"),
        beside("loops", f"time {what}", "a plain loop", times, "ms"),
    ]


def search(folder: Path) -> list[Fact]:
    results = read(folder, "beam")
    times = [harness.figure(results, "total_s", kind="speed", way=way, steps=256) for way in ("search", "HF")]
    speed = harness.figure(read(folder, "hf"), "ratio", kind="search", model="bart", prompt=8)
    return [
        beside("beam", "beam search, 256 tokens of a transformer", "`generate`", times, "s"),
        Fact("hf", "beam search with BART after 8 tokens", "`generate`", speed and 1 / speed, 1.0, "times"),
    ]


def packed(folder: Path) -> list[Fact]:
    results = read(folder, "packed")
    times = [
        harness.milliseconds(results, "total_s", kind="kept", case="conformer", way=way) for way in ("packed", "padded")
    ]
    short = [
        harness.milliseconds(read(folder, "attention"), "total_s", workload="causal", variant=way, T=16)
        for way in ("packed", "padded sdpa")
    ]
    return [
        beside("packed", "a Conformer block on packed rows", "padded rows", times, "ms"),
        beside("attention", "attention over packed rows of up to 16 tokens", "padded SDPA", short, "ms"),
    ]


# ---- the headline ----


def headline(found: Sequence[Fact]) -> str:
    """A bullet for each kind of result, then those that peers win."""
    of: dict[str, list[Fact]] = {}
    for fact in found:
        of.setdefault(fact.what, []).append(fact)
    lines = [bullet(facts) for facts in of.values() if all(fact.ratio and fact.ratio < 1.05 for fact in facts)]
    lost = [fact for fact in found if fact.ratio and fact.ratio >= 1.05]
    if lost:
        lines += ["", "Where peers win:", "", *(bullet([fact]) for fact in lost)]
    return "\n".join(lines)


def bullet(facts: Sequence[Fact]) -> str:
    """What ours takes, beside each peer, with the page and the script."""
    first = facts[0]
    name = first.what[0].upper() + first.what[1:]
    link = f"([figures]({first.script}.md), [script](../../profiling/{first.script}.py))"
    if first.unit == "times":
        return f"- {name}: {harness.digits(first.ours)} times the time of {first.peer} {link}."
    others = ", ".join(f"{fact.peer} {shown(fact.theirs, fact.unit)}" for fact in facts)
    return f"- {name}: **{shown(first.ours, first.unit)}**; {others} {link}."


def shown(value: float | None, unit: str) -> str:
    return harness.digits(value, unit)


def made_with(folder: Path, found: Sequence[Fact]) -> str:
    """Versions and machines of the results that the headline has figures of."""
    names = dict.fromkeys(fact.script for fact in found)
    made = [about for name in names for about in abouts(read(folder, name))]
    versions = sorted({captions.versions(about)["tensorloop"] for about in made})
    machines = sorted({about["machine"]["processor"] for about in made})
    made_by, processors = " and ".join(versions), " and ".join(machines)
    return (
        f"Measured with tensorloop {made_by} on the CPU ({processors}). Each page has its own machine, versions and "
        "command: compare ratios, not times of different pages."
    )


def abouts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [results["about"], *results.get("again", {}).values()] if "about" in results else []


# ---- the picture ----


def draw(found: Sequence[Fact]) -> str:
    """Bars of ours over the peer's on a log axis, beside a line at 1; colours that light and dark pages bear."""
    ratios = [fact.ratio for fact in found if fact.ratio]
    low = min([*ratios, 0.1])
    high = max([*ratios, 1.5])

    def place(ratio: float) -> float:
        return LEFT + WIDTH * (math.log(ratio) - math.log(low)) / (math.log(high) - math.log(low))

    height = TOP + ROW * len(found) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" font-size="12" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
        "<title>tensorloop / alternative (lower is better)</title>",
        "<style>text { fill: #1f1f1e } .peer { fill: #5d5c57 } .axis { stroke: #1f1f1e } .card { fill: #ffffff }"
        " @media (prefers-color-scheme: dark) { text { fill: #eeeeec } .peer { fill: #b5b4ad }"
        " .axis { stroke: #eeeeec } .card { fill: #1b1b1a } }</style>",
        f'<rect class="card" width="720" height="{height}" rx="8"/>',
        '<text x="16" y="24" font-size="14" font-weight="bold">tensorloop / alternative (lower is better)</text>',
        '<text x="16" y="42" class="peer">time, or memory where it says so; log scale; '
        "right of the line, the alternative wins</text>",
    ]
    one = place(1)
    for number, fact in enumerate(found):
        assert fact.ratio
        y, x = TOP + ROW * number, place(fact.ratio)
        left, width = min(one, x), max(abs(x - one), 1)
        fill = OURS if fact.ratio <= 1 else THEIRS
        label = f"{fact.what}, against {fact.peer}".replace("`", "")
        parts += [
            f'<text x="{LEFT}" y="{y + 11}">{html.escape(label)}</text>',
            f'<rect x="{left:.1f}" y="{y + 17}" width="{width:.1f}" height="14" rx="2" fill="{fill}"/>',
        ]
        parts.append(f'<text x="{max(one, x) + 6:.1f}" y="{y + 28}">{harness.digits(fact.ratio)}</text>')
    parts.append(f'<line class="axis" x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 6}" y2="{height - 12}"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    folder = harness.results("").parent
    found = facts(folder)
    (harness.ROOT / PICTURE).write_text(draw(found))
    picture = f"![A bar for each figure: tensorloop / alternative, lower is better](../images/{Path(PICTURE).name})"
    text = "\n\n".join([headline(found), picture, made_with(folder, found)])
    if not harness.replace_between(harness.ROOT / PAGE, MARKER, text):
        print(f"{PAGE} is unchanged: it lacks the lines of the marker {MARKER}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
