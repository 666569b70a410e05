"""Three loops of loop_inputs.py in TensorFlow, as one writes them with its TensorArray: see README.md beside this file.

Inputs are read from an unstacked TensorArray, outputs are written to one. W3 needs the keys and values so far at every
step, which a TensorArray gives by `gather`, or by `stack` and a slice of that.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import answering
import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
from plain_loops import loop_inputs

Tensors = dict[str, Any]  # name -> tensor


def read_only(xs: Any) -> Any:
    """A TensorArray with the rows of xs."""
    array = tf.TensorArray(xs.dtype, size=xs.shape[0], element_shape=xs.shape[1:], clear_after_read=False)
    return array.unstack(xs)


def empty(xs: Any, width: int) -> Any:
    """A TensorArray for as many elements (B, width) as xs has rows."""
    shape = (xs.shape[1], width)
    return tf.TensorArray(xs.dtype, size=xs.shape[0], element_shape=shape, clear_after_read=False)


def w1(p: Tensors, T: int) -> Any:
    xs, dtype = read_only(p["xs"]), p["xs"].dtype

    def body(t: Any, ys: Any) -> Any:
        return t + 1, ys.write(t, xs.read(t) * tf.sqrt(tf.cast(t, dtype)))

    _, ys = tf.while_loop(lambda t, _: t < T, body, (tf.constant(0), empty(p["xs"], p["xs"].shape[-1])))
    return tf.reduce_sum(ys.stack())


def w2(p: Tensors, T: int) -> Any:
    xs, hidden = read_only(p["xs"]), p["Wh"].shape[0]

    def body(t: Any, h: Any, c: Any, hs: Any) -> Any:
        i, f, g, o = tf.split(xs.read(t) @ p["Wx"] + h @ p["Wh"] + p["b"], 4, axis=-1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        h = tf.sigmoid(o) * tf.tanh(c)
        return t + 1, h, c, hs.write(t, h)

    zeros = tf.zeros((p["xs"].shape[1], hidden), p["xs"].dtype)
    state = tf.constant(0), zeros, zeros, empty(p["xs"], hidden)
    *_, hs = tf.while_loop(lambda t, *_: t < T, body, state)
    return tf.reduce_sum(hs.stack() ** 2) / T


def gathered(array: Any, length: Any) -> Any:
    return array.gather(tf.range(length))


def stacked(array: Any, length: Any) -> Any:
    return array.stack()[:length]


def w3(prefix: Callable[[Any, Any], Any], p: Tensors, T: int) -> Any:
    xs, width = read_only(p["xs"]), p["xs"].shape[-1]

    def body(t: Any, o: Any, loss: Any, K: Any, V: Any) -> Any:
        h = tf.tanh(xs.read(t) @ p["Wx"] + o @ p["Wo"])
        K, V = K.write(t, h @ p["Wk"]), V.write(t, h @ p["Wv"])
        scores = tf.einsum("bd,tbd->bt", h @ p["Wq"], prefix(K, t + 1)) / np.sqrt(width)
        o = tf.einsum("bt,tbd->bd", tf.nn.softmax(scores), prefix(V, t + 1))
        return t + 1, o, loss + tf.reduce_sum(o**2), K, V

    start = tf.zeros_like(p["xs"][0])
    state = tf.constant(0), start, tf.reduce_sum(start), empty(p["xs"], width), empty(p["xs"], width)
    return tf.while_loop(lambda t, *_: t < T, body, state)[2]


LOOPS: dict[str, dict[str, Callable[[Tensors, int], Any]]] = {
    "W1": {"tf_array": w1},
    "W2": {"tf_array": w2},
    "W3": {"tf_gather": partial(w3, gathered), "tf_stack": partial(w3, stacked)},
}


FEW = 16  # steps


def compiled(cell: dict[str, Any], double: bool) -> answering.Compiled:
    """One function for forward and backward, traced before it is run.

    For memory a loop of few steps warms up: TensorFlow keeps what it freed, and would hide what the loop takes.
    """

    def tensors(T: int) -> Tensors:
        dtype = np.float64 if double else np.float32
        return {name: tf.constant(x.astype(dtype)) for name, x in loop_inputs.make(cell["workload"], T).items()}

    def both(p: Tensors) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(p)
            loss = LOOPS[cell["workload"]][cell["variant"]](p, p["xs"].shape[0])
        return loss, tape.gradient(loss, p)

    traced: Any = tf.function(both)
    given, few = tensors(cell["T"]), tensors(FEW if cell["kind"] == "memory" else cell["T"])
    start = time.perf_counter()
    traced.get_concrete_function(given)
    trace_s = time.perf_counter() - start

    def ready(p: Tensors) -> Any:
        loss, grads = traced(p)
        return float(loss), grads  # on the CPU, all is there when the function returns

    return answering.Compiled(lambda: ready(few), lambda: ready(given), trace_s)


def threads(count: int) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(count)
    tf.config.threading.set_inter_op_parallelism_threads(count)


if __name__ == "__main__":
    answering.main(compiled, threads)
