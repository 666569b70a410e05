"""regroup beside plain PyTorch and FBGEMM: forward + backward, and the kernel alone against the copy bandwidth.

    python profiling/regroup.py                        # 5 rounds, a few minutes
    python profiling/regroup.py --fbgemm-python PATH   # a Python that has fbgemm_gpu beside the same torch

Values and gradients come first: where a way's differ from split + cat's, it has an error and no figure.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pages import plots, sentences
from running import harness
from running.script import Peer, Result, Script, Target
from torch import Tensor

from tensorloop.kernels.cpu import regroup as cpu_moves
from tensorloop.regroup import RegroupPlan, regroup

BANDWIDTH_TARGET = 0.8  # of a copy's, kernel alone, first case
RUNS = {"quick": 5, "short": 10, "usual": 40}
SHORT = ("few", "many")  # cases

Way = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Case(NamedTuple):
    title: str
    batch: int
    keys: list[list[str]]
    lengths: list[list[int]]
    groups: list[list[str]]


def cases() -> dict[str, Case]:
    wide, deep = [f"d{i}" for i in range(40)], [f"s{i}" for i in range(40)]
    narrow = [f"d{i}" for i in range(200)]
    order = [narrow[i] for i in np.random.RandomState(0).permutation(200)]
    few = [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
    few_groups = [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]]
    many_groups = [wide[::2] + deep[::2], wide[1::2] + deep[1::2] + wide[:5]]
    return {
        "few": Case("6 keys of 96 to 1024", 2048, few, [[96, 256], [512, 128, 768], [1024]], few_groups),
        "many": Case("80 keys of 64 and 128", 512, [wide, deep], [[64] * 40, [128] * 40], many_groups),
        "narrow": Case("200 keys of 16, shuffled", 512, [narrow], [[16] * 200], [order[:100], order[100:]]),
    }


def slice_cat(case: Case) -> Way:
    """A slice for every key wanted: the straightforward way."""
    place = places(case)

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([values[i][:, a:b] for i, a, b in map(place.get, group)], 1) for group in case.groups]

    return run


def split_cat(case: Case) -> Way:
    """A split for every input, which is one step of autograd."""

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        parts = {}
        for x, names, widths in zip(values, case.keys, case.lengths, strict=True):
            parts.update(zip(names, x.split(widths, 1), strict=True))
        return [torch.cat([parts[key] for key in group], 1) for group in case.groups]

    return run


def cat_index(case: Case) -> Way:
    """All inputs as one, then columns by number."""
    starts = [0, *accumulate(sum(widths) for widths in case.lengths)]
    place = places(case)
    columns = [[(starts[i] + a, starts[i] + b) for i, a, b in map(place.get, group)] for group in case.groups]
    index = torch.cat([torch.arange(a, b) for group in columns for a, b in group])
    sizes = [sum(b - a for a, b in group) for group in columns]

    def run(values: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.cat(list(values), 1).index_select(1, index).split(sizes, 1)

    return run


def fbgemm(case: Case) -> Way:
    """FBGEMM's operator, its tables made beforehand."""
    import fbgemm_gpu  # noqa: F401  # pyright: ignore[reportMissingImports]

    like = torch.empty(1, sum(case.lengths[0]))
    operators = torch.ops.fbgemm
    tables = operators.kt_regroup_arguments(like, case.keys, case.lengths, case.groups)
    return lambda values: operators.permute_multi_embedding(list(values), *tables)


def places(case: Case) -> Any:
    """key -> (input, first column, one past the last)"""
    found = {}
    for i, (names, widths) in enumerate(zip(case.keys, case.lengths, strict=True)):
        ends = list(accumulate(widths))
        found.update({key: (i, end - width, end) for key, end, width in zip(names, ends, widths, strict=True)})
    return found


WAYS: dict[str, Callable[[Case], Way]] = {
    "RegroupPlan": lambda case: RegroupPlan(case.keys, case.lengths, case.groups),
    "regroup": lambda case: lambda values: regroup(values, case.keys, case.lengths, case.groups),
    "split + cat": split_cat,
    "slice + cat": slice_cat,
    "cat + index_select": cat_index,
    "FBGEMM": fbgemm,
}


def run_cell(cell: harness.Cell) -> dict[str, Any]:
    """What a process of its own does."""
    case = cases()[cell["case"]]
    torch.manual_seed(0)
    values = [torch.randn(case.batch, sum(widths), requires_grad=True) for widths in case.lengths]
    if cell["kind"] == "kernel":
        return kernel_alone(case, [x.detach() for x in values], cell["runs"])
    way = WAYS[cell["way"]](case)
    expected = split_cat(case)(values)
    cotangents = [torch.randn_like(x) for x in expected]
    agree(way(values), expected, 0.0)
    agree(torch.autograd.grad(way(values), values, cotangents), torch.autograd.grad(expected, values, cotangents), 1e-6)
    del expected
    with torch.no_grad():
        forward = harness.seconds(lambda: way(values), cell["runs"])
    both = harness.seconds(lambda: torch.autograd.grad(way(values), values, cotangents), cell["runs"])
    return {"forward_s": forward, "total_s": both}


def agree(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def kernel_alone(case: Case, values: list[Tensor], runs: int) -> dict[str, Any]:
    """Into outputs that are there, taking turns with a copy of as many bytes."""
    moves = RegroupPlan(case.keys, case.lengths, case.groups)._map
    out = [torch.empty(case.batch, width) for width in moves.targets]
    source = torch.randn(sum(x.numel() for x in out))
    target = torch.empty_like(source)
    found: dict[str, Any] = {"bytes": 2 * source.numel() * source.element_size(), "kernel_s": [], "copy_s": []}
    for _ in range(runs):
        found["kernel_s"] += harness.seconds(lambda: cpu_moves.run(values, out, moves), 1)
        found["copy_s"] += harness.seconds(lambda: target.copy_(source), 1)
    return found


def cells(args: Namespace) -> list[harness.Cell]:
    found: list[harness.Cell] = []
    for case in SHORT if args.set == "short" else cases():
        found += [{"kind": "time", "case": case, "way": way, "runs": RUNS[args.set]} for way in WAYS]
        found.append({"kind": "kernel", "case": case, "runs": RUNS[args.set]})
    return found


def measured(result: Result) -> dict[str, Case]:
    found = {entry["cell"]["case"] for entry in result["entries"]}
    return {name: case for name, case in cases().items() if name in found}


def section(result: Result, picture: str) -> str:
    shown = measured(result)
    header = ["", *(f"{case.title}, B = {case.batch}" for case in shown.values())]
    rows = [[f"`{way}`" if "egroup" in way else way, *(both(result, name, way) for name in shown)] for way in WAYS]
    kernel = ["kernel alone", *(alone(result, name) for name in shown)]
    return "\n\n".join(
        [
            f"Milliseconds of forward + backward (of forward alone), float32, medians of {result['about']['runs']} "
            "runs. The last line is the kernel without autograd into memory that is there, and the share of a copy's "
            "bandwidth that it reaches.",
            harness.table(header, [*rows, kernel]),
            f"![forward + backward beside the fastest peer]({picture})",
        ]
    )


def summary(result: Result) -> list[str]:
    ratios = {}
    for name, case in measured(result).items():
        ours, peer = harness.milliseconds(result, "total_s", case=name, way="RegroupPlan"), fastest_peer(result, name)
        if ours and peer:
            ratios[f"{peer[0]}, {case.title}"] = ours / peer[1]
    if not ratios:
        return []
    parts = sentences.listed([sentences.speed(x, f"the fastest peer ({name})") for name, x in ratios.items()])
    return [f"`RegroupPlan` is {parts}.", *sentences.winners(ratios)]


def both(result: Result, case: str, way: str) -> str:
    total, forward = (harness.milliseconds(result, key, case=case, way=way) for key in ("total_s", "forward_s"))
    if total is None or forward is None:
        return harness.why_not(result, case=case, way=way)
    return f"{total:.2f} ({forward:.2f})"


def alone(result: Result, case: str) -> str:
    kernel, copy = (harness.milliseconds(result, key, case=case, kind="kernel") for key in ("kernel_s", "copy_s"))
    if not kernel or not copy:
        return harness.why_not(result, case=case, kind="kernel")
    return f"{kernel:.2f}, {copy / kernel:.2f} of a copy"


def targets(result: Result) -> list[Target]:
    found = []
    for name, case in measured(result).items():
        ours, peer = harness.milliseconds(result, "total_s", case=name, way="RegroupPlan"), fastest_peer(result, name)
        if ours and peer:
            found.append(Target(f"{case.title}: time / fastest peer", ours / peer[1], 1))
    kernel, copy = (harness.milliseconds(result, key, case="few", kind="kernel") for key in ("kernel_s", "copy_s"))
    if kernel and copy:
        what = f"{cases()['few'].title}: kernel alone, share of a copy's bandwidth"
        found.append(Target(what, copy / kernel, BANDWIDTH_TARGET, least=True))
    return found


def fastest_peer(result: Result, case: str) -> tuple[str, float] | None:
    times = {way: harness.milliseconds(result, "total_s", case=case, way=way) for way in list(WAYS)[2:]}
    return min(((way, t) for way, t in times.items() if t), key=lambda found: found[1], default=None)


def draw(result: Result, path: Path) -> None:
    groups = {}
    for name, case in measured(result).items():
        peer = fastest_peer(result, name)
        found = [(way, harness.milliseconds(result, "total_s", case=name, way=way)) for way in WAYS]
        groups[case.title] = [plots.Ratio(way, t / peer[1], way in list(WAYS)[:2]) for way, t in found if t and peer]
    with plots.drawing(path, (8, 5)) as drawn:
        title = "regroup: time relative to the fastest alternative (lower is faster)"
        plots.ratios(drawn.subplots(), groups, title)


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 5},
    targets=targets,
    draw=draw,
    peers=[Peer("fbgemm", ("fbgemm_gpu",), lambda cell: cell.get("way") == "FBGEMM")],
    settings=lambda args: {"runs": RUNS[args.set]},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
