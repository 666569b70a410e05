"""The loops of loop_inputs.py, each in tensorloop and in the ways plain PyTorch has.

Every variant of a workload takes the same leaves and gives the same loss. Those of other frameworks are in
peers/jax_loops.py. Shapes: T time, B batch, F features, H hidden; N is W4's number of steps, read from a tensor.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from plain_loops import workloads
from plain_loops.workloads import Leaves, Loop, differentiated, leaves
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import TensorArray

# ---- W2: an LSTM ----

State = tuple[Tensor, Tensor]


def lstm_step(d: Leaves, state: State, x: Tensor) -> State:
    h, c = state
    i, f, g, o = (x @ d["Wx"] + h @ d["Wh"] + d["b"]).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def lstm_start(d: Leaves) -> State:
    zeros = d["xs"].new_zeros(d["xs"].shape[1], d["Wh"].shape[0])
    return zeros, zeros


def w2_scan(d: Leaves, checkpoints: int | None = None) -> Tensor:
    def body(state: State, x: Tensor) -> tuple[State, Tensor]:
        state = lstm_step(d, state, x)
        return state, state[0]

    _, hs = tl.scan(body, lstm_start(d), d["xs"], checkpoints=checkpoints)
    return (hs**2).sum() / len(d["xs"])


def w2_scan_sqrt(d: Leaves) -> Tensor:
    return w2_scan(d, checkpoints=round(math.sqrt(len(d["xs"]))))


def w2_list(d: Leaves, slices: Iterable[Tensor]) -> Tensor:
    state, hs = lstm_start(d), []
    for x in slices:
        state = lstm_step(d, state, x)
        hs.append(state[0])
    return (torch.stack(hs) ** 2).sum() / len(d["xs"])


def w2_list_unbind(d: Leaves) -> Tensor:
    return w2_list(d, d["xs"].unbind(0))


def w2_list_index(d: Leaves) -> Tensor:
    return w2_list(d, (d["xs"][t] for t in range(len(d["xs"]))))


# ---- W3: a cache that trains ----

Cache = tuple[Tensor, TensorArray, TensorArray]


def w3_scan(d: Leaves, checkpoints: int | None = None) -> Tensor:
    def body(carry: Cache, x: Tensor) -> tuple[Cache, Tensor]:
        o, K, V = carry
        h = torch.tanh(x @ d["Wx"] + o @ d["Wo"])
        K.append(h @ d["Wk"])
        V.append(h @ d["Wv"])
        o = workloads.attend(h @ d["Wq"], K[: len(K)], V[: len(V)])
        return (o, K, V), (o**2).sum()

    init = torch.zeros_like(d["xs"][0]), TensorArray(), TensorArray()
    _, losses = tl.scan(body, init, d["xs"], checkpoints=checkpoints)
    return losses.sum()


# ---- W4: a loop of unknown length ----


def w4_step(d: Leaves, x: Tensor) -> Tensor:
    return torch.tanh(x @ d["W"] + d["b"]) * 0.9 + 0.1 * d["x0"]


def w4_while_loop(d: Leaves, checkpoints: int | None = None) -> Tensor:
    def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, n = carry
        return w4_step(d, x), n + 1

    init = d["x0"], torch.zeros_like(d["N"])
    x, _ = tl.while_loop(lambda carry: carry[1] < d["N"], body, init, checkpoints=checkpoints)
    return (x**2).sum()


def w4_plain(d: Leaves) -> Tensor:
    x, n = d["x0"], torch.zeros_like(d["N"])
    while n < d["N"]:
        x, n = w4_step(d, x), n + 1
    return (x**2).sum()


def w4_steps(d: Leaves, x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = w4_step(d, x)
    return x


def w4_segments(d: Leaves) -> Tensor:
    """Segments of sqrt(N) steps, each recomputed in backward: to cut them, N is read before the loop."""
    x, N = d["x0"], int(d["N"])
    length = math.isqrt(N)
    for first in range(0, N, length):
        segment = partial(w4_steps, d, count=min(length, N - first))
        x = checkpoint(segment, x, use_reentrant=False)
    return (x**2).sum()


def w4_body_calls(N: int, checkpoints: int | None) -> int:
    """How often the body runs in forward and backward, counted on small tensors."""
    d = {
        name: x.detach()[(slice(8),) * x.dim()].clone().requires_grad_(x.requires_grad)
        for name, x in leaves("W4", N).items()
    }
    calls = 0

    def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return w4_step(d, carry[0]), carry[1] + 1

    init = d["x0"], torch.zeros_like(d["N"])
    x, _ = tl.while_loop(lambda carry: carry[1] < N, body, init, checkpoints=checkpoints)
    torch.autograd.grad((x**2).sum(), differentiated(d))
    return calls


# ---- W5: rows that stop on their own ----

Rows = tuple[int, Tensor, TensorArray]
Context = tuple[TensorArray, Tensor]  # xs, lens


def w5_while_loop(d: Leaves) -> Tensor:
    """All rows stay in the batch, so the body may close over the steps' rows, as a plain loop does."""
    xs, lens = d["xs"].unbind(0), d["lens"]

    def body(carry: Rows) -> Rows:
        t, h, ys = carry
        h = torch.tanh(xs[t] @ d["Wx"] + h @ d["Wh"])
        return t + 1, h, ys.append(h)

    init = 0, torch.zeros_like(d["xs"][0]), TensorArray()
    _, _, ys = tl.while_loop(lambda carry: lens > carry[0], body, init)
    return (ys.stack() ** 2).sum()


def w5_while_loop_compact(d: Leaves) -> Tensor:
    def running(carry: Rows, context: Context) -> Tensor:
        return context[1] > carry[0]

    def body(carry: Rows, context: Context) -> Rows:
        t, h, ys = carry
        h = torch.tanh(context[0][t] @ d["Wx"] + h @ d["Wh"])
        return t + 1, h, ys.append(h)

    init = 0, torch.zeros_like(d["xs"][0]), TensorArray()
    context = TensorArray.unstack(d["xs"]), d["lens"]
    _, _, ys = tl.while_loop(running, body, init, context=context, compact=True)
    return (ys.stack() ** 2).sum()


def w5_masked(d: Leaves) -> Tensor:
    """All rows at every step; the loss leaves out by one mask what came after a row's end."""
    steps = int(d["lens"].max())
    active = (torch.arange(steps)[:, None] < d["lens"])[:, :, None]
    h, hs = torch.zeros_like(d["xs"][0]), []
    for x, running in zip(d["xs"][:steps].unbind(0), active.unbind(0), strict=True):
        h = torch.where(running, torch.tanh(x @ d["Wx"] + h @ d["Wh"]), h)
        hs.append(h)
    ys = torch.where(active, torch.stack(hs), h.new_zeros(()))
    return (ys**2).sum()


def w5_sorted(d: Leaves) -> Tensor:
    """Rows sorted by length, so that those still running are a slice: lengths are known before the loop."""
    lens, order = d["lens"].sort(descending=True)
    counts = (lens > torch.arange(int(lens[0]))[:, None]).sum(1).tolist()
    h, hs = torch.zeros_like(d["xs"][0]), []
    for x, n in zip(d["xs"][: len(counts)].index_select(1, order).unbind(0), counts, strict=True):
        h = torch.tanh(x[:n] @ d["Wx"] + h[:n] @ d["Wh"])
        hs.append(h)
    return (torch.cat(hs) ** 2).sum()


# ---- which, and how they compare ----

CHECKPOINTS = (8, 32, 128)  # of W4

VARIANTS: dict[str, dict[str, Loop]] = {
    "W2": {
        "scan": w2_scan,
        "scan_sqrt": w2_scan_sqrt,
        "list_unbind": w2_list_unbind,
        "list_index": w2_list_index,
    },
    "W3": {"scan": w3_scan, "scan_32": partial(w3_scan, checkpoints=32), "cat": workloads.w3_cat},
    "W4": {
        "while_loop": w4_while_loop,
        **{f"while_loop_{K}": partial(w4_while_loop, checkpoints=K) for K in CHECKPOINTS},
        "plain": w4_plain,
        "segments": w4_segments,
    },
    "W5": {
        "while_loop": w5_while_loop,
        "while_loop_compact": w5_while_loop_compact,
        "masked": w5_masked,
        "sorted": w5_sorted,
    },
}
PEERS = {  # those of peers/jax_loops.py
    "W2": ("lax_scan", "eqx_scan"),
    "W3": ("eqx_buffers",),
    "W4": (*(f"eqx_{K}" for K in CHECKPOINTS), "lax_scan"),
    "W5": (),
}
PLAIN = {"W2": "list_unbind", "W3": "cat", "W4": "plain", "W5": "masked"}  # what ratios are taken against
# Variants whose memory does not grow with T: a short loop warms up all they will touch.
FLAT = {f"while_loop_{K}" for K in CHECKPOINTS}
