"""Processor seconds of the first compiled call of a process, forward and backward, beyond `import torch`.

    python profiling/first_call.py             # some 5 minutes; twice that with --before
    python profiling/first_call.py --short     # the LSTM alone
    python profiling/first_call.py --before CHECKOUT/tensorloop/__init__.py    # another checkout too, in turns

Each figure is of fresh processes on one thread, as a median. `warm`: machine code of the body is on disk, from another
process. `cold`: it is not. Python's own bytecode is on disk in both. `modules` counts what is loaded beyond torch's.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from pages import plots
from running import harness
from running.script import Place, Result, Script, Target

ROOT = Path(__file__).parents[1]
BEFORE = Place("before", "INIT", "tensorloop/__init__.py of another checkout, which is measured in turns with this one")
BOUND_S = 1 / 3
LSTM = """
cell = torch.nn.LSTMCell(32, 32)
def step(carry, x):
    h, c = cell(x, carry)
    return (h, c), h
zeros = torch.zeros(4, 32)
_, ys = tl.scan(step, (zeros, zeros), torch.randn(16, 4, 32), compile="strict"{})
ys.sum().backward()
"""
PLAIN = """
w = torch.eye(32, requires_grad=True)
def step(h, x):
    {}
    return h, h
_, ys = tl.scan(step, torch.zeros(4, 32), torch.randn(16, 4, 32), compile="strict")
ys.sum().backward()
"""
BODIES = {
    "LSTM cell, B=4, H=32": LSTM.format(""),
    "tiny": PLAIN.format("h = torch.tanh(h * w[0] + x)"),
    "12 operations": PLAIN.format(
        "h = torch.sigmoid(torch.tanh(h @ w + x) * x - h).exp().sin() * w[0] + x.cos() * (h.abs() + 1).sqrt()"
    ),
    "linear algebra": PLAIN.format(
        "a = h @ h.mT + 4 * torch.eye(4) + x @ x.mT; h = torch.linalg.solve(a, x @ w) + torch.linalg.cholesky(a) @ x"
    ),
    "softmax and a norm": PLAIN.format("h = torch.nn.functional.layer_norm((h @ w + x).softmax(1), (32,))"),
    "GRU cell": """
cell = torch.nn.GRUCell(32, 32)
h, _ = tl.scan(lambda h, x: (cell(x, h), None), torch.zeros(4, 32), torch.randn(16, 4, 32), compile="strict")
h.sum().backward()
""",
    "an array in the carry": """
w = torch.eye(32, requires_grad=True)
def step(carry, x):
    h, seen = carry
    h = torch.tanh(h @ w + x)
    return (h, seen.append(h)), h
(h, seen), _ = tl.scan(step, (torch.zeros(4, 32), tl.TensorArray()), torch.randn(16, 4, 32), compile="strict")
seen.stack().sum().backward()
""",
    "LSTM cell with checkpoints": LSTM.format(", checkpoints=4"),
}
FIRST = next(iter(BODIES))
HOW = ("warm", "cold")
PROCESSES = {"quick": 1, "short": 3, "usual": 3}
PROGRAM = """
import json, sys, time
import torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
torch.set_num_threads(1)
before, start = len(sys.modules), time.process_time()
import tensorloop as tl
exec(sys.argv[2])
print(json.dumps({"seconds": time.process_time() - start, "modules": len(sys.modules) - before}))
"""


def cells(args: Namespace) -> list[harness.Cell]:
    bodies = list(BODIES) if args.set == "usual" else [FIRST]
    checkouts = ["now", *(["before"] if BEFORE.path else [])]
    return [
        {"kind": "first", "body": body, "how": how, "checkout": checkout, "processes": PROCESSES[args.set]}
        for body in bodies
        for how in HOW
        for checkout in checkouts
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """Fresh processes one after the other, behind one that leaves its bytecode; a cold one finds no machine code."""
    root = ROOT if cell["checkout"] == "now" or BEFORE.path is None else BEFORE.path.parents[1]
    with tempfile.TemporaryDirectory() as kept:
        first_call(cell["body"], root, kept, kept)
        found = []
        for _ in range(cell["processes"]):
            with tempfile.TemporaryDirectory() as empty:
                found.append(first_call(cell["body"], root, kept, kept if cell["how"] == "warm" else empty))
    return {key: [answer[key] for answer in found] for key in found[0]}


def first_call(body: str, root: Path, bytecode: str, machine_code: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, bytecode, BODIES[body]]
    environment = os.environ | {"XDG_CACHE_HOME": machine_code, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.TIMEOUT_S, env=environment, cwd=root)
    if done.returncode:
        raise RuntimeError(harness.last_line(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def bodies(result: Result) -> list[str]:
    return list(dict.fromkeys(entry["cell"]["body"] for entry in result["entries"]))


def checkouts(result: Result) -> list[str]:
    found = {entry["cell"]["checkout"] for entry in result["entries"]}
    return [name for name in ("before", "now") if name in found]


def targets(result: Result) -> list[Target]:
    spent = harness.figure(result, "seconds", body=FIRST, how="warm", checkout="now")
    return [Target(f"{FIRST}, warm", spent, BOUND_S, unit="s")]


def summary(result: Result) -> list[str]:
    warm, cold = (harness.figure(result, "seconds", body=FIRST, how=how, checkout="now") for how in HOW)
    if warm is None or cold is None:
        return []
    return [
        f"The first compiled call of an LSTM cell, forward and backward, takes a process {warm:.2f} seconds of the "
        f"processor beyond `import torch`, and {cold:.2f} where its machine code is not on disk yet."
    ]


def section(result: Result, picture: str) -> str:
    columns = [(checkout, how) for checkout in checkouts(result) for how in HOW]
    rows = []
    for body in bodies(result):
        spent = [harness.figure(result, "seconds", body=body, how=how, checkout=name) for name, how in columns]
        count = harness.figure(result, "modules", body=body, how="warm", checkout="now")
        rows.append(
            [body, *("error" if x is None else f"{x:.2f}" for x in spent), "-" if count is None else f"{count:.0f}"]
        )
    both = len(checkouts(result)) > 1
    header = ["body", *(f"{how}, {name}" if both else how for name, how in columns), "modules"]
    return "\n\n".join(
        [
            "Processor seconds of a fresh process from after `import torch` to the end of the first backward, medians.",
            harness.table(header, rows),
            f"![Seconds of the first compiled call of a process]({picture})",
        ]
    )


def draw(result: Result, path: Path) -> None:
    """Bars for each body, warm."""
    shown, names = bodies(result), checkouts(result)
    with plots.drawing(path, (8, 1.2 + 0.5 * len(shown))) as drawn:
        axes = drawn.subplots()
        for number, name in enumerate(names):
            spent = [harness.figure(result, "seconds", body=body, how="warm", checkout=name) or 0 for body in shown]
            heights = [k + 0.36 * (number - (len(names) - 1) / 2) for k in range(len(shown))]
            colour = plots.COLOURS[0] if name == "now" else "#bbbbbb"
            axes.bar_label(axes.barh(heights, spent, height=0.34, label=name, color=colour), fmt="%.2f", padding=3)
        axes.set_yticks(range(len(shown)), shown, fontsize=8.5)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("seconds of the processor, beyond `import torch`; machine code on disk")
        drawn.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 2},
    targets=targets,
    draw=draw,
    places=[BEFORE],
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
