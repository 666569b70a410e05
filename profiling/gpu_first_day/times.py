"""Ten loops in one process: as graphs and as kernels, beside the eager loop, cuDNN, and torch.compile of the body."""

import time
from functools import partial
from typing import Any

import gpu
import torch
from compiled_loops import gpu_counts
from compiled_loops.gpu_workloads import leaves, loss_of
from gpu_first_day.kept import ABSENT
from gpu_first_day.world import Items, World, fell, kernels, told
from plain_loops import workloads

from tensorloop.loop.compiled.run.plan import plans

LOOPS = ("W2s", "RNNs", "W2", "gru", "heads32", "heads64", "kalman", "W4", "W3", "crf")
SOON = ("eager", "compiled", "kernels", "nn_lstm", "nn_gru")
LATE = ("step",)  # torch compiles for half a minute or more: last, for what is left of the time


def items(world: World) -> Items:
    refused = gpu_counts.refusals()
    cells = [(loop, way) for ways in (SOON, LATE) for loop in LOOPS for way in ways if way in gpu.ways(loop)]
    return {f"{loop} {way}": partial(timed, world, loop, way, refused) for loop, way in cells}


def timed(world: World, loop: str, way: str, refused: list[str]) -> dict[str, Any]:
    if world.rehearsed and way == "step":
        return {ABSENT: "torch.compile does not compile for a pretended device"}
    steps = gpu.CHECKED if world.rehearsed else gpu.STEPS.get(loop, 512)
    plans.clear()
    refused.clear()
    d = leaves(loop, steps, torch.float32)
    loss, inputs = loss_of(loop, way, d, steps), workloads.differentiated(d)

    def run() -> None:
        torch.autograd.grad(loss(), inputs, allow_unused=True)

    with told() as notes, kernels(way == "kernels"):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        first = (time.perf_counter() - start) * 1e3
        few = way == "eager"
        ms = world.microseconds(run, runs=3 if few else 10, warm=1 if few else 3) / 1e3
    row = {"ms": ms, "first_ms": first, "steps": steps, "notes": notes, "fell": fell(notes)}
    if way == "kernels" and refused:
        row["refused"] = refused[0]
    return row | {"said": f"{ms:.3f} ms, {ms / steps * 1e3:.2f} us a step; the first {first:.0f} ms"}
