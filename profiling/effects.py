"""What it costs that the Python of a body is followed: later calls of compiled loops, and first calls with checkpoints.

Each loop runs in turn as it is and with `tl.loop.pure(body_fn)`, which nobody follows; the ratio of the least process
times of many is printed. Loops have 20 steps; with checkpoints the steps that are followed are the first two.

    python profiling/effects.py            200 calls of each
    python profiling/effects.py --quick    3 calls of each
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tensorloop as tl

STEPS, WIDTH = 20, 16


class Gated(nn.Module):
    """A cell of the user's with a helper, a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.candidate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mixed(self, h: Tensor, x: Tensor) -> Tensor:
        """The part that is kept."""
        return torch.sigmoid(self.gate(h) + x)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.mixed(h, x)
        found, parts = {"h": (1 - z) * h + z * torch.tanh(self.candidate(h))}, []
        for k in range(3):
            parts.append(found["h"] * k)
        h = torch.stack(parts).mean(0)
        return h, h


def loops() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """(name, body_fn, init) of each loop."""
    h = torch.zeros(4, WIDTH)
    lstm, layers = nn.LSTMCell(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))

    def step(s: tuple[Tensor, Tensor], x: Tensor) -> tuple[Any, Tensor]:
        s = lstm(x, s)
        return s, s[0]

    def energy(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        z = c.detach().requires_grad_()
        return c - 0.1 * torch.autograd.grad((z**4).sum(), z)[0] + x, None

    yield "tanh", lambda c, x: (torch.tanh(c + x), None), h
    yield "LSTMCell", step, (h, h)
    yield "two layers", lambda c, x: (layers(c) * 0.5 + x, c), h
    yield "gated cell", Gated(), h
    yield "autograd.grad", energy, h


def least(run: Callable[[], Any], other: Callable[[], Any], calls: int) -> tuple[float, float]:
    """The least process time of each in seconds, in turn."""
    best = [float("inf")] * 2
    for _ in range(calls):
        for k, work in enumerate((run, other)):
            begun = time.thread_time()
            work()
            best[k] = min(best[k], time.thread_time() - begun)
    return best[0], best[1]


def main(calls: int) -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    xs = torch.randn(STEPS, 4, WIDTH, requires_grad=True)
    print("| body | later call, compiled (us) | / not followed | with checkpoints (us) | / not followed |")
    print("| --- | --- | --- | --- | --- |")
    for name, body, init in loops():
        row = [name]
        for options in ({"compile": "strict"}, {"checkpoints": 5}):
            given = xs.detach() if "compile" in options else xs
            scan = partial(tl.scan, init=init, xs=given, **options)
            run, other = partial(scan, body), partial(scan, tl.loop.pure(body))
            run()
            other()
            followed, alone = least(run, other, calls)
            row += [f"{followed * 1e6:.0f}", f"{followed / alone:.2f}"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(3 if "--quick" in sys.argv[1:] else 200)
