"""A decoder that attends to its own past: a cache of keys and values grown with `torch.cat`.

Each step makes the whole cache anew, and attention keeps every copy for backward: O(T²) bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl

B, HEADS, D = 2, 4, 32  # batch, heads, features

torch.manual_seed(0)
cell, to_qkv, out = nn.GRUCell(D, D), nn.Linear(D, 3 * D), nn.Linear(D, D)


def inputs(T: int) -> Tensor:
    return torch.randn(T, B, D, generator=torch.Generator().manual_seed(0))


def before(T: int) -> Tensor:
    h = torch.zeros(B, D)
    keys = values = torch.zeros(B, HEADS, 0, D // HEADS)
    loss = torch.zeros(())
    for x in inputs(T):
        h = cell(x, h)
        q, k, v = to_qkv(h).view(B, 3, HEADS, 1, D // HEADS).unbind(1)
        keys = torch.cat([keys, k], dim=2)
        values = torch.cat([values, v], dim=2)
        read = F.scaled_dot_product_attention(q, keys, values)
        h = h + out(read.reshape(B, D))
        loss = loss + h.square().mean()
    return loss / T


def after(T: int) -> Tensor:
    h = torch.zeros(B, D)
    keys, values = tl.TensorArray(), tl.TensorArray()
    loss = torch.zeros(())
    for x in inputs(T):
        h = cell(x, h)
        q, k, v = to_qkv(h).view(B, 3, HEADS, D // HEADS).unbind(1)
        keys.append(k)
        values.append(v)
        read = tl.attention(q, keys, values)
        h = h + out(read.reshape(B, D))
        loss = loss + h.square().mean()
    return loss / T
