"""A state-space layer as in Mamba, one with a matrix state as in RWKV-7, advantages of long episodes: time in shards.

Each process has a part of the steps, `(T / P, B, ...)`, as plain tensors; only the recurrence knows of the others. With
`mesh=None` all steps are here. Weights are whole in every process, and what each finds is a share of their gradient:
sum it over the processes, as `train.py` does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

import tensorloop as tl


def recurrence(a: Tensor, b: Tensor, mesh: DeviceMesh | None, reverse: bool = False, matrix: bool = False) -> Tensor:
    """`tl.linear_recurrence` over the first dim, of which each process of the mesh has a part."""
    if mesh is None:
        return tl.linear_recurrence(a, b, reverse=reverse, matrix=matrix)
    placed: list[Any] = [DTensor.from_local(x, mesh, [Shard(0)]) for x in (a, b)]
    return tl.linear_recurrence(*placed, reverse=reverse, matrix=matrix).to_local()


class StateSpace(nn.Module):
    """The recurrence of Mamba (Gu and Dao, 2023): a step size for each entry and step, `states` numbers for each."""

    def __init__(self, features: int, states: int = 4) -> None:
        super().__init__()
        self.step, self.inside = nn.Linear(features, features), nn.Linear(features, 2 * states)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(features, 1))

    def forward(self, x: Tensor, mesh: DeviceMesh | None = None) -> Tensor:  # (T, B, F)
        step = functional.softplus(self.step(x))
        into, out = self.inside(x).chunk(2, -1)
        a = torch.exp(-step.unsqueeze(-1) * self.decay.exp())
        b = (step * x).unsqueeze(-1) * into.unsqueeze(-2)
        return (recurrence(a, b, mesh) * out.unsqueeze(-2)).sum(-1)


class DeltaRule(nn.Module):
    """The recurrence of RWKV-7 (Peng et al., 2025): S = S (diag(w) - k^T (a k)) + v^T k, one matrix S for each row."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, 5 * features)

    def forward(self, x: Tensor, mesh: DeviceMesh | None = None) -> Tensor:  # (T, B, F)
        r, w, k, v, a = self.project(x).chunk(5, -1)
        k, w, a = functional.normalize(k, dim=-1), torch.sigmoid(w), torch.sigmoid(a)
        # Each of the F rows of S is a vector that the transposed matrix takes on.
        turn = torch.diag_embed(w) - (a * k).unsqueeze(-1) * k.unsqueeze(-2)
        state = recurrence(turn.unsqueeze(2), v.unsqueeze(-1) * k.unsqueeze(-2), mesh, matrix=True)
        return (state * r.unsqueeze(-2)).sum(-1)


def advantages(
    rewards: Tensor, values: Tensor, done: Tensor, last: Tensor, mesh: DeviceMesh | None = None,
    discount: float = 0.99, trace: float = 0.95,
) -> Tensor:  # fmt: skip
    """Generalised advantages (Schulman et al., 2016) of steps (T, B); `last` (B,) is the value after all of them."""
    after = last
    if mesh is not None:  # the value of the next process's first step
        after = tl.distributed.exclusive_fold(
            lambda _, first: first, last, values[0].detach().clone(), group=mesh, reverse=True
        )
    following = torch.cat([values[1:], after.unsqueeze(0)])
    goes_on = discount * (~done).to(values)
    surprise = rewards + goes_on * following - values
    return recurrence(trace * goes_on, surprise.detach(), mesh, reverse=True)
