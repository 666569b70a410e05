"""What the tests of attention share: leaves, masks, and block masks made of them."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


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
    return create_block_mask(mod, B, H, T, S, device=str(torch.get_default_device()), BLOCK_SIZE=size)  # pyright: ignore[reportArgumentType]


def dense_mask(mod: object, B: int, H: int, T: int, S: int) -> Tensor:
    """(B, H, T, S) bool, by asking about every pair."""
    grid = torch.meshgrid(*(torch.arange(n) for n in (B, H, T, S)), indexing="ij")
    return mod(*grid)  # pyright: ignore[reportCallIssue]
