"""What a budget costs: time and bytes of four loops under budgets, beside plain loops, K carries and other ways.

An LSTM, a decoder that attends to an array of its states, an ODE solver (Runge-Kutta steps of a small net), and a net
with dropout and batch norm, each forward and backward: the plain loop, blocks of 16 steps by hand in an
`autograd.Function`, `torch.utils.checkpoint` over the same blocks, and ours with K=16, blocks, K=T, and budgets of 0.5,
0.2, 0.05 and 0.01 of what the plain loop takes; eager, and compiled where that is possible. All run in one process, one
thread, in turns. Printed are the median of the ratios of processor time to the plain loop of the same turn, and the
most bytes alive beside arguments, outputs and gradients.

    python profiling/budgets.py            9 turns
    python profiling/budgets.py --quick    1 turn, of a few steps
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tensorloop as tl

B, H, BLOCK = 4, 32, 16
SHARES = (0.5, 0.2, 0.05, 0.01)
Run = Callable[[], Any]


class Loop:
    """A loop of T steps over a state of tensors: `step(state, x)` gives the next state."""

    def __init__(self, name: str, state: Any, xs: Tensor, step: Callable[[Any, Tensor], Any], net: nn.Module) -> None:
        self.name, self.state, self.xs, self.step, self.net = name, state, xs, step, net

    def ours(self, plan: Any, compile: bool = False) -> Any:
        return tl.scan(lambda s, x: (self.step(s, x), None), self.state, self.xs, checkpoints=plan, compile=compile)[0]

    def in_blocks(self, block: Callable[..., Any]) -> Any:
        state = self.state
        for xs in self.xs.split(BLOCK):
            state = block(state, xs)
        return state

    def steps(self, state: Any, xs: Tensor) -> Any:
        for x in xs.unbind():
            state = self.step(state, x)
        return state

    def by_torch(self, state: Any, xs: Tensor) -> Any:
        return checkpoint(self.steps, state, xs, use_reentrant=False)

    def by_hand(self, state: Any, xs: Tensor) -> Any:
        single = isinstance(state, Tensor)
        found = Block.apply(self, xs, *((state,) if single else state), *self.net.parameters())
        return found[0] if single else found


class Block(torch.autograd.Function):
    """Steps that are run again in backward."""

    @staticmethod
    def forward(ctx: Any, loop: Loop, xs: Tensor, *rest: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        n = len(rest) - len([*loop.net.parameters()])
        ctx.loop = loop
        ctx.save_for_backward(xs, *rest[:n])
        state = loop.steps(rest[0] if n == 1 else rest[:n], xs)
        return (state,) if n == 1 else tuple(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        xs, *state = ctx.saved_tensors
        with torch.enable_grad():
            state = [x.detach().requires_grad_() for x in state]
            last = ctx.loop.steps(state[0] if len(state) == 1 else tuple(state), xs)
        outs = [last] if isinstance(last, Tensor) else [*last]
        return None, None, *torch.autograd.grad(outs, [*state, *ctx.loop.net.parameters()], grads)


def loops(T: int) -> list[Loop]:
    cell = nn.LSTMCell(H, H)
    xs, start = torch.randn(T, B, H), torch.zeros(B, H)
    field = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))

    def kutta(h: Tensor, x: Tensor) -> Tensor:
        k1 = field(h)
        k2 = field(h + 0.05 * k1)
        k3 = field(h + 0.05 * k2)
        return h + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + field(h + 0.1 * k3))

    net = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H), nn.Dropout(0.1), nn.Tanh(), nn.Linear(H, H))
    return [
        Loop("LSTM", (start, start), xs, lambda s, x: cell(x, s), cell),
        Loop("ODE solver", torch.randn(B, H), xs, kutta, field),
        Loop("dropout, batch norm", start, xs, lambda h, x: torch.tanh(h + net(h + x)), net),
    ]


class Decoder(Loop):
    """Attends to an array of its states: no block by hand, since the array is the state."""

    def __init__(self, T: int) -> None:
        cell = nn.LSTMCell(H, H)
        super().__init__("decoder over an array", None, torch.randn(T, B, H), lambda s, x: s, cell)
        self.cell, self.start = cell, torch.zeros(B, H)

    def ours(self, plan: Any, compile: bool = False) -> Any:
        def body(carry: Any, x: Tensor) -> Any:
            h, c, states = carry
            h, c = self.cell(x, (h, c))
            past = states.append(h).stack()
            weights = torch.softmax((past * h).sum(-1), 0)
            return (h + (weights[..., None] * past).sum(0), c, states), None

        init = self.start, self.start, tl.TensorArray()
        return tl.scan(body, init, self.xs, checkpoints=plan, compile=compile)[0][:2]


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def seconds(run: Run, net: nn.Module) -> float:
    start = time.process_time()
    torch.autograd.grad([x.square().sum() for x in tensors(run())], [*net.parameters()])
    return time.process_time() - start


def nbytes(found: list[Tensor]) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def peak(run: Run, net: nn.Module) -> int:
    """The most bytes alive beside what is given, outputs and gradients."""
    with tl.memory.track() as tracker:
        outs = [x for x in tensors(run()) if x.requires_grad]
        grads = [torch.ones_like(x) for x in outs]
        found = torch.autograd.grad(outs, [*net.parameters()], grads)
    return tracker.peak - nbytes([*outs, *grads, *found])


def plans(loop: Loop, everything: int) -> dict[str, tuple[Run, Run | None]]:
    """By name: the eager run, and the compiled one."""
    found: dict[str, tuple[Run, Run | None]] = {"plain": (lambda: loop.ours(None), lambda: loop.ours(None, True))}
    if not isinstance(loop, Decoder):
        found["blocks of 16 by hand"] = (lambda: loop.in_blocks(loop.by_hand), None)
        found["`torch.utils.checkpoint`, blocks of 16"] = (lambda: loop.in_blocks(loop.by_torch), None)
    ours: dict[str, Any] = {"K=16": 16, "K=16, residuals of 16": tl.Checkpoints(k=BLOCK, residuals=BLOCK)}
    ours["K=T"] = len(loop.xs)
    for share in SHARES:
        ours[f"budget of {share} ({int(share * everything):,})"] = tl.Checkpoints(budget=int(share * everything))
    for name, plan in ours.items():
        found[name] = (lambda plan=plan: loop.ours(plan), lambda plan=plan: loop.ours(plan, True))
    return found


def report(loop: Loop, turns: int) -> None:
    """Prints a line for each plan."""
    runs: dict[tuple[str, int], Run] = {}
    said: dict[tuple[str, int], str] = {}
    for name, both in plans(loop, peak(lambda: loop.ours(None), loop.net)).items():
        for k, run in enumerate(both):
            if run is None:
                continue
            try:
                seconds(run, loop.net)
                said[name, k] = f"{peak(run, loop.net):,}"
                runs[name, k] = run
            except ValueError as error:
                said[name, k] = f"refused: {str(error).rpartition('at least ')[2].split()[0]} at least"
    found = [{key: seconds(run, loop.net) for key, run in runs.items()} for _ in range(turns)]
    for name in dict.fromkeys(name for name, _ in said):
        cells = []
        for k in (0, 1):
            if (name, k) in runs:
                ratio = statistics.median(turn[name, k] / turn["plain", 0] for turn in found)
                cells += [f"{ratio:.2f}", said[name, k]]
            else:
                cells += ["", said.get((name, k), "")]
        print(f"| {loop.name} | {name} | {' | '.join(cells)} |", flush=True)


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    T = 32 if quick else 256
    print("| loop | plan | eager: time | bytes | compiled: time | bytes |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for loop in (*loops(T), Decoder(T)):
        report(loop, 1 if quick else 9)


if __name__ == "__main__":
    main(sys.argv[1:])
