"""Loops with `compile="auto"` beside eager and compiled ones: 1, 10 and 100 calls in a fresh process.

    python profiling/auto_compile.py             # some 10 minutes
    python profiling/auto_compile.py --short     # the LSTM alone

Processor seconds beyond `import torch` of calls with their backward, one thread, a process each, in turns; machine code
of the bodies is on disk, as in the second run of a program. The bodies are those of `first_call.py`, those of
`bodies.py` that need no package, and the programs of `programs.py`, with 64 steps.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from first_call import BODIES
from pages import plots
from running import harness
from running.script import Result, Script, Target

ROOT = Path(__file__).parents[1]
HOW = {"eager": "False", "compiled": "True", "auto": '"auto"'}
UNSTABLE = {("linear algebra", 64)}  # its matrix is no longer positive there
CALLS = (1, 10, 100)
STEPS, PORT_STEPS = (64,), 64
PROCESSES = {"quick": 1, "short": 3, "usual": 1}
BOUND = 1.5
OTHERS = ("maml", "slstm", "called")
OTHER = """
sys.path.insert(0, {folder!r})
from compiled_loops.body_workloads import BODIES
body = BODIES[{name!r}]({steps}, torch.float32)
def call():
    body.scan(compile={how}).backward()
"""
PORTED = (
    "ntm",
    "dnc",
    "tacotron",
    "ode",
    "maml of programs.py",
    "transducer",
    "pondering",
    "pondernet",
    "whisper",
    "mamba",
)
PORT = """
sys.path[:0] = [{folder!r}, "."]
def told(loop):
    return lambda *args, **options: loop(*args, **(options | dict(compile={how})))
for name in ("scan", "while_loop", "fori_loop", "map"):
    setattr(tl, name, told(getattr(tl, name)))
import programs
args, leaves = programs.made({name!r}.split()[0], {steps})
after = programs.module({name!r}.split()[0]).after
def call():
    torch.autograd.grad(after(*args), leaves, allow_unused=True)
"""
PROGRAM = """
import json, sys, time
import torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
torch.set_num_threads(1)
start = time.process_time()
import tensorloop as tl
exec(sys.argv[2])
for _ in range(int(sys.argv[3])):
    call()
print(json.dumps({"seconds": time.process_time() - start}))
"""


def program(body: str, steps: int, how: str) -> str:
    """What a body's text sets up, and its call as a function."""
    if body in PORTED:
        return PORT.format(folder=str(ROOT / "profiling"), name=body, steps=steps, how=HOW[how])
    if body in OTHERS:
        return OTHER.format(folder=str(ROOT / "profiling"), name=body, steps=steps, how=HOW[how])
    lines = BODIES[body].strip().replace('"strict"', HOW[how]).replace("torch.randn(16,", f"torch.randn({steps},")
    texts = lines.splitlines()
    first = next(i for i, line in enumerate(texts) if "tl.scan(" in line)
    return "\n".join([*texts[:first], "def call():", *(f"    {line}" for line in texts[first:])])


def cells(args: Namespace) -> list[harness.Cell]:
    bodies = [*BODIES, *OTHERS, *PORTED] if args.set == "usual" else list(BODIES)[:1]
    return [
        {"kind": "auto", "body": body, "steps": steps, "calls": calls, "processes": PROCESSES[args.set]}
        for body in bodies
        for steps in ((PORT_STEPS,) if body in PORTED else STEPS if args.set == "usual" else STEPS[:1])
        if (body, steps) not in UNSTABLE
        for calls in (CALLS if args.set != "quick" else CALLS[:1])
    ]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """Processes of each kind in turns, behind one that leaves bytecode and machine code."""
    found: dict[str, list[float]] = {how: [] for how in HOW}
    with tempfile.TemporaryDirectory() as kept:
        run(cell, "compiled", kept, 1)
        for _ in range(cell["processes"]):
            for how, seconds in found.items():
                seconds.append(run(cell, how, kept, cell["calls"]))
    return dict(found)


def run(cell: harness.Cell, how: str, kept: str, calls: int) -> float:
    text = program(cell["body"], cell["steps"], how)
    environment = os.environ | {"XDG_CACHE_HOME": kept, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", PROGRAM, kept, text, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.TIMEOUT_S, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(harness.last_line(done.stderr))
    return json.loads(done.stdout.splitlines()[-1])["seconds"]


def ratio(result: Result, cell: harness.Cell) -> float | None:
    """Of auto to the better of the others."""
    eager, compiled, auto = (harness.figure(result, how, **cell) for how in HOW)
    return None if eager is None or compiled is None or auto is None else auto / min(eager, compiled)


def cells_of(result: Result) -> list[harness.Cell]:
    return [entry["cell"] for entry in result["entries"]]


def targets(result: Result) -> list[Target]:
    found = [(ratio(result, cell), cell) for cell in cells_of(result)]
    worst = max((x for x, _ in found if x is not None), default=None)
    return [Target("auto : the better of eager and compiled, the largest", worst, BOUND)]


def summary(result: Result) -> list[str]:
    found = sorted(x for cell in cells_of(result) if (x := ratio(result, cell)) is not None)
    if not found:
        return []
    within = sum(x <= BOUND for x in found)
    return [
        f'`compile="auto"` takes {found[len(found) // 2]:.2f} times the better of an eager and a compiled loop '
        f"(median), at most {found[-1]:.2f} times; {within} of {len(found)} are within {BOUND}."
    ]


def section(result: Result, picture: str) -> str:
    rows = []
    for cell in cells_of(result):
        spent = [harness.figure(result, how, **cell) for how in HOW]
        shown = ["error" if x is None else f"{x:.2f}" for x in (*spent, ratio(result, cell))]
        rows.append([cell["body"], str(cell["steps"]), str(cell["calls"]), *shown])
    header = ["body", "steps", "calls", *(f"{how}, s" for how in HOW), "auto : better"]
    return "\n\n".join([harness.table(header, rows, 1), f"![Ratios of auto to the better of the others]({picture})"])


def draw(result: Result, path: Path) -> None:
    """A point for each body and number of steps, by the number of calls."""
    with plots.drawing(path, (6, 3.6)) as drawn:
        axes = drawn.subplots()
        for number, steps in enumerate(sorted({*STEPS, PORT_STEPS})):
            found = [(cell["calls"], ratio(result, cell)) for cell in cells_of(result) if cell["steps"] == steps]
            points = [(calls * (1 + 0.1 * number), x) for calls, x in found if x is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True), "o", color=plots.COLOURS[number], label=f"{steps} steps", alpha=0.7
                )
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(CALLS, [str(n) for n in CALLS])
        axes.set_ylim(0, None)
        axes.set_xlabel("calls in the process")
        axes.set_ylabel("time, auto / the better of the others")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    targets=targets,
    draw=draw,
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
