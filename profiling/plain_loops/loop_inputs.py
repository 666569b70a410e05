"""Inputs of the loops: numpy alone, so that every peer can import it.

W1, W3 and ring: as in workloads.py.
W2, an LSTM: z = x_t Wx + h Wh + b in the order i, f, g, o; c = sigmoid(f) c + sigmoid(i) tanh(g);
  h = sigmoid(o) tanh(c); the loss is sum(h**2) / T over all steps.
W2s: W2, small. RNN and RNNs: h = tanh(x_t Wx + h Wh) where the row's first feature is above -0.5, else h as it was;
  the loss is that of W2.
W4, a loop of unknown length: x = 0.9 tanh(x W + b) + 0.1 x0 from x = x0, while n < N, where N is data; the loss is
  sum(x**2) at the end.
W5, rows that stop on their own: h = tanh(x_t Wx + h Wh) while t < lens[b], frozen after; the loss is the sum of h**2
  over the steps that each row took.
"""

import numpy as np

Arrays = dict[str, np.ndarray]

# (B, F) of a step
SEQUENCES = {"W1": (10, 5), "W2": (32, 256), "W3": (8, 64), "W4": (64, 256), "W5": (32, 128), "ring": (8, 64)}
SEQUENCES |= {"W2s": (4, 32), "RNN": (32, 256), "RNNs": (4, 32)}
WEIGHTS: dict[str, dict[str, tuple[int, ...]]] = {
    "W1": {},
    "W2": {"Wx": (256, 1024), "Wh": (256, 1024), "b": (1024,)},
    "W3": dict.fromkeys(("Wx", "Wo", "Wq", "Wk", "Wv"), (64, 64)),
    "W4": {"W": (256, 256), "b": (256,)},
    "W5": dict.fromkeys(("Wx", "Wh"), (128, 128)),
    "ring": dict.fromkeys(("W", "U"), (64, 64)),
    "W2s": {"Wx": (32, 128), "Wh": (32, 128), "b": (128,)},
    "RNN": dict.fromkeys(("Wx", "Wh"), (256, 256)),
    "RNNs": dict.fromkeys(("Wx", "Wh"), (32, 32)),
}


def make(workload: str, T: int) -> Arrays:
    """The inputs, float32 but for counts: xs (T, B, F) or x0 (B, F), weights (fan in, out), N () or lens (B,) int64.

    Standard normal, weights divided by sqrt(fan in), biases by 10. `RandomState` gives every version of numpy the
    same numbers; they are drawn in the order of the entries. Lengths are uniform in 1..T.
    """
    random = np.random.RandomState(0)
    B, F = SEQUENCES[workload]
    drawn = {"x0": random.randn(B, F)} if workload == "W4" else {"xs": random.randn(T, B, F)}
    for name, shape in WEIGHTS[workload].items():
        drawn[name] = random.randn(*shape) * (shape[0] ** -0.5 if len(shape) == 2 else 0.1)
    arrays: Arrays = {name: values.astype(np.float32) for name, values in drawn.items()}
    if workload == "W4":
        arrays["N"] = np.array(T, dtype=np.int64)
    if workload == "W5":
        arrays["lens"] = np.random.RandomState(0).randint(1, T + 1, size=B).astype(np.int64)
    return arrays
