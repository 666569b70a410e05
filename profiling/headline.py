"""The five facts of the README, measured in one run: `python profiling/headline.py`, some four minutes.

    python profiling/headline.py --jax-python PYTHON   # a Python that has JAX and Equinox: see peers/README.md

Each fact takes one row of a larger script, which checks values and gradients, has more sizes and more peers, and is
named in the table. Values are compared here too, before anything is timed.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import beam
import compiled
import packed
import torch
from compiled_loops import compiled_workloads
from plain_loops import loop_workloads, workloads
from running import harness
from running.script import Result, Script, differing
from torch import Tensor
from whole_models import beam_models

import tensorloop as tl
from docs import curve
from docs.site import slug

SOURCE = "https://github.com/tensorloop/tensorloop/blob/main"
SIZES = {"quick": 24, "short": 256, "usual": 1024}  # steps of the LSTM and of the decoder
LONG = {"quick": 24, "short": 1000, "usual": 10_000}  # steps of the loop of unknown length
TOKENS = {"quick": 4, "short": 64, "usual": 64}
RUNS = {"quick": 1, "short": 5, "usual": 10}
CHECKED = 24
AGREE = 1e-9  # of the largest value, in float64


class Fact(NamedTuple):
    """A row of the table; the first way is ours."""

    what: str
    ways: dict[str, str]
    figures: dict[str, Callable[[float], str]]
    """What a process answers -> how that is written."""


def seconds(x: float) -> str:
    return f"{harness.digits(x * 1e3)} ms" if x < 1 else f"{harness.digits(x)} s"


def size(x: float) -> str:
    return f"{harness.digits(x / 1e6)} MB" if x < 1e9 else f"{harness.digits(x / 1e9)} GB"


def speed(x: float) -> str:
    return f"{round(x, -1):,.0f} tokens/s"


FACTS = {
    "lstm": Fact(
        "An LSTM cell in a loop, B=4, H=32, T={T:,}: forward + backward",
        {
            "compiled": "`tl.scan(compile=True)`",
            "eager": "the same `tl.scan`, eager",
            "lax_scan": "`lax.scan`, jitted",
            "nn_lstm": "`nn.LSTM`",
        },
        {"total_s": seconds},
    ),
    "decoder": Fact(
        "A decoder that attends to its past, T={T:,}: bytes kept for backward, forward + backward",
        {
            "compiled": "`tl.TensorArray`, `tl.scan(compile=True)`",
            "TensorArray": "`tl.TensorArray` in a Python loop",
            "torch.cat": "`torch.cat` in a Python loop",
        },
        {"held_bytes": size, "total_s": seconds},
    ),
    "unknown": Fact(
        "A loop of unknown length, {T:,} steps of a (64, 256) carry: peak memory, time",
        {"compiled_32mb": "budget of 32 MB, compiled", "plain": "the loop in Python"},
        {"peak_bytes": size, "total_s": seconds},
    ),
    "search": Fact(
        "Beam search, {T} tokens of a small GPT-2, 16 rows, 8 beams: speed",
        {"tl": "`tl.beam_search`", "HF": "`generate` of transformers"},
        {"tokens_a_second": speed},
    ),
    "conformer": Fact(
        "A Conformer block on 32 rows of 100 to 1,000 frames: time, bytes kept for backward",
        {"packed": "packed rows", "padded": "padded rows"},
        {"total_s": seconds, "held_bytes": size},
    ),
}


# ---- which cells ----


def cells(args: Namespace) -> list[harness.Cell]:
    T, N, runs = SIZES[args.set], LONG[args.set], RUNS[args.set]
    found: list[harness.Cell] = []
    lstm = {"fact": "lstm", "kind": "time", "workload": "W2s", "T": T, "threads": 1, "repeats": runs}
    found += [lstm | {"variant": way} for way in FACTS["lstm"].ways]
    for kind in ("count", "time"):
        cell = {"fact": "decoder", "kind": kind, "T": T, "threads": 2, "repeats": min(runs, 5)}
        found += [cell | {"variant": way} for way in FACTS["decoder"].ways]
    for kind in ("time", "memory"):
        cell = {"fact": "unknown", "kind": kind, "T": N, "threads": 2, "repeats": min(runs, 5)}
        found += [cell | {"variant": way} for way in FACTS["unknown"].ways]
    tokens = {"fact": "search", "kind": "speed", "T": TOKENS[args.set], "repeats": min(runs, 5)}
    found += [tokens | {"variant": way} for way in FACTS["search"].ways]
    block = {"fact": "conformer", "kind": "kept", "T": 0, "repeats": min(runs, 5)}
    return found + [block | {"variant": way} for way in FACTS["conformer"].ways]


def checks(args: Namespace) -> list[harness.Cell]:
    """Those of the Conformer are in its own cells."""
    lstm = {"kind": "check", "fact": "lstm", "workload": "W2s", "T": CHECKED, "variants": ["compiled", "lax_scan"]}
    search = {"kind": "check", "fact": "search", "what": "speed", "steps": 8, "at_most": beam.CHECKS["speed"]}
    return [lstm, *({"kind": "check", "fact": fact, "at_most": AGREE} for fact in ("decoder", "unknown")), search]


# ---- what a process of its own does ----


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    torch.set_num_threads(cell.get("threads", harness.THREADS))
    return (CHECK if cell["kind"] == "check" else MEASURE)[cell["fact"]](cell)


def with_scan(net: torch.nn.GRUCell, xs: Tensor) -> Tensor:
    """The loss of `curve.with_array` by a compiled loop."""

    def body(carry: tuple[Tensor, tl.TensorArray], x: Tensor) -> tuple[tuple[Tensor, tl.TensorArray], None]:
        h, states = carry
        states.append(h[:, None])
        return (net(x + tl.attention(h[:, None], states, states)[:, 0], h), states), None

    (h, _), _ = tl.scan(body, (xs.new_zeros(8, 16), tl.TensorArray()), xs, compile="strict")
    return h.square().mean()


DECODERS = {"compiled": with_scan, "TensorArray": curve.with_array, "torch.cat": curve.with_cat}


def decoder(cell: harness.Cell) -> dict[str, Any]:
    loop = DECODERS[cell["variant"]]
    if cell["kind"] == "count":
        ((_, held),) = curve.counted(loop, (cell["T"],))
        return {"held_bytes": held}
    net, xs = torch.nn.GRUCell(16, 16), torch.randn(cell["T"], 8, 16)
    inputs = list(net.parameters())
    return {"total_s": harness.seconds(lambda: torch.autograd.grad(loop(net, xs), inputs), cell["repeats"], 1)}


def loop_of(way: str, N: int, dtype: torch.dtype) -> tuple[Callable[[], Tensor], workloads.Leaves]:
    """The loop of unknown length: its loss, and its leaves."""
    if way == "plain":
        d = loop_workloads.leaves("W4", N, dtype)
        return partial(loop_workloads.VARIANTS["W4"]["plain"], d), d
    d = compiled_workloads.leaves("W4", N, dtype)
    return compiled_workloads.loss_of("W4", way, d, N), d


def unknown(cell: harness.Cell) -> dict[str, Any]:
    loss, d = loop_of(cell["variant"], cell["T"], torch.float32)
    inputs = workloads.differentiated(d)
    if cell["kind"] == "memory":
        return harness.peak_of(loss, inputs)
    return {"total_s": harness.seconds(lambda: torch.autograd.grad(loss(), inputs), cell["repeats"], 1)}


def search(cell: harness.Cell) -> dict[str, Any]:
    timed = beam.speed({"way": cell["variant"], "steps": cell["T"], "runs": cell["repeats"]})
    tokens = beam_models.ROWS * cell["T"]  # of one hypothesis a row
    return {"tokens_a_second": [tokens / s for s in timed["total_s"]]}


def check_decoder(cell: harness.Cell) -> dict[str, Any]:
    torch.manual_seed(0)
    net, xs = torch.nn.GRUCell(16, 16).double(), torch.randn(CHECKED, 8, 16, dtype=torch.float64)
    return {"apart": beam.apart_by([way(net, xs) for way in DECODERS.values()], list(net.parameters()))}


def check_unknown(cell: harness.Cell) -> dict[str, Any]:
    found = []
    for way in FACTS["unknown"].ways:
        loss, d = loop_of(way, 2 * CHECKED, torch.float64)
        found.append(compiled.gradients(loss, d))
    return {"apart": max(workloads.apart(*found).values())}


def conformer(cell: harness.Cell) -> dict[str, Any]:
    return packed.run_cell(cell | {"case": "conformer", "way": cell["variant"], "runs": cell["repeats"]})


MEASURE: dict[str, Callable[[harness.Cell], dict[str, Any]]] = {
    "lstm": compiled.time_cell,
    "decoder": decoder,
    "unknown": unknown,
    "search": search,
    "conformer": conformer,
}
CHECK: dict[str, Callable[[harness.Cell], dict[str, Any]]] = {
    "lstm": compiled.check_cell,
    "decoder": check_decoder,
    "unknown": check_unknown,
    "search": beam.check,
}


def disagreements(entries: list[harness.Entry]) -> list[str]:
    """The LSTM's check answers for each way; the others' answer with one number."""
    lstm = [entry for entry in entries if entry["cell"]["fact"] == "lstm"]
    rest = [entry for entry in entries if entry["cell"]["fact"] != "lstm"]
    return compiled.differing(lstm) + differing(rest)


# ---- what is written ----


def written(result: Result, name: str, way: str) -> str:
    fact = FACTS[name]
    values = [harness.figure(result, key, fact=name, variant=way, **kind_of(name, key)) for key in fact.figures]
    said = [say(x) for say, x in zip(fact.figures.values(), values, strict=True) if x is not None]
    return ", ".join(said) or harness.why_not(result, fact=name, variant=way)


def kind_of(name: str, key: str) -> dict[str, str]:
    """Bytes and time have a process each."""
    kinds = {
        "unknown": {"peak_bytes": "memory", "total_s": "time"},
        "decoder": {"held_bytes": "count", "total_s": "time"},
    }
    return {"kind": kinds[name][key]} if name in kinds else {}


def steps_of(result: Result, name: str) -> int:
    return next(entry["cell"]["T"] for entry in result["entries"] if entry["cell"]["fact"] == name)


def title(name: str, T: int) -> tuple[str, str]:
    """What a fact is about, and what was measured."""
    what, _, measured = FACTS[name].what.format(T=T).partition(": ")
    return what, measured


def section(result: Result, picture: str) -> str:
    """The page: a table for each fact."""
    parts = []
    for name, fact in FACTS.items():
        what, measured = title(name, steps_of(result, name))
        rows = [(way, written(result, name, key)) for key, way in fact.ways.items()]
        parts += [f"## {what}", harness.table(("", measured), rows)]
    return "\n\n".join(parts)


def for_readme(result: Result, picture: str) -> str:
    """The README's table, whose rows link to those of the page."""
    rows = ["| benchmark | tensorloop | alternatives |", "| --- | --- | --- |"]  # not aligned: its rows are long
    for name, fact in FACTS.items():
        ours, *others = fact.ways
        beside = ", ".join(f"{written(result, name, way)} {fact.ways[way]}" for way in others)
        what, measured = title(name, steps_of(result, name))
        link = f"[{what}]({SOURCE}/docs/benchmarks/headline.md#{slug(what)}): {measured}"
        rows.append(f"| {link} | **{written(result, name, ours)}** {fact.ways[ours]} | {beside} |")
    return "\n".join(rows)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    rounds={"quick": 1, "short": 1, "usual": 3},
    checks=checks,
    disagreements=disagreements,
    also=[("README.md", "headline", for_readme)],
    peers=(compiled.JAX,),
    # The loop of unknown length contracts: its gradients fade into denormal numbers, which are many times slower.
    prepare=lambda: torch.set_flush_denormal(True),
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
