"""Kernels of loops under NVIDIA's compute-sanitizer: memory out of bounds, races in shared memory, barriers.

A kernel that is wrong on purpose comes first with each tool: where the tool does not report that one, that it reports
nothing of ours says nothing.
"""

import re
import sys
from functools import partial
from typing import Any

from gpu_first_day.facts import tool_at
from gpu_first_day.kept import ABSENT, ERROR
from gpu_first_day.world import Items, World

TOOLS = ("memcheck", "racecheck", "synccheck")
CASES = 12
FOUND = 9  # the exit status that a tool is told to give where it has found something
NUMBER = re.compile(r"SUMMARY: (\d+)")
OURS = ("--kernel-regex", "kns=run")  # our kernels' name: torch's are neither slowed down nor judged
REFUSED = ("not supported", "Unable to", "Failed to initialize")  # said where the tool cannot work on this machine


def items(world: World) -> Items:
    return {f"{tool}: {what}": partial(ran, world, tool, what) for tool in TOOLS for what in ("planted", "ours")}


def ran(world: World, tool: str, what: str) -> dict[str, Any]:
    sanitizer = tool_at("compute-sanitizer")
    if not sanitizer:
        return {ABSENT: "compute-sanitizer is not on this machine"}
    if what == "planted" and tool == "synccheck":
        return {ABSENT: "no kernel is planted for synccheck"}
    own = [sys.executable, "-m", "gpu_first_day.sanitized", what if what == "ours" else tool]
    own += [str(CASES), *(["--rehearse"] if world.rehearsed else [])]
    command = [sanitizer, "--tool", tool, *OURS, "--error-exitcode", str(FOUND), *own]
    status, text = world.ran(command, f"{tool}-{what}.log", 1 / (len(TOOLS) - TOOLS.index(tool)))
    said = [line.strip("= ") for line in text.splitlines() if line.startswith("=====")]
    summary = next((line for line in reversed(said) if "SUMMARY" in line), "")
    faults = int(number[1]) if (number := NUMBER.search(summary)) else None
    row: dict[str, Any] = {"status": status, "summary": summary}
    if refusal := next((line for line in said if any(word in line for word in REFUSED)), ""):
        return row | {ABSENT: f"compute-sanitizer does not work here: {refusal}"}
    last = (text.strip().splitlines() or ["no output"])[-1]
    if what == "planted":
        return row | ({"said": "reported"} if faults else {ERROR: f"{tool} did not report the planted fault: {last}"})
    row["cases"] = re.findall(r"^ran (\w+)$", text, re.MULTILINE)
    row["launches"] = sum(int(n) for n in re.findall(r"^launches (\d+)$", text, re.MULTILINE))
    if status or faults != 0 or not row["launches"]:
        return row | {ERROR: f"exit status {status}, {row['launches']} launches of ours: {summary or last}"}
    return row | {"said": f"{summary}; {len(row['cases'])} cases, {row['launches']} launches of ours"}
