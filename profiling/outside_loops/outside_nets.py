"""Recurrent nets: ncps, xlstm, SpeechBrain, mambapy, rwkv, dnc, echotorch."""

from functools import partial

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl


def sequence(size: Size) -> Tensor:
    """Inputs (B, T, F)."""
    return torch.randn(size.rows, size.steps, size.width, requires_grad=True)


def ncps(name: str, size: Size) -> Made:
    net = find(f"ncps.torch.{name}")(size.width, size.width)
    xs = sequence(size)

    def port(xs: Tensor, compile: bool | None = None):
        def body(h, x):
            y, h = net.rnn_cell(x, h, 1.0)
            return h, y

        h, ys = tl.scan(body, xs.new_zeros(len(xs), net.state_size), xs, dim=1, compile=compile)
        return ys, h

    return Made(net, port, (xs,), list(net.parameters()))


def slstm(size: Size) -> Made:
    heads, head = 4, size.width // 4 or 1
    width = heads * head
    forward = find("xlstm.blocks.slstm.src.vanilla.slstm_forward")
    step = find("xlstm.blocks.slstm.src.vanilla.slstm.slstm_forward_pointwise")
    weights = torch.randn(heads, 4 * head, head) / head**0.5
    bias = torch.randn(4 * width)
    xs = torch.randn(size.steps, size.rows, 4 * width)
    for x in (weights, bias, xs):
        x.requires_grad_()
    states = torch.zeros(4, size.rows, width)

    def port(xs: Tensor, states: Tensor, weights: Tensor, bias: Tensor, compile: bool | None = None):
        def body(states, x):
            mixed = torch.einsum("bhi,hgi->bhg", states[0].view(-1, heads, head), weights)
            mixed = mixed.view(-1, heads, 4, head).transpose(1, 2).reshape(-1, 4 * width)
            states, gates = step(x, mixed, bias, states, {})
            return states, (states, gates)

        last, (after, gates) = tl.scan(body, states, xs, compile=compile)
        after = torch.cat([states[None], after]).transpose(0, 1)
        return after, last, torch.cat([gates, gates.new_zeros(1, *gates.shape[1:])])

    return Made(lambda *xs: forward(*xs, step), port, (xs, states, weights, bias))


def speechbrain(name: str, size: Size) -> Made:
    """The recurrence of a layer, on its inputs times a weight, as the layer calls it."""
    net = find(f"speechbrain.nnet.RNN.{name}_Layer")(size.width, size.width, 1, size.rows)
    w = torch.randn(size.rows, size.steps, 2 * size.width, requires_grad=True)
    start = torch.zeros(size.rows, size.width)

    def original(w: Tensor, h: Tensor):
        return net._ligru_cell(w, h) if name == "LiGRU" else net._sligru_cell(w, h)

    def port(w: Tensor, h: Tensor, compile: bool | None = None):
        mask = net._sample_drop_mask(w)

        def body(h, w):
            mixed = net.u(h) if name == "LiGRU" else net.layer_norm(net.u(h))
            a, z = (w + mixed).chunk(2, 1)
            z = torch.sigmoid(z)
            h = z * h + (1 - z) * net.act(a) * mask
            return h, h

        return tl.scan(body, h, w, dim=1, compile=compile)[1]

    return Made(original, port, (w, start), [p for n, p in net.named_parameters() if n.startswith(("u", "layer_norm"))])


def quasi(size: Size) -> Made:
    net = find("speechbrain.nnet.RNN.QuasiRNNLayer")(size.width, size.width, False)
    f = torch.rand(size.steps, size.rows, size.width, requires_grad=True)
    x = torch.randn(size.steps, size.rows, size.width, requires_grad=True)

    def port(f: Tensor, x: Tensor, hidden: None, compile: bool | None = None):
        return tl.linear_recurrence(1 - f, f * x)

    return Made(net.forgetMult, port, (f, x, None))


def mamba(size: Size) -> Made:
    config = find("mambapy.mamba.MambaConfig")(d_model=size.width // 2, n_layers=1)
    block = find("mambapy.mamba.MambaBlock")(config)
    x, delta = sequence(size), torch.rand(size.rows, size.steps, size.width, requires_grad=True)
    b, c = (torch.randn(size.rows, size.steps, config.d_state, requires_grad=True) for _ in range(2))
    a, d = -torch.rand(size.width, config.d_state), torch.randn(size.width)

    def port(x, delta, a, b, c, d, compile: bool | None = None):
        def body(h, step):
            x, delta, b, c = step
            h = torch.exp(delta[..., None] * a) * h + (delta * x)[..., None] * b[:, None]
            return h, (h @ c[..., None])[..., 0] + d * x

        return tl.scan(body, x.new_zeros(len(x), *a.shape), (x, delta, b, c), dim=1, compile=compile)[1]

    inputs = (x, delta, a.requires_grad_(), b, c, d.requires_grad_())
    return Made(lambda *xs: block.selective_scan_seq(*xs), port, inputs)


def dnc(size: Size) -> Made:
    """Its controller is one step of `nn.LSTM`, its memory a dict that each step changes."""
    net = find("dnc.DNC")(
        size.width, size.width, nr_cells=8, cell_size=8, read_heads=2, batch_first=True, num_hidden_layers=1
    )
    xs = sequence(size)
    start = net._init_hidden(None, size.rows, True)

    def port(xs: Tensor, compile: bool | None = None):
        def body(carry, x):
            controller, memory = carry
            y, (controller, memory, read) = net._layer_forward(torch.cat([x, start[2]], 1), 0, (controller, memory))
            return (controller, memory), (torch.cat([y, read], 1), read)

        (controller, memory), (ys, reads) = tl.scan(body, (start[0][0], dict(start[1])), xs, dim=1, compile=compile)
        return net.output(ys), ([controller], memory, reads[:, -1])

    def original(xs: Tensor):
        return net(xs, (list(start[0]), dict(start[1]), start[2]))

    return Made(original, port, (xs,), list(net.parameters()))


SB = "speechbrain.nnet.RNN."
LOOPS = [
    Loop("ncps", "CfC", partial(ncps, "CfC"), "ncps.torch.CfC.forward", wraps=True),
    Loop("ncps", "LTC", partial(ncps, "LTC"), "ncps.torch.LTC.forward", wraps=True),
    Loop("xlstm", "sLSTM, vanilla backend", slstm, "xlstm.blocks.slstm.src.vanilla.slstm_forward", wraps=True),
    Loop("speechbrain", "LiGRU", partial(speechbrain, "LiGRU"), SB + "LiGRU_Layer._ligru_cell"),
    Loop("speechbrain", "SLiGRU", partial(speechbrain, "SLiGRU"), SB + "SLiGRU_Layer._sligru_cell"),
    Loop("speechbrain", "QuasiRNN", quasi, SB + "QuasiRNNLayer.forgetMult", compiles=False),
    Loop("mambapy", "selective scan", mamba, "mambapy.mamba.MambaBlock.selective_scan_seq"),
    Loop("dnc", "DNC", dnc, "dnc.DNC.forward", wraps=True, double=False, at_most=1e-4),
]
