"""A Conformer with a Transformer decoder, in ordinary torch: rows are packed, padded, or one alone.

Convolutions take away time, attention knows relative positions; the decoder has RMS norms, rotary positions and gated
layers. Two losses: CTC of the encoder, cross entropy of the decoder.
"""

from itertools import pairwise
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def longest(x: Any) -> int:
    """The steps of the longest row of x (B, T, F)."""
    return x.max_len if hasattr(x, "max_len") else x.shape[1]


def lens_of(x: Any) -> Tensor:
    """(B,): the steps of each row of x (B, T, F)."""
    return x.lens if hasattr(x, "lens") else torch.full((x.shape[0],), x.shape[1])


def split_heads(x: Any, heads: int) -> Any:
    """(B, T, heads * d) -> (B, heads, T, d)"""
    B, T, _ = x.shape
    return x.view(B, T, heads, -1).transpose(1, 2)


def join_heads(x: Any) -> Any:
    """(B, heads, T, d) -> (B, T, heads * d)"""
    return x.transpose(1, 2).flatten(2)


def shift_distances(x: Any) -> Any:
    """(B, heads, T, 2 T - 1), by distance, -> (B, heads, T, T), by key."""
    B, H, T, n = x.shape
    x = F.pad(x, (1, 0)).view(B, H, -1, T)
    return x[:, :, 1:].view(B, H, T, n)[..., : n // 2 + 1]


def attend_by_distance(q: Any, k: Any, v: Any, table: Any, u: Tensor, w: Tensor, dropout: float = 0.0) -> Any:
    """Attention of Transformer-XL: heads first, a table (heads, R, d) of distances from far behind to far ahead.

    The biases u and w (heads, 1, d) are added to queries, for keys and for distances.
    """
    n, middle = longest(q.transpose(1, 2)), table.shape[-2] // 2
    near = table[:, middle - n + 1 : middle + n]
    scores = (q + u) @ k.transpose(-2, -1) + shift_distances((q + w) @ near.transpose(-2, -1))
    weights = (scores * q.shape[-1] ** -0.5).softmax(-1)
    return F.dropout(weights, dropout) @ v


class Along(nn.Module):
    """Layers that have time last, for x (B, T, C)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class PooledFront(nn.Module):
    """Convolutions over time and features, each with its strides and a pool."""

    def __init__(self, features: int, width: int, channels: int, strides: list[Any], pools: list[Any]) -> None:
        super().__init__()
        sizes = [1, *[channels] * len(strides)]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride, padding=1) for (a, b), stride in zip(pairwise(sizes), strides, strict=True)
        )
        self.pools = pools
        for (_, stride), (_, pool) in zip(strides, pools, strict=True):
            features = ceil(ceil(features / stride) / pool)
        self.out = nn.Linear(channels * features, width)

    def forward(self, x: Any) -> Any:
        x = x.unsqueeze(1)
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = F.max_pool2d(F.relu(conv(x)), pool, ceil_mode=True)
        B, C, T, n = x.shape
        return self.out(x.transpose(1, 2).reshape(B, T, C * n))


class Feedforward(nn.Module):
    """Two linear layers with a squared ReLU between."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.out(F.relu(self.into(self.norm(x))) ** 2)


class DistanceAttention(nn.Module):
    """Self-attention that knows the distance between query and key."""

    def __init__(self, width: int, heads: int, reach: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(heads, 2 * reach - 1, width // heads))
        self.u, self.w = (nn.Parameter(torch.randn(heads, 1, width // heads)) for _ in "uw")

    def forward(self, x: Any) -> Any:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        return self.out(join_heads(attend_by_distance(q, k, v, self.table, self.u, self.w, dropout)))


class ConvolutionModule(nn.Module):
    """Gate, depthwise convolution as long as wanted, batch norm."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, kernel, padding="same", groups=width)
        self.batch_norm, self.out = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        x = F.glu(self.into(self.norm(x)), -1).transpose(1, 2)
        return self.out(F.silu(self.batch_norm(self.conv(x)).transpose(1, 2)))


class ConformerLayer(nn.Module):
    """Half a feedforward layer, attention, convolution, half a feedforward layer, norm."""

    def __init__(self, width: int, heads: int, kernel: int, reach: int) -> None:
        super().__init__()
        self.first, self.last = Feedforward(width, 24), Feedforward(width, 24)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.conv = DistanceAttention(width, heads, reach), ConvolutionModule(width, kernel)

    def forward(self, x: Any) -> Any:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(self.before(x))
        x = x + self.conv(x)
        return self.after(x + 0.5 * self.last(x))


class Conformer(nn.Module):
    """Subsampling, then layers."""

    def __init__(self, features: int, width: int, strides: list[Any], pools: list[Any], kernel: int = 32) -> None:
        super().__init__()
        self.front = PooledFront(features, width, 4, strides, pools)
        self.layers = nn.Sequential(*(ConformerLayer(width, 2, kernel, 12) for _ in range(2)))

    def forward(self, x: Any) -> Any:
        return self.layers(self.front(x))


def rotate(x: Any) -> Any:
    """Rotary positions of x (B, heads, T, d)."""
    T, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(T)[:, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, a gated feedforward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.qkv, self.own = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.q, self.kv, self.other = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.gate, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any, states: Any) -> Any:
        q, k, v = (split_heads(y, self.heads) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.own(join_heads(y))
        q = split_heads(self.q(self.norms[1](x)), self.heads)
        k, v = (split_heads(y, self.heads) for y in self.kv(states).chunk(2, -1))
        x = x + self.other(join_heads(F.scaled_dot_product_attention(q, k, v)))
        a, b = self.gate(self.norms[2](x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b)


class Recognizer(nn.Module):
    """Features and labels to the two losses of each row, and the encoder's states."""

    def __init__(self, features: int = 8, width: int = 16, labels: int = 11) -> None:
        super().__init__()
        self.encoder = Conformer(features, width, [(1, 1), (3, 1), (2, 1)], [(1, 2), (1, 1), (1, 1)])
        self.ctc = nn.Linear(width, labels + 1)
        self.embedding = nn.Embedding(labels, width)
        self.decoder = nn.ModuleList(DecoderLayer(width, 2) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, labels, bias=False)

    def forward(self, x: Any, labels: Any) -> tuple[Any, Any, Any]:
        states = self.encoder(x)
        scores = self.ctc(states).log_softmax(-1)
        blank = scores.shape[-1] - 1
        ctc = F.ctc_loss(scores.transpose(0, 1), labels, lens_of(states), lens_of(labels), blank, "none", True)
        y = self.embedding(labels)
        for layer in self.decoder:
            y = layer(y, states)
        logits = self.head(self.norm(y))
        return ctc, F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1), states
