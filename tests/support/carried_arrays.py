"""Loops with a TensorArray in the carry, for tests: their inputs, and a scan around a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tensorloop import TensorArray

B, D, SLOTS, T = 3, 5, 4, 7


def rotation(size: int, dtype: torch.dtype) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0].to(dtype).requires_grad_()


class Inputs:
    """Tensors that get gradients: weights, the first state, slots, xs."""

    def __init__(self, dtype: torch.dtype = torch.float64, steps: int = T, slots: int = SLOTS) -> None:
        torch.manual_seed(0)
        self.U, self.W, self.Q = (rotation(D, dtype) for _ in range(3))
        self.h, self.xs, self.slots = (
            torch.randn(*shape, B, D, dtype=dtype).requires_grad_() for shape in ((), (steps,), (slots,))
        )

    def leaves(self) -> list[Tensor]:
        return [self.U, self.W, self.Q, self.h, self.xs, self.slots]


def scanned(d: Inputs, compile: Any, step: Callable[..., Tensor], empty: bool = False, **options: Any) -> Any:
    """A scan whose step is given (h, array, x, Inputs), changes the array and gives the next h."""

    def body(state: Any, x: Tensor) -> Any:
        h, array = state
        h = step(h, array, x, d)
        return (h, array), h.sum(-1)

    array = TensorArray() if empty else TensorArray.unstack(d.slots)
    return tl.scan(body, (d.h, array), d.xs, compile=compile, **options)


def next_state(h: Tensor, x: Tensor, d: Inputs, more: Tensor | float = 0.0) -> Tensor:
    return torch.tanh(h @ d.U + x + more)


def appends(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
    h = next_state(h, x, d)
    a.append(h * 2)
    return h


def tensors(tree: Any) -> list[Tensor]:
    return [
        x.stack() if isinstance(x, TensorArray) else x
        for x in tree_leaves(tree)
        if isinstance(x, (Tensor, TensorArray))
    ]
