"""What the tests of attention share: the definition, packed tensors by hand, block masks."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None, sees: Tensor | None = None
) -> Tensor:
    """q (B, T, heads, D), k and v (B, S, heads_kv, D); `sees` (B, heads, T, S); 0 where a query sees nothing."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = torch.ones_like(scores, dtype=torch.bool) if sees is None else sees.expand(scores.shape)
    mask = mask.tril() if causal else mask
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True) if scores.numel() else scores) * mask
    total = weights.sum(-1, keepdim=True)
    return (weights / torch.where(total == 0, 1, total) @ v).transpose(1, 2)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, q_lens: list[int], k_lens: list[int], causal: bool = False
) -> Tensor:
    """Row by row: q (N, heads, D), k and v (M, heads_kv, D)."""
    rows = zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    nothing = q.new_zeros(0, q.shape[1], v.shape[2])
    return torch.cat([nothing, *(attention(*(x[None] for x in row), causal=causal)[0] for row in rows)])


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 5)


def by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < 2 + 3 * h


def by_row(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j < 7 * b) & (i >= 2)


DOCUMENTS = torch.tensor([0] * 5 + [1] * 9 + [2] * 2 + [3] * 20)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)


def block_mask(mod: object, B: int | None, H: int | None, T: int, S: int, size: int = 4) -> BlockMask:
    return create_block_mask(mod, B, H, T, S, device="cpu", BLOCK_SIZE=size)  # pyright: ignore[reportArgumentType]


def dense_mask(mod: object, B: int, H: int, T: int, S: int) -> Tensor:
    """(B, H, T, S) bool, by asking about every pair."""
    grid = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    return mod(*grid)  # pyright: ignore[reportCallIssue]
