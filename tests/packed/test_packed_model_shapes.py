"""Modules that make masks, tables and sizes as known models of other packages do, on packed rows and on rows alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorloop.packed import PackedTensor

D, HEADS, WIDTH = torch.float64, 2, 8
LENS = [[5, 1, 9], [4, 4], [3], [2, 7, 7, 1]]


class Attention(nn.Module):
    """Self-attention of WIDTH features in two heads; `bias` and `mask` come from what stands below."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Any) -> Any:
        return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)

    def scores(self, q: Any, k: Any) -> Any:
        return q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)

    def forward(self, x: Any) -> Any:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        out = self.weights(q, k) @ v
        return self.o(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], WIDTH))

    def weights(self, q: Any, k: Any) -> Any:
        return self.scores(q, k).softmax(-1)


class TriangleOfDifference(Attention):
    """The mask of a decoder whose keys may be more than its queries."""

    def weights(self, q: Any, k: Any) -> Any:
        s = self.scores(q, k)
        i, j = s.shape[-2:]
        mask = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        return s.masked_fill(mask, -torch.finfo(s.dtype).max).softmax(-1)


class MaskByPositions(Attention):
    """A mask by comparing positions of queries and keys, added as large negative numbers, with a past of no steps."""

    def weights(self, q: Any, k: Any) -> Any:
        s, past = self.scores(q, k), 0
        at = torch.arange(past, past + q.shape[-2])
        keys = torch.arange(k.shape[-2] + past)
        seen = (keys[None, None, None, :] <= at[None, None, :, None]).expand(q.shape[0], 1, -1, -1)
        added = torch.where(seen, torch.zeros((), dtype=D), torch.finfo(D).min)
        return (s + added[:, :, :, : k.shape[-2]]).softmax(-1)


class KeptTriangle(Attention):
    """Cuts the rows of the last queries out of a triangle that is kept, less another: a window."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        triangle = torch.ones(64, 64, dtype=torch.bool).tril()
        self.register_buffer("bias", (triangle ^ triangle.tril(-4)).view(1, 1, 64, 64), persistent=False)

    def weights(self, q: Any, k: Any) -> Any:
        queries, keys = q.size(-2), k.size(-2)
        mask = self.bias[:, :, keys - queries : keys, :keys]
        s = self.scores(q, k)
        return torch.where(mask, s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype)).softmax(-1)


class Alibi(Attention):
    """Slopes for each head times distances, which are kept and cut from their end."""

    bias: Any = None

    def weights(self, q: Any, k: Any) -> Any:
        i, j = q.shape[-2], k.shape[-2]
        if self.bias is None or not (self.bias.shape[-1] >= j and self.bias.shape[-2] >= i):
            far = -(torch.arange(j)[None, None, :] - torch.arange(j - i, j)[None, :, None]).abs()
            bias = far * torch.tensor([0.5, 0.25], dtype=D).view(2, 1, 1)
            self.bias = F.pad(bias, (0, 0, 0, 0, 0, HEADS - bias.shape[0]))
        return (self.scores(q, k) + self.bias[..., -i:, -j:]).softmax(-1)


class AlibiOfMask(Attention):
    """Distances from the sum of a mask of ones."""

    def weights(self, q: Any, k: Any) -> Any:
        mask = torch.ones((k.shape[0], k.shape[-2]), dtype=D)
        at = ((mask.cumsum(-1) - 1) * mask)[:, None, None, :]
        return (self.scores(q, k) + torch.tensor([0.5, 0.25], dtype=D).view(1, 2, 1, 1) * at).softmax(-1)


class BucketsOfDistance(Attention):
    """A bias by buckets of distances, linear and then logarithmic."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, HEADS)

    def weights(self, q: Any, k: Any) -> Any:
        i, j = q.shape[-2], k.shape[-2]
        far = torch.arange(j)[None, :] - torch.arange(j - i, j)[:, None]
        side, n = (far > 0).long() * 8, far.abs()
        large = 4 + (torch.log(n.float().clamp(min=1) / 4) / math.log(8) * 4).long()
        bucket = side + torch.where(n < 4, n, torch.min(large, torch.full_like(large, 7)))
        return (self.scores(q, k) + self.table(bucket).permute(2, 0, 1)[None]).softmax(-1)


class JoinedHeads(Attention):
    """Heads joined with the batch, and sizes of what comes checked, as encoders of speech do."""

    def forward(self, x: Any) -> Any:
        b, t, _ = x.size()
        q, k, v = (y.reshape(b * HEADS, -1, WIDTH // HEADS) for y in map(self.split, (self.q(x), self.k(x), self.v(x))))
        s = torch.bmm(q, k.transpose(1, 2))
        if s.size() != (b * HEADS, t, k.size(1)):
            raise ValueError(f"scores should be {(b * HEADS, t, k.size(1))}, not {s.size()}")
        out = torch.bmm(s.softmax(-1), v)
        if out.size() != (b * HEADS, t, WIDTH // HEADS):
            raise ValueError(f"outputs should be {(b * HEADS, t, WIDTH // HEADS)}, not {out.size()}")
        return self.o(out.view(b, HEADS, t, -1).transpose(1, 2).reshape(b, t, WIDTH))


class Rotary(Attention):
    """Angles of positions times frequencies, as the product of matrices."""

    def weights(self, q: Any, k: Any) -> Any:
        at = torch.arange(q.shape[-2])[None]
        angles = (torch.tensor([1.0, 0.1], dtype=D)[None, :, None] @ at[:, None, :].to(D)).transpose(1, 2)
        both = torch.cat((angles, angles), dim=-1)[:, None]

        def turn(x: Any) -> Any:
            left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
            return x * both.cos() + torch.cat((-right, left), dim=-1) * both.sin()

        return self.scores(turn(q), turn(k)).softmax(-1)


class LearnedPositions(nn.Module):
    """An embedding of positions, of which one stands in front."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(32, WIDTH), TriangleOfDifference()

    def forward(self, x: Any) -> Any:
        t = x.shape[1]
        return self.layer(x + self.places(torch.arange(0, t) + 2).unsqueeze(0))


class Sinusoids(nn.Module):
    """A table of sines that is made once it is too short, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None
        self.layer = Attention()

    def forward(self, x: Any) -> Any:
        if self.table is None or self.table.size(1) < x.size(1):
            at = torch.arange(0, x.size(1), dtype=D).unsqueeze(1)
            steps = torch.exp(torch.arange(0, WIDTH, 2, dtype=D) * -(math.log(10000.0) / WIDTH))
            table = torch.zeros((x.size(1), WIDTH), dtype=D)
            table[:, 0::2] = torch.sin(at * steps)
            table[:, 1::2] = torch.cos(at * steps)
            self.table = table.unsqueeze(0)
        return self.layer(x * math.sqrt(WIDTH) + self.table[:, : x.size(1)])


class TurnedDistances(Attention):
    """Content to position: keys of distances, gathered for each query by an index made of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Embedding(2 * 32, WIDTH // HEADS)

    def weights(self, q: Any, k: Any) -> Any:
        i, j = q.size(-2), k.size(-2)
        far = torch.arange(i)[:, None] - torch.arange(j)[None, :]
        keys = self.far(far.clamp(-32, 31) + 32)
        return (self.scores(q, k) + torch.einsum("bhid,ijd->bhij", q, keys)).softmax(-1)


MODULES: list[Callable[[], nn.Module]] = [
    *(TriangleOfDifference, MaskByPositions, KeptTriangle, Alibi, AlibiOfMask, BucketsOfDistance, JoinedHeads, Rotary),
    *(LearnedPositions, Sinusoids, TurnedDistances),
]


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_a_module_sees_every_row_alone(make: Callable[[], nn.Module]):
    """Values, and gradients of input and weights, of one batch after another, through one module."""
    torch.manual_seed(0)
    module = make().double()
    for lens in LENS:
        values = torch.randn(sum(lens), WIDTH, dtype=D, requires_grad=True)
        x = PackedTensor(values, lens)
        found: list[Tensor] = list(module(x).unbind())
        wanted = [module(row[None])[0] for row in x.unbind()]
        weights = [torch.randn_like(row) for row in wanted]
        both = []
        for rows in (found, wanted):
            loss = torch.stack([(w * row).sum() for w, row in zip(weights, rows, strict=True)]).sum()
            both.append(torch.autograd.grad(loss, [values, *module.parameters()]))
        for row, alone in zip(found, wanted, strict=True):
            torch.testing.assert_close(row, alone)
        for grad, alone in zip(*both, strict=True):
            torch.testing.assert_close(grad, alone)
