"""The random numbers of a search: a hash of (seed of the row, step, hypothesis, token).

So a row draws the same ones whatever batch it is in, and on every device.
"""

import math
from typing import Any

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw_seeds(chooser: Any, rows: int, device: torch.device) -> Tensor:
    """(B,) int64, from torch's generator or the chooser's own; one number is drawn."""
    if not hasattr(chooser, "generator"):
        return torch.zeros(rows, dtype=torch.int64, device=device)
    generator = chooser.generator
    at = "cpu" if generator is None else generator.device
    seed = torch.randint(1 << 62, (), generator=generator, device=at).to(device)
    return _mix(seed + _GOLDEN * torch.arange(rows, device=device))


def draw_first(seeds: Tensor) -> Tensor:
    """A Gumbel variable (B,), float64, before step 0."""
    return _to_gumbel(_mix(seeds))


def draw(seeds: Tensor, t: int, shape: torch.Size) -> Tensor:
    """Gumbel variables of this shape (B, K, V), float64, for step t."""
    size = shape[1:].numel()
    count = torch.arange(size, device=seeds.device) + (t * size + 1)
    return _to_gumbel(_mix(seeds[:, None] + _GOLDEN * count)).view(shape)


def _to_gumbel(bits: Tensor) -> Tensor:
    uniform = (_shift_right(bits, 12).double() + 0.5) * math.ldexp(1, -52)
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele et al. 2014), in wrapping int64."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """With zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
