"""Ten programs out of papers before and after their loops are ported: lines changed, peak memory, time.

    python profiling/programs.py                                  # 2 to 4 minutes
    python profiling/programs.py --torchdiffeq-python PYTHON      # and the adaptive solver beside torchdiffeq's

The forms are in docs/examples/ported, each with the same parameters and inputs. Lines are those of the functions that
differ. A process that takes times runs the forms in turn, in one thread; memory is taken in a process for each.
"""

import ast
import difflib
import importlib
import inspect
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import plots, sentences
from running import harness
from running.script import Peer, Result, Script, Target
from torch import Tensor

from docs.examples.recipes import act, ode, rnnt


class Port(NamedTuple):
    title: str
    how: str
    T: int
    forms: tuple[Callable[..., object], Callable[..., object]] | None = None
    """The functions that differ, where they are not the module's `before` and `after`."""


PORTS = {
    "ntm": Port("Neural Turing machine", "carrying, scan, K=8, compiled", 256),
    "dnc": Port("Differentiable neural computer", "scan, K=8, compiled", 128),
    "tacotron": Port("Tacotron 2, decoder", "carrying, map, K=16, compiled", 256),
    "ode": Port("dopri5, one step for the batch", "while_loop, K=32, compiled", 192),
    "maml": Port("MAML, inner loop", "fori_loop, K=16", 128),
    "transducer": Port(
        "RNN-T loss", "scan over packed xs, K=8", 128, (rnnt.Transducer.plain_loss, rnnt.Transducer.loss)
    ),
    "pondering": Port("ACT", "while_loop in scan, K=8", 48, (act.Pondering.plain, act.Pondering.forward)),
    "pondernet": Port("PonderNet", "scan, K=16, compiled", 256),
    "whisper": Port("Whisper-like decoding, hooks", "carrying, TensorArray, compiled", 256),
    "mamba": Port("Mamba, selective scan", "scan, K=16, compiled", 1024),
}
SHORT = ("ntm", "whisper", "mamba")
CHECK = 9  # T in float64
RUNS = 3
SECONDS = 2.0  # after which there are no more runs of a program
PEER_WAYS = ("torchdiffeq", "ours, eager", "ours, compiled")
TIME_TARGET, MEMORY_TARGET, GRADIENT_TARGET = 1.5, 0.1, 1.0


def module(name: str) -> Any:
    return importlib.import_module(f"docs.examples.ported.{name}")


def made(name: str, T: int, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Arguments of both forms, and the parameters."""
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        args = module(name).make(T)
    finally:
        torch.set_default_dtype(torch.float32)
    return args, list(args[0].parameters())


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    torch.set_num_threads(1)
    if cell["kind"] == "check":
        return {"apart": max(apart(program) for program in cell["programs"])}
    if cell["kind"] == "exact":
        return inexact()
    args, leaves = made(cell["program"], cell["T"])
    if cell["kind"] == "time":
        ways = {way: lambda way=way: form(cell["program"], way)(*args) for way in cell["ways"]}
        return in_turn(ways, leaves, cell["runs"])
    return harness.peak_of(lambda: form(cell["program"], cell["way"])(*args), leaves)


def form(program: str, way: str) -> Callable[..., Tensor]:
    """A form of a program; of the solver also those that stand beside torchdiffeq."""
    others = {"torchdiffeq": by_torchdiffeq, "ours, eager": eager, "ours, compiled": module("ode").after}
    return others[way] if way in others else getattr(module(program), way)


def by_torchdiffeq(swing: Any, y: Tensor, end: Tensor) -> Tensor:
    """Direct backpropagation through its dopri5."""
    from torchdiffeq import odeint  # pyright: ignore[reportMissingImports]

    times = torch.cat([torch.zeros_like(end), end])
    return odeint(swing, y, times, rtol=1e-6, atol=1e-6, method="dopri5")[-1].square().mean()


def eager(swing: Any, y: Tensor, end: Tensor) -> Tensor:
    return ode.solve(swing, y, 0.0, end, rtol=1e-6, atol=1e-6, checkpoints=32).y.square().mean()


def inexact() -> dict[str, float]:
    """How far gradients at a tolerance of 1e-6 are from those at 1e-11, relative, in float64."""
    args, leaves = made("ode", 32, torch.float64)

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])

    swing, y, end = args
    fine = ode.solve(swing, y, 0.0, end, rtol=1e-11, atol=1e-11, checkpoints=64, compile=True, compact=False)
    exact = gradient(fine.y.square().mean())
    found = {"torchdiffeq": by_torchdiffeq(*args), "ours": module("ode").after(*args)}
    return {name: float((gradient(loss) - exact).norm() / exact.norm()) for name, loss in found.items()}


def apart(program: str) -> float:
    """The largest difference of loss and gradients of a form from those of the first, beside the largest gradient."""
    args, leaves = made(program, CHECK, torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        found = [
            [loss, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]
            for loss in (form(program, way)(*args) for way in ways_of(program))
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = ((a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    differences = [float((a - b).detach().abs().max()) for a, b in pairs]
    return max(differences) / max(float(x.detach().abs().max()) for x in found[0])


def in_turn(ways: dict[str, Callable[[], Tensor]], leaves: Sequence[Tensor], runs: int) -> dict[str, list[float]]:
    """Seconds of the processor for forward + backward, after a run of each that does not count."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    began = time.process_time()
    for run in range(runs + 1):
        for way, loss in ways.items():
            start = time.process_time()
            torch.autograd.grad(loss(), leaves, allow_unused=True)
            if run:
                found[way].append(time.process_time() - start)
        if run and time.process_time() - began > SECONDS:
            break
    return found


def ways_of(program: str) -> list[str]:
    """The forms that there are; `by_hand` has state of modules in its own carry."""
    return [way for way in ("before", "by_hand", "after") if hasattr(module(program), way)]


def changed(program: str, way: str = "after") -> tuple[int, int, int]:
    """Lines that go, lines that come, lines that there were; docstrings and empty lines are none."""
    forms = PORTS[program].forms or (module(program).before, getattr(module(program), way))
    old, new = (body(function) for function in forms)
    marks = [line[0] for line in difflib.ndiff(old, new)]
    return marks.count("-"), marks.count("+"), len(old)


def body(function: Callable[..., object]) -> list[str]:
    """Its statements, a line each as they are formatted."""
    lines, _ = inspect.getsourcelines(function)
    (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(tree, ast.FunctionDef)
    first = tree.body[1 if ast.get_docstring(tree) else 0].lineno
    return [line.rstrip() for line in lines[first - 1 :] if line.strip()]


def cells(args: Namespace) -> list[harness.Cell]:
    found: list[harness.Cell] = []
    for program in SHORT if args.set != "usual" else PORTS:
        T = CHECK if args.set == "quick" else PORTS[program].T
        ways = ways_of(program)
        found.append({"kind": "time", "program": program, "T": T, "ways": ways, "runs": RUNS})
        found += [{"kind": "memory", "program": program, "T": T, "way": way} for way in ways]
    T = CHECK if args.set == "quick" else PORTS["ode"].T
    beside = {"program": "ode", "T": T, "peer": True}
    found.append({"kind": "time", **beside, "ways": PEER_WAYS, "runs": RUNS})
    found += [{"kind": "memory", **beside, "way": way} for way in PEER_WAYS]
    return [*found, {"kind": "exact", "peer": True}]


def checks(args: Namespace) -> list[harness.Cell]:
    return [{"kind": "check", "programs": list(SHORT if args.set != "usual" else PORTS), "at_most": 1e-9}]


def figures(result: Result, program: str, ways: Sequence[str] = ("before", "after")) -> tuple[float | None, ...]:
    """Milliseconds of each form, MiB of each."""
    times = [harness.milliseconds(result, way, kind="time", program=program, ways=ways_of(program)) for way in ways]
    peaks = [harness.figure(result, "peak_bytes", kind="memory", program=program, way=way) for way in ways]
    return *times, *(None if peak is None else peak / 2**20 for peak in peaks)


def section(result: Result, picture: str) -> str:
    rows = []
    for entry in result["entries"]:
        program = entry["cell"].get("program")
        if entry["cell"]["kind"] != "time" or entry["cell"].get("peer"):
            continue
        gone, come, all_lines = changed(program)
        *times, m0, m1 = figures(result, program)
        port = PORTS[program]
        rows.append(
            [
                port.title,
                port.how,
                f"{entry['cell']['T']:,}",
                f"-{gone} +{come} of {all_lines}",
                *(harness.digits(m, "MiB") for m in (m0, m1)),
                harness.digits(quotient(m1, m0)),
                *(harness.digits(t, "ms") for t in times),
                harness.digits(quotient(times[1], times[0])),
            ]
        )
    header = ["program", "with", "T", "lines changed", "held before", "after", "ratio", "time before", "after", "ratio"]
    return "\n\n".join(
        [
            f"Forward + backward, float32, in one thread; time of the processor, medians of up to {RUNS} runs. *Held* "
            "is the growth of resident memory at its peak.",
            harness.table(header, rows, text_columns=2),
            "The three that keep state on modules, with it in a carry of the body's own, and with `tl.carrying`:",
            by_hand(result),
            "The solver beside torchdiffeq's `odeint` with direct backpropagation, of the same tolerance and with one "
            "step size for the batch; the error of the gradient is relative to that at a tolerance of 1e-11, float64.",
            beside_torchdiffeq(result),
            f"![Memory and time of programs: after / before porting]({picture})",
        ]
    )


def summary(result: Result) -> list[str]:
    """What porting does to bytes and time, and which programs are slower for it."""
    found = {program: figures(result, program) for program in PORTS if figures(result, program)[0]}
    times = {PORTS[program].title: quotient(after, before) for program, (before, after, *_) in found.items()}
    held = [x for _, _, before, after in found.values() if (x := quotient(after, before))]
    if not held:
        return []
    return [
        f"With their loops ported, {len(held)} programs hold {sentences.share(min(held))} to "
        f"{sentences.share(max(held))} of the memory that they held before.",
        *sentences.winners({f"{name}, as it was": x for name, x in times.items()}),
    ]


def by_hand(result: Result) -> str:
    rows = []
    for entry in result["entries"]:
        program, ways = entry["cell"].get("program"), ("by_hand", "after")
        if entry["cell"]["kind"] != "time" or entry["cell"].get("peer") or "by_hand" not in ways_of(program):
            continue
        figures_ = figures(result, program, ways)
        for i, (way, name) in enumerate(zip(ways, ("by hand", "carrying"), strict=True)):
            gone, come, _ = changed(program, way)
            row = [PORTS[program].title, name, f"-{gone} +{come}"]
            rows.append([*row, harness.digits(figures_[i + 2], "MiB"), harness.digits(figures_[i], "ms")])
    return harness.table(["program", "state", "lines changed", "held", "time"], rows, text_columns=2)


def beside_torchdiffeq(result: Result) -> str:
    rows = []
    for way in PEER_WAYS:
        peak = harness.figure(result, "peak_bytes", peer=True, way=way)
        held = harness.digits(peak and peak / 2**20, "MiB")
        error = harness.figure(result, "torchdiffeq" if way == "torchdiffeq" else "ours", kind="exact")
        seconds = harness.milliseconds(result, way, kind="time", peer=True)
        if seconds is None:
            rows.append([way, *[harness.why_not(result, kind="time", peer=True)] * 3])
            continue
        rows.append([way, harness.digits(seconds, "ms"), held, harness.digits(error)])
    return harness.table(["dopri5", "time", "held", "error of the gradient"], rows)


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def targets(result: Result) -> list[Target]:
    def beside(key: str, **cell: Any) -> float | None:
        return harness.figure(result, key, peer=True, **cell)

    ours, theirs = PEER_WAYS[2], PEER_WAYS[0]
    time_ratio = quotient(beside(ours, kind="time"), beside(theirs, kind="time"))
    memory_ratio = quotient(*(beside("peak_bytes", kind="memory", way=way) for way in (ours, theirs)))
    error_ratio = quotient(beside("ours", kind="exact"), beside("torchdiffeq", kind="exact"))
    return [
        Target("dopri5: time / torchdiffeq", time_ratio, TIME_TARGET),
        Target("dopri5: memory / torchdiffeq", memory_ratio, MEMORY_TARGET),
        Target("dopri5: error of the gradient / torchdiffeq", error_ratio, GRADIENT_TARGET),
    ]


def draw(result: Result, path: Path) -> None:
    groups: dict[str, list[plots.Ratio]] = {"memory held": [], "time": []}
    for program, port in PORTS.items():
        t0, t1, m0, m1 = figures(result, program)
        for heading, ratio in zip(groups, (quotient(m1, m0), quotient(t1, t0)), strict=True):
            if ratio:
                groups[heading].append(plots.Ratio(port.title, ratio, True))
    with plots.drawing(path, (8, 6)) as drawn:
        plots.ratios(drawn.subplots(), groups, "after / before porting (lower is better)")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    checks=checks,
    targets=targets,
    draw=draw,
    settings=lambda args: {"threads": 1},
    peers=[Peer("torchdiffeq", ("torchdiffeq",), lambda cell: bool(cell.get("peer")))],
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
