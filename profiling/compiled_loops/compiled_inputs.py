"""Inputs of the loops of compiled.py: numpy alone, so that peers can import it. What a step does is in its docstring.

The workloads of loop_inputs.py are here too. All others are small, a step is some microseconds of arithmetic, but for
the last two: there one row is made from others, or there is but one.
"""

from collections.abc import Callable

import numpy as np
from plain_loops import loop_inputs

Arrays = loop_inputs.Arrays
Random = np.random.RandomState
MAKERS: dict[str, Callable[[Random, int], Arrays]] = {}
ODE_END = 0.25  # the time that a step of the usual T stands for, in the adaptive solver: it ends at N * this


def maker(make: Callable[[Random, int], Arrays]) -> Callable[[Random, int], Arrays]:
    MAKERS[make.__name__] = make
    return make


def make(workload: str, T: int) -> Arrays:
    """The inputs, float32 but for counts, by name; the same numbers for every framework."""
    if workload not in MAKERS:
        return loop_inputs.make(workload, T)
    drawn = {name: np.asarray(x) for name, x in MAKERS[workload](Random(0), T).items()}
    return {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in drawn.items()}


def weight(random: Random, *shape: int) -> np.ndarray:
    return random.randn(*shape) * shape[-2] ** -0.5


def turn(size: int, angle: float) -> np.ndarray:
    """A rotation: what is multiplied by it neither grows nor fades."""
    c, s = np.cos(angle), np.sin(angle)
    return np.kron(np.eye(size // 2), np.array([[c, -s], [s, c]]))


@maker
def rk4(random: Random, T: int) -> Arrays:
    """A step of Runge-Kutta of sin(x A) - x / 10; B = 8, D = 16."""
    return {"x0": random.randn(8, 16), "A": weight(random, 16, 16), "scale": np.array(0.7)}


@maker
def ln_rnn(random: Random, T: int) -> Arrays:
    """h = tanh(layer_norm(x Wx + h Wh)); B = 8, H = 64."""
    wx, wh = weight(random, 32, 64), weight(random, 64, 64)
    return {"xs": random.randn(T, 8, 32), "Wx": wx, "Wh": wh, "gain": 1 + 0.1 * random.randn(64), "b": np.zeros(64)}


@maker
def memory(random: Random, T: int) -> Arrays:
    """h = tanh(x Wx + softmax(h Wq K^T) V); 32 slots; B = 8, D = 32."""
    weights = {name: weight(random, 32, 32) for name in ("Wx", "Wq")}
    slots = {name: random.randn(8, 32, 32) for name in ("K", "V")}
    return {"xs": random.randn(T, 8, 32), **weights, **slots}


@maker
def crf(random: Random, T: int) -> Arrays:
    """alpha = logsumexp(alpha[:, :, None] + A, 1) + x, the partition function of a CRF; B = 8, 32 tags."""
    return {"xs": random.randn(T, 8, 32), "A": random.randn(32, 32)}


@maker
def viterbi(random: Random, T: int) -> Arrays:
    """The same with max, and the best tag before as y; the loss is the score of the best path."""
    return crf(random, T)


@maker
def hmm(random: Random, T: int) -> Arrays:
    """alpha = (alpha A) exp(x), divided by its sum, whose logarithm is y; A is a softmax; B = 8, 32 states."""
    return crf(random, T)


@maker
def gru(random: Random, T: int) -> Arrays:
    """torch.nn.GRU's cell; B = 8, H = 64."""
    weights = {"Wx": weight(random, 32, 192), "Wh": weight(random, 64, 192)}
    return {"xs": random.randn(T, 8, 32), **weights, "bx": 0.1 * random.randn(192), "bh": 0.1 * random.randn(192)}


@maker
def min_gru(random: Random, T: int) -> Arrays:
    """z = sigmoid(x Wz), h = (1 - z) h + z (x Wh); B = 8, H = 64."""
    return {"xs": random.randn(T, 8, 32), "Wz": weight(random, 32, 64), "Wh": weight(random, 32, 64)}


@maker
def iir(random: Random, T: int) -> Arrays:
    """y = b0 x + b1 x' + b2 x'' - a1 y' - a2 y'', a filter of the second order; 32 channels."""
    b, a = np.array([[0.2, 0.3, 0.1]]).T + 0.01 * random.randn(3, 32), np.array([[-1.6, 0.81]]).T + np.zeros((2, 32))
    return {"xs": random.randn(T, 32), "b": b, "a": a}


@maker
def kalman(random: Random, T: int) -> Arrays:
    """A filter of 4 states, one of which is measured: mean and covariance; B = 16. y is the log likelihood."""
    return {"xs": random.randn(T, 16), "A": turn(4, 0.2) * 0.99, "q": np.array(0.1), "r": np.array(0.5)}


@maker
def adam(random: Random, T: int) -> Arrays:
    """A step of Adam for a linear regression of 16 rows and 32 features, other rows at each step; y is the loss."""
    return {"xs": random.randn(T, 16, 32), "target": random.randn(32), "w0": random.randn(32), "rate": np.array(-3.0)}


@maker
def s5(random: Random, T: int) -> Arrays:
    """h = exp(-decay + i phase) h + x B, y = the real part of h C; h is complex; B = 8, 64 states."""
    weights = {name: weight(random, 32, 64) for name in ("B_real", "B_imag")}
    out = {name: weight(random, 64, 32) for name in ("C_real", "C_imag")}
    return {"xs": random.randn(T, 8, 32), "decay": random.rand(64) * 0.1, "phase": random.randn(64), **weights, **out}


@maker
def ode(random: Random, T: int) -> Arrays:
    """Steps of Heun's method to the time N * ODE_END of sin(x A) - x / 10; their size is the error's; B = 8, D = 16."""
    return {"x0": random.randn(8, 16), "A": weight(random, 16, 16), "N": np.array(T, dtype=np.int64)}


@maker
def bn_rnn(random: Random, T: int) -> Arrays:
    """h = tanh(normed over rows(x + h W)); B = 64, H = 512."""
    return {"xs": random.randn(T, 64, 512), "W": weight(random, 512, 512)}


@maker
def one_row(random: Random, T: int) -> Arrays:
    """h = tanh(W h + x); h and x have one dim, of 1024."""
    return {"xs": random.randn(T, 1024), "W": weight(random, 1024, 1024)}


@maker
def kf(random: Random, T: int) -> Arrays:
    """A Kalman filter of 8 states and 4 observations by Cholesky; B = 32. y is the log likelihood."""
    noise = {"q": np.array(0.1), "r": np.array(0.5)}
    return {"xs": random.randn(T, 32, 4), "A": turn(8, 0.2) * 0.99, "H": weight(random, 4, 8), **noise}


@maker
def root_kf(random: Random, T: int) -> Arrays:
    """The same with a triangular root of the covariance, by QR."""
    return kf(random, T)


@maker
def ekf(random: Random, T: int) -> Arrays:
    """An extended Kalman filter of x + sin(x W) / 10, whose first 3 of 6 states are measured; by solve; B = 32."""
    noise = {"q": np.array(0.1), "r": np.array(0.5)}
    return {"xs": random.randn(T, 32, 3), "W": weight(random, 6, 6), **noise}


@maker
def lqr(random: Random, T: int) -> Arrays:
    """Riccati's recurrence of 8 states and 4 controls with changing costs, backward in time, by solve; one system."""
    return {"xs": 1 + random.rand(T, 8), "A": turn(8, 0.2), "B": weight(random, 8, 4), "r": np.array(0.5)}


@maker
def gp(random: Random, T: int) -> Arrays:
    """A Gaussian process by sequential inference: two Matern kernels, mixed into 3 series at uneven times; B = 16."""
    scales = {"rates": np.array([0.7, 2.0]), "r": np.array(0.3), "mix": weight(random, 3, 2)}
    return {"xs": random.randn(T, 16, 3), "dt": 0.1 + random.rand(T, 16), **scales}
