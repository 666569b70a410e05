"""What eager checkpointed loops cost beside the plain loop: in one process, one thread and processor time, in turns.

An LSTM of B=4, H=32, T=256, forward and backward: the plain loop, the same steps by hand in an `autograd.Function` (in
blocks of 16, and one by one), `torch.utils.checkpoint` over blocks of 16, and ours with K=16, with K=T, and with K=16
carries and the residuals of 16 steps. Then other loops, T=128: arrays in the carry, captures that bodies read in full,
rows that stop, packed xs, modules with statistics, loops that count. Printed are microseconds of a step and the median
of the ratios to the plain loop of the same turn.

    python profiling/checkpoint_price.py            15 turns
    python profiling/checkpoint_price.py --quick    1 turn, of a few steps
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensorloop as tl

B, H, BLOCK = 4, 32, 16
Run = Callable[[], Tensor]


class Lstm:
    """The loop of the first table."""

    def __init__(self, T: int) -> None:
        self.T, self.cell, self.xs = T, nn.LSTMCell(H, H), torch.randn(T, B, H)
        self.start = torch.zeros(B, H), torch.zeros(B, H)

    def body(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        h, c = self.cell(x, state)
        return (h, c), h

    def steps(self, state: Any, xs: Tensor) -> tuple[Any, Tensor]:
        """Some steps in a Python loop."""
        ys = []
        for x in xs.unbind():
            state, y = self.body(state, x)
            ys.append(y)
        return state, torch.stack(ys)

    def ours(self, plan: Any) -> Tensor:
        return tl.scan(self.body, self.start, self.xs, checkpoints=plan)[1]

    def in_blocks(self, size: int, block: Callable[[Any, Tensor], tuple[Any, Tensor]]) -> Tensor:
        state, ys = self.start, []
        for xs in self.xs.split(size):
            state, y = block(state, xs)
            ys.append(y)
        return torch.cat(ys)

    def by_hand(self, state: Any, xs: Tensor) -> tuple[Any, Tensor]:
        h, c, ys = Block.apply(self, xs, *state, *self.cell.parameters())
        return (h, c), ys

    def by_torch(self, state: Any, xs: Tensor) -> tuple[Any, Tensor]:
        found: Any = checkpoint(self.steps, state, xs, use_reentrant=False)
        return found


class Block(torch.autograd.Function):
    """Steps that are run again in backward."""

    @staticmethod
    def forward(ctx: Any, loop: Lstm, xs: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.loop = loop
        ctx.save_for_backward(xs, h, c)
        (h, c), ys = loop.steps((h, c), xs)
        return h, c, ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        xs, h, c = ctx.saved_tensors
        with torch.enable_grad():
            state = h.detach().requires_grad_(), c.detach().requires_grad_()
            last, ys = ctx.loop.steps(state, xs)
        return None, None, *torch.autograd.grad([*last, ys], [*state, *ctx.loop.cell.parameters()], grads)


class Others:
    """The loops of the second table."""

    def __init__(self, T: int) -> None:
        self.T, self.cell, self.norm = T, nn.LSTMCell(H, H), nn.BatchNorm1d(H)
        self.xs, self.start = torch.randn(T, B, H), (torch.zeros(B, H), torch.zeros(B, H))
        self.memory = torch.randn(10, B, H, requires_grad=True)
        self.lengths = torch.tensor([T, T * 3 // 4, T // 2, T // 3])

    def arrays(self, plan: Any) -> Tensor:
        """A decoder that collects five things."""

        def body(i: int, carry: Any) -> Any:
            h, c, *arrays = carry
            h, c = self.cell(self.xs[i], (h, c))
            return h, c, *[x.append(h * j) for j, x in enumerate(arrays)]

        found = tl.fori_loop(0, self.T, body, (*self.start, *(tl.TensorArray() for _ in range(5))), checkpoints=plan)
        return torch.stack([x.stack() for x in found[2:]])

    def captures(self, plan: Any) -> Tensor:
        """Attention to a memory."""

        def body(state: Any, x: Tensor) -> Any:
            h, c = self.cell(x, state)
            weights = torch.softmax((self.memory * h).sum(-1), 0)
            return (h + (weights[..., None] * self.memory).sum(0), c), h

        return tl.scan(body, self.start, self.xs, checkpoints=plan)[1]

    def rows(self, plan: Any) -> Tensor:
        def body(carry: Any) -> Any:
            n, h, c = carry
            return n + 1, *self.cell(h, (h, c))

        start = torch.zeros(B, dtype=torch.long), *self.start
        return tl.while_loop(lambda carry: carry[0] < self.lengths, body, start, checkpoints=plan)[1]

    def packed(self, plan: Any) -> Tensor:
        xs = tl.pack_padded(self.xs.transpose(0, 1), self.lengths)

        def body(state: Any, x: Tensor) -> Any:
            h, c = self.cell(x, state)
            return (h, c), h

        return tl.scan(body, self.start, xs, checkpoints=plan)[1].values

    def modules(self, plan: Any) -> Tensor:
        def body(state: Any, x: Tensor) -> Any:
            h, c = self.cell(self.norm(x), state)
            return (h, c), h

        return tl.scan(body, self.start, self.xs, checkpoints=plan)[1]

    def counts(self, plan: Any) -> Tensor:
        return tl.fori_loop(0, self.T, lambda i, state: self.cell(self.xs[i], state), self.start, checkpoints=plan)[0]


def seconds(run: Run) -> float:
    start = time.process_time()
    run().square().sum().backward()
    return time.process_time() - start


def report(title: str, runs: dict[str, Run], turns: int, steps: int) -> None:
    """Times all in turns, the first of them the plain loop, and prints a line for each."""
    for run in runs.values():
        seconds(run)
    found = [[seconds(run) for run in runs.values()] for _ in range(turns)]
    for k, name in enumerate(runs):
        micros = statistics.median(turn[k] for turn in found) / steps * 1e6
        ratio = statistics.median(turn[k] / turn[0] for turn in found)
        print(f"{title:10} {name:26} {micros:8.1f} us a step {ratio:6.2f} times")


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lstm, others, turns = Lstm(32 if quick else 256), Others(16 if quick else 128), 1 if quick else 15
    blocks = tl.Checkpoints(k=BLOCK, residuals=BLOCK)
    runs: dict[str, Run] = {
        "plain": lambda: lstm.ours(None),
        "blocks of 16 by hand": lambda: lstm.in_blocks(BLOCK, lstm.by_hand),
        "each step by hand": lambda: lstm.in_blocks(1, lstm.by_hand),
        "torch.utils.checkpoint": lambda: lstm.in_blocks(BLOCK, lstm.by_torch),
        "K=16": lambda: lstm.ours(16),
        "K=T": lambda: lstm.ours(lstm.T),
        "K=16, residuals of 16": lambda: lstm.ours(blocks),
    }
    report("LSTM", runs, turns, lstm.T)
    for name in ("arrays", "captures", "rows", "packed", "modules", "counts"):
        loop = getattr(others, name)
        plans = {"plain": None, "K=16": 16, "K=T": others.T, "K=16, residuals of 16": blocks}
        report(name, {said: lambda loop=loop, plan=plan: loop(plan) for said, plan in plans.items()}, turns, others.T)


if __name__ == "__main__":
    main(sys.argv[1:])
