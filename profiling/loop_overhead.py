"""Microseconds a step that scan and while_loop cost beyond a bare Python loop whose body does next to nothing.

The body turns four small vectors by a fixed rotation, so that neither values nor gradients vanish. A checkpointed
loop is held against what its body calls cost in bare loops: one without gradient for each plain advance, one with
gradient and backward for each step.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

import tensorloop as tl

REPEATS = 7

Run = Callable[[], Tensor]


class Bare(NamedTuple):
    """Seconds of the bare loop."""

    without_gradient: list[float]
    forward: list[float]
    both: list[float]


def rotation() -> Tensor:
    angle = 1.0
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


class Scan:
    """h = h R + x, with h the y of each step."""

    def __init__(self, T: int) -> None:
        self.R = rotation()
        self.xs = torch.randn(T, 4, 2)
        self.start = torch.randn(4, 2).requires_grad_()

    def body(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = h @ self.R + x
        return h, h

    def bare(self) -> Tensor:
        h, ys = self.start, []
        for x in self.xs.unbind(0):
            h, y = self.body(h, x)
            ys.append(y)
        return torch.stack(ys).sum()

    def ours(self, checkpoints: int | None) -> Tensor:
        _, ys = tl.scan(self.body, self.start, self.xs, checkpoints=checkpoints)
        return ys.sum()


class While:
    """h = h R, n += 1 while n < N."""

    def __init__(self, T: int) -> None:
        self.R = rotation()
        self.N = torch.tensor(T)
        self.start = torch.randn(4, 2).requires_grad_()

    def running(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        return carry[1] < self.N

    def body(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return carry[0] @ self.R, carry[1] + 1

    def bare(self) -> Tensor:
        carry = self.start, torch.zeros_like(self.N)
        while self.running(carry):
            carry = self.body(carry)
        return carry[0].sum()

    def ours(self, checkpoints: int | None) -> Tensor:
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


def costs(loop: str, T: int, checkpoints: int, advances: int) -> dict[str, list[float]]:
    """Microseconds a step of each way of running the loop, and of the bare loops that it is held against.

    The ways take turns, so that a busy moment hits all of them. The first turn warms up and is not kept. `advances`
    is the number of plain advances that the checkpoint schedule needs for T steps.
    """
    trial = LOOPS[loop](T)
    found: dict[str, list[float]] = {}
    for turn in range(1 + REPEATS):
        gc.collect()
        gc.disable()
        dry = without_gradient(trial.bare)
        bare = seconds(trial.bare, trial.start)
        kept = seconds(lambda: trial.ours(None), trial.start)
        few = seconds(lambda: trial.ours(checkpoints), trial.start)
        gc.enable()
        if turn:
            budget = advances / T * dry + bare[1]
            _add(found, "all", "forward", kept[0], bare[0], T)
            _add(found, "all", "both", kept[1], bare[1], T)
            _add(found, "checkpoints", "forward", few[0], dry, T)
            _add(found, "checkpoints", "both", few[1], budget, T)
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
