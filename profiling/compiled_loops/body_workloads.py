"""The loops of bodies.py: bodies that other packages and papers write, as their own loop and as `tl.scan`.

A workload is a function of T and a dtype that returns a `Body`. Those of spiking nets import their package.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tensorloop as tl

ROWS, UNITS = 32, 64
DIRECTLY = "donot_use_mm_for_euclid_dist"  # with products torch composes distances of native operations


class Body(NamedTuple):
    """A loop whose steps somebody else wrote, or nearly so."""

    leaves: list[Tensor]
    """What the gradients are of."""
    scan: Callable[..., Tensor]
    """The loss by `tl.scan`, which is given the options."""
    own: Callable[[], Tensor]
    """The loss by the loop that the package's users write, or by a Python loop over the same step."""


class Layers(nn.Module):
    """Three layers of spiking units behind linear ones; `neuron` makes a layer's units."""

    def __init__(self, neuron: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(UNITS, UNITS) for _ in range(3))
        self.units = nn.ModuleList(neuron() for _ in range(3))


def spikes_in(T: int, dtype: torch.dtype) -> Tensor:
    """Spikes from outside, a fifth of all places."""
    return (torch.rand(T, ROWS, UNITS, generator=torch.Generator().manual_seed(1)) < 0.2).to(dtype)


def layers(neuron: Callable[[], nn.Module], dtype: torch.dtype) -> Layers:
    """The net, with weights large enough that about a tenth of the units fire."""
    torch.manual_seed(0)
    net = Layers(neuron).to(dtype)
    for weight in net.weights.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, 0.1, 0.5)
    return net


def loss(spikes: Tensor) -> Tensor:
    """Of how often each unit of the last layer fires."""
    return spikes.mean(0).square().mean()


def snntorch(T: int, dtype: torch.dtype) -> Body:
    """Leaky integrate-and-fire units, which keep their state, with the package's own surrogate gradient."""
    import snntorch as snn  # pyright: ignore[reportMissingImports]

    net, xs = layers(lambda: snn.Leaky(beta=0.9, init_hidden=True), dtype), spikes_in(T, dtype)

    def step(x: Tensor) -> Tensor:
        for weight, unit in zip(net.weights, net.units, strict=True):
            x = unit(weight(x))
        return x

    def begin() -> None:
        units: Any = net.units
        for unit in units:
            unit.reset_mem()

    def own() -> Tensor:
        begin()
        return loss(torch.stack([step(x) for x in xs]))

    def scan(**options: Any) -> Tensor:
        begin()
        return loss(tl.carrying(net.units).map(step, xs, **options))

    return Body(list(net.weights.parameters()), scan, own)


def norse(T: int, dtype: torch.dtype) -> Body:
    """The package's LIF cells; their own state is None before the first step."""
    from norse.torch import LIFCell  # pyright: ignore[reportMissingImports]

    net, xs = layers(LIFCell, dtype), spikes_in(T, dtype)

    def step(states: list[Any], x: Tensor) -> tuple[list[Any], Tensor]:
        after = []
        for weight, unit, state in zip(net.weights, net.units, states, strict=True):
            x, state = unit(weight(x), state)
            after.append(state)
        return after, x

    def own() -> Tensor:
        states, ys = [None, None, None], []
        for x in xs:
            states, y = step(states, x)
            ys.append(y)
        return loss(torch.stack(ys))

    def scan(**options: Any) -> Tensor:
        states, first = step([None, None, None], xs[0])
        ys = tl.scan(step, states, xs[1:], **options)[1]
        return loss(torch.cat([first[None], ys]))

    return Body(list(net.weights.parameters()), scan, own)


def spikingjelly(T: int, dtype: torch.dtype) -> Body:
    """The package's LIF nodes in its multi-step mode with its own torch code; one step at a time in ours."""
    from spikingjelly.activation_based import functional as jelly  # pyright: ignore[reportMissingImports]
    from spikingjelly.activation_based import neuron  # pyright: ignore[reportMissingImports]

    net, xs = layers(neuron.LIFNode, dtype), spikes_in(T, dtype)

    def step(x: Tensor) -> Tensor:
        for weight, unit in zip(net.weights, net.units, strict=True):
            x = unit(weight(x))
        return x

    def own() -> Tensor:
        jelly.reset_net(net)
        jelly.set_step_mode(net, "m")
        return loss(step(xs))

    def scan(**options: Any) -> Tensor:
        jelly.reset_net(net)
        jelly.set_step_mode(net, "s")
        return loss(tl.carrying(*net.units).map(step, xs, **options))

    return Body(list(net.weights.parameters()), scan, own)


def maml(T: int, dtype: torch.dtype) -> Body:
    """The inner loop of model-agnostic meta-learning: T steps of gradient descent on a small net (Finn et al. 2017)."""
    torch.manual_seed(0)
    sizes = [1, 40, 40, 1]
    start = [
        p.to(dtype).requires_grad_()
        for n, m in itertools.pairwise(sizes)
        for p in (torch.randn(n, m) * n**-0.5, torch.zeros(m))
    ]
    x = torch.linspace(-5, 5, 10, dtype=dtype)[:, None]
    shown, asked = torch.sin(x), torch.sin(x + 0.5)

    def net(params: list[Tensor], x: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = params
        return torch.tanh(torch.tanh(x @ w1 + b1) @ w2 + b2) @ w3 + b3

    def step(params: list[Tensor]) -> list[Tensor]:
        loss = functional.mse_loss(net(params, x), shown)
        grads = torch.autograd.grad(loss, params, create_graph=True)
        return [p - 0.01 * g for p, g in zip(params, grads, strict=True)]

    def after(params: list[Tensor]) -> Tensor:
        return functional.mse_loss(net(params, x + 0.5), asked)

    def own() -> Tensor:
        params = start
        for _ in range(T):
            params = step(params)
        return after(params)

    def scan(**options: Any) -> Tensor:
        return after(tl.scan(lambda params, _: (step(params), None), start, length=T, **options)[0])

    return Body(start, scan, own)


def slstm(T: int, dtype: torch.dtype) -> Body:
    """The sLSTM of xLSTM (Beck et al. 2024) as its plain form is written: the stabilizer's first step is an `if`."""
    torch.manual_seed(0)
    xs = torch.randn(T, ROWS, 4 * UNITS, dtype=dtype)
    recurrent = (torch.randn(UNITS, 4 * UNITS, dtype=dtype) * UNITS**-0.5).requires_grad_()
    bias = torch.zeros(4 * UNITS, dtype=dtype).requires_grad_()

    def step(state: tuple[Tensor, ...], x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        y, c, n, m = state
        i, f, z, o = (x + y @ recurrent + bias).chunk(4, -1)
        kept = m + functional.logsigmoid(f)
        after = i if torch.all(n == 0.0) else torch.maximum(i, kept)
        put, kept = torch.exp(i - after).clamp(max=1.0), torch.exp(kept - after).clamp(max=1.0)
        c, n = kept * c + put * torch.tanh(z), kept * n + put
        y = torch.sigmoid(o) * c / n
        return (y, c, n, after), y

    def start() -> tuple[Tensor, ...]:
        return (torch.zeros(ROWS, UNITS, dtype=dtype),) * 4

    def own() -> Tensor:
        state, ys = start(), []
        for x in xs:
            state, y = step(state, x)
            ys.append(y)
        return torch.stack(ys).square().mean()

    def scan(**options: Any) -> Tensor:
        return tl.scan(step, start(), xs, **options)[1].square().mean()

    return Body([recurrent, bias], scan, own)


def called(T: int, dtype: torch.dtype, *, operation: bool = True) -> Body:
    """A tanh RNN in whose step one operation is not native: distances to some points, by `torch.cdist`."""
    torch.manual_seed(0)
    xs, weight = torch.randn(T, ROWS, UNITS, dtype=dtype), torch.randn(UNITS, UNITS, dtype=dtype) * UNITS**-0.5
    points = torch.randn(UNITS, UNITS, dtype=dtype)
    weight.requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cdist(h, points, compute_mode=DIRECTLY) if operation else h
        h = torch.tanh(x + h @ weight - 0.1 * seen)
        return h, h

    def own() -> Tensor:
        h, ys = xs.new_zeros(ROWS, UNITS), []
        for x in xs:
            h, y = step(h, x)
            ys.append(y)
        return torch.stack(ys).square().mean()

    def scan(**options: Any) -> Tensor:
        return tl.scan(step, xs.new_zeros(ROWS, UNITS), xs, **options)[1].square().mean()

    return Body([weight], scan, own)


def cdist_alone(T: int, dtype: torch.dtype) -> Callable[[], Any]:
    """T forward and backward passes of the operation that is called out, by torch alone."""
    x, points = torch.randn(ROWS, UNITS, dtype=dtype), torch.randn(UNITS, UNITS, dtype=dtype)
    grad = torch.randn(ROWS, UNITS, dtype=dtype)

    def run() -> None:
        with torch.no_grad():
            for _ in range(T):
                found = torch.cdist(x, points, compute_mode=DIRECTLY)
                torch.ops.aten._cdist_backward(grad, x, points, 2.0, found)

    return run


BODIES: dict[str, Callable[[int, torch.dtype], Body]] = {
    **{"snntorch": snntorch, "norse": norse, "spikingjelly": spikingjelly, "maml": maml, "slstm": slstm},
    **{"called": called},
}
