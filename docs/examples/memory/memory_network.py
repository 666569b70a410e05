"""A memory network: slot t of a memory is written with `torch.where`, then all slots so far are read.

An in-place write would stop the backward pass, so tutorials make a new memory for each write: O(T²) bytes.
"""

import torch
from torch import Tensor, nn

import tensorloop as tl

B, D = 2, 32  # batch, features

torch.manual_seed(0)
cell = nn.GRUCell(D, D)


def inputs(T: int) -> Tensor:
    return torch.randn(T, B, D, generator=torch.Generator().manual_seed(0))


def before(T: int) -> Tensor:
    memory, slots = torch.zeros(T, B, D), torch.arange(T)[:, None, None]
    h = read = torch.zeros(B, D)
    for t, x in enumerate(inputs(T)):
        h = cell(x + read, h)
        memory = torch.where(slots == t, h, memory)
        weights = torch.einsum("bd,tbd->tb", h, memory[: t + 1]).softmax(0)
        read = torch.einsum("tb,tbd->bd", weights, memory[: t + 1])
    return (h + read).square().mean()


def after(T: int) -> Tensor:
    memory = tl.TensorArray()  # elements (B, 1, D): one head
    h = read = torch.zeros(B, D)
    for x in inputs(T):
        h = cell(x + read, h)
        memory.append(h[:, None])
        read = tl.attention(h[:, None], memory, memory, scale=1.0)[:, 0]
    return (h + read).square().mean()
