"""The inner loop of MAML (Finn, Abbeel & Levine 2017): steps of gradient descent that are differentiated themselves."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import tensorloop as tl

Params = dict[str, Tensor]


def adapt(net: nn.Module, params: Params, x: Tensor, y: Tensor) -> Params:
    """One step."""
    loss = mse_loss(functional_call(net, params, x), y)
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    return {name: p - 0.05 * g for (name, p), g in zip(params.items(), grads, strict=True)}


def before(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> Tensor:
    params: Params = dict(net.named_parameters())
    for _ in range(steps):
        params = adapt(net, params, x, y)
    return mse_loss(functional_call(net, params, x + 0.1), y)


def after(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> Tensor:
    params: Params = dict(net.named_parameters())
    params = tl.fori_loop(0, steps, lambda i, params: adapt(net, params, x, y), params, checkpoints=16)
    return mse_loss(functional_call(net, params, x + 0.1), y)


def make(T: int) -> tuple[nn.Module, Tensor, Tensor, int]:
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    x = 10 * torch.rand(100, 1) - 5
    return net, x, x.sin(), T
