"""A neural Turing machine (Graves, Wayne & Danihelka 2014) whose memory is an attribute of a module.

Every step writes all of the memory anew, and backward keeps every one of them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import tensorloop as tl

ROWS, SLOTS, WIDTH, HIDDEN, BITS = 8, 64, 16, 64, 8


def similarity(cells: Tensor, key: Tensor) -> Tensor:
    """Cosines (B, SLOTS)."""
    return (cells @ key[..., None])[..., 0] / (cells.norm(dim=2) * key.norm(dim=1, keepdim=True) + 1e-8)


class Memory:
    cells: Any  # (B, SLOTS, WIDTH)

    def reset(self, rows: int, like: Tensor) -> None:
        self.cells = like.new_full((rows, SLOTS, WIDTH), 0.01)

    def address(self, key: Tensor, said: Tensor, before: Tensor) -> Tensor:
        """By content, then shifted from where it was, then sharpened."""
        strength, gate, sharpness, shift = said.split([1, 1, 1, 3], 1)
        near = similarity(self.cells, key)
        content = (softplus(strength) * near).softmax(1)
        mixed = torch.sigmoid(gate) * content + (1 - torch.sigmoid(gate)) * before
        around = torch.stack([mixed.roll(1, 1), mixed, mixed.roll(-1, 1)], 2)
        sharp = (around @ shift.softmax(1)[..., None])[..., 0] ** (1 + softplus(sharpness))
        return sharp / sharp.sum(1, keepdim=True).clamp(min=1e-8)

    def read(self, w: Tensor) -> Tensor:
        return (w[:, None] @ self.cells)[:, 0]

    def write(self, w: Tensor, erase: Tensor, add: Tensor) -> None:
        self.cells = self.cells * (1 - w[..., None] * erase[:, None]) + w[..., None] * add[:, None]


class NTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.controller = nn.LSTMCell(BITS + WIDTH, HIDDEN)
        self.to_read, self.to_write = nn.Linear(HIDDEN, WIDTH + 6), nn.Linear(HIDDEN, 3 * WIDTH + 6)
        self.out = nn.Linear(HIDDEN + WIDTH, BITS)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        self.memory.reset(len(x), x)
        first = torch.zeros(len(x), SLOTS).to(x)
        first[:, 0] = 1
        nothing = x.new_zeros(len(x), HIDDEN)
        return nothing, nothing, x.new_zeros(len(x), WIDTH), first, first

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        h, c, read, w_read, w_write = state
        h, c = self.controller(torch.cat([x, read], 1), (h, c))
        key, said = self.to_read(h).split([WIDTH, 6], 1)
        w_read = self.memory.address(key, said, w_read)
        read = self.memory.read(w_read)
        key, erase, add, said = self.to_write(h).split([WIDTH, WIDTH, WIDTH, 6], 1)
        w_write = self.memory.address(key, said, w_write)
        self.memory.write(w_write, torch.sigmoid(erase), add)
        return self.out(torch.cat([h, read], 1)), (h, c, read, w_read, w_write)


def before(ntm: NTM, xs: Tensor) -> Tensor:
    state = ntm.start(xs[0])
    outs = []
    for x in xs:
        out, state = ntm(x, state)
        outs.append(out)
    return torch.stack(outs).square().mean()


def by_hand(ntm: NTM, xs: Tensor) -> Tensor:
    @tl.loop.pure  # what it sets it takes off again
    def step(carry: Any, x: Tensor) -> Any:
        ntm.memory.cells, state = carry
        out, state = ntm(x, state)
        return (vars(ntm.memory).pop("cells"), state), out

    state = ntm.start(xs[0])
    init = vars(ntm.memory).pop("cells"), state
    _, outs = tl.scan(step, init, xs, checkpoints=8, compile=True)
    return outs.square().mean()


def after(ntm: NTM, xs: Tensor) -> Tensor:
    state = ntm.start(xs[0])
    loops = tl.carrying(ntm.memory)
    _, outs = loops.scan(lambda state, x: ntm(x, state)[::-1], state, xs, checkpoints=8, compile=True)
    return outs.square().mean()


def make(T: int) -> tuple[NTM, Tensor]:
    return NTM(), torch.randn(T, ROWS, BITS)
