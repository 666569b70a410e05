"""What it costs that the Python of a body is followed: later calls of compiled loops, and calls with checkpoints.

A step that was followed is known by what it read: a later call compares that, and follows nothing. Each loop runs in
turn as it is and with all forgotten before each call, so that its steps are followed every time; the ratio of the least
process times of many is printed, and how long the comparison takes. Loops have 20 steps; with checkpoints the steps
that are followed are the first two.

Below that training rollouts of a small Llama (two layers of 64, eight rows, 64 tokens), whose functions have ways that
no step takes: plain ones, with checkpoints, and with these where nothing is followed once a step has brought nothing
new. Printed are the medians of the ratios of process times to the plain one of the same turn.

    python profiling/effects.py            200 calls of each, 7 turns
    python profiling/effects.py --quick    3 calls of each, 1 turn
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tensorloop as tl
from tensorloop.loop.effects.notes import Ways
from tensorloop.loop.known_reads import known_reads

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


def least(run: Callable[[], Any], calls: int) -> tuple[float, float, float]:
    """The least process times in seconds: of a call, of one that is followed, and of the comparisons in a call."""
    found, times = known_reads.find, [0.0]

    def find(root: Any, loop: Any) -> Any:
        begun = time.thread_time()
        step = found(root, loop)
        times[0] += time.thread_time() - begun
        return step

    best = [float("inf")] * 3
    for _ in range(calls):
        known_reads.clear()
        for k in (1, None, 0, 2):  # a call that is not timed comes to know the step again
            times[0] = 0.0
            known_reads.find = find if k == 2 else found
            begun = time.thread_time()
            run()
            taken = time.thread_time() - begun
            if k is not None:
                best[k] = min(best[k], times[0] if k == 2 else taken)
    known_reads.find = found
    return best[0], best[1], best[2]


def rollouts(turns: int) -> None:
    """Prints the table of rollouts."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=256, **sizes))
    ids = torch.randint(3, 1000, (8, 16))
    plans: dict[str, Any] = {"12 carries": 12, "12 carries, blocks of 6": tl.Checkpoints(k=12, residuals=6)}

    def seconds(plan: Any = None) -> float:
        torch.manual_seed(1)
        begun = time.process_time()
        drawn = tl.hf.rollout(model, ids, do_sample=True, max_new_tokens=64, eos_token_id=[], checkpoints=plan)
        drawn.log_probs.sum().backward()
        return time.process_time() - begun

    all_known, found = Ways.all_known, list[list[float]]()

    def settled(self: Ways) -> bool:
        return self.settled

    try:
        for _ in range(turns + 1):  # the first to know the code
            plain, row = seconds(), list[float]()
            for plan in plans.values():
                for asks in (all_known, settled):
                    Ways.all_known = asks
                    row.append(seconds(plan) / plain)
                Ways.all_known = all_known
            found.append(row)
    finally:
        Ways.all_known = all_known
    print("\n| rollout / plain | followed | not followed |\n| --- | --- | --- |")
    ratios = [statistics.median(turn) for turn in zip(*found[1:], strict=True)]
    for k, name in enumerate(plans):
        print(f"| {name} | {ratios[2 * k]:.2f} | {ratios[2 * k + 1]:.2f} |", flush=True)


def main(calls: int) -> None:
    """Prints the table of loops."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    xs = torch.randn(STEPS, 4, WIDTH, requires_grad=True)
    columns = "(us) | comparing (us) | followed / that"
    print(f"| body | compiled, later {columns} | with checkpoints {columns} |")
    print(f"|{' --- |' * 7}")
    for name, body, init in loops():
        row = [name]
        for options in ({"compile": "strict"}, {"checkpoints": 5}):
            given = xs.detach() if "compile" in options else xs
            run = partial(tl.scan, body, init, given, **options)
            run()
            later, followed, comparing = least(run, calls)
            row += [f"{later * 1e6:.0f}", f"{comparing * 1e6:.1f}", f"{followed / later:.2f}"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    quick = "--quick" in sys.argv[1:]
    main(3 if quick else 200)
    rollouts(1 if quick else 7)
