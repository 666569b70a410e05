"""Spiking nets: norse, snnTorch, SpikingJelly, Sinabs, Rockpool. Each port calls the package's own step."""

from functools import partial

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl


def currents(size: Size) -> Tensor:
    """Inputs (T, B, F) that make neurons spike now and then."""
    return (2 * torch.rand(size.steps, size.rows, size.width)).requires_grad_()


def norse(module: str, size: Size) -> Made:
    net = find(f"norse.torch.{module}")(size.width, size.width)
    xs = currents(size)
    with torch.no_grad():
        net.input_weights.mul_(10)

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            spikes, state = net.activation(x, state, net.input_weights, net.recurrent_weights, net.p, net.dt)
            return state, spikes

        state, spikes = tl.scan(body, tl.first_only(net.state_fallback(xs)), xs, compile=compile)
        return spikes, state

    return Made(net, port, (xs,), list(net.parameters()))


def snntorch(neuron: str, size: Size, **options: float) -> Made:
    """The usual loop of a tutorial: a layer, neurons that keep their state, the spikes in a list."""
    layer, net = torch.nn.Linear(size.width, size.width), find(f"snntorch.{neuron}")(init_hidden=True, **options)
    xs = currents(size)
    reset = getattr(net, {"Leaky": "reset_mem", "Synaptic": "reset_mem", "Alpha": "reset_mem"}[neuron])

    def original(xs: Tensor):
        reset()
        spikes = []
        for x in xs:
            spikes.append(net(layer(x)))
        return torch.stack(spikes), net.mem

    def port(xs: Tensor, compile: bool | None = None):
        reset()
        spikes = tl.carrying(net).map(lambda x: net(layer(x)), xs, compile=compile)
        return spikes, net.mem

    return Made(original, port, (xs,), list(layer.parameters()))


def spikingjelly(neuron: str, size: Size) -> Made:
    net = find(f"spikingjelly.activation_based.neuron.{neuron}")(step_mode="m")
    reset = find("spikingjelly.activation_based.functional.reset_net")
    xs = currents(size)

    def original(xs: Tensor):
        reset(net)
        return net(xs)

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            (spike,), state = net.single_step_functional_forward((x,), state)
            return state, spike

        return tl.scan(body, (torch.zeros_like(xs[0]),), xs, compile=compile)[1]

    return Made(original, port, (xs,), list(net.parameters()))


def sinabs(size: Size) -> Made:
    layer = torch.nn.Linear(size.width, size.width)
    net = find("sinabs.layers.LIFRecurrent")(tau_mem=20.0, tau_syn=10.0, rec_connect=layer)
    step = find("sinabs.layers.functional.lif.lif_forward_single")
    xs = (4 * torch.rand(size.rows, size.steps, size.width)).requires_grad_()

    def original(xs: Tensor):
        net.reset_states()
        return net(xs), net.v_mem

    def port(xs: Tensor, compile: bool | None = None):
        options = net.spike_threshold, net.spike_fn, net.reset_fn, net.surrogate_grad_fn, net.min_v_mem, net.norm_input
        memory, synapse = net.alpha_mem_calculated, net.alpha_syn_calculated

        def body(carry, x):
            state, back = carry
            spikes, state = step(x + back, memory, synapse, dict(state), *options)
            return (state, layer(spikes)), spikes

        zeros = torch.zeros_like(xs[:, 0])
        (state, _), spikes = tl.scan(body, ({"v_mem": zeros, "i_syn": zeros}, zeros), xs, dim=1, compile=compile)
        net.v_mem, net.i_syn, net.firing_rate = state["v_mem"], state["i_syn"], spikes.mean()
        return spikes, net.v_mem

    return Made(original, port, (xs,), list(net.parameters()))


def rockpool(size: Size) -> Made:
    net = find("rockpool.nn.modules.LIFTorch")(
        (size.width, size.width), has_rec=True, dt=1e-3, tau_mem=0.02, tau_syn=0.01
    )
    xs = (0.5 * torch.rand(size.rows, size.steps, size.width)).requires_grad_()

    def original(xs: Tensor):
        net.reset_state()
        return net(xs)[0]

    def port(xs: Tensor, compile: bool | None = None):
        alpha, beta = net.alpha, net.beta
        noises = net.noise_std * net.dt**0.5 * torch.randn(*xs.shape[:2], size.width)

        def body(state, x):
            (vmem, spikes, isyn), (x, noise) = state, x
            isyn = (isyn + x[..., None] + (spikes @ net.w_rec).unflatten(1, isyn.shape[1:])) * beta
            vmem = vmem * alpha + isyn.sum(2) + noise + net.bias
            spikes = net.spike_generation_fn(vmem, net.threshold, net.learning_window, net.max_spikes_per_dt)
            return (vmem - spikes * net.threshold, spikes, isyn), spikes

        zeros = xs.new_zeros(len(xs), size.width)
        state, spikes = tl.scan(body, (zeros, zeros, zeros[..., None]), (xs, noises), dim=1, compile=compile)
        net.vmem, net.spikes, net.isyn = (x[0].detach() for x in state)
        return spikes

    return Made(original, port, (xs,), list(net.parameters().astorch()))


NORSE = "norse.torch.module.snn.SNNRecurrent.forward"
LOOPS = [
    Loop("norse", "LIFRecurrent", partial(norse, "LIFRecurrent"), NORSE, wraps=True),
    Loop("norse", "LSNNRecurrent", partial(norse, "LSNNRecurrent"), NORSE, wraps=True),
    Loop("norse", "LIFAdExRecurrent", partial(norse, "LIFAdExRecurrent"), NORSE, wraps=True),
    Loop("snntorch", "Leaky behind a layer", partial(snntorch, "Leaky", beta=0.9), wraps=True),
    Loop("snntorch", "Synaptic behind a layer", partial(snntorch, "Synaptic", alpha=0.8, beta=0.9), wraps=True),
    Loop("spikingjelly", "LIFNode", partial(spikingjelly, "LIFNode"), wraps=True),
    Loop("spikingjelly", "ParametricLIFNode", partial(spikingjelly, "ParametricLIFNode"), wraps=True),
    Loop(
        "sinabs",
        "LIFRecurrent",
        sinabs,
        "sinabs.layers.functional.lif.lif_recurrent",
        wraps=True,
        double=False,
        at_most=1e-4,
    ),
    Loop(
        "rockpool",
        "LIFTorch",
        rockpool,
        "rockpool.nn.modules.torch.lif_torch.LIFTorch.forward",
        double=False,
        at_most=1e-4,
    ),
]
