"""Learning within a loop: TorchOpt, higher."""

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import tensorloop as tl

RATE = 0.1


def task(size: Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A net, and inputs and targets to adapt to and to judge by."""
    net = nn.Sequential(nn.Linear(size.width, size.width), nn.Tanh(), nn.Linear(size.width, 1))
    return net, (*(torch.randn(2, size.rows, n) for n in (size.width, 1)),)


def params_of(net: nn.Module) -> dict[str, Tensor]:
    """Its parameters by name."""
    return dict(net.named_parameters())


def count_of(size: Size) -> int:
    """Steps of an inner loop."""
    return max(size.steps // 2, 3)


def maml(size: Size) -> Made:
    net, data = task(size)
    torchopt = {name: find(f"torchopt.{name}") for name in ("MetaSGD", "extract_state_dict", "recover_state_dict")}

    def original(xs: Tensor, ys: Tensor):
        kept = torchopt["extract_state_dict"](net, by="reference")
        inner = torchopt["MetaSGD"](net, lr=RATE)
        for _ in range(count_of(size)):
            inner.step(mse_loss(net(xs[0]), ys[0]))
        loss = mse_loss(net(xs[1]), ys[1])
        torchopt["recover_state_dict"](net, kept)
        return loss

    def port(xs: Tensor, ys: Tensor, compile: bool | None = None):
        def body(i, params):
            loss = mse_loss(functional_call(net, params, xs[0]), ys[0])
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            return {name: w - RATE * g for (name, w), g in zip(params.items(), grads, strict=True)}

        params = tl.fori_loop(0, count_of(size), body, params_of(net), compile=compile)
        return mse_loss(functional_call(net, params, xs[1]), ys[1])

    return Made(original, port, data, list(net.parameters()))


def adam(size: Size) -> Made:
    """The port calls TorchOpt's own update, whose state is in the carry."""
    net, data = task(size)
    optimizer = find("torchopt.adam")(lr=RATE)
    apply = find("torchopt.apply_updates")

    def step(params, state, xs: Tensor, ys: Tensor):
        loss = mse_loss(functional_call(net, params, xs[0]), ys[0])
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        updates, state = optimizer.update(dict(zip(params, grads, strict=True)), state, inplace=False)
        return apply(params, updates, inplace=False), state

    def original(xs: Tensor, ys: Tensor):
        params = params_of(net)
        state = optimizer.init(params)
        for _ in range(count_of(size)):
            params, state = step(params, state, xs, ys)
        return mse_loss(functional_call(net, params, xs[1]), ys[1])

    def port(xs: Tensor, ys: Tensor, compile: bool | None = None):
        params = params_of(net)
        init = params, optimizer.init(params)
        params, _ = tl.fori_loop(0, count_of(size), lambda i, c: step(*c, xs, ys), init, compile=compile)
        return mse_loss(functional_call(net, params, xs[1]), ys[1])

    return Made(original, port, data, list(net.parameters()))


def higher(size: Size) -> Made:
    net, data = task(size)
    context = find("higher.innerloop_ctx")

    def original(xs: Tensor, ys: Tensor):
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
        with context(net, optimizer, copy_initial_weights=False) as (inner, inner_optimizer):
            for _ in range(count_of(size)):
                inner_optimizer.step(mse_loss(inner(xs[0]), ys[0]))
            return mse_loss(inner(xs[1]), ys[1])

    def port(xs: Tensor, ys: Tensor, compile: bool | None = None):
        def body(i, carry):
            params, past = carry
            loss = mse_loss(functional_call(net, params, xs[0]), ys[0])
            grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            past = {name: 0.9 * past[name] + g for name, g in zip(params, grads, strict=True)}
            return {name: w - RATE * past[name] for name, w in params.items()}, past

        params = params_of(net)
        init = params, {name: torch.zeros_like(w) for name, w in params.items()}
        params, _ = tl.fori_loop(0, count_of(size), body, init, compile=compile)
        return mse_loss(functional_call(net, params, xs[1]), ys[1])

    return Made(original, port, data, list(net.parameters()))


LOOPS = [
    Loop("torchopt", "MAML with MetaSGD", maml),
    Loop("torchopt", "inner loop with Adam", adam, wraps=True),
    Loop("higher", "inner loop with momentum", higher),
]
