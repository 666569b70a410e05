"""The CTC loss on the CPU, float32: threads share the rows, and the states of a frame are computed as vectors.

What the arguments are is said in `kernels/eager/ctc.py`. States are in the log domain: a scaled linear one would lose
paths that are improbable now and the only ones at the end.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled, inlined
from tensorloop.kernels.cpu.exponential import exp
from tensorloop.kernels.cpu.offsets import bounds_of, longest_of
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import array

CELL_COST = 16  # a state of a frame, as bytes that are read and written in the same time (`threads.share`)
NONE = np.float32(-np.inf)


def ctc_loss(
    values: Tensor, offsets: Tensor, tokens: Tensor, token_offsets: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """(B,), and what backward needs."""
    rows = _rows(values, offsets, tokens, token_offsets, blank, "ctc_loss")
    alpha, losses = values.new_empty(int(rows[-1][-1])), values.new_empty(len(offsets) - 1)
    share(_forwards, len(losses), CELL_COST * len(alpha), (*rows, array(alpha), array(losses)))
    return losses, alpha


def ctc_loss_grad(
    grad: Tensor,
    values: Tensor,
    offsets: Tensor,
    tokens: Tensor,
    token_offsets: Tensor,
    blank: int,
    losses: Tensor,
    alpha: Tensor,
) -> Tensor:
    """(N, V)"""
    rows = _rows(values, offsets, tokens, token_offsets, blank, "ctc_loss_grad")
    out = values.contiguous().exp()  # written to where it stands, so in the order of rows
    more = [array(x) for x in (alpha, losses, grad.contiguous(), out)]
    share(_backwards, len(losses), 2 * CELL_COST * len(alpha) + 8 * out.numel(), (*rows, *more))
    return out


def _rows(values: Tensor, offsets: Tensor, tokens: Tensor, token_offsets: Tensor, blank: int, name: str) -> Any:
    bounds = bounds_of(offsets, len(values), name), bounds_of(token_offsets, len(tokens), name)
    if len(bounds[0]) != len(bounds[1]):
        raise ValueError(f"{name}: {len(bounds[0]) - 1} rows of frames, {len(bounds[1]) - 1} of targets")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < values.shape[1]:
        raise ValueError(f"{name}: targets must be at least 0 and below {values.shape[1]}")
    cells = offsets.diff() * (2 * token_offsets.diff() + 1)
    starts = torch.cat([cells.new_zeros(1), cells.cumsum(0)])
    return array(values), bounds[0], array(tokens), bounds[1], blank, array(starts)


@inlined
def _log(x: Any) -> Any:
    """log of a float32 in [1, 3], within 1e-7: log(sqrt(3)) and twice the artanh of |z| <= 0.27."""
    y = x * np.float32(0.57735026919)
    z = (y - np.float32(1)) / (y + np.float32(1))
    s = z * z
    t = np.float32(2 / 11)
    t = t * s + np.float32(2 / 9)
    t = t * s + np.float32(2 / 7)
    t = t * s + np.float32(2 / 5)
    t = t * s + np.float32(2 / 3)
    t = t * s + np.float32(2)
    return np.float32(0.54930614433) + t * z


@inlined
def _sum_three(a: Any, b: Any, c: Any) -> Any:
    """log(e^a + e^b + e^c)"""
    top = max(a, max(b, c))
    base = top if top > NONE else np.float32(0)
    return base + _log(exp(a - base) + exp(b - base) + exp(c - base)) if top > NONE else NONE


@inlined
def _read_labels(tokens: Any, first: Any, last: Any, blank: Any, labels: Any, skips: Any) -> Any:
    """The label of every state, and 0 where it may be reached from the one but one before, else -inf; their number."""
    count = 2 * (last - first) + 1
    for s in range(count):
        labels[s] = blank if s % 2 == 0 else tokens[first + s // 2]
        skips[s] = (
            np.float32(0) if s % 2 == 1 and s > 1 and tokens[first + s // 2] != tokens[first + s // 2 - 1] else NONE
        )
    return count


@compiled
def _forwards(
    begin: int, end: int, values: Any, bounds: Any, tokens: Any, token_bounds: Any, blank: int, starts: Any, alpha: Any,
    losses: Any,
) -> None:  # fmt: skip
    most = 2 * longest_of(begin, end, token_bounds, 1) + 1
    labels, skips = np.empty(most, np.int64), np.empty(most, np.float32)
    before, own = np.empty(most + 2, np.float32), np.empty(most, np.float32)
    for b in range(begin, end):
        count = _read_labels(tokens, token_bounds[b], token_bounds[b + 1], blank, labels, skips)
        frames = bounds[b + 1] - bounds[b]
        before[: count + 2] = NONE
        before[1] = 0  # a path begins in state 0, or 1 by a skip of nothing
        for t in range(frames):
            row = values[bounds[b] + t]
            now = alpha[starts[b] + t * count : starts[b] + (t + 1) * count]
            for s in range(count):
                own[s] = row[labels[s]]
            if t == 0:
                now[:] = NONE
                now[0] = own[0]
                if count > 1:
                    now[1] = own[1]
            else:
                for s in range(count):
                    now[s] = _sum_three(before[s + 2], before[s + 1], before[s] + skips[s]) + own[s]
            before[2 : count + 2] = now
            before[:2] = NONE
        if frames == 0:
            losses[b] = np.float32(0) if count == 1 else np.float32(np.inf)
        elif count == 1:
            losses[b] = -before[2]
        else:
            losses[b] = -_sum_three(before[count + 1], before[count], NONE)


@compiled
def _backwards(
    begin: int, end: int, values: Any, bounds: Any, tokens: Any, token_bounds: Any, blank: int, starts: Any, alpha: Any,
    losses: Any, grad: Any, out: Any,
) -> None:  # fmt: skip
    most = 2 * longest_of(begin, end, token_bounds, 1) + 1
    labels, skips = np.empty(most, np.int64), np.empty(most + 2, np.float32)
    behind, beta = np.empty(most + 2, np.float32), np.empty(most, np.float32)
    for b in range(begin, end):
        count = _read_labels(tokens, token_bounds[b], token_bounds[b + 1], blank, labels, skips)
        skips[count : count + 2] = NONE
        behind[: count + 2] = NONE  # what follows, with the next frame's own
        frames, scale, loss = bounds[b + 1] - bounds[b], grad[b], losses[b]
        if scale == 0 or loss == np.inf:
            out[bounds[b] : bounds[b + 1]] = np.float32(0) if scale == 0 else np.float32(np.nan)
            continue
        for t in range(frames - 1, -1, -1):
            place = bounds[b] + t
            row, to = values[place], out[place]
            now = alpha[starts[b] + t * count : starts[b] + (t + 1) * count]
            if t == frames - 1:
                beta[:count] = NONE
                beta[max(count - 2, 0) : count] = 0
            else:
                for s in range(count):
                    beta[s] = _sum_three(behind[s], behind[s + 1], behind[s + 2] + skips[s + 2])
            for v in range(len(to)):
                to[v] *= scale
            for s in range(count):
                behind[s] = exp(min(now[s] + beta[s] + loss, np.float32(0))) * scale
            for s in range(count):
                to[labels[s]] -= behind[s]
            for s in range(count):
                behind[s] = beta[s] + row[labels[s]]
