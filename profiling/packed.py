"""Packing, padding, reductions over rows and permutations beside PyTorch's ways and FBGEMM's: forward + backward.

    python profiling/packed.py                         # 3 rounds, some 20 minutes
    python profiling/packed.py --quick                 # every cell once: to see that it runs
    python profiling/packed.py --only pack pad         # these cases alone, the others from the results there are
    python profiling/packed.py --report                # tables and picture again, from the results there are
    python profiling/packed.py --fbgemm-python PATH    # a Python that has fbgemm_gpu beside the same torch

Every way is timed twice. *Fresh*: blocks above some 32 MiB come from the system, a page at a time, as glibc's malloc
has it by default; most of the time goes there, whatever the kernel. *Kept*: malloc gives freed blocks out again.
Values and gradients come first: a way whose own differ from ours has `wrong` in place of a figure.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import harness
import packed_ways
import plots
import torch
from packed_ways import CASES, FEATURES, PERMUTED, ROWS
from torch import Tensor

NAME = "packed"
DEFAULT_OUT = harness.results(NAME)
MEMORY = ("fresh", "kept")
BANDWIDTH = 0.8  # of a copy's, fresh memory, forward: pack and pad
SELECT = 0.4  # of index_select's time, there and back
TITLES = {
    "pack": "(B, T, D) to packed",
    "pad": "packed to (B, T, D)",
    "permute": f"(1, {PERMUTED}, {FEATURES}) permuted and back",
}


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    if cell["way"] == "copy":
        return {"forward_s": harness.seconds(partial(copy, cell["case"]), cell["runs"])}
    ways = CASES[cell["case"]]()
    way, ours = ways[cell["way"]], next(iter(ways.values()))
    x = packed_ways.inputs(cell["case"])
    expected = ours.run(x)
    cotangent = torch.randn_like(expected)
    same = way.compared or way.run
    wanted = torch.autograd.grad(expected, x, cotangent)[0]
    worst = max(distance(same(x), expected), distance(torch.autograd.grad(same(x), x, cotangent)[0], wanted))
    if not worst < 1e-5:
        return {"error": f"wrong: off by {worst:.2g} of the largest number"}
    del expected, wanted
    with torch.no_grad():
        forward = harness.seconds(lambda: way.run(x), cell["runs"])
    return {
        "forward_s": forward,
        "total_s": harness.seconds(lambda: torch.autograd.grad(way.run(x), x, cotangent), cell["runs"]),
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


def measure(names: Sequence[str], rounds: int, runs: int, fbgemm_python: str | None) -> list[harness.Entry]:
    cells = [
        {"kind": kind, "case": case, "way": way, "runs": runs}
        for case in names
        for way in [*CASES[case](), *(["copy"] if case in ("pack", "pad") else [])]
        for kind in MEMORY
    ]

    def process(script: Path, cell: harness.Cell) -> dict[str, Any]:
        if cell["way"] != "FBGEMM":
            return harness.spawn(script, cell)
        return harness.spawn(script, cell, fbgemm_python) if fbgemm_python else {"error": "not installed"}

    return harness.measure(Path(__file__).resolve(), cells, rounds, process)


def ways_of(result: dict[str, Any], case: str) -> list[str]:
    """Ours first."""
    found = [entry["cell"]["way"] for entry in result["entries"] if entry["cell"]["case"] == case]
    return [way for way in dict.fromkeys(found) if way != "copy"]


def benchmarks(result: dict[str, Any], picture: str) -> str:
    """The section of the document."""
    about = result["about"]
    r = packed_ways.ragged()
    lines = [
        f"Milliseconds of forward + backward (of forward alone). B = {ROWS} rows of lengths uniform in 1..{r.steps}, "
        f"N = {r.n}, D = {FEATURES}, float32, {about['threads']} threads, median of {about['rounds']} rounds of "
        f"{about['runs']} runs on {about['machine']['processor']}; torch {about['versions']['torch']}, "
        f"{about['date']}. *Fresh* memory is malloc's default, *kept* is malloc told to keep what was freed.",
        "",
        harness.table(["", "way", "fresh", "kept", "fresh / ours"], rows(result), text_columns=2),
        "",
        *(f"- {line}" for line in targets(result)),
        "",
        f"![forward + backward beside the fastest peer]({picture})",
    ]
    return "\n".join(lines)


def rows(result: dict[str, Any]) -> list[list[str]]:
    lines = []
    for case in CASES:
        ways = ways_of(result, case)
        for way in ways:
            ours, own = (
                harness.milliseconds(result, "total_s", kind="fresh", case=case, way=w) for w in (ways[0], way)
            )
            title = TITLES.get(case, f"{case} over rows") if way == ways[0] else ""
            name = f"**`{way}`**" if way == ways[0] else way
            ratio = f"{own / ours:.2f}" if own and ours else "-"
            lines.append([title, name, *(both(result, kind, case, way) for kind in MEMORY), ratio])
    return lines


def both(result: dict[str, Any], kind: str, case: str, way: str) -> str:
    total, forward = (
        harness.milliseconds(result, key, kind=kind, case=case, way=way) for key in ("total_s", "forward_s")
    )
    if total is not None and forward is not None:
        return f"{total:.1f} ({forward:.1f})"
    errors = [
        raw.get("error", "")
        for entry in result["entries"]
        if {"kind": kind, "case": case, "way": way}.items() <= entry["cell"].items()
        for raw in entry["raw"]
    ]
    return "wrong" if any(error.startswith("wrong") for error in errors) else "error"


def targets(result: dict[str, Any]) -> list[str]:
    """What was to be reached, and whether it was."""
    lines = []
    for case in CASES:
        for kind in MEMORY:
            ours, peer = ours_of(result, case, kind), fastest_peer(result, case, kind)
            if ours and peer:
                most = SELECT if case == "permute" else 1.0
                lines.append(
                    f"{case}, {kind} memory: at most {most} of the fastest peer's time ({peer[0]}): "
                    f"{ours / peer[1]:.2f}, {'reached' if ours <= most * peer[1] else 'missed'}."
                )
    for case in ("pack", "pad"):
        way = next(iter(ways_of(result, case)), "")
        for kind in MEMORY:
            own, copied = (
                harness.milliseconds(result, "forward_s", kind=kind, case=case, way=w) for w in (way, "copy")
            )
            if own and copied:
                reached = "reached" if copied / own >= BANDWIDTH else "missed"
                lines.append(
                    f"{case}, {kind} memory, forward: at least {BANDWIDTH} of the bandwidth of a copy that reads and "
                    f"writes as many bytes: {copied / own:.2f}, {reached}."
                )
    return lines


def ours_of(result: dict[str, Any], case: str, kind: str) -> float | None:
    ways = ways_of(result, case)
    return harness.milliseconds(result, "total_s", kind=kind, case=case, way=ways[0]) if ways else None


def fastest_peer(result: dict[str, Any], case: str, kind: str) -> tuple[str, float] | None:
    times = [
        (way, harness.milliseconds(result, "total_s", kind=kind, case=case, way=way))
        for way in ways_of(result, case)[1:]
    ]
    return min(((way, t) for way, t in times if t), key=lambda found: found[1], default=None)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    drawn, both_axes = plt.subplots(1, 2, figsize=(13, 11), layout="constrained")
    for axes, kind in zip(both_axes, MEMORY, strict=True):
        groups = {}
        for case in CASES:
            peer, ways = fastest_peer(result, case, kind), ways_of(result, case)
            found = [(way, harness.milliseconds(result, "total_s", kind=kind, case=case, way=way)) for way in ways]
            groups[case] = [plots.Ratio(way, t / peer[1], way == ways[0]) for way, t in found if t and peer]
        plots.ratios(axes, groups, f"{kind} memory: time against the fastest peer (less is faster)")
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few runs")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="cases to measure")
    parser.add_argument("--rounds", type=int, default=3, help="how often every cell is measured; %(default)s")
    parser.add_argument("--report", action="store_true", help="measure nothing: tables and picture from --out")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the file of results, JSON")
    parser.add_argument("--fbgemm-python", default=os.environ.get("FBGEMM_PYTHON"), help="a Python with fbgemm_gpu")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # JSON: what a process of its own is to do
    args = parser.parse_args(given)
    args.out = args.out.resolve()
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    if args.cell:
        harness.answer(run_cell, args.cell)
        return 0
    old = json.loads(args.out.read_text()) if args.out.exists() else {"entries": []}
    if args.report:
        result = old
    else:
        rounds, runs = (1, 5) if args.quick else (args.rounds, 25)
        about = harness.about(rounds, runs=runs)
        kept = [entry for entry in old["entries"] if entry["cell"]["case"] not in args.only]
        result = {"about": about, "entries": kept + measure(args.only, rounds, runs, args.fbgemm_python)}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    harness.publish(
        NAME,
        args.out,
        lambda path: draw(result, path),
        [("docs/benchmarks.md", NAME, lambda picture: benchmarks(result, picture))],
    )
    for line in harness.failures(result["entries"]):
        print("no figure:", line, file=sys.stderr)
    print(benchmarks(result, args.out.with_suffix(".png").name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
