"""The RNN-T loss on the CPU: one row after the other, threads share the rows; its sums are float64.

What the arguments are is said in `kernels/lattices.py`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, inlined
from tensorloop.kernels.cpu.offsets import bounds_of
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array

CELL_COST = 60  # an entry, as bytes that are read and written in the same time (`threads.share`)


def rnnt_loss(scores: Tensor, offsets: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """(B,), and the forward sums (N,) float64."""
    rows = _rows(scores, offsets, widths, "rnnt_loss")
    alpha, losses = scores.new_empty(len(scores), dtype=torch.float64), scores.new_empty(len(widths))
    share(_forwards, len(losses), CELL_COST * len(alpha), (*rows, array(alpha), array(losses)))
    return losses, alpha


def rnnt_loss_grad(
    grad: Tensor, scores: Tensor, offsets: Tensor, widths: Tensor, losses: Tensor, alpha: Tensor
) -> Tensor:
    """(N, 2)"""
    rows = _rows(scores, offsets, widths, "rnnt_loss_grad")
    out = scores.new_empty(scores.shape)
    more = [array(x) for x in (alpha, losses, grad.contiguous(), out)]
    share(_backwards, len(losses), 2 * CELL_COST * len(alpha), (*rows, *more))
    return out


def _rows(scores: Tensor, offsets: Tensor, widths: Tensor, name: str) -> tuple[Any, ...]:
    bounds = bounds_of(offsets, len(scores), name)
    if len(widths) != len(bounds) - 1 or bool((widths < 1).any()) or bool((offsets.diff() % widths).any()):
        raise ValueError(f"{name}: a row's length must be a multiple of its width, 1 or more; got {widths}")
    return array(scores), bounds, array(widths)


@inlined
def _add(a: Any, b: Any) -> Any:
    """log(e^a + e^b)"""
    top, low = max(a, b), min(a, b)
    return top + np.log1p(np.exp(low - top)) if low > -np.inf else top


@compiled
def _forwards(begin: int, end: int, scores: Any, bounds: Any, widths: Any, alpha: Any, losses: Any) -> None:
    for b in range(begin, end):
        width, first, last = widths[b], bounds[b], bounds[b + 1]
        if first == last:
            losses[b] = 0 if width == 1 else np.inf
            continue
        for n in range(first, last):
            total = 0.0 if n == first else -np.inf
            if n - first >= width:
                total = _add(total, alpha[n - width] + scores[n - width, 0])
            if (n - first) % width > 0:
                total = _add(total, alpha[n - 1] + scores[n - 1, 1])
            alpha[n] = total
        losses[b] = -(alpha[last - 1] + scores[last - 1, 0])


@compiled
def _backwards(
    begin: int, end: int, scores: Any, bounds: Any, widths: Any, alpha: Any, losses: Any, grad: Any, out: Any
) -> None:
    longest = 0
    for b in range(begin, end):
        longest = max(longest, widths[b])
    beta = np.empty(longest + 1, np.float64)  # of the entries of a frame; behind the last token there is none
    for b in range(begin, end):
        width, first, last, scale = widths[b], bounds[b], bounds[b + 1], grad[b]
        if scale == 0 or losses[b] == np.inf:
            out[first:last] = 0 if scale == 0 else np.nan
            continue
        beta[: width + 1] = -np.inf
        for n in range(last - 1, first - 1, -1):
            u = (n - first) % width
            stay = (0.0 if n == last - 1 else beta[u]) + scores[n, 0]  # that of the next frame: it is written below
            go = beta[u + 1] + scores[n, 1] if u + 1 < width else -np.inf
            base = alpha[n] + losses[b]
            out[n, 0] = -scale * np.exp(base + stay)
            out[n, 1] = -scale * np.exp(base + go)
            beta[u] = _add(stay, go)
