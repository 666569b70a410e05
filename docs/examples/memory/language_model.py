"""A recurrent language model, cell by cell: `xs[t]` of a tensor that needs a gradient.

Saved bytes are O(T). The time is not: the gradient of each `xs[t]` is a tensor of zeros as large as `xs`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl

V, B, D = 50, 4, 32  # vocabulary, batch, features

torch.manual_seed(0)
embed, cell, head = nn.Embedding(V, D), nn.GRUCell(D, D), nn.Linear(D, V)


def text(T: int) -> Tensor:
    return torch.randint(V, (T + 1, B), generator=torch.Generator().manual_seed(0))


def before(T: int) -> Tensor:
    tokens = text(T)
    xs = embed(tokens[:-1])  # (T, B, D)
    h = torch.zeros(B, D)
    outputs = []
    for t in range(T):
        h = cell(xs[t], h)
        outputs.append(h)
    logits = head(torch.stack(outputs))  # (T, B, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())


def after(T: int) -> Tensor:
    tokens = text(T)

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cell(x, h)
        return h, h

    _, outputs = tl.scan(step, torch.zeros(B, D), embed(tokens[:-1]))
    logits = head(outputs)  # (T, B, V)
    return F.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
