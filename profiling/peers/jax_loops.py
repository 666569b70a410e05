"""The loops of loop_inputs.py in JAX and Equinox: one cell, one process, one line of JSON.

loops.py runs it with the Python of a venv that has jax, equinox and numpy (see README.md beside this file), with the
folder profiling/ on the path, and one of these cells:

    {"kind": "time", "workload": W, "variant": V, "T": T, "threads": n, "repeats": n, "slow": seconds}
    {"kind": "memory", "workload": W, "variant": V, "T": T, "threads": n}
    {"kind": "gradients", "workload": W, "variant": V, "T": T, "threads": n, "out": FILE}   in float64, into a .npz
    {"kind": "versions"}

W4's N is data to Equinox's loops, as it is to tensorloop's; `lax.scan` is told it.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox  # pyright: ignore[reportMissingImports]
import equinox.internal as eqxi  # pyright: ignore[reportMissingImports]
import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import loop_inputs
import numpy as np
import resident
from jax import lax  # pyright: ignore[reportMissingImports]

Arrays = dict[str, Any]  # name -> jax array


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


def w3_buffers(p: Arrays, T: int) -> Any:
    """Keys and values in write-only buffers of T slots; a step attends to all slots, masked."""
    slots = jnp.arange(T)

    def body(state: Any) -> Any:
        t, o, K, V, loss = state
        h = jnp.tanh(p["xs"][t] @ p["Wx"] + o @ p["Wo"])
        K, V = K.at[t].set(h @ p["Wk"]), V.at[t].set(h @ p["Wv"])
        scores = jnp.einsum("bd,tbd->bt", h @ p["Wq"], K[...]) / np.sqrt(o.shape[-1])
        weights = jax.nn.softmax(jnp.where(slots <= t, scores, -jnp.inf), axis=-1)
        o = jnp.einsum("bt,tbd->bd", weights, V[...])
        return t + 1, o, K, V, loss + jnp.sum(o**2)

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


LOOPS: dict[str, dict[str, Callable[[Arrays, int], Any]]] = {
    "W2": {"lax_scan": partial(w2, lax.scan), "eqx_scan": partial(w2, partial(eqxi.scan, kind="checkpointed"))},
    "W3": {"eqx_buffers": w3_buffers},
    "W4": {"lax_scan": w4_told, **{f"eqx_{K}": partial(w4_checkpointed, K) for K in (8, 32, 128)}},
}


# ---- measuring ----


Run = Callable[[], Any]
WARM = 500  # steps that warm up a loop which reads N, as in loops.py


def compiled(cell: dict[str, Any], dtype: Any) -> tuple[Run, Run, float]:
    """Two calls that give loss and gradients when they are ready, and the seconds that compiling took.

    The first is a warm-up: the same executable, given a smaller N where it reads one.
    """
    arrays = {name: jnp.asarray(x) for name, x in loop_inputs.make(cell["workload"], cell["T"]).items()}
    floating = {name: x.astype(dtype) for name, x in arrays.items() if x.dtype.kind == "f"}
    counts = {name: x for name, x in arrays.items() if x.dtype.kind != "f"}
    loop = LOOPS[cell["workload"]][cell["variant"]]

    def loss(floating: Arrays, counts: Arrays) -> Any:
        return loop(floating | counts, cell["T"])

    start = time.perf_counter()
    run = jax.jit(jax.value_and_grad(loss)).lower(floating, counts).compile()
    compile_s = time.perf_counter() - start
    few = {name: jnp.minimum(x, WARM) for name, x in counts.items()}
    return (
        lambda: jax.block_until_ready(run(floating, few)),
        lambda: jax.block_until_ready(run(floating, counts)),
        compile_s,
    )


def time_run(cell: dict[str, Any]) -> dict[str, Any]:
    warm_up, run, compile_s = compiled(cell, jnp.float32)
    warm_up()
    total, value = [], 0.0
    while len(total) < cell["repeats"] and sum(total) <= cell["slow"]:
        gc.collect()
        start = time.perf_counter()
        loss, grads = run()
        total.append(time.perf_counter() - start)
        value = float(loss)
        del loss, grads
    return {"loss": value, "compile_s": compile_s, "total_s": total}


def peak(cell: dict[str, Any]) -> dict[str, Any]:
    warm_up, run, compile_s = compiled(cell, jnp.float32)
    warm_up()
    before = resident.settle()
    loss, grads = run()
    growth = resident.high_water() - before
    value = float(loss)
    del loss, grads
    return {"loss": value, "compile_s": compile_s, "peak_bytes": growth}


def gradients(cell: dict[str, Any]) -> dict[str, Any]:
    jax.config.update("jax_enable_x64", True)
    _, run, _ = compiled(cell, jnp.float64)
    loss, grads = run()
    arrays: dict[str, Any] = {name: np.asarray(grad) for name, grad in grads.items()}
    np.savez(cell["out"], **arrays)
    return {"loss": float(loss)}


def versions(cell: dict[str, Any]) -> dict[str, Any]:
    return {"jax": jax.__version__, "equinox": equinox.__version__}


KINDS = {"time": time_run, "memory": peak, "gradients": gradients, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", required=True, type=json.loads, help="what to do, JSON")
    cell = parser.parse_args().cell
    if "threads" in cell:  # XLA starts as many as there are cores for this process
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cell["threads"]])
    try:
        result = KINDS[cell["kind"]](cell)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
