"""An adaptive solver as libraries for PyTorch have it: one step size for the whole batch, and a Python loop.

The solver is that of the recipes; the whole batch is one row of it.
"""

import torch
from torch import Tensor, nn

from docs.examples.recipes.ode import Dopri5, solve

ROWS, WIDTH, TOLERANCE = 128, 64, 1e-6


class Swing(nn.Module):
    """A quick oscillator, and a net that disturbs it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([5 * y[..., 1], -20 * y[..., 0]], -1) + self.net(y)


def before(swing: Swing, y: Tensor, end: Tensor) -> Tensor:
    solver = Dopri5(swing, TOLERANCE, TOLERANCE, y, guarded=False)
    state = solver.start(torch.zeros_like(end), y)
    while solver.goes_on(state, (end,)):
        state = solver.step(state, (end,))
    return state.y.square().mean()


def after(swing: Swing, y: Tensor, end: Tensor) -> Tensor:
    state = solve(swing, y, 0.0, end, rtol=TOLERANCE, atol=TOLERANCE, checkpoints=32, compile=True, compact=False)
    return state.y.square().mean()


def make(T: int) -> tuple[Swing, Tensor, Tensor]:
    return Swing(), torch.randn(1, ROWS, 2), torch.tensor([T / 32])
