"""Packing, padding, reductions over rows, permutations, layers of channels and of speech beside PyTorch's and FBGEMM's.

    python profiling/packed.py                         # one round
    python profiling/packed.py --full                  # 3 rounds
    python profiling/packed.py --only pack pad         # these cases alone, the others stay as they are
    python profiling/packed.py --fbgemm-python PATH    # a Python that has fbgemm_gpu beside the same torch

Every way is timed twice. *Fresh*: blocks above some 32 MiB come from the system, a page at a time, as glibc's malloc
has it by default; most of the time goes there, whatever the kernel. *Kept*: malloc gives freed blocks out again.
Values and gradients come first: a way whose own differ from ours has `wrong` in place of a figure.
"""

import sys
from argparse import ArgumentParser, Namespace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from packed_rows import packed_models, packed_ways
from packed_rows.packed_ways import FEATURES, PERMUTED, ROWS
from pages import plots, sentences
from running import harness
from running.script import Peer, Result, Script, Target
from torch import Tensor

from tensorloop import memory

CASES = packed_ways.CASES | packed_models.CASES
RUNS = {"quick": 1, "short": 5, "usual": 25, "full": 25}
SHORT = {  # cases, and what ours is held against in the short set: the fastest of the others where they were measured
    "pack": ("index_select", "copy"),
    "pad": ("index_copy_", "copy"),
    "softmax": ("row by row",),
    "permute": ("index_select",),
}
MEMORY = ("fresh", "kept")
BANDWIDTH = 0.8  # of a copy's, fresh memory, forward: pack and pad
SELECT = 0.4  # of index_select's time, there and back
# Of torch's time on as many entries in rows of one length, forward + backward.
LAYERS = {"conv1d": 1.1, "depthwise": 1.1, "max_pool": 1.2, "avg_pool": 1.2, "batch_norm": 1.2, "conformer": 0.6}
UNBOUND = ("dropout", "score_mod")  # figures to see, without a target
HELD = {"conformer": 0.6}  # of the padded block's bytes that are kept for backward
TITLES = {
    "pack": "(B, T, D) to packed",
    "pad": "packed to (B, T, D)",
    "permute": f"(1, {PERMUTED}, {FEATURES}) permuted and back",
    "conv1d": "convolution of 5 entries",
    "depthwise": "convolution of 15, each channel alone",
    "max_pool": "largest of each 2 entries",
    "avg_pool": "mean of each 2 entries",
    "batch_norm": "batch norm",
    "conformer": "a Conformer block",
    "ctc": "the CTC loss",
    "dropout": "attention with dropout",
    "score_mod": "attention, ALiBi",
}


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    if cell["way"] == "copy":
        return {"forward_s": harness.seconds(partial(copy, cell["case"]), cell["runs"])}
    ways = CASES[cell["case"]]()
    way, ours = ways[cell["way"]], next(iter(ways.values()))
    of_model = cell["case"] in packed_models.CASES
    warmups = 1 if of_model else 3
    x = (packed_models if of_model else packed_ways).inputs(cell["case"])
    expected = (ours.compared or ours.run)(x)
    cotangent = torch.randn_like(expected)
    same = way.compared or way.run
    wanted = torch.autograd.grad(expected, x, cotangent)[0]
    worst = max(distance(same(x), expected), distance(torch.autograd.grad(same(x), x, cotangent)[0], wanted))
    if not worst < packed_models.APART.get(cell["case"], 1e-5):
        return {"error": f"wrong: off by {worst:.2g} of the largest number"}
    del expected, wanted
    with torch.no_grad():
        forward = harness.seconds(lambda: way.run(x), cell["runs"], warmups)
        cotangent = torch.randn_like(way.run(x))
    leaves = (x, *way.weights)
    return {
        **({"held_bytes": memory.saved_residuals(way.run, x).bytes} if of_model else {}),
        "forward_s": forward,
        "total_s": harness.seconds(lambda: torch.autograd.grad(way.run(x), leaves, cotangent), cell["runs"], warmups),
    }


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def copy(case: str) -> Tensor:
    """Reads as many bytes as the case, and writes as many into memory that is as fresh."""
    r, values = packed_ways.ragged(), source()
    if case == "pack":
        return values.clone()
    out = torch.empty(ROWS * r.steps, FEATURES)
    out[: r.n].copy_(values)
    out[r.n :].zero_()
    return out


@cache
def source() -> Tensor:
    return torch.randn(packed_ways.ragged().n, FEATURES)


def cells(args: Namespace) -> list[harness.Cell]:
    cases = SHORT if args.set == "short" else CASES
    return [
        {"kind": kind, "case": case, "way": way, "runs": RUNS[args.set]}
        for case in args.only or cases
        for way in ways_and_copy(case)
        if args.set != "short" or way in (next(iter(CASES[case]())), *SHORT.get(case, ()))
        for kind in memories(case)
    ]


def memories(case: str) -> tuple[str, ...]:
    return MEMORY[1:] if case in packed_models.CASES else MEMORY


def ways_and_copy(case: str) -> list[str]:
    """Ours first."""
    return [*CASES[case](), *(["copy"] if case in ("pack", "pad") else [])]


def ways_of(result: Result, case: str) -> list[str]:
    """Ours first."""
    found = [entry["cell"]["way"] for entry in result["entries"] if entry["cell"]["case"] == case]
    return [way for way in dict.fromkeys(found) if way != "copy"]


def section(result: Result, picture: str) -> str:
    r = packed_ways.ragged()
    return "\n\n".join(
        [
            f"Milliseconds of forward + backward (of forward alone). B = {ROWS} rows of lengths uniform in "
            f"1..{r.steps}, N = {r.n}, D = {FEATURES}, float32, medians of {result['about']['runs']} runs. *Fresh* "
            "memory is malloc's default, *kept* is malloc told to keep what was freed; the last column "
            "is of fresh memory, of kept memory for the last four. Of the "
            f"Conformer block and the CTC loss there are {packed_models.ROWS['ctc']} rows of {packed_models.LEAST}.."
            f"{packed_models.MOST} frames, of attention {packed_models.ROWS['dropout']}, of width "
            f"{packed_models.WIDTH}, {packed_models.HEADS} heads; CTC has {packed_models.LABELS} labels.",
            harness.table(["", "way", "fresh", "kept", "/ ours"], rows(result), text_columns=2),
            f"![forward + backward beside the fastest peer]({picture})",
        ]
    )


def summary(result: Result) -> list[str]:
    """The block that people train, then each case against its fastest peer."""
    text, ratios = [], {}
    ours, padded = (
        harness.milliseconds(result, "total_s", kind="kept", case="conformer", way=way) for way in ("packed", "padded")
    )
    if ours and padded:
        text.append(f"A Conformer block on packed rows is {sentences.speed(ours / padded, 'on padded ones')}.")
    for case in CASES:
        for kind in memories(case):
            own, peer = ours_of(result, case, kind), fastest_peer(result, case, kind)
            if own and peer:
                ratios[f"{peer[0]}, {TITLES.get(case, f'{case} over rows')}, {kind} memory"] = own / peer[1]
    return [*text, *sentences.winners(ratios)]


def rows(result: Result) -> list[list[str]]:
    lines = []
    for case in CASES:
        ways = ways_of(result, case)
        for way in ways:
            ours, own = (
                harness.milliseconds(result, "total_s", kind=memories(case)[0], case=case, way=w)
                for w in (ways[0], way)
            )
            title = TITLES.get(case, f"{case} over rows") if way == ways[0] else ""
            name = f"**`{way}`**" if way == ways[0] else way
            ratio = f"{own / ours:.2f}" if own and ours else "-"
            lines.append(
                [
                    title,
                    name,
                    *(both(result, kind, case, way) if kind in memories(case) else "-" for kind in MEMORY),
                    ratio,
                ]
            )
    return lines


def both(result: Result, kind: str, case: str, way: str) -> str:
    total, forward = (
        harness.milliseconds(result, key, kind=kind, case=case, way=way) for key in ("total_s", "forward_s")
    )
    if total is not None and forward is not None:
        return f"{total:.1f} ({forward:.1f})"
    return harness.why_not(result, kind=kind, case=case, way=way)


def targets(result: Result) -> list[Target]:
    found = []
    for case in CASES:
        for kind in MEMORY:
            ours, peer = ours_of(result, case, kind), fastest_peer(result, case, kind)
            if ours and peer:
                what = f"{case}, {kind} memory: time / fastest peer"
                bound = None if case in UNBOUND else SELECT if case == "permute" else LAYERS.get(case, 1)
                found.append(Target(what, ours / peer[1], bound))
        if case in packed_models.CASES:
            held = [
                harness.figure(result, "held_bytes", kind="kept", case=case, way=way) for way in ("packed", "padded")
            ]
            if held[0] and held[1]:
                found.append(Target(f"{case}: bytes kept for backward / padded", held[0] / held[1], HELD.get(case)))
    for case in ("pack", "pad"):
        way = next(iter(ways_of(result, case)), "")
        for kind in MEMORY:
            own, copied = (
                harness.milliseconds(result, "forward_s", kind=kind, case=case, way=w) for w in (way, "copy")
            )
            if own and copied:
                what = f"{case}, {kind} memory, forward: share of a copy's bandwidth"
                found.append(Target(what, copied / own, BANDWIDTH, least=True))
    return found


def ours_of(result: Result, case: str, kind: str) -> float | None:
    ways = ways_of(result, case)
    return harness.milliseconds(result, "total_s", kind=kind, case=case, way=ways[0]) if ways else None


def fastest_peer(result: Result, case: str, kind: str) -> tuple[str, float] | None:
    times = [
        (way, harness.milliseconds(result, "total_s", kind=kind, case=case, way=way))
        for way in ways_of(result, case)[1:]
    ]
    return min(((way, t) for way, t in times if t), key=lambda found: found[1], default=None)


def draw(result: Result, path: Path) -> None:
    with plots.drawing(path, (13, 11)) as drawn:
        for axes, kind in zip(drawn.subplots(1, 2), MEMORY, strict=True):
            groups = {}
            for case in CASES:
                peer, ways = fastest_peer(result, case, kind), ways_of(result, case)
                found = [(way, harness.milliseconds(result, "total_s", kind=kind, case=case, way=way)) for way in ways]
                groups[case] = [plots.Ratio(way, t / peer[1], way == ways[0]) for way, t in found if t and peer]
            title = f"{kind} memory: time relative to the fastest alternative (lower is faster)"
            plots.ratios(axes, {case: bars for case, bars in groups.items() if bars}, title)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="cases to measure anew")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1, "full": 3},
    targets=targets,
    draw=draw,
    peers=[Peer("fbgemm", ("fbgemm_gpu",), lambda cell: cell["way"] == "FBGEMM")],
    options=options,
    group=lambda cell: cell["case"],
    settings=lambda args: {"runs": RUNS[args.set]},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
