"""Milliseconds that `import tensorloop` adds to torch's, and what the first touch of a name adds to that.

    python profiling/import_time.py             # some 6 minutes
    python profiling/import_time.py --short     # `import tensorloop` alone

Each figure is the processor time of a fresh process from after `import torch`, as a median over processes. Python
keeps what it has compiled: `kept` is any import but the first, `compiled anew` one from sources that have no cache yet,
or in a place where none can be written. `modules` counts files of tensorloop, `others` those of anybody else that torch
had not loaded.
"""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from pages import plots
from running import harness
from running.script import Result, Script, Target

BUDGET_MS = 100
HOW = ("kept", "compiled anew")
IMPORT = "import tensorloop"
NAMES = ("TensorArray", "scan", "PackedTensor", "attention", "regroup", "beam_search", "minimum_risk")
PROCESSES = {"quick": 1, "short": 3, "usual": 5}
PROGRAM = """
import json, sys, time
import torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], sys.argv[2] == "compiled anew"
before = set(sys.modules)
start = time.process_time()
exec(sys.argv[3])
seconds = time.process_time() - start
new = [name.split(".")[0] for name in set(sys.modules) - before]
ours = new.count("tensorloop")
others = sum(name not in sys.stdlib_module_names for name in new) - ours
print(json.dumps({"seconds": seconds, "modules": ours, "others": others}))
"""


def cells(args: Namespace) -> list[harness.Cell]:
    names = NAMES if args.set == "usual" else ()
    statements = (IMPORT, *(f"{IMPORT}; tensorloop.{name}" for name in names))
    processes = PROCESSES[args.set]
    return [
        {"kind": "import", "statement": statement, "how": how, "processes": processes}
        for statement in statements
        for how in HOW
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """Fresh processes one after the other, which find what the first one has compiled, or nothing."""
    with tempfile.TemporaryDirectory() as cache:
        if cell["how"] == "kept":
            imported(cell, cache)
        found = [imported(cell, cache) for _ in range(cell["processes"])]
    return {key: [answer[key] for answer in found] for key in found[0]}


def imported(cell: harness.Cell, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, cache, cell["how"], cell["statement"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(harness.last_line(done.stderr))
    return json.loads(done.stdout)


def statements(result: Result) -> list[str]:
    return list(dict.fromkeys(entry["cell"]["statement"] for entry in result["entries"]))


def targets(result: Result) -> list[Target]:
    spent = harness.milliseconds(result, "seconds", statement=IMPORT, how="compiled anew")
    return [Target(f"`{IMPORT}`, compiled anew", spent, BUDGET_MS, unit="ms")]


def summary(result: Result) -> list[str]:
    kept, anew = (harness.milliseconds(result, "seconds", statement=IMPORT, how=how) for how in HOW)
    if kept is None or anew is None:
        return []
    return [
        f"After `import torch`, `{IMPORT}` takes {kept:.1f} ms of processor time, or {anew:.1f} ms when Python has to "
        "compile the files first. The first use of a name loads the rest."
    ]


def section(result: Result, picture: str) -> str:
    rows = []
    for statement in statements(result):
        spent = [harness.milliseconds(result, "seconds", statement=statement, how=how) for how in HOW]
        counts = [harness.figure(result, key, statement=statement, how="kept") for key in ("modules", "others")]
        times = ["error" if x is None else f"{x:.1f} ms" for x in spent]
        rows.append([f"`{statement}`", *times, *("-" if x is None else f"{x:.0f}" for x in counts)])
    return "\n\n".join(
        [
            "Processor time, medians. *Modules* are files of tensorloop, *others* those of anybody else that torch had "
            "not loaded.",
            harness.table(["after `import torch`", *HOW, "modules", "others"], rows),
            f"![Milliseconds of the import and of the first touch of a name]({picture})",
        ]
    )


def draw(result: Result, path: Path) -> None:
    """A pair of bars for each statement, beside the budget."""
    shown = statements(result)
    with plots.drawing(path, (8, 1.2 + 0.7 * len(shown))) as drawn:
        axes = drawn.subplots()
        for number, how in enumerate(HOW):
            spent = [harness.milliseconds(result, "seconds", statement=statement, how=how) or 0 for statement in shown]
            heights = [k + 0.36 * (number - 0.5) for k in range(len(shown))]
            bars = axes.barh(heights, spent, height=0.34, label=how, color=plots.COLOURS[0] if number else "#bbbbbb")
            axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8.5)
        axes.axvline(BUDGET_MS, color="black", linewidth=1, linestyle="--", label=f"at most, for `{IMPORT}`")
        axes.set_yticks(range(len(shown)), [text.split("; ")[-1] for text in shown], fontsize=8.5)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("milliseconds of the processor, beyond `import torch`")
        drawn.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 3},
    targets=targets,
    draw=draw,
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
