"""Recurrences as a loop, as an associative scan, whole and in chunks, and as a linear recurrence: bytes and times.

    python profiling/associative.py           # 3 to 4 minutes

Four programs: the partition function of a conditional random field (whose scan is of matrices, where the loop carries
vectors), generalised advantage estimation, a diagonal state-space layer (as in Mamba), and linear attention with
decays (as in RWKV). Bytes are counted: what is kept for backward beside the inputs, and the most alive at one time.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pages import sentences
from running import harness
from running.script import Result, Script, Target
from torch import Tensor

import tensorloop as tl
from tensorloop import memory

STEPS = {"quick": (9,), "short": (256,), "usual": (1024,)}
CHUNKS = 8
APART = 1e-10
WAYS = {
    "loop": "tl.scan",
    "loop, K": f"tl.scan, checkpoints={CHUNKS}",
    "associative": "tl.associative_scan",
    "chunks": f"tl.associative_scan, checkpoints={CHUNKS}",
    "recurrence": "tl.linear_recurrence",
}
Leaves = Sequence[Tensor]
Loss = Callable[..., Tensor]


def then(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """h -> a h + b, and after it another."""
    return q[0] * p[0], q[0] * p[1] + q[1]


def linear(way: str, a: Tensor, b: Tensor, reverse: bool = False) -> Tensor:
    """h[t] = a[t] h[t - 1] + b[t], time first."""
    if way == "recurrence":
        return tl.linear_recurrence(a, b, reverse=reverse)
    if way in ("associative", "chunks"):
        checkpoints = CHUNKS if way == "chunks" else None
        return tl.associative_scan(then, (a, b), reverse=reverse, checkpoints=checkpoints)[1]

    def step(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        h = x[0] * h + x[1]
        return h, h

    checkpoints = CHUNKS if way == "loop, K" else None
    return tl.scan(step, torch.zeros_like(b[0]), (a, b), reverse=reverse, checkpoints=checkpoints)[1]


# ---- conditional random field: (T, B, N) scores of labels, (N, N) of pairs


def crf_inputs(T: int, dtype: torch.dtype) -> Leaves:
    return torch.randn(T, 8, 12, dtype=dtype), torch.randn(12, 12, dtype=dtype)


def crf(way: str, scores: Tensor, pairs: Tensor) -> Tensor:
    if way in ("associative", "chunks"):
        checkpoints = CHUNKS if way == "chunks" else None
        steps = pairs + scores.unsqueeze(-2)
        last = tl.associative_scan(
            lambda p, q: (p.unsqueeze(-1) + q.unsqueeze(-3)).logsumexp(-2), steps, checkpoints=checkpoints
        )[-1]
        return last.clone().logsumexp((-2, -1)).sum()  # of a view, all of the scan would be kept
    checkpoints = CHUNKS if way == "loop, K" else None
    last, _ = tl.scan(
        lambda h, x: ((h.unsqueeze(-1) + pairs + x.unsqueeze(-2)).logsumexp(-2), None),
        torch.zeros_like(scores[0]),
        scores,
        checkpoints=checkpoints,
    )
    return last.logsumexp(-1).sum()


# ---- advantages: (T, B) rewards, values and ends of episodes


def gae_inputs(T: int, dtype: torch.dtype) -> Leaves:
    return torch.randn(T, 256, dtype=dtype), torch.randn(T + 1, 256, dtype=dtype), (torch.rand(T, 256) > 0.02).to(dtype)


def gae(way: str, rewards: Tensor, values: Tensor, going: Tensor) -> Tensor:
    delta = rewards + 0.99 * values[1:] * going - values[:-1]
    return linear(way, 0.99 * 0.95 * going, delta, reverse=True).square().mean()


# ---- a diagonal state-space layer: (T, B, D) steps and inputs, (T, B, N) gates in and out, (D, N) decays


def mamba_inputs(T: int, dtype: torch.dtype) -> Leaves:
    gates = (torch.randn(T, 2, 16, dtype=dtype) for _ in range(2))
    return (
        torch.rand(T, 2, 64, dtype=dtype),
        torch.randn(T, 2, 64, dtype=dtype),
        *gates,
        torch.rand(64, 16, dtype=dtype),
    )


def mamba(way: str, steps: Tensor, x: Tensor, into: Tensor, out: Tensor, decay: Tensor) -> Tensor:
    a = torch.exp(-steps.unsqueeze(-1) * decay)
    b = (steps * x).unsqueeze(-1) * into.unsqueeze(-2)
    return (linear(way, a, b) @ out.unsqueeze(-1)).square().mean()


# ---- linear attention with a decay for each key: (T, H, K) decays, keys and queries, (T, H, V) values


def rwkv_inputs(T: int, dtype: torch.dtype) -> Leaves:
    return *(torch.rand(T, 4, 16, dtype=dtype) for _ in range(3)), torch.randn(T, 4, 16, dtype=dtype)


def rwkv(way: str, decay: Tensor, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    b = keys.unsqueeze(-1) * values.unsqueeze(-2)
    a = decay.sigmoid().unsqueeze(-1)
    h = linear(way, a if way == "recurrence" else a.expand_as(b), b)
    return (queries.unsqueeze(-2) @ h).square().mean()


PROGRAMS: dict[str, tuple[str, Callable[[int, torch.dtype], Leaves], Loss]] = {
    "crf": ("random field, 12 labels", crf_inputs, crf),
    "gae": ("advantages", gae_inputs, gae),
    "mamba": ("state-space layer", mamba_inputs, mamba),
    "rwkv": ("linear attention", rwkv_inputs, rwkv),
}


def ways_of(program: str) -> list[str]:
    return [way for way in WAYS if not (program == "crf" and way == "recurrence")]


def made(program: str, T: int, dtype: torch.dtype) -> tuple[Loss, list[Tensor]]:
    torch.manual_seed(0)
    _, inputs, loss = PROGRAMS[program]
    leaves = [x.requires_grad_() for x in inputs(T, dtype)]
    return loss, leaves


def wanted(program: str, leaves: list[Tensor]) -> list[Tensor]:
    return leaves[:2] if program == "gae" else leaves  # the ends of episodes are given


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "run", "program": program, "T": T, "way": way, "repeats": 1 if args.set == "quick" else 3}
        for program in PROGRAMS
        for T in STEPS[args.set]
        for way in ways_of(program)
    ]


def checks(args: Namespace) -> list[harness.Cell]:
    return [{"kind": "check", "program": program, "at_most": APART} for program in PROGRAMS]


def check(program: str) -> dict[str, Any]:
    loss, leaves = made(program, 40, torch.float64)
    leaves = [x if x.dtype.is_floating_point else x.detach() for x in leaves]
    first, *others = (torch.autograd.grad(loss(way, *leaves), wanted(program, leaves)) for way in ways_of(program))
    apart = [float((x - y).norm() / y.norm()) for other in others for x, y in zip(other, first, strict=True)]
    return {"apart": max(apart)}


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    program = cell["program"]
    if cell["kind"] == "check":
        return check(program)
    torch.set_num_threads(1)
    loss, leaves = made(program, cell["T"], torch.float32)
    leaves = [x if any(x is y for y in wanted(program, leaves)) else x.detach() for x in leaves]

    def run() -> Tensor:
        return loss(cell["way"], *leaves)

    timed = harness.time_run(run, wanted(program, leaves), 2, cell["repeats"])
    kept = memory.saved(run).bytes
    peak = memory.peak(lambda: torch.autograd.grad(run(), wanted(program, leaves)))
    return timed | {"kept": kept, "peak": peak}


# ---- what the results say


def ratio(result: Result, key: str, program: str, T: int, way: str) -> float | None:
    ours, loop = (harness.figure(result, key, program=program, T=T, way=x) for x in (way, "loop"))
    return None if ours is None or not loop else ours / loop


def cell_text(result: Result, key: str, program: str, T: int, way: str) -> str:
    found, times = (harness.figure(result, key, program=program, T=T, way=way), ratio(result, key, program, T, way))
    if found is None or times is None:
        return harness.why_not(result, program=program, T=T, way=way)
    figure = f"{found * 1000:,.1f} ms" if key == "total_s" else f"{found / 2**20:,.2f} MiB"
    return figure if way == "loop" else f"{figure} ({harness.digits(times)}x)"


COLUMNS = {"kept": "kept for backward", "peak": "most alive", "total_s": "forward + backward"}


def section(result: Result, picture: str) -> str:
    lengths = sorted({entry["cell"]["T"] for entry in result["entries"]})
    rows = [
        [PROGRAMS[program][0], str(T), WAYS[way], *(cell_text(result, key, program, T, way) for key in COLUMNS)]
        for program in PROGRAMS
        for T in lengths
        for way in ways_of(program)
    ]
    return "\n\n".join(
        [
            "float32, one thread. Bytes are counted, inputs left out. In brackets: relative to `tl.scan`, which keeps "
            "what a Python loop keeps.",
            harness.table(["program", "T", "code", *COLUMNS.values()], rows, text_columns=3),
        ]
    )


def summary(result: Result) -> list[str]:
    """Our operators against a loop of `tl.scan`, which is the peer here."""
    T = max(entry["cell"]["T"] for entry in result["entries"])

    def times(way: str) -> dict[str, float]:
        found = {PROGRAMS[program][0]: ratio(result, "total_s", program, T, way) for program in PROGRAMS}
        return {title: x for title, x in found.items() if x}

    text = []
    if found := times("recurrence"):
        parts = [f"{sentences.speed(x, 'a `tl.scan`')} ({title})" for title, x in found.items()]
        text.append(f"`tl.linear_recurrence` is {sentences.listed(parts)}.")
    peers = {f"`tl.scan` beside `tl.associative_scan`, {title}": x for title, x in times("associative").items()}
    return [*text, *sentences.winners(peers)]


def targets(result: Result) -> list[Target]:
    lengths = sorted({entry["cell"]["T"] for entry in result["entries"]})
    best = {program: "chunks" if program == "crf" else "recurrence" for program in PROGRAMS}
    found = []
    for what, key, bound in (("bytes kept", "kept", 1.3), ("time", "total_s", 1.0)):
        for program, way in best.items():
            text = f"{PROGRAMS[program][0]}, {WAYS[way]}: {what}, times those of `tl.scan`"
            found.append(Target(text, ratio(result, key, program, lengths[-1], way), bound, unit="x"))
    return found


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 2},
    checks=checks,
    targets=targets,
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
