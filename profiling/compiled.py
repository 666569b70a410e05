"""Compiled loops beside eager ones, nn.LSTM and lax.scan: forward + backward, float32.

    python profiling/compiled.py                       # 3 rounds, some minutes
    python profiling/compiled.py --jax-python PYTHON   # a Python that has JAX: see peers/README.md

Values and gradients come first: where a compiled loop's differ from the eager one's, nothing is timed.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import plots
import torch
import workloads
from loop_peers import JAX
from loop_workloads import Cache, State, lstm_start, lstm_step
from script import Result, Script, Target, target_table
from torch import Tensor, nn
from workloads import Leaves

import tensorloop as tl

LENGTHS = {"W2s": 1024, "W2": 512, "RNNs": 1024, "RNN": 512, "W3": 1024}
TITLES = {
    "W2s": "LSTM, B = 4, H = 32, T = 1024",
    "W2": "LSTM, B = 32, H = 256, T = 512",
    "RNNs": "tanh RNN + where, B = 4, H = 32, T = 1024",
    "RNN": "tanh RNN + where, B = 32, H = 256, T = 512",
    "W3": "a cache that trains, B = 8, D = 64, T = 1024",
}
WAYS = ("compiled", "compiled_k32", "eager", "nn_lstm", "lax_scan")
BOUNDS = {  # of what another way takes
    "W2s": {"lax_scan": 0.3, "nn_lstm": 1.0},
    "W2": {"lax_scan": 0.5, "nn_lstm": 0.85},
    "RNNs": {"lax_scan": 0.4},
    "RNN": {"lax_scan": 0.7},
    "W3": {"eager": 0.7},
}
RUNS = {"quick": 2, "short": 5, "usual": 10}


def lstm(d: Leaves, compile: Any, checkpoints: int | None = None) -> Tensor:
    """The loss of W2."""

    def body(state: State, x: Tensor) -> tuple[State, Tensor]:
        state = lstm_step(d, state, x)
        return state, state[0]

    _, hs = tl.scan(body, lstm_start(d), d["xs"], checkpoints=checkpoints, compile=compile)
    return (hs**2).sum() / len(d["xs"])


def rnn(d: Leaves, compile: Any, checkpoints: int | None = None) -> Tensor:
    """The loss of RNN: a row whose first feature is below -0.5 keeps its state."""

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.where(x[:, :1] > -0.5, torch.tanh(x @ d["Wx"] + h @ d["Wh"]), h)
        return h, h

    start = d["xs"].new_zeros(d["xs"].shape[1], d["Wh"].shape[0])
    _, hs = tl.scan(body, start, d["xs"], checkpoints=checkpoints, compile=compile)
    return (hs**2).sum() / len(d["xs"])


def cache(d: Leaves, compile: Any, checkpoints: int | None = None) -> Tensor:
    """The loss of W3."""

    def body(carry: Cache, x: Tensor) -> tuple[Cache, Tensor]:
        o, K, V = carry
        h = torch.tanh(x @ d["Wx"] + o @ d["Wo"])
        K.append(h @ d["Wk"])
        V.append(h @ d["Wv"])
        o = workloads.attend(h @ d["Wq"], K.stack(), V.stack())
        return (o, K, V), (o**2).sum()

    init = torch.zeros_like(d["xs"][0]), tl.TensorArray(), tl.TensorArray()
    return tl.scan(body, init, d["xs"], checkpoints=checkpoints, compile=compile)[1].sum()


def loss_of(workload: str, way: str, d: Leaves) -> Callable[[], Tensor]:
    """What a way computes."""
    loop = lstm if workload.startswith("W2") else cache if workload == "W3" else rnn
    if way == "nn_lstm":
        module = nn.LSTM(d["xs"].shape[2], d["Wh"].shape[0])
        return lambda: (module(d["xs"])[0] ** 2).sum() / len(d["xs"])
    if way == "eager":
        return partial(loop, d, False)
    return partial(loop, d, "strict", 32 if way == "compiled_k32" else None)


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    torch.set_num_threads(harness.THREADS)
    workload, way = cell["workload"], cell["variant"]
    if cell["kind"] == "check":
        d = workloads.leaves(workload, cell["T"], torch.float64)
        expected = workloads.gradients(partial(_called, loss_of(workload, "eager", d)), d)
        found = workloads.gradients(partial(_called, loss_of(workload, way, d)), d)
        return {"apart": max(workloads.apart(found, expected).values())}
    d = workloads.leaves(workload, cell["T"])
    loss, leaves = loss_of(workload, way, d), workloads.differentiated(d)

    def run() -> None:
        torch.autograd.grad(loss(), leaves, allow_unused=True)

    start = time.perf_counter()
    run()  # tracing, partition and compiling, in a process that has done none of them
    return {"first_s": [time.perf_counter() - start], "total_s": harness.seconds(run, cell["repeats"])}


def _called(loss: Callable[[], Tensor], d: Leaves) -> Tensor:
    return loss()


def ways(workload: str) -> list[str]:
    lacks = {"compiled_k32", "nn_lstm"} if workload == "W3" else set() if workload.startswith("W2") else {"nn_lstm"}
    return [way for way in WAYS if way not in lacks]


def cells(args: Namespace) -> list[harness.Cell]:
    small = ("W2s", "RNNs") if args.set == "short" else tuple(LENGTHS)
    repeats = RUNS[args.set]
    return [
        {
            "kind": "time",
            "workload": w,
            "variant": way,
            "T": 32 if args.set == "quick" else LENGTHS[w],
            "repeats": repeats,
        }
        for w in small
        for way in ways(w)
    ]


def checks(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "check", "workload": w, "variant": way, "T": 33, "at_most": 1e-10}
        for w in LENGTHS
        for way in ("compiled", "compiled_k32")
        if way in ways(w)
    ]


def measured(result: Result) -> list[str]:
    found = {entry["cell"]["workload"] for entry in result["entries"]}
    return [w for w in LENGTHS if w in found]


def time_of(result: Result, workload: str, way: str) -> float | None:
    return harness.milliseconds(result, "total_s", workload=workload, variant=way)


def section(result: Result, picture: str) -> str:
    shown = measured(result)
    rows = [[way, *(_shown(result, w, way) for w in shown)] for way in WAYS]
    return "\n\n".join(
        [
            f"Milliseconds of forward + backward, float32, medians of {result['about']['runs']} runs. `compiled_k32` "
            "keeps 32 carries. lax.scan computes x W in the loop, as the body is written.",
            harness.table(["", *(TITLES[w] for w in shown)], rows),
            target_table(targets(result)),
            f"![forward + backward beside the eager loop]({picture})",
        ]
    )


def _shown(result: Result, workload: str, way: str) -> str:
    if way not in ways(workload):
        return "-"
    value = time_of(result, workload, way)
    return harness.why_not(result, workload=workload, variant=way) if value is None else f"{value:.2f}"


def targets(result: Result) -> list[Target]:
    found = []
    for w in measured(result):
        ours = time_of(result, w, "compiled")
        for peer, bound in BOUNDS[w].items():
            theirs = time_of(result, w, peer)
            found.append(Target(f"{TITLES[w]}: time / {peer}", ours / theirs if ours and theirs else None, bound))
    return found


def draw(result: Result, path: Path) -> None:
    groups = {}
    for w in measured(result):
        eager = time_of(result, w, "eager")
        found = [(way, time_of(result, w, way)) for way in ways(w)]
        groups[TITLES[w]] = [plots.Ratio(way, t / eager, way.startswith("compiled")) for way, t in found if t and eager]
    with plots.drawing(path, (8, 6)) as drawn:
        plots.ratios(drawn.subplots(), groups, "forward + backward, against the eager loop (less is faster)")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    targets=targets,
    draw=draw,
    peers=[JAX],
    settings=lambda args: {"runs": RUNS[args.set]},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
