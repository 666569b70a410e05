"""A differentiable neural computer (Graves et al. 2016): usage, allocation by sorting, and links between all slots.

A matrix of links, slots by slots, is made anew at every step.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import tensorloop as tl

ROWS, SLOTS, WIDTH, HIDDEN, BITS = 4, 64, 16, 64, 8


def similarity(cells: Tensor, key: Tensor) -> Tensor:
    """Cosines (B, SLOTS)."""
    return (cells @ key[..., None])[..., 0] / (cells.norm(dim=2) * key.norm(dim=1, keepdim=True) + 1e-8)


class State(NamedTuple):
    h: Tensor
    c: Tensor
    memory: Tensor  # (B, SLOTS, WIDTH)
    usage: Tensor  # (B, SLOTS)
    links: Tensor  # (B, SLOTS, SLOTS): was i written right after j?
    latest: Tensor  # (B, SLOTS)
    w_read: Tensor
    w_write: Tensor
    read: Tensor  # (B, WIDTH)


class DNC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.controller = nn.LSTMCell(BITS + WIDTH, HIDDEN)
        self.interface = nn.Linear(HIDDEN, 4 * WIDTH + 8)
        self.out = nn.Linear(HIDDEN + WIDTH, BITS)

    def start(self, x: Tensor) -> State:
        def none(*shape: int) -> Tensor:
            return x.new_zeros(len(x), *shape)

        slots = [none(SLOTS) for _ in range(4)]
        memory, links = none(SLOTS, WIDTH), none(SLOTS, SLOTS)
        return State(none(HIDDEN), none(HIDDEN), memory, slots[0], links, slots[1], slots[2], slots[3], none(WIDTH))

    def allocation(self, usage: Tensor) -> Tensor:
        """The least used slots first."""
        order = (0.005 + 0.99 * usage).sort(1)
        free = (1 - order.values) * torch.cat([torch.ones_like(usage[:, :1]), order.values.cumprod(1)[:, :-1]], 1)
        return torch.zeros_like(usage).scatter(1, order.indices, free)

    def forward(self, x: Tensor, s: State) -> tuple[State, Tensor]:
        h, c = self.controller(torch.cat([x, s.read], 1), (s.h, s.c))
        said = self.interface(h)
        read_key, write_key, erase, add, numbers, modes = said.split([WIDTH] * 4 + [5, 3], 1)
        read_strength, write_strength, free, allocate, write = numbers.split(1, 1)
        usage = (s.usage + s.w_write - s.usage * s.w_write) * (1 - torch.sigmoid(free) * s.w_read)
        content = (softplus(write_strength) * similarity(s.memory, write_key)).softmax(1)
        allocate = torch.sigmoid(allocate)
        w_write = torch.sigmoid(write) * (allocate * self.allocation(usage) + (1 - allocate) * content)
        memory = s.memory * (1 - w_write[..., None] * torch.sigmoid(erase)[:, None]) + w_write[..., None] * add[:, None]
        kept = 1 - w_write[:, :, None] - w_write[:, None, :]
        links = (kept * s.links + w_write[:, :, None] * s.latest[:, None, :]) * (1 - torch.eye(SLOTS).to(x))
        latest = (1 - w_write.sum(1, keepdim=True)) * s.latest + w_write
        content = (softplus(read_strength) * similarity(memory, read_key)).softmax(1)
        ways = torch.stack(
            [(links.mT @ s.w_read[..., None])[..., 0], content, (links @ s.w_read[..., None])[..., 0]], 2
        )
        w_read = (ways @ modes.softmax(1)[..., None])[..., 0]
        read = (w_read[:, None] @ memory)[:, 0]
        state = State(h, c, memory, usage, links, latest, w_read, w_write, read)
        return state, self.out(torch.cat([h, read], 1))


def before(dnc: DNC, xs: Tensor) -> Tensor:
    state = dnc.start(xs[0])
    outs = []
    for x in xs:
        state, out = dnc(x, state)
        outs.append(out)
    return torch.stack(outs).square().mean()


def after(dnc: DNC, xs: Tensor) -> Tensor:
    _, outs = tl.scan(lambda state, x: dnc(x, state), dnc.start(xs[0]), xs, checkpoints=8, compile=True)
    return outs.square().mean()


def make(T: int) -> tuple[DNC, Tensor]:
    return DNC(), torch.randn(T, ROWS, BITS)
