"""The loops of loop_inputs.py in JAX and Equinox, run by a venv that has them: see README.md beside this file.

W4's N is data to Equinox's loops, as it is to tensorloop's; `lax.scan` is told it.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import answering
import equinox.internal as eqxi  # pyright: ignore[reportMissingImports]
import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax import lax  # pyright: ignore[reportMissingImports]
from plain_loops import loop_inputs

Arrays = dict[str, Any]  # name -> jax array


# ---- W1 ----


def w1(p: Arrays, T: int) -> Any:
    _, ys = lax.scan(lambda t, x: (t + 1, x * jnp.sqrt(t)), jnp.zeros((), p["xs"].dtype), p["xs"])
    return jnp.sum(ys)


# ---- W2 ----


def lstm_step(p: Arrays, state: Any, x: Any) -> Any:
    h, c = state
    i, f, g, o = jnp.split(x @ p["Wx"] + h @ p["Wh"] + p["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def w2(scan: Callable[..., Any], p: Arrays, T: int) -> Any:
    zeros = jnp.zeros((p["xs"].shape[1], p["Wh"].shape[0]), p["xs"].dtype)
    _, hs = scan(partial(lstm_step, p), (zeros, zeros), p["xs"])
    return jnp.sum(hs**2) / T


# ---- W3 ----


def w3_step(p: Arrays, slots: Any, state: Any) -> Any:
    """Keys and values are of T slots from the start; a step attends to all of them, masked."""
    t, o, K, V, loss = state
    h = jnp.tanh(p["xs"][t] @ p["Wx"] + o @ p["Wo"])
    K, V = K.at[t].set(h @ p["Wk"]), V.at[t].set(h @ p["Wv"])
    scores = jnp.einsum("bd,tbd->bt", h @ p["Wq"], K[...]) / np.sqrt(o.shape[-1])
    weights = jax.nn.softmax(jnp.where(slots <= t, scores, -jnp.inf), axis=-1)
    o = jnp.einsum("bt,tbd->bd", weights, V[...])
    return t + 1, o, K, V, loss + jnp.sum(o**2)


def w3_carried(p: Arrays, T: int) -> Any:
    """The slots are in the carry of a scan, which keeps them for every step."""
    empty = jnp.zeros_like(p["xs"])
    state = jnp.array(0), empty[0], empty, empty, jnp.zeros((), empty.dtype)
    state, _ = lax.scan(lambda state, _: (w3_step(p, jnp.arange(T), state), None), state, None, length=T)
    return state[-1]


def w3_buffers(p: Arrays, T: int) -> Any:
    """The slots are in Equinox's write-only buffers."""
    body = partial(w3_step, p, jnp.arange(T))

    empty = jnp.zeros_like(p["xs"])
    state = jnp.array(0), empty[0], empty, empty, jnp.zeros((), empty.dtype)
    state = eqxi.while_loop(
        lambda s: s[0] < T, body, state, max_steps=T, buffers=lambda s: (s[2], s[3]), kind="checkpointed"
    )
    return state[-1]


# ---- W4 ----


def w4_step(p: Arrays, x: Any) -> Any:
    return jnp.tanh(x @ p["W"] + p["b"]) * 0.9 + 0.1 * p["x0"]


def w4_checkpointed(checkpoints: int, p: Arrays, T: int) -> Any:
    def body(state: Any) -> Any:
        x, n = state
        return w4_step(p, x), n + 1

    state = p["x0"], jnp.zeros_like(p["N"])
    x, _ = eqxi.while_loop(lambda s: s[1] < p["N"], body, state, kind="checkpointed", checkpoints=checkpoints)
    return jnp.sum(x**2)


def w4_told(p: Arrays, T: int) -> Any:
    x, _ = lax.scan(lambda x, _: (w4_step(p, x), None), p["x0"], None, length=T)
    return jnp.sum(x**2)


# ---- W5 ----


def w5_masked(p: Arrays, T: int) -> Any:
    """All rows at every step."""

    def body(carry: Any, x: Any) -> Any:
        t, h = carry
        running = (t < p["lens"])[:, None]
        h = jnp.where(running, jnp.tanh(x @ p["Wx"] + h @ p["Wh"]), h)
        return (t + 1, h), jnp.where(running, h, 0)

    _, ys = lax.scan(body, (jnp.array(0), jnp.zeros_like(p["xs"][0])), p["xs"])
    return jnp.sum(ys**2)


LOOPS: dict[str, dict[str, Callable[[Arrays, int], Any]]] = {
    "W1": {"lax_scan": w1},
    "W2": {"lax_scan": partial(w2, lax.scan), "eqx_scan": partial(w2, partial(eqxi.scan, kind="checkpointed"))},
    "W3": {"eqx_buffers": w3_buffers, "lax_scan": w3_carried},
    "W4": {"lax_scan": w4_told, **{f"eqx_{K}": partial(w4_checkpointed, K) for K in (8, 32, 128)}},
    "W5": {"lax_scan": w5_masked},
}

WARM = 500  # steps that warm up a loop which reads N, as in loops.py


def compiled(cell: dict[str, Any], double: bool) -> answering.Compiled:
    """One of LOOPS with its inputs."""
    arrays = loop_inputs.make(cell["workload"], cell["T"])
    return executable(cell, arrays, LOOPS[cell["workload"]][cell["variant"]], double)


def executable(
    cell: dict[str, Any], inputs: loop_inputs.Arrays, loop: Callable[[Arrays, int], Any], double: bool
) -> answering.Compiled:
    """A loss and its gradients. The warm-up is the same executable, given a smaller N where it reads one."""
    jax.config.update("jax_enable_x64", double)
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    dtype = jnp.float64 if double else jnp.float32
    floating = {name: x.astype(dtype) for name, x in arrays.items() if x.dtype.kind == "f"}
    counts = {name: x for name, x in arrays.items() if x.dtype.kind != "f"}

    def loss(floating: Arrays, counts: Arrays) -> Any:
        return loop(floating | counts, cell["T"])

    start = time.perf_counter()
    run = jax.jit(jax.value_and_grad(loss)).lower(floating, counts).compile()
    compile_s = time.perf_counter() - start
    few = {name: jnp.minimum(x, WARM) for name, x in counts.items()}
    return answering.Compiled(
        lambda: jax.block_until_ready(run(floating, few)),
        lambda: jax.block_until_ready(run(floating, counts)),
        compile_s,
    )


def threads(count: int) -> None:
    """XLA starts as many as there are cores for this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


if __name__ == "__main__":
    answering.main(compiled, threads)
