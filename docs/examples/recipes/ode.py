"""An adaptive solver of ordinary differential equations in which every row takes steps of its own.

Dormand and Prince's pair of orders 5 and 4, with a PI controller, as a `tl.while_loop`: a row stops where its time has
come and leaves the batch. Nobody knows how many steps there will be; `checkpoints` bounds what backward needs of them.
Gradients are those of the steps taken, whose sizes count as constants.

Sources: Dormand & Prince 1980; Hairer, Nørsett & Wanner 1993, II.4 (first step) and IV.2 (PI controller); Chen et al.
2018 (training through a solver).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tensorloop as tl

Field = Callable[..., Tensor]  # (t (B,), y (B, *F), *args) -> dy/dt (B, *F)

STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),  # the solution of order 5
)
TIMES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)  # order 5 minus order 4
SAFETY, SMALLEST, LARGEST = 0.9, 0.2, 10.0
BEFORE, NOW = 0.04, 0.17  # exponents of the controller: the errors of the step before and of this one


class State(NamedTuple):
    t: Tensor  # (B,)
    y: Tensor  # (B, *F)
    slope: Tensor  # (B, *F): the field at t and y, which the step before has computed
    h: Tensor  # (B,): the size of the next step
    error: Tensor  # (B,): of the last step that was taken, 1 is what is allowed


class Solution(NamedTuple):
    y: Tensor  # (B, *F), at `end`
    steps: Tensor  # (B,): attempts that each row made


class Dopri5:
    """One solver for one field. `step` is the body of a loop, `goes_on` its condition."""

    def __init__(self, field: Field, rtol: float, atol: float, like: Tensor, guarded: bool) -> None:
        self.field, self.rtol, self.atol, self.guarded = field, rtol, atol, guarded
        self.stages = [like.new_tensor(row) for row in STAGES]
        self.weights = like.new_tensor(ERROR)

    def start(self, t: Tensor, y: Tensor, *args: Any) -> State:
        """With a first step after which the fifth order's share is about 1 % of what is allowed."""
        slope = self.field(t, y, *args)
        with torch.no_grad():
            scale = self.atol + self.rtol * y.abs()
            size, speed = _rms(y / scale), _rms(slope / scale)
            small = torch.where((size < 1e-5) | (speed < 1e-5), 1e-6, 0.01 * size / speed)
            ahead = self.field(t + small, y + _beside(y, small) * slope, *args)
            fastest = torch.maximum(speed, _rms((ahead - slope) / scale) / small)
            h = torch.where(fastest <= 1e-15, (1e-3 * small).clamp(min=1e-6), (0.01 / fastest) ** (1 / 5))
            return State(t, y, slope, torch.minimum(100 * small, h), torch.ones_like(t))

    def goes_on(self, state: State, row: tuple[Any, ...]) -> Tensor:
        return (state.t < row[0]) & (state.t + state.h > state.t)  # no step: it has become too small, or is NaN

    def step(self, state: State, row: tuple[Any, ...]) -> State:
        end, *args = row
        left = end - state.t
        h = torch.minimum(state.h, left)
        y, slope, error = self.attempt(state, h, args)
        if self.guarded and not error.isfinite().all():
            # A step out of the field's domain is not taken, yet 0 times infinity would be in its gradient.
            y, slope, _ = self.attempt(state, torch.where(error.isfinite(), h, 0), args)
        error = torch.where(error.isfinite(), error, torch.inf)
        taken, last = error <= 1, state.h >= left
        least = error.clamp(min=1e-4)
        factor = (SAFETY * least**-NOW * torch.where(taken, state.error, 1) ** BEFORE).clamp(SMALLEST, LARGEST)
        wider = h.detach() * torch.where(taken, factor, factor.clamp(max=1))
        return State(
            torch.where(taken, torch.where(last, end, state.t + h), state.t),
            torch.where(_beside(y, taken), y, state.y),
            torch.where(_beside(y, taken), slope, state.slope),
            torch.where(taken & last, torch.maximum(state.h, wider), wider),  # the end has cut the last one short
            torch.where(taken, least, state.error),
        )

    def attempt(self, state: State, h: Tensor, args: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """y after a step of h, the slope there, and how large its error is beside what is allowed."""
        slopes, y, width = [state.slope], state.y, _beside(state.y, h)
        for weights, part in zip(self.stages, TIMES, strict=True):
            y = state.y + width * (torch.stack(slopes, -1) @ weights)
            slopes.append(self.field(state.t + part * h, y, *args))
        far = torch.maximum(state.y.detach().abs(), y.detach().abs())
        between = width.detach() * (torch.stack(slopes, -1).detach() @ self.weights)
        return y, slopes[-1], _rms(between / (self.atol + self.rtol * far))


def solve(
    field: Field,
    y: Tensor,
    begin: Tensor | float,
    end: Tensor | float,
    *args: Any,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    **options: Any,
) -> Solution:
    """y (B, *F), of one dim of features at least, from `begin` to `end`: (B,), each row's own, or one number for all.

    `args` are trees of tensors (B, ...) that the field gets after t and y: what belongs to a row and leaves with it.
    What all rows share is closed over. `options` are those of `tl.while_loop`: checkpoints, compile, max_steps. With
    `compile` a field must stay finite on steps that are too large, too, or gradients may be NaN.
    """
    begin, end = (torch.as_tensor(t, dtype=y.dtype, device=y.device).expand(len(y)) for t in (begin, end))
    solver = Dopri5(field, rtol, atol, y, guarded=not options.get("compile"))
    state, steps = tl.while_loop(
        solver.goes_on,
        solver.step,
        solver.start(begin, y, *args),
        context=(end, *args),
        return_steps=True,
        **{"compact": True} | options,
    )
    _check(state, end)
    return Solution(state.y, steps)


def solve_at(
    field: Field, y: Tensor, times: Tensor, *args: Any, rtol: float = 1e-6, atol: float = 1e-6, checkpoints: Any = None
) -> Tensor:
    """y at each of the times (T,), the first of which is where it begins: (T, B, *F). A scan around the loop.

    With `checkpoints` backward keeps that many states between times, and the steps between two times at once.
    """
    solver = Dopri5(field, rtol, atol, y, guarded=True)

    def until(state: State, end: Tensor) -> tuple[State, Tensor]:
        row = end.expand(len(y)), *args
        state = tl.while_loop(solver.goes_on, solver.step, state, context=row, compact=True)
        _check(state, row[0])
        return state, state.y

    _, ys = tl.scan(until, solver.start(times[0].expand(len(y)), y, *args), times[1:], checkpoints=checkpoints)
    return torch.cat([y[None], ys])


def _check(state: State, end: Tensor) -> None:
    if (late := ~(state.t >= end)).any():
        row = int(late.nonzero()[0])
        t, h = float(state.t[row]), float(state.h[row])
        raise RuntimeError(f"row {row} has come to t={t:.6g} of {float(end[row]):.6g} and cannot go on: h={h:.2g}")


def _rms(x: Tensor) -> Tensor:
    """(B, *F) -> (B,)"""
    return x.flatten(1).square().mean(1).sqrt()


def _beside(y: Tensor, row: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...), to go with y"""
    return row.reshape(-1, *[1] * (y.ndim - 1))
