"""Bodies that other packages and papers write, compiled, beside the loops that their users write.

    python profiling/bodies.py                       # two minutes; spiking nets only where their packages are
    python profiling/bodies.py --snn-python PYTHON   # a Python with torch, snntorch, norse and spikingjelly

Forward + backward in float32, one thread. Losses and gradients come first: where those of the compiled loop differ from
those of the package's own by more than 1e-6 of the largest, or, in float64, by more than 1e-9, nothing is timed.
"""

import sys
import time
import warnings
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from compiled_loops.body_workloads import BODIES, called, cdist_alone
from running import harness
from running.script import Peer, Result, Script, Target

from tensorloop.loop.compiled import front

TITLES = {
    "snntorch": "snntorch, 3 layers of Leaky",
    "norse": "norse, 3 layers of LIFCell",
    "spikingjelly": "SpikingJelly, 3 layers of LIFNode",
    "maml": "MAML, inner loop",
    "slstm": "sLSTM, an `if` on torch.all",
    "called": "RNN with one torch.cdist a step",
}
T = {"snntorch": 100, "norse": 100, "spikingjelly": 100, "maml": 50, "slstm": 256, "called": 512}
BOUNDS = {"snntorch": 0.2, "norse": 0.2, "spikingjelly": 0.2, "maml": 0.2, "slstm": 0.2}
SPIKING = ("snntorch", "norse", "spikingjelly")
WAYS = {"compiled": "compiled", "eager": "eager scan", "own": "its own loop"}
PARTS = {"without": "the same loop without it", "alone": "the operation alone"}
STEPS_CHECKED = 20
SNN = Peer("snn", ("torch", *SPIKING), lambda cell: cell["workload"] in SPIKING)


def cells(args: Namespace) -> list[harness.Cell]:
    found = []
    for w, steps in T.items():
        ways = [*WAYS, *(PARTS if w == "called" else ())]
        cell = {"kind": "time", "workload": w, "T": STEPS_CHECKED if args.set == "quick" else steps}
        found += [cell | {"variant": way} for way in ways]
    return found


def checks(args: Namespace) -> list[harness.Cell]:
    # The packages' surrogates make float32 of what they are given.
    cell = {"kind": "check", "T": STEPS_CHECKED}
    return [cell | {"workload": w, "at_most": 1e-6 if w in SPIKING else 1e-9} for w in T]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", front.NotCompiledWarning)  # the time of such a loop says so in its results
    return check_cell(cell) if cell["kind"] == "check" else time_cell(cell)


def check_cell(cell: harness.Cell) -> dict[str, Any]:
    """How far loss and gradients of the compiled loop lie from the own loop's, as a part of the largest."""
    w = cell["workload"]
    body = BODIES[w](cell["T"], torch.float32 if w in SPIKING else torch.float64)
    found, expected = [
        (loss, *torch.autograd.grad(loss, body.leaves)) for loss in (body.scan(compile=True), body.own())
    ]
    pairs = zip(found, expected, strict=True)
    return {"apart": max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in pairs)}


def time_cell(cell: harness.Cell) -> dict[str, Any]:
    w, way, steps = cell["workload"], cell["variant"], cell["T"]
    if way == "alone":
        return {"total_s": harness.seconds(cdist_alone(steps, torch.float32), 10)}
    body = called(steps, torch.float32, operation=False) if way == "without" else BODIES[w](steps, torch.float32)
    loss = body.own if way == "own" else partial(body.scan, compile=way != "eager")

    def run() -> None:
        torch.autograd.grad(loss(), body.leaves)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start = time.perf_counter()
        run()
        first = time.perf_counter() - start
        total = harness.seconds(run, 10)
    reasons = [str(x.message) for x in told if issubclass(x.category, front.NotCompiledWarning)]
    return {"first_s": [first], "total_s": total} | ({"not_compiled": reasons[0]} if reasons else {})


def time_of(result: Result, w: str, way: str) -> float | None:
    """Milliseconds."""
    return harness.milliseconds(result, "total_s", kind="time", workload=w, variant=way)


def targets(result: Result) -> list[Target]:
    found = []
    for w, bound in BOUNDS.items():
        ours, own = time_of(result, w, "compiled"), time_of(result, w, "own")
        found.append(Target(f"{TITLES[w]}: compiled / its own loop", ours / own if ours and own else None, bound))
    whole, *parts = (time_of(result, "called", way) for way in ("compiled", "without", "alone"))
    steps = next((e["cell"]["T"] for e in result["entries"] if e["cell"]["workload"] == "called"), 1)
    more = None if whole is None or None in parts else (whole - sum(x or 0.0 for x in parts)) * 1e3 / steps
    return [
        *found,
        Target("an operation called out, forward and backward: more than itself, a step", more, 10, unit="µs"),
    ]


def section(result: Result, picture: str) -> str:
    rows = []
    for w, title in TITLES.items():
        times = [time_of(result, w, way) for way in WAYS]
        steps = next((e["cell"]["T"] for e in result["entries"] if e["cell"]["workload"] == w), None)
        rows.append([f"{title}, T={steps}", *(harness.digits(x) if x else "-" for x in times)])
    text = (
        "Milliseconds of forward + backward, float32, one thread, medians of 10 runs in each round. `its own loop` is "
        "the loop that the package's users write; of the others a Python loop over the same step."
    )
    table = harness.table(["", *WAYS.values()], rows)
    parts = [time_of(result, "called", way) for way in ("compiled", *PARTS)]
    called_out = harness.table(
        ["with torch.cdist", *PARTS.values()], [[harness.digits(x) if x else "-" for x in parts]]
    )
    return "\n\n".join([text, table, "What calling out of a native step takes, milliseconds:", called_out])


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    targets=targets,
    peers=[SNN],
    group=lambda cell: cell["workload"],
    titles=TITLES,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
