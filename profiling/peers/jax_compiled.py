"""The loops of compiled.py in JAX and Equinox, run by a venv that has them: see README.md beside this file.

`lax.scan` is told how many steps a loop of unknown length takes; Equinox's loops read it, as tensorloop's do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import answering
import equinox.internal as eqxi  # pyright: ignore[reportMissingImports]
import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
from compiled_loops.compiled_inputs import ODE_END, make
from jax import lax  # pyright: ignore[reportMissingImports]
from jax_loops import Arrays, executable, lstm_step, threads, w1, w3_carried, w4_checkpointed, w4_told
from jax_matrices import MATRICES


class Work(NamedTuple):
    """A scan, and the loss of (carry, ys)."""

    body: Callable[..., Any]
    init: Any
    xs: Any
    loss: Callable[[Any, Any], Any]


def mean_square(carry: Any, ys: Any) -> Any:
    return jnp.sum(ys**2) / len(ys)


def square(carry: Any, ys: Any) -> Any:
    return jnp.sum(carry**2)


def rows(p: Arrays, width: int) -> Any:
    return jnp.zeros((p["xs"].shape[1], width), p["xs"].dtype)


def lstm(p: Arrays) -> Work:
    zeros = rows(p, len(p["Wh"]))
    return Work(partial(lstm_step, p), (zeros, zeros), p["xs"], mean_square)


def rnn(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        h = jnp.where(x[:, :1] > -0.5, jnp.tanh(x @ p["Wx"] + h @ p["Wh"]), h)
        return h, h

    return Work(body, rows(p, len(p["Wh"])), p["xs"], mean_square)


def field(p: Arrays, x: Any) -> Any:
    return jnp.sin(x @ p["A"]) - x / 10


def rk4(p: Arrays) -> Work:
    def body(x: Any, _: None) -> Any:
        f, dt = partial(field, p), 0.05 * p["scale"]
        k1 = f(x)
        k2 = f(x + dt / 2 * k1)
        k3 = f(x + dt / 2 * k2)
        k4 = f(x + dt * k3)
        return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return Work(body, p["x0"], None, square)


def ln_rnn(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        z = x @ p["Wx"] + h @ p["Wh"]
        z = z - z.mean(-1, keepdims=True)
        h = jnp.tanh(z * lax.rsqrt((z**2).mean(-1, keepdims=True) + 1e-5) * p["gain"] + p["b"])
        return h, h

    return Work(body, rows(p, 64), p["xs"], mean_square)


def memory(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        scores = jnp.einsum("bd,bnd->bn", h @ p["Wq"], p["K"]) / 32**0.5
        h = jnp.tanh(x @ p["Wx"] + jnp.einsum("bn,bnd->bd", jax.nn.softmax(scores, -1), p["V"]))
        return h, h

    return Work(body, rows(p, 32), p["xs"], mean_square)


def crf(p: Arrays) -> Work:
    def body(alpha: Any, x: Any) -> Any:
        return jax.nn.logsumexp(alpha[:, :, None] + p["A"], 1) + x, None

    return Work(body, rows(p, 32), p["xs"], lambda alpha, _: jnp.sum(jax.nn.logsumexp(alpha, -1)))


def viterbi(p: Arrays) -> Work:
    def body(score: Any, x: Any) -> Any:
        ways = score[:, :, None] + p["A"]
        before = jnp.argmax(ways, 1)
        return jnp.take_along_axis(ways, before[:, None], 1)[:, 0] + x, before

    return Work(body, rows(p, 32), p["xs"], lambda score, before: jnp.sum(score.max(-1)) + 0 * before.sum())


def hmm(p: Arrays) -> Work:
    chances = jax.nn.softmax(p["A"], -1)

    def body(alpha: Any, x: Any) -> Any:
        alpha = alpha @ chances * jnp.exp(x)
        total = alpha.sum(-1, keepdims=True)
        return alpha / total, jnp.log(total[:, 0])

    return Work(body, rows(p, 32) + 1 / 32, p["xs"], lambda alpha, ys: jnp.sum(ys))


def gru(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        xr, xz, xn = jnp.split(x @ p["Wx"] + p["bx"], 3, -1)
        hr, hz, hn = jnp.split(h @ p["Wh"] + p["bh"], 3, -1)
        z = jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h
        return h, h

    return Work(body, rows(p, 64), p["xs"], mean_square)


def min_gru(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        z = jax.nn.sigmoid(x @ p["Wz"])
        h = (1 - z) * h + z * (x @ p["Wh"])
        return h, h

    return Work(body, rows(p, 64), p["xs"], mean_square)


def iir(p: Arrays) -> Work:
    b, a = p["b"], p["a"]

    def body(state: Any, x: Any) -> Any:
        x1, x2, y1, y2 = state
        y = b[0] * x + b[1] * x1 + b[2] * x2 - a[0] * y1 - a[1] * y2
        return (x, x1, y, y1), y

    return Work(body, (jnp.zeros_like(p["xs"][0]),) * 4, p["xs"], mean_square)


def kalman(p: Arrays) -> Work:
    A, noise = p["A"], jnp.eye(4, dtype=p["A"].dtype) * p["q"]

    def body(state: Any, z: Any) -> Any:
        x, P = state
        x, P = x @ A.T, A @ P @ A.T + noise
        s = P[:, 0, 0] + p["r"]
        gain, wrong = P[:, :, 0] / s[:, None], z - x[:, 0]
        x, P = x + gain * wrong[:, None], P - gain[:, :, None] * P[:, None, 0]
        return (x, P), jnp.log(s) + wrong**2 / s

    start = jnp.zeros((16, 4), A.dtype), jnp.broadcast_to(jnp.eye(4, dtype=A.dtype), (16, 4, 4))
    return Work(body, start, p["xs"], lambda carry, ys: jnp.sum(ys) / len(ys))


def adam(p: Arrays) -> Work:
    rate = jnp.exp(p["rate"])

    def body(state: Any, x: Any) -> Any:
        w, m, v, t = state
        wrong = x @ (w - p["target"])
        g = x.T @ wrong / 16
        m, v, t = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2, t + 1
        w = w - rate * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-3)
        return (w, m, v, t), jnp.mean(wrong**2)

    zeros = jnp.zeros_like(p["w0"])
    return Work(body, (p["w0"], zeros, zeros, zeros[0]), p["xs"], lambda carry, ys: jnp.sum(ys) / len(ys))


def s5(p: Arrays) -> Work:
    turn = jnp.exp(-p["decay"] + 1j * p["phase"])
    B, C = p["B_real"] + 1j * p["B_imag"], p["C_real"] + 1j * p["C_imag"]

    def body(h: Any, x: Any) -> Any:
        h = turn * h + x @ B
        return h, (h @ C).real

    return Work(body, jnp.zeros((8, 64), B.dtype), p["xs"], mean_square)


def bn_rnn(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        a = x + h @ p["W"]
        a = a - a.mean(0)
        h = jnp.tanh(a / jnp.sqrt((a**2).mean(0) + 1e-3))
        return h, h

    return Work(body, rows(p, 512), p["xs"], mean_square)


def one_row(p: Arrays) -> Work:
    def body(h: Any, x: Any) -> Any:
        h = jnp.tanh(p["W"] @ h + x)
        return h, h

    return Work(body, jnp.zeros_like(p["xs"][0]), p["xs"], mean_square)


SCANS: dict[str, Callable[[Arrays], Any]] = {
    **{"W2": lstm, "W2s": lstm, "RNN": rnn, "RNNs": rnn, "rk4": rk4, "ln_rnn": ln_rnn, "memory": memory, "crf": crf},
    **{"viterbi": viterbi, "hmm": hmm, "gru": gru, "min_gru": min_gru, "iir": iir, "kalman": kalman, "adam": adam},
    **{"s5": s5, "bn_rnn": bn_rnn, "one_row": one_row},
    **MATRICES,
}


def scanned(workload: str, scan: Callable[..., Any], p: Arrays, T: int) -> Any:
    work = Work(*SCANS[workload](p))
    return work.loss(*scan(work.body, work.init, work.xs, T))


# ---- the adaptive solver ----


def ode_step(p: Arrays, carry: Any) -> Any:
    t, dt, x = carry
    k = field(p, x)
    after = x + dt / 2 * (k + field(p, x + dt * k))
    error = lax.stop_gradient(jnp.max(jnp.abs(after - (x + dt * k))))
    good = error < 1e-2
    wanted = dt * jnp.clip(0.9 * jnp.sqrt(1e-2 / (error + 1e-8)), 0.3, 2.0)
    t, x = jnp.where(good, t + dt, t), jnp.where(good, after, x)
    return t, jnp.minimum(wanted, ode_end(p) - t + 1e-4), x


def ode_end(p: Arrays) -> Any:
    return p["N"].astype(p["x0"].dtype) * ODE_END


def ode_start(p: Arrays) -> Any:
    zero = jnp.zeros((), p["x0"].dtype)
    return zero, zero + 0.1, p["x0"]


def ode_checkpointed(p: Arrays, T: int) -> Any:
    end = ode_end(p)
    _, _, x = eqxi.while_loop(
        lambda carry: carry[0] < end, partial(ode_step, p), ode_start(p), kind="checkpointed", checkpoints=32
    )
    return jnp.sum(x**2)


def ode_told(steps: int, p: Arrays, T: int) -> Any:
    carry, _ = lax.scan(lambda carry, _: (ode_step(p, carry), None), ode_start(p), None, length=steps)
    return jnp.sum(carry[2] ** 2)


def ode_steps(p: Arrays) -> int:
    """How many steps the solver takes."""
    last = lax.while_loop(lambda c: c[0][0] < ode_end(p), lambda c: (ode_step(p, c[0]), c[1] + 1), (ode_start(p), 0))
    return int(last[1])


def loop_of(workload: str, variant: str, p: Arrays) -> Callable[[Arrays, int], Any]:
    """The loss of (arrays, T)."""
    if workload in SCANS:
        kept = partial(eqxi.scan, kind="checkpointed", checkpoints=32)
        return partial(scanned, workload, lax.scan if variant == "lax_scan" else kept)
    if workload == "ode":
        return partial(ode_told, ode_steps(p)) if variant == "lax_scan" else ode_checkpointed
    if workload == "W4":
        return w4_told if variant == "lax_scan" else partial(w4_checkpointed, 32)
    return {"W1": w1, "W3": w3_carried}[workload]


def compiled(cell: dict[str, Any], double: bool) -> answering.Compiled:
    """Value and gradient, with the inputs of compiled.py."""
    jax.config.update("jax_enable_x64", double)
    arrays = make(cell["workload"], cell["T"])
    dtype = jnp.float64 if double else jnp.float32
    known = {name: jnp.asarray(x, dtype if x.dtype.kind == "f" else None) for name, x in arrays.items()}
    return executable(cell, arrays, loop_of(cell["workload"], cell["variant"], known), double)


if __name__ == "__main__":
    answering.main(compiled, threads)
