"""Milliseconds that `import tensorloop` adds to torch's, and what the first touch of a name adds to that.

Each figure is the processor time of a fresh process from after `import torch`, as a median over processes. Python
keeps what it has compiled: `kept` is any import but the first, `compiled anew` one from sources that have no cache yet,
or in a place where none can be written. `modules` counts files of tensorloop, `others` those of anybody else that torch
had not loaded.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

BUDGET_MS = 100
HOW = ("kept", "compiled anew")
IMPORT = "import tensorloop"
STATEMENTS = (IMPORT, *(f"{IMPORT}; tensorloop.{name}" for name in ("scan", "PackedTensor", "attention", "regroup")))
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


def run_cell(cache: Path, cell: harness.Cell) -> dict[str, Any]:
    """One statement in a fresh process that finds what was compiled before in `cache`, or nothing."""
    folder = cache / ("kept" if cell["how"] == "kept" else "empty")
    command = [sys.executable, "-c", PROGRAM, str(folder), cell["how"], cell["statement"]]
    environment = os.environ | {"PYTHONPATH": str(harness.ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=harness.TIMEOUT_S)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout)


def measure(statements: tuple[str, ...], rounds: int) -> list[harness.Entry]:
    cells = [{"kind": "import", "statement": statement, "how": how} for statement in statements for how in HOW]
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells:  # fills the cache
            run_cell(Path(folder), cell)
        return harness.measure(Path(folder), cells, rounds, run_cell)


def figure(entries: list[harness.Entry], statement: str, how: str, key: str) -> float:
    (entry,) = (e for e in entries if (e["cell"]["statement"], e["cell"]["how"]) == (statement, how))
    found = harness.median(entry, key)
    return float("nan") if found is None else found


def report(entries: list[harness.Entry], about: dict[str, Any]) -> str:
    rows = [
        [
            f"`{statement}`",
            *(f"{1e3 * figure(entries, statement, how, 'seconds'):.1f} ms" for how in HOW),
            *(f"{figure(entries, statement, 'kept', key):.0f}" for key in ("modules", "others")),
        ]
        for statement in dict.fromkeys(entry["cell"]["statement"] for entry in entries)
    ]
    worst = 1e3 * figure(entries, IMPORT, "compiled anew", "seconds")
    where = f"{about['machine']['processor']}, {about['machine']['cores']} cores; torch {about['versions']['torch']}"
    return "\n".join(
        [
            harness.table(["after `import torch`", *HOW, "modules", "others"], rows),
            "",
            f"At most {BUDGET_MS} ms, compiled anew: {'reached' if worst <= BUDGET_MS else 'missed'}.",
            f"Made by `{about['command']}`. Processor time, medians of {about['rounds']} processes. {where}, Python "
            f"{about['versions']['python']}; {about['date']}; load of the machine at the start: "
            f"{about['load_at_start']}.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="processes for each figure (15)")
    parser.add_argument("--quick", action="store_true", help="`import tensorloop` alone, one process")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    about = harness.about(rounds)
    entries = measure((IMPORT,) if options.quick else STATEMENTS, rounds)
    print(report(entries, about))
    return 1 if harness.failures(entries) else 0


if __name__ == "__main__":
    raise SystemExit(main())
