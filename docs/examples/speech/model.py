"""A Conformer over packed rows: every layer sees the frames there are, and no mask is needed anywhere.

Source: Gulati et al. 2020, with rotary positions (Su et al. 2021) in place of relative ones, and convolutions over time
alone in front.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl

BLANK = 0


class Config(NamedTuple):
    features: int
    labels: int  # with the blank, which is 0
    width: int = 128
    blocks: int = 4
    heads: int = 4
    kernel: int = 15
    dropout: float = 0.1


class FeedForward(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        super().__init__(*layers, nn.Dropout(dropout))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: tl.PackedTensor, turns: Tensor) -> tl.PackedTensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        seen = tl.attention(rotated(q, turns), rotated(k, turns), v)
        return self.dropout(self.out(seen.flatten(-2)))


class Convolution(nn.Module):
    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.gated = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GLU())
        self.depthwise = nn.Conv1d(width, width, kernel, padding="same", groups=width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, x: tl.PackedTensor) -> tl.PackedTensor:
        return self.out(self.norm(self.depthwise(self.gated(x).transpose(1, 2))).transpose(1, 2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4, kernel: int = 15, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.behind = (FeedForward(width, dropout) for _ in range(2))
        self.attention = SelfAttention(width, heads, dropout)
        self.convolution = Convolution(width, kernel, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: tl.PackedTensor, turns: Tensor) -> tl.PackedTensor:
        """x (B, T*, width); turns (T, 2, width / heads / 2), T the longest row."""
        x = x + 0.5 * self.before(x)
        x = x + self.attention(x, turns)
        x = x + self.convolution(x)
        return self.norm(x + 0.5 * self.behind(x))


class Conformer(nn.Module):
    """Frames (B, T*, features) to log-probabilities (B, ceil(T / 4)*, labels)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.subsample = nn.ModuleList(
            nn.Conv1d(channels, width, 3, stride=2, padding=1) for channels in (config.features, width)
        )
        self.blocks = nn.ModuleList(
            Block(width, config.heads, config.kernel, config.dropout) for _ in range(config.blocks)
        )
        self.head = nn.Linear(width, config.labels)

    def encode(self, frames: tl.PackedTensor) -> tl.PackedTensor:
        """(B, ceil(T / 4)*, width)"""
        x = frames.transpose(1, 2)
        for conv in self.subsample:
            x = conv(x).relu()
        x = x.transpose(1, 2)
        turns = angles(x.max_len, self.config.width // self.config.heads, x.values)
        for block in self.blocks:
            x = block(x, turns)
        return x

    def scores(self, encoded: tl.PackedTensor) -> tl.PackedTensor:
        return self.head(encoded).log_softmax(-1)

    def forward(self, frames: tl.PackedTensor) -> tl.PackedTensor:
        return self.scores(self.encode(frames))

    def loss(self, frames: tl.PackedTensor, labels: tl.PackedTensor) -> Tensor:
        """-log p(labels | frames), by the label and the mean over rows."""
        return ctc(self(frames), labels)


def ctc(scores: tl.PackedTensor, labels: tl.PackedTensor) -> Tensor:
    return F.ctc_loss(scores, labels, scores.lens, labels.lens, blank=BLANK, zero_infinity=True)


def angles(steps: int, size: int, like: Tensor) -> Tensor:
    """(steps, 2, size / 2): by what the numbers of a head are turned at each step, as cosines and sines."""
    half = size // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.arange(steps)[:, None] * speeds
    return torch.stack([turned.cos(), turned.sin()], 1).to(like)


def rotated(x: Any, turns: Tensor) -> Any:
    """x (B, T*, heads, size), packed or padded, turned by its place: products of two tell how far apart they are."""
    cos, sin = turns[:, None].unbind(2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
