"""The tests that are for a device, every failure by name, and how they do where warnings are errors."""

import importlib.util
import re
import sys
from functools import partial
from typing import Any

from gpu_first_day.kept import ABSENT, ERROR
from gpu_first_day.world import Items, World

FILES = ("test_gpu_compiled", "test_gpu")
NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
SUMMARY = re.compile(r"^.*\b(?:passed|failed|errors?|skipped|deselected)\b.* in [\d.]+s.*$", re.MULTILINE)
NEEDED = ("pytest", "hypothesis")


def items(world: World) -> Items:
    """Warnings are errors in a run of their own, so that a new torch's do not hide what else there is."""
    kinds = {"": ["-W", "default"], ", warnings as errors": []}
    return {f"{file}{kind}": partial(ran, world, file, more) for kind, more in kinds.items() for file in FILES}


def ran(world: World, file: str, more: list[str]) -> dict[str, Any]:
    if lacks := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return {ABSENT: f"not installed: {', '.join(lacks)}"}
    options = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--durations=8", *more]
    command = [sys.executable, "-m", "pytest", f"tests/{file}.py", *options, *(["--device"] if world.rehearsed else [])]
    status, text = world.ran(command, f"{file}{'' if more else '-errors'}.log")
    failed, summaries = NAMED.findall(text), SUMMARY.findall(text)
    said = summaries[-1].strip("= ") if summaries else (text.strip().splitlines() or ["no output"])[-1]
    row: dict[str, Any] = {"status": status, "failed": failed, "said": said}
    return row if not status and summaries else row | {ERROR: f"exit status {status}: {said}"}
