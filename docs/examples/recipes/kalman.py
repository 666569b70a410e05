"""A Kalman filter that is trained: the likelihood of a series under a linear model with Gaussian noise.

What is believed of the hidden state, a mean and a covariance for each row of the batch, is the carry of a scan. The
numbers that are observed at one time come one after another, so that no matrix is inverted or factorised, and
`compile=True` makes machine code of the step; NaN stands for a number that was not observed.

Sources: Kalman 1960; Anderson & Moore 1979, 6.3 (one observation after another).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tensorloop as tl


class Belief(NamedTuple):
    mean: Tensor  # (B, D)
    cov: Tensor  # (B, D, D)


class Kalman(nn.Module):
    """State x' = A x + noise, observed as C x + noise; A, C and how large the noise is are learnt."""

    def __init__(self, transition: Tensor, observation: Tensor) -> None:
        super().__init__()
        self.transition, self.observation = nn.Parameter(transition), nn.Parameter(observation)  # (D, D), (E, D)
        self.log_drift = nn.Parameter(torch.zeros(len(transition)))  # logarithms of variances
        self.log_noise = nn.Parameter(torch.zeros(len(observation)))

    def begin(self, rows: int) -> Belief:
        """Nothing is known yet but the scale: a standard normal."""
        wide = self.transition.shape[0]
        return Belief(self.transition.new_zeros(rows, wide), torch.eye(wide).to(self.transition).expand(rows, -1, -1))

    def look(self, belief: Belief, y: Tensor) -> tuple[Belief, tuple[Tensor, Tensor, Tensor]]:
        """The belief about the next state, when y (B, E) was observed; and log p(y), mean and variances of this one."""
        mean, cov = belief
        likelihood = torch.zeros_like(mean[:, 0])
        for c, noise, number in zip(self.observation, self.log_noise.exp(), y.unbind(1), strict=True):
            seen = ~number.isnan()
            toward = cov @ c  # (B, D)
            variance = toward @ c + noise  # (B,)
            surprise = torch.where(seen, number, 0) - mean @ c
            gain = torch.where(seen[:, None], toward / variance[:, None], 0)
            mean = mean + gain * surprise[:, None]
            cov = cov - gain[:, :, None] * toward[:, None, :]
            normal = -0.5 * (surprise.square() / variance + variance.log() + math.log(2 * math.pi))
            likelihood = likelihood + torch.where(seen, normal, 0)
        ahead = Belief(
            mean @ self.transition.T, self.transition @ cov @ self.transition.T + self.log_drift.exp().diag()
        )
        return ahead, (likelihood, mean, cov.diagonal(dim1=1, dim2=2))

    def forward(self, ys: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """log p (B,) of series (T, B, E); means and variances (T, B, D) of states, by what was observed till then."""
        _, (likelihoods, means, variances) = tl.scan(self.look, self.begin(ys.shape[1]), ys, **options)
        return likelihoods.sum(0), means, variances

    def plain(self, ys: Tensor) -> Tensor:
        """log p as a Python loop."""
        belief, total = self.begin(ys.shape[1]), 0.0
        for y in ys:
            belief, (likelihood, _, _) = self.look(belief, y)
            total = total + likelihood
        return torch.as_tensor(total)


def make_series(steps: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A pendulum that swings and is pushed about, of which only the place is seen, and one time in five not that.

    States (T, B, 2) and observations (T, B, 1).
    """
    angle = 0.2
    turn = 0.995 * torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    state, states = torch.randn(rows, 2, generator=generator), []
    for _ in range(steps):
        states.append(state)
        state = state @ turn.T + 0.1 * torch.randn(rows, 2, generator=generator)
    xs = torch.stack(states)
    ys = xs[..., :1] + 0.5 * torch.randn(steps, rows, 1, generator=generator)
    return xs, torch.where(torch.rand(ys.shape, generator=generator) < 0.2, torch.nan, ys)


def train(model: Kalman, ys: Tensor, updates: int, **options: Any) -> list[float]:
    """-log p per number observed, at each update."""
    adam, losses = torch.optim.Adam(model.parameters(), 0.05), []
    for _ in range(updates):
        loss = -model(ys, **options)[0].sum() / (~ys.isnan()).sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses
