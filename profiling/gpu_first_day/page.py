"""The page of a first day: the verdict, what was run where, then each stage, for somebody who was not there."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpu_first_day.kept import ABSENT, ERROR, Kept, Row

REHEARSED = (
    "**A rehearsal on a pretended device.** No time here means anything, and no driver has been asked; it shows that "
    "every stage runs."
)


def page(identity: Mapping[str, Any], found: Mapping[str, Kept], verdict: Mapping[str, Any]) -> str:
    blocks = ["# The first day on a GPU", *([REHEARSED] if identity["rehearsed"] else [])]
    blocks += [f"**{verdict['answer']}.**", *listed("Against it:", verdict["against"])]
    blocks += listed("Missing for it:", verdict["missing"])
    if verdict["ratios"]:
        blocks.append(f"Kernels relative to graphs: median {verdict['median']:.2f}, worst {verdict['worst']:.2f}.")
    blocks += ["## What was run where", where(identity, found["facts"]), ran(found)]
    blocks += [block for name, kept in found.items() for block in section(name, kept)]
    return "\n\n".join(blocks) + "\n"


def where(identity: Mapping[str, Any], facts: Kept) -> str:
    device, versions = (facts.rows.get(name, {}) for name in ("device", "versions"))
    machine = device.get("said") or device.get(ABSENT) or device.get(ERROR) or "no device was asked"
    shown = [f"{key} {versions[key]}" for key in ("llvmlite", "LLVM", "numba", "numba-cuda") if key in versions]
    told = [
        f"tensorloop {identity['tensorloop']}",
        f"torch {identity['torch']}",
        f"Python {identity['python']}",
        *shown,
    ]
    return f"{machine}. {', '.join(told)}. Sources {identity['sources']}."


def ran(found: Mapping[str, Kept]) -> str:
    rows = ["| stage | ran | failed | absent | not run | seconds | processes |", "| --- |" + " ---: |" * 6]
    for name, kept in found.items():
        numbers = [len(kept.rows), len(kept.errors), len(kept.absent), len(kept.left)]
        cells = [*map(str, numbers), f"{kept.seconds:.0f}", str(kept.processes)] if kept.processes else ["-"] * 6
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def listed(title: str, lines: list[str], most: int = 20) -> list[str]:
    if not lines:
        return []
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return [title, "\n".join(f"- {' '.join(line.split())[:400]}" for line in [*lines[:most], *more])]


def section(name: str, kept: Kept) -> list[str]:
    if not kept.processes:
        return []
    failed = [f"The stage ended before its items: {kept.failed}"] if kept.failed else []
    return [f"## {name.capitalize()}", *failed, *SECTIONS.get(name, plain)(kept), *unfinished(kept)]


def unfinished(kept: Kept) -> list[str]:
    left = kept.left
    return [f"Not run, for want of time: {', '.join(left[:12])}{' ...' if len(left) > 12 else ''}."] if left else []


def outcome(row: Row) -> str:
    if ERROR in row:
        return f"**{row[ERROR]}**"
    return f"absent: {row[ABSENT]}" if ABSENT in row else str(row.get("said", "done"))


def plain(kept: Kept) -> list[str]:
    """An item a line."""
    return listed("", [f"{name}: {outcome(row)}" for name, row in kept.rows.items()], 60)[1:]


def facts(kept: Kept) -> list[str]:
    tools = kept.rows.get("tools", {})
    missing = [name for name, value in tools.items() if value == "not there"]
    return [*plain(kept), *([f"Tools that are not there: {', '.join(missing)}."] if missing else [])]


def proofs(kept: Kept) -> list[str]:
    """How many are right each way, and every other one by name."""
    count, total = Counter[str](), Counter[str]()
    for name, row in kept.rows.items():
        way = " ".join(name.split(" ")[:2])
        total[way] += 1
        count[way] += not (ERROR in row or ABSENT in row or row.get("fell"))
    lines = [f"as {way}: {count[way]} of {total[way]} right and on no lower rung" for way in total]
    refused = Counter(row["refused"] for row in kept.rows.values() if row.get("refused"))
    lines += [f"{number} asked for as kernels and recorded as graphs: {why}" for why, number in refused.items()]
    others = [f"{name}: {outcome(row)}" for name, row in kept.rows.items() if ERROR in row or row.get("fell")]
    return [*listed("", lines, 60)[1:], *listed("Not right, or on a lower rung:", others, 60)]


def times(kept: Kept) -> list[str]:
    """Loops by ways, in milliseconds."""
    loops = list(dict.fromkeys(name.split(" ")[0] for name in kept.names))
    ways = list(dict.fromkeys(name.split(" ", 1)[1] for name in kept.names))
    rows = [f"| ms, forward + backward | steps | {' | '.join(ways)} |", "| --- |" + " ---: |" * (1 + len(ways))]
    for loop in loops:
        of = {way: kept.rows.get(f"{loop} {way}", {}) for way in ways}
        steps = next((row["steps"] for row in of.values() if "steps" in row), "-")
        cells = [f"{row['ms']:.3f}{'*' if row.get('refused') else ''}" if "ms" in row else "-" for row in of.values()]
        rows.append(f"| {loop} | {steps} | {' | '.join(cells)} |")
    others = [f"{name}: {outcome(row)}" for name, row in kept.rows.items() if ERROR in row or ABSENT in row]
    fallen = [f"{name}: {'; '.join(row['fell'])}" for name, row in kept.rows.items() if row.get("fell")]
    stars = ["\\* asked for as a kernel, and recorded as graphs."] if any("*" in row for row in rows) else []
    return ["\n".join(rows), *stars, *listed("Without a time:", others), *listed("On a lower rung:", fallen)]


def tests(kept: Kept) -> list[str]:
    failed = [f"{name}: {test}" for name, row in kept.rows.items() for test in row.get("failed", [])]
    return [*plain(kept), *listed("Failed:", failed, 60)]


SECTIONS = {"facts": facts, "proofs": proofs, "times": times, "tests": tests}
