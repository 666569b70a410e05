"""TorchRL: returns and advantages, its LSTM and GRU in Python, with resets."""

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor

import tensorloop as tl

GAMMA, LAMBDA = 0.99, 0.95
VALUES = "torchrl.objectives.value.functional."
NETS = "torchrl.modules.tensordict_module.rnn."


def trajectory(size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values, next values, rewards, done, terminated, each (B, T, 1), as TorchRL wants them."""
    shape = size.rows, size.steps, 1
    value, after, reward = (torch.randn(shape, requires_grad=True) for _ in range(3))
    done = torch.rand(shape) < 0.1
    return value, after, reward, done, done & (torch.rand(shape) < 0.5)


def gae(size: Size) -> Made:
    inputs = trajectory(size)
    original = find(VALUES + "generalized_advantage_estimate")

    def port(
        value: Tensor, after: Tensor, reward: Tensor, done: Tensor, terminated: Tensor, compile: bool | None = None
    ):
        delta = reward + GAMMA * after * ~terminated - value
        advantage = tl.linear_recurrence(LAMBDA * GAMMA * ~done, delta, dim=1, reverse=True)
        return advantage, advantage + value

    return Made(lambda *xs: original(GAMMA, LAMBDA, *xs), port, inputs)


def td_lambda(size: Size) -> Made:
    _, after, reward, done, terminated = trajectory(size)
    original = find(VALUES + "td_lambda_return_estimate")

    def port(after: Tensor, reward: Tensor, done: Tensor, terminated: Tensor, compile: bool | None = None):
        after = after * ~terminated
        share = torch.where(done, 0.0, LAMBDA)
        found = reward + GAMMA * (1 - share) * after
        return tl.linear_recurrence(GAMMA * share, found, dim=1, init=after[:, -1], reverse=True)

    return Made(lambda *xs: original(GAMMA, LAMBDA, *xs), port, (after, reward, done, terminated))


def td1(size: Size) -> Made:
    _, after, reward, done, terminated = trajectory(size)
    original = find(VALUES + "td1_return_estimate")

    def port(after: Tensor, reward: Tensor, done: Tensor, terminated: Tensor, compile: bool | None = None):
        after = after * ~terminated
        found = reward + GAMMA * torch.where(done, after, 0.0)
        return tl.linear_recurrence(GAMMA * ~done, found, dim=1, init=after[:, -1], reverse=True)

    return Made(lambda *xs: original(GAMMA, *xs), port, (after, reward, done, terminated))


def vtrace(size: Size) -> Made:
    value, after, reward, done, terminated = trajectory(size)
    here, there = (torch.randn_like(value, requires_grad=True) for _ in range(2))
    original = find(VALUES + "vtrace_advantage_estimate")

    def port(here, there, value, after, reward, done, terminated, compile: bool | None = None):
        rho = (here - there).exp().clamp_max(1.0)
        delta = rho * (reward + GAMMA * after * ~terminated - value)
        vs = tl.linear_recurrence(GAMMA * ~done * rho, delta, dim=1, reverse=True) + value
        following = torch.where(done, after, torch.cat([vs[:, 1:], after[:, -1:]], 1))
        return rho * (reward + GAMMA * following * ~terminated - value), vs

    return Made(lambda *xs: original(GAMMA, *xs), port, (here, there, value, after, reward, done, terminated))


def lstm(size: Size) -> Made:
    net = find(NETS + "LSTM")(size.width, size.width, batch_first=True)
    xs = torch.randn(size.rows, size.steps, size.width, requires_grad=True)
    weights = net.weight_ih_l0, net.bias_ih_l0, net.weight_hh_l0, net.bias_hh_l0

    def port(xs: Tensor, compile: bool | None = None):
        def body(state, x):
            h, c = net._lstm_cell(x, *state, *weights)
            return (h, c), h

        zeros = xs.new_zeros(xs.shape[0], net.hidden_size)
        (h, c), ys = tl.scan(body, (zeros, zeros), xs, dim=1, compile=compile)
        return ys, (h[None], c[None])

    return Made(net, port, (xs,), list(net.parameters()))


def gru(size: Size) -> Made:
    net = find(NETS + "GRU")(size.width, size.width, batch_first=True)
    xs = torch.randn(size.rows, size.steps, size.width, requires_grad=True)
    weights = net.weight_ih_l0, net.bias_ih_l0, net.weight_hh_l0, net.bias_hh_l0

    def port(xs: Tensor, compile: bool | None = None):
        def body(h, x):
            h = net._gru_cell(x, h, *weights)
            return h, h

        h, ys = tl.scan(body, xs.new_zeros(xs.shape[0], net.hidden_size), xs, dim=1, compile=compile)
        return ys, h[None]

    return Made(net, port, (xs,), list(net.parameters()))


def resets(size: Size) -> Made:
    """`LSTMModule` on episodes that begin within the batch; its cell is TorchRL's in Python."""
    module = find(NETS + "LSTMModule")(
        input_size=size.width,
        hidden_size=size.width,
        in_key="x",
        out_key="y",
        python_based=True,
        default_recurrent_mode=True,
    )
    xs = torch.randn(size.rows, size.steps, size.width, requires_grad=True)
    begins = torch.rand(size.rows, size.steps, 1) < 0.1
    begins[:, 0] = True
    net = module.lstm
    weights = net.weight_ih_l0, net.bias_ih_l0, net.weight_hh_l0, net.bias_hh_l0

    def original(xs: Tensor, begins: Tensor):
        data = find("tensordict.TensorDict")({"x": xs, "is_init": begins}, begins.shape[:2])
        return module(data)["y"]

    def port(xs: Tensor, begins: Tensor, compile: bool | None = None):
        def body(state, x):
            x, begins = x
            h, c = net._lstm_cell(x, *(torch.where(begins, 0.0, s) for s in state), *weights)
            return (h, c), h

        zeros = xs.new_zeros(xs.shape[0], net.hidden_size)
        return tl.scan(body, (zeros, zeros), (xs, begins), dim=1, compile=compile)[1]

    return Made(original, port, (xs, begins), list(net.parameters()))


LOOPS = [
    Loop("torchrl", "generalized advantage estimate", gae, VALUES + "generalized_advantage_estimate", compiles=False),
    Loop("torchrl", "TD(lambda) returns", td_lambda, VALUES + "td_lambda_return_estimate", compiles=False),
    Loop("torchrl", "TD(1) returns", td1, VALUES + "td1_return_estimate", compiles=False),
    Loop("torchrl", "V-trace", vtrace, VALUES + "vtrace_advantage_estimate", compiles=False),
    Loop("torchrl", "LSTM in Python", lstm, NETS + "LSTM._lstm", wraps=True),
    Loop("torchrl", "GRU in Python", gru, NETS + "GRU._gru", wraps=True),
    Loop("torchrl", "LSTMModule with resets", resets, NETS + "LSTM._lstm", wraps=True),
]
