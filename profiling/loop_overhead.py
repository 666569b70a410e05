"""Microseconds a step that scan and while_loop cost beyond a bare Python loop whose body does next to nothing.

    python profiling/loop_overhead.py     # some 3 minutes

The body turns four small vectors by a fixed rotation, so that neither values nor gradients vanish. A checkpointed
loop is held against what its body calls cost in bare loops: one without gradient for each plain advance, one with
gradient and backward for each step.
"""

import gc
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from pages import plots
from running import harness
from running.script import Result, Script, Target
from torch import Tensor

import tensorloop as tl
from tensorloop import schedule

SIZES = {"quick": (20,), "short": (1000,), "usual": (100, 1000, 10000)}  # steps
REPEATS = {"quick": 1, "short": 7, "usual": 7}  # turns of a process, beside one that warms up
K = 32  # checkpoints
KEEPS = {"all": "every step", "checkpoints": f"K={K}", "checked": f"K={K}, check=True"}
WAYS = {"forward": "forward", "both": "forward + backward"}
APART = 1e-10

Run = Callable[[], Tensor]
Plan = int | tl.Checkpoints | None


def rotation(dtype: torch.dtype) -> Tensor:
    angle = 1.0
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=dtype)


class Scan:
    """h = h R + x, with h the y of each step."""

    def __init__(self, T: int, dtype: torch.dtype = torch.float32) -> None:
        self.R = rotation(dtype)
        self.xs = torch.randn(T, 4, 2, dtype=dtype)
        self.start = torch.randn(4, 2, dtype=dtype).requires_grad_()

    def body(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = h @ self.R + x
        return h, h

    def bare(self) -> Tensor:
        h, ys = self.start, []
        for x in self.xs.unbind(0):
            h, y = self.body(h, x)
            ys.append(y)
        return torch.stack(ys).sum()

    def ours(self, checkpoints: Plan) -> Tensor:
        _, ys = tl.scan(self.body, self.start, self.xs, checkpoints=checkpoints)
        return ys.sum()


class While:
    """h = h R, n += 1 while n < N."""

    def __init__(self, T: int, dtype: torch.dtype = torch.float32) -> None:
        self.R = rotation(dtype)
        self.N = torch.tensor(T)
        self.start = torch.randn(4, 2, dtype=dtype).requires_grad_()

    def running(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        return carry[1] < self.N

    def body(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return carry[0] @ self.R, carry[1] + 1

    def bare(self) -> Tensor:
        carry = self.start, torch.zeros_like(self.N)
        while self.running(carry):
            carry = self.body(carry)
        return carry[0].sum()

    def ours(self, checkpoints: Plan) -> Tensor:
        init = self.start, torch.zeros_like(self.N)
        return tl.while_loop(self.running, self.body, init, checkpoints=checkpoints)[0].sum()


LOOPS = {"scan": Scan, "while_loop": While}


def seconds(run: Run, start: Tensor) -> tuple[float, float]:
    """Of forward, and of forward + backward, the time to drop the graph included."""
    begun = time.perf_counter()
    loss = run()
    forward = time.perf_counter() - begun
    torch.autograd.grad(loss, start)
    del loss
    return forward, time.perf_counter() - begun


def without_gradient(run: Run) -> float:
    begun = time.perf_counter()
    with torch.no_grad():
        run()
    return time.perf_counter() - begun


def planned_advances(steps: int, checkpoints: int, known: bool) -> int:
    """Plain advances that the schedule needs for a loop of so many steps, the first sweep's among them."""
    plan = schedule.of(checkpoints, steps if known else None)
    return schedule.advances(plan, steps, known)


def costs(loop: str, T: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds a step of each way of running the loop, and of the bare loops that it is held against.

    The ways take turns, so that a busy moment hits all of them. The first turn warms up and is not kept.
    """
    trial, advances = LOOPS[loop](T), planned_advances(T, K, known=loop == "scan")
    found: dict[str, list[float]] = {}
    for turn in range(1 + repeats):
        gc.collect()
        gc.disable()
        dry = without_gradient(trial.bare)
        bare = seconds(trial.bare, trial.start)
        kept = seconds(lambda: trial.ours(None), trial.start)
        few = seconds(lambda: trial.ours(K), trial.start)
        checked = seconds(lambda: trial.ours(tl.Checkpoints(k=K, check=True)), trial.start)
        gc.enable()
        if turn:
            budget = advances / T * dry + bare[1]
            _add(found, "all", "forward", kept[0], bare[0], T)
            _add(found, "all", "both", kept[1], bare[1], T)
            _add(found, "checkpoints", "forward", few[0], dry, T)
            _add(found, "checkpoints", "both", few[1], budget, T)
            _add(found, "checked", "forward", checked[0], dry, T)
            _add(found, "checked", "both", checked[1], budget, T)
    return found


def _add(found: dict[str, list[float]], keeps: str, way: str, ours: float, bare: float, T: int) -> None:
    for name, value in (("ours", ours), ("bare", bare), ("over", ours - bare)):
        found.setdefault(f"{keeps} {way} {name}", []).append(value / T * 1e6)


def bare_steps(
    loop: Callable[[int], Tensor], leaves: Iterable[Tensor], count: int, way: str, repeats: int
) -> list[float]:
    """Seconds a step of the bare loop `loop(count)`: of "forward" without gradient, or of "both" ways."""
    inputs, found = list(leaves), []
    for _ in range(1 + repeats):
        gc.collect()
        if way == "forward":
            found.append(without_gradient(lambda: loop(count)) / count)
        else:
            begun = time.perf_counter()
            torch.autograd.grad(loop(count), inputs)
            found.append((time.perf_counter() - begun) / count)
    return found[1:]


def apart(loop: str, T: int) -> float:
    """The largest relative distance of our gradients from the bare loop's, in float64."""
    trial = LOOPS[loop](T, torch.float64)
    right, *others = (
        torch.autograd.grad(run(), trial.start)[0]
        for run in (trial.bare, lambda: trial.ours(None), lambda: trial.ours(K))
    )
    return max(float((found - right).abs().max() / right.abs().max()) for found in others)


# ---- the script ----


def checks(args: Namespace) -> list[harness.Cell]:
    return [{"kind": "check", "loop": loop, "T": 100, "at_most": APART} for loop in LOOPS]


def cells(args: Namespace) -> list[harness.Cell]:
    repeats = REPEATS[args.set]
    return [{"kind": "overhead", "loop": loop, "T": T, "repeats": repeats} for T in SIZES[args.set] for loop in LOOPS]


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    if cell["kind"] == "check":
        return {"apart": apart(cell["loop"], cell["T"])}
    return costs(cell["loop"], cell["T"], cell["repeats"])


def sizes(result: Result) -> list[int]:
    return sorted({entry["cell"]["T"] for entry in result["entries"]})


def figure(result: Result, loop: str, T: int, keeps: str, way: str, what: str) -> float | None:
    """Microseconds a step: of ours, of bare loops, or of ours over bare loops."""
    return harness.figure(result, f"{keeps} {way} {what}", kind="overhead", loop=loop, T=T)


def cell_text(result: Result, loop: str, T: int, keeps: str, way: str) -> str:
    ours, over = (figure(result, loop, T, keeps, way, what) for what in ("ours", "over"))
    if ours is None or over is None:
        return harness.why_not(result, loop=loop, T=T)
    return f"{ours:.1f} ({over:.1f})"


def summary(result: Result) -> list[str]:
    """A step of ours beside the same body in a bare Python loop, which is faster by that much."""
    T = sizes(result)[-1]
    plain, kept = (figure(result, "scan", T, keeps, "both", "over") for keeps in ("all", "checkpoints"))
    if plain is None or kept is None:
        return []
    return [
        f"A step of `tl.scan` takes {plain:.1f} us longer, forward and backward, than the same body in a bare Python "
        f"loop, and {kept:.0f} us longer with {K} checkpoints. The bare loop always wins here; the difference matters "
        "where a body takes tens of microseconds."
    ]


def section(result: Result, picture: str) -> str:
    Ts = sizes(result)
    rows = [
        [f"tl.{loop}", kept, way_text, *(cell_text(result, loop, T, keeps, way) for T in Ts)]
        for loop in LOOPS
        for keeps, kept in KEEPS.items()
        for way, way_text in WAYS.items()
    ]
    return "\n\n".join(
        [
            "Microseconds a step of a loop whose body turns four vectors of two numbers. In brackets: beyond the same "
            "body calls in bare Python loops, plain advances without gradient.",
            harness.table(["loop", "keeps", "way", *(f"T={T:,}" for T in Ts)], rows, text_columns=3),
            f"![Microseconds a step over T]({picture})",
        ]
    )


def targets(result: Result) -> list[Target]:
    """Nothing was promised; these are the figures that one wants to see."""
    T = sizes(result)[-1]
    return [
        Target(f"tl.{loop}, {kept}, T={T:,}: a step beyond bare loops", found, unit="us")
        for loop in LOOPS
        for keeps, kept in KEEPS.items()
        if (found := figure(result, loop, T, keeps, "both", "over")) is not None
    ]


def draw(result: Result, path: Path) -> None:
    with plots.drawing(path, (11, 4)) as drawn:
        for axes, loop in zip(drawn.subplots(1, 2), LOOPS, strict=True):
            lines = []
            for keeps, kept in KEEPS.items():
                for what, name in (("ours", f"tl.{loop}"), ("bare", "bare loops")):
                    values = [(T, figure(result, loop, T, keeps, "both", what)) for T in sizes(result)]
                    points = [(T, x) for T, x in values if x]
                    if points:
                        Ts, found = zip(*points, strict=True)
                        lines.append(plots.Curve(f"{name}, {kept}", Ts, found, len(lines), what == "ours"))
            plots.curves(axes, lines, "us a step, forward + backward", f"tl.{loop}", base=10)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    targets=targets,
    draw=draw,
    settings=lambda args: {"repeats": REPEATS[args.set], "checkpoints": K},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
