"""The loops of compiled.py in tensorloop; the same in JAX are in peers/jax_compiled.py.

A workload is a function of the leaves that gives a `Work`: body, init, xs and the loss of what comes out. The two loops
of unknown length give their loss themselves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from compiled_loops.compiled_inputs import ODE_END, make
from compiled_loops.compiled_matrices import MATRICES
from plain_loops.loop_workloads import Cache, lstm_start, lstm_step, w4_step
from plain_loops.workloads import Leaves, attend
from torch import Tensor, nn
from torch.nn import functional

import tensorloop as tl


class Work(NamedTuple):
    """A scan, and the loss of (carry, ys)."""

    body: Callable[..., Any]
    init: Any
    xs: Any
    loss: Callable[[Any, Any], Tensor]


def leaves(workload: str, T: int, dtype: torch.dtype = torch.float32) -> Leaves:
    """The inputs as tensors; the floating ones get a gradient."""
    return {
        name: torch.from_numpy(x).to(dtype).requires_grad_() if x.dtype.kind == "f" else torch.tensor(x)
        for name, x in make(workload, T).items()
    }


def mean_square(carry: Any, ys: Tensor) -> Tensor:
    return (ys**2).sum() / len(ys)


def square(carry: Tensor, ys: Any) -> Tensor:
    return (carry**2).sum()


def w1(d: Leaves) -> Work:
    def body(t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return t + 1, x * torch.sqrt(t)

    return Work(body, torch.zeros((), dtype=d["xs"].dtype), d["xs"], lambda carry, ys: ys.sum())


def lstm(d: Leaves) -> Work:
    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        state = lstm_step(d, state, x)
        return state, state[0]

    return Work(body, lstm_start(d), d["xs"], mean_square)


def rows(d: Leaves, width: int) -> Tensor:
    """Zeros, as many rows as xs have."""
    return d["xs"].new_zeros(d["xs"].shape[1], width)


def rnn(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(x[:, :1] > -0.5, torch.tanh(x @ d["Wx"] + h @ d["Wh"]), h)
        return h, h

    return Work(body, rows(d, len(d["Wh"])), d["xs"], mean_square)


def field(d: Leaves, x: Tensor) -> Tensor:
    """What the solvers follow."""
    return torch.sin(x @ d["A"]) - x / 10


def rk4(d: Leaves) -> Work:
    def body(x: Tensor, _: None) -> tuple[Tensor, None]:
        f, dt = partial(field, d), 0.05 * d["scale"]
        k1 = f(x)
        k2 = f(x + dt / 2 * k1)
        k3 = f(x + dt / 2 * k2)
        k4 = f(x + dt * k3)
        return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return Work(body, d["x0"], None, square)


def ln_rnn(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(functional.layer_norm(x @ d["Wx"] + h @ d["Wh"], d["b"].shape, d["gain"], d["b"]))
        return h, h

    return Work(body, rows(d, 64), d["xs"], mean_square)


def memory(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bd,bnd->bn", h @ d["Wq"], d["K"]) / 32**0.5
        h = torch.tanh(x @ d["Wx"] + torch.einsum("bn,bnd->bd", torch.softmax(scores, -1), d["V"]))
        return h, h

    return Work(body, rows(d, 32), d["xs"], mean_square)


def crf(d: Leaves) -> Work:
    def body(alpha: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.logsumexp(alpha[:, :, None] + d["A"], 1) + x, None

    return Work(body, rows(d, 32), d["xs"], lambda alpha, _: torch.logsumexp(alpha, -1).sum())


def viterbi(d: Leaves) -> Work:
    def body(score: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        best, before = (score[:, :, None] + d["A"]).max(1)
        return best + x, before

    def loss(score: Tensor, before: Tensor) -> Tensor:
        return score.amax(-1).sum() + 0 * before.sum()

    return Work(body, rows(d, 32), d["xs"], loss)


def hmm(d: Leaves) -> Work:
    chances = torch.softmax(d["A"], -1)

    def body(alpha: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        alpha = alpha @ chances * torch.exp(x)
        total = alpha.sum(-1, keepdim=True)
        return alpha / total, torch.log(total[:, 0])

    return Work(body, rows(d, 32) + 1 / 32, d["xs"], lambda alpha, ys: ys.sum())


def gru(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        xr, xz, xn = (x @ d["Wx"] + d["bx"]).chunk(3, -1)
        hr, hz, hn = (h @ d["Wh"] + d["bh"]).chunk(3, -1)
        z = torch.sigmoid(xz + hz)
        h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
        return h, h

    return Work(body, rows(d, 64), d["xs"], mean_square)


def min_gru(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.sigmoid(x @ d["Wz"])
        h = (1 - z) * h + z * (x @ d["Wh"])
        return h, h

    return Work(body, rows(d, 64), d["xs"], mean_square)


def iir(d: Leaves) -> Work:
    b, a = d["b"], d["a"]

    def body(state: tuple[Tensor, ...], x: Tensor) -> Any:
        x1, x2, y1, y2 = state
        y = b[0] * x + b[1] * x1 + b[2] * x2 - a[0] * y1 - a[1] * y2
        return (x, x1, y, y1), y

    return Work(body, (torch.zeros_like(d["xs"][0].detach()),) * 4, d["xs"], mean_square)


def kalman(d: Leaves) -> Work:
    A, noise = d["A"], torch.eye(4, dtype=d["A"].dtype) * d["q"]

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, P = state
        x, P = x @ A.T, A @ P @ A.T + noise
        s = P[:, 0, 0] + d["r"]
        gain, wrong = P[:, :, 0] / s[:, None], z - x[:, 0]
        x, P = x + gain * wrong[:, None], P - gain[:, :, None] * P[:, None, 0]
        return (x, P), torch.log(s) + wrong**2 / s

    start = rows_of(d, 4), torch.eye(4, dtype=A.dtype).expand(16, 4, 4)
    return Work(body, start, d["xs"], lambda carry, ys: ys.sum() / len(ys))


def rows_of(d: Leaves, width: int) -> Tensor:
    return d["xs"].new_zeros(16, width)


def adam(d: Leaves) -> Work:
    rate = torch.exp(d["rate"])

    def body(state: tuple[Tensor, ...], x: Tensor) -> Any:
        w, m, v, t = state
        wrong = x @ (w - d["target"])
        g = x.T @ wrong / 16
        m, v, t = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2, t + 1
        w = w - rate * (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.99**t)) + 1e-3)
        return (w, m, v, t), (wrong**2).mean()

    zeros = torch.zeros_like(d["w0"].detach())
    start = d["w0"], zeros, zeros, zeros.new_zeros(())
    return Work(body, start, d["xs"], lambda carry, ys: ys.sum() / len(ys))


def bn_rnn(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = x + h @ d["W"]
        a = a - a.mean(0)
        h = torch.tanh(a / torch.sqrt((a**2).mean(0) + 1e-3))
        return h, h

    return Work(body, rows(d, 512), d["xs"], mean_square)


def one_row(d: Leaves) -> Work:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(d["W"] @ h + x)
        return h, h

    return Work(body, torch.zeros_like(d["xs"][0].detach()), d["xs"], mean_square)


def s5(d: Leaves) -> Work:
    turn = torch.polar(torch.exp(-d["decay"]), d["phase"])
    B, C = torch.complex(d["B_real"], d["B_imag"]), torch.complex(d["C_real"], d["C_imag"])

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = turn * h + x.to(B.dtype) @ B
        return h, (h @ C).real

    return Work(body, torch.zeros(8, 64, dtype=B.dtype), d["xs"], mean_square)


def w3(d: Leaves) -> Work:
    def body(carry: Cache, x: Tensor) -> tuple[Cache, Tensor]:
        o, K, V = carry
        h = torch.tanh(x @ d["Wx"] + o @ d["Wo"])
        K.append(h @ d["Wk"])
        V.append(h @ d["Wv"])
        o = attend(h @ d["Wq"], K.stack(), V.stack())
        return (o, K, V), (o**2).sum()

    start = torch.zeros_like(d["xs"][0].detach()), tl.TensorArray(), tl.TensorArray()
    return Work(body, start, d["xs"], lambda carry, ys: ys.sum())


SCANS: dict[str, Callable[[Leaves], Any]] = {
    **{"W1": w1, "W2": lstm, "W2s": lstm, "RNN": rnn, "RNNs": rnn, "rk4": rk4, "ln_rnn": ln_rnn, "memory": memory},
    **{"crf": crf, "viterbi": viterbi, "hmm": hmm, "gru": gru, "min_gru": min_gru, "iir": iir, "kalman": kalman},
    **{"adam": adam, "s5": s5, "bn_rnn": bn_rnn, "one_row": one_row, "W3": w3},
    **MATRICES,
}


def scanned(workload: str, d: Leaves, T: int, **options: Any) -> Tensor:
    """The loss of a scan."""
    work = Work(*SCANS[workload](d))
    return work.loss(*tl.scan(work.body, work.init, work.xs, T, **options))


# ---- loops of unknown length ----


def w4(d: Leaves, **options: Any) -> Tensor:
    def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return w4_step(d, carry[0]), carry[1] + 1

    init = d["x0"], torch.zeros_like(d["N"])
    x, _ = tl.while_loop(lambda carry: carry[1] < d["N"], body, init, **options)
    return (x**2).sum()


def ode(d: Leaves, **options: Any) -> Tensor:
    end = d["N"].to(d["x0"].dtype) * ODE_END

    def body(carry: tuple[Tensor, Tensor, Tensor]) -> Any:
        t, dt, x = carry
        k = field(d, x)
        after = x + dt / 2 * (k + field(d, x + dt * k))
        error = (after - (x + dt * k)).abs().amax().detach()
        good = error < 1e-2
        wanted = dt * torch.clamp(0.9 * torch.sqrt(1e-2 / (error + 1e-8)), 0.3, 2.0)
        t, x = torch.where(good, t + dt, t), torch.where(good, after, x)
        return t, torch.minimum(wanted, end - t + 1e-4), x

    zero = torch.zeros((), dtype=d["x0"].dtype)
    _, _, x = tl.while_loop(lambda carry: carry[0] < end, body, (zero, zero + 0.1, d["x0"]), **options)
    return (x**2).sum()


def loss_of(workload: str, way: str, d: Leaves, T: int) -> Callable[[], Tensor]:
    """What a way of ours, of eager loops or of torch's modules computes."""
    if way.startswith("nn_"):
        return partial(of_module(way, d), d["xs"])
    if way == "torch_scan":
        return partial(torch.compile(partial(torch_scan, workload)), d)
    options: dict[str, Any] = {"compile": way.startswith("compiled")}
    if way.endswith("k32"):
        options["checkpoints"] = 32
    elif way.endswith("mb"):
        options["checkpoints"] = tl.Checkpoints(budget=way.rpartition("_")[2])
    loops: dict[str, Callable[..., Tensor]] = {"W4": w4, "ode": ode}
    if workload in loops:
        return partial(loops[workload], d, **options)
    return partial(scanned, workload, d, T, **options)


def of_module(way: str, d: Leaves) -> Callable[[Tensor], Tensor]:
    """The loss of torch's own module, with weights of its own: nn.LSTM's are turned and have two biases."""
    module = {"nn_lstm": nn.LSTM, "nn_gru": nn.GRU}[way](d["xs"].shape[2], len(d["Wh"]))
    return lambda xs: mean_square(None, module(xs)[0])


def torch_scan(workload: str, d: Leaves) -> Tensor:
    """Torch's own operator, compiled by torch.compile."""
    from torch._higher_order_ops.scan import scan

    work = Work(*SCANS[workload](d))

    def body(carry: Any, x: Tensor) -> Any:
        carry, y = work.body(carry, x)
        return carry, y.clone()

    return work.loss(*scan(body, work.init, work.xs))
