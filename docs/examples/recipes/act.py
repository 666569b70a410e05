"""Adaptive computation time: a recurrent net that thinks about each input as long as it likes.

At each input the net takes steps until its halting probabilities have added up to 1; the state it goes on with is their
mean by these probabilities. A loop in a loop: a scan over the inputs, and in its body a `while_loop` in which each row
of the batch stops on its own and leaves. `checkpoints` on the outer one bounds what all inputs and all steps keep.

Source: Graves 2016, equations 5 to 13.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import tensorloop as tl

EPSILON = 0.01  # a row stops when its probabilities have come this close to 1


class Thought(NamedTuple):
    state: Tensor  # (B, H)
    mean: Tensor  # (B, H): states so far, by their probabilities
    spent: Tensor  # (B,): the sum of these
    rest: Tensor  # (B,): what was left for the last step
    steps: Tensor  # (B,)


class Pondering(nn.Module):
    """Inputs (T, B, F) to logits (T, B), and to the ponder cost (T, B)."""

    def __init__(self, features: int, width: int, most: int = 20) -> None:
        super().__init__()
        self.cell = nn.GRUCell(features + 1, width)
        self.halt, self.out = nn.Linear(width, 1), nn.Linear(width, 1)
        nn.init.constant_(self.halt.bias, -1.0)
        self.most = most

    def begin(self, state: Tensor) -> Thought:
        none = state.new_zeros(len(state))
        return Thought(state, torch.zeros_like(state), none, none, none)

    def goes_on(self, thought: Thought, x: Tensor) -> Tensor:
        return thought.spent < 1 - EPSILON

    def think(self, thought: Thought, x: Tensor) -> Thought:
        """One step; a flag tells the first step at an input from the others."""
        first = (thought.steps == 0).to(x.dtype)
        state = self.cell(torch.cat([x, first[:, None]], 1), thought.state)
        p, left = torch.sigmoid(self.halt(state))[:, 0], 1 - thought.spent
        last = (p >= left - EPSILON) | (thought.steps == self.most - 1)
        weight = torch.where(last, left, p)
        return Thought(
            state,
            thought.mean + weight[:, None] * state,
            torch.where(last, 1, thought.spent + p),
            torch.where(last, left, thought.rest),
            thought.steps + 1,
        )

    def forward(self, xs: Tensor, checkpoints: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, cost and steps, (T, B) each. The cost is steps + rest, whose gradient is that of the rest alone."""

        def read(state: Tensor, x: Tensor) -> tuple[Tensor, Thought]:
            end = tl.while_loop(self.goes_on, self.think, self.begin(state), context=x, compact=True)
            return end.mean, end

        start = xs.new_zeros(xs.shape[1], self.cell.hidden_size)
        _, ends = tl.scan(read, start, xs, checkpoints=checkpoints)
        return self.out(ends.mean)[..., 0], ends.steps + ends.rest, ends.steps

    def plain(self, xs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same as Python loops: all rows of the batch take the steps of the slowest."""
        state, ends = xs.new_zeros(xs.shape[1], self.cell.hidden_size), []
        for x in xs:
            thought = self.begin(state)
            while (running := self.goes_on(thought, x)).any():
                new = self.think(thought, x)
                pairs = zip(new, thought, strict=True)
                thought = Thought(*(torch.where(pick(running, a), a, b) for a, b in pairs))
            ends.append(thought)
            state = thought.mean
        stacked = Thought(*(torch.stack(leaf) for leaf in zip(*ends, strict=True)))
        return self.out(stacked.mean)[..., 0], stacked.steps + stacked.rest, stacked.steps


def pick(row: Tensor, like: Tensor) -> Tensor:
    return row if like.ndim == 1 else row[:, None]


def make_parities(steps: int, rows: int, features: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (T, B, F) of which some features are 1 or -1; the target (T, B): is the number of ones odd?"""
    shape = steps, rows, features
    signs = torch.randint(2, shape, generator=generator) * 2 - 1
    asked = torch.randint(1, features + 1, (steps, rows, 1), generator=generator) > torch.arange(features)
    xs = signs * asked
    return xs.float(), ((xs == 1).sum(-1) % 2).float()


def compute_loss(model: Pondering, xs: Tensor, targets: Tensor, price: float, **options: Any) -> Tensor:
    logits, cost, _ = model(xs, **options)
    return binary_cross_entropy_with_logits(logits, targets) + price * cost.mean()
