"""The selective scan of Mamba (Gu & Dao 2023), by its reference's way: all factors first, then a loop."""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import tensorloop as tl

ROWS, WIDTH, STATES = 2, 64, 16


class SSM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.arange(1.0, STATES + 1).log().repeat(WIDTH, 1).to(torch.get_default_dtype()))
        self.to_delta, self.to_bc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * STATES)

    def project(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """delta (T, B, WIDTH), b and c (T, B, STATES)"""
        b, c = self.to_bc(u).chunk(2, -1)
        return softplus(self.to_delta(u)), b, c


def before(ssm: SSM, u: Tensor) -> Tensor:
    delta, b, c = ssm.project(u)
    decay = torch.exp(delta[..., None] * -ssm.log_a.exp())
    new = (delta * u)[..., None] * b[:, :, None]
    x = u.new_zeros(ROWS, WIDTH, STATES)
    ys = []
    for i in range(len(u)):
        x = decay[i] * x + new[i]
        ys.append((x @ c[i, :, :, None])[..., 0])
    return torch.stack(ys).square().mean()


def after(ssm: SSM, u: Tensor) -> Tensor:
    delta, b, c = ssm.project(u)

    def step(x: Tensor, now: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        u, delta, b, c = now
        x = torch.exp(delta[..., None] * -ssm.log_a.exp()) * x + (delta * u)[..., None] * b[:, None]
        return x, (x @ c[..., None])[..., 0]

    _, ys = tl.scan(step, u.new_zeros(ROWS, WIDTH, STATES), (u, delta, b, c), compile=True, checkpoints=16)
    return ys.square().mean()


def make(T: int) -> tuple[SSM, Tensor]:
    return SSM(), torch.randn(T, ROWS, WIDTH)
