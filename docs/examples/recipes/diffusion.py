"""Training through the sampler of a diffusion model, through all of its steps or the last few.

A net that removes noise is trained on a ring of eight clouds in the plane. Then it is tuned by what comes out in the
end: a reward of the samples, whose gradient goes back through the sampler, step by step. The sampler is a scan;
`checkpoints` makes all of its steps affordable, `last` differentiates the final ones alone.

Sources: Ho et al. 2020 (the noise); Song et al. 2021 (DDIM, the sampler); Clark et al. 2024 (DRaFT: rewards through all
or the last K steps).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import tensorloop as tl


class Denoiser(nn.Module):
    """x (B, 2) at time t in (0, 1] to the noise in it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[..., None] * (math.pi * torch.tensor([0.5, 1.0, 2.0])).to(x)
        return self.net(torch.cat([x, waves.sin().expand(*x.shape[:-1], 3), waves.cos().expand(*x.shape[:-1], 3)], -1))


def signal(t: Tensor) -> Tensor:
    """How much of the data is left at time t, as a share of variance: a cosine, a little more than 0 at 1."""
    return (0.5 * math.pi * 0.995 * t).cos().square()


def make_ring(rows: int, generator: torch.Generator) -> Tensor:
    """(B, 2): eight clouds around 0."""
    angle = torch.randint(8, (rows,), generator=generator) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.07 * torch.randn(rows, 2, generator=generator)


def denoising_loss(model: Denoiser, x: Tensor, generator: torch.Generator) -> Tensor:
    t = torch.rand(len(x), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    kept = signal(t)[:, None]
    return (model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t) - noise).square().mean()


def sample(model: Denoiser, noise: Tensor, steps: int, last: int | None = None, **options: Any) -> Tensor:
    """Samples (B, 2) from noise (B, 2). Gradients go through the `last` steps, None for all; options are `scan`'s."""
    times = torch.linspace(1, 0, steps + 1, dtype=noise.dtype, device=noise.device)

    def step(x: Tensor, span: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        now, then = map(signal, span)
        guess = model(x, span[0])
        clean = (x - (1 - now).sqrt() * guess) / now.sqrt()
        return then.sqrt() * clean + (1 - then).sqrt() * guess, None

    first = 0 if last is None else steps - last
    with torch.no_grad():
        x, _ = tl.scan(step, noise, (times[:first], times[1 : first + 1]))
    return tl.scan(step, x, (times[first:-1], times[first + 1 :]), **options)[0]


def plain_sample(model: Denoiser, noise: Tensor, steps: int) -> Tensor:
    """The same as a Python loop."""
    x, times = noise, torch.linspace(1, 0, steps + 1, dtype=noise.dtype)
    for t, after in pairwise(times):
        now, then, guess = signal(t), signal(after), model(x, t)
        x = then.sqrt() * (x - (1 - now).sqrt() * guess) / now.sqrt() + (1 - then).sqrt() * guess
    return x


def to_the_right(x: Tensor) -> Tensor:
    """A reward (B,): on the ring, and as far to the right as it goes."""
    return x[:, 0] - 4 * (x.norm(dim=1) - 1).square()


def train(model: Denoiser, loss_of: Callable[[], Tensor], updates: int, rate: float) -> list[float]:
    adam, losses = torch.optim.Adam(model.parameters(), rate), []
    for _ in range(updates):
        loss = loss_of()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses
