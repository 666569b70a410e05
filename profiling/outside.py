"""Loops of other packages beside their ports to this library: the same numbers, in how many lines, bytes, seconds.

    python profiling/outside.py --outside-python PYTHON              # a Python that has the packages: some 20 minutes
    python profiling/outside.py --outside-python PYTHON --only ncps  # one package

The original is the package's, unmodified. The port is written with `tl.scan` and its like; where the package has a
cell, the port calls it ("its cell"). `tl.testing.same_loop` compares them in values, gradients, second derivatives,
side effects and random numbers, eager, compiled and within a budget of bytes, for several lengths. The distance shown
is of values and gradients, in float64 where that can be. Times are processor seconds of a forward and backward pass in
float32 by one thread, in turns, and their median; what compiles is compiled before.

A pip of that Python finds all by the names in `PACKAGES`, without their dependencies, and then what an import of each
asks for. Of torchaudio, leave the folder `lib` out where it does not load beside torch's CPU build. What is not
installed is left out, and the page says so.
"""

import importlib.metadata
import statistics
import sys
import warnings
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

from outside_loops.outside_check import Loop, Size, check
from pages import plots
from running import harness
from running.script import Peer, Result, Script, Target

FAMILIES = {
    "attention": ("torchaudio", "speechbrain"),
    "chains": ("pytorch-crf", "pomegranate", "torch-kf", "torchcde"),
    "meta": ("torchopt", "higher"),
    "nets": ("ncps", "xlstm", "speechbrain", "mambapy", "dnc"),
    "recurrent": ("torchrecurrent",),
    "rl": ("torchrl",),
    "solvers": ("torchdiffeq", "torchsde", "torchode"),
    "sound": ("torchaudio", "torchlpc", "torchcomp"),
    "spiking": ("norse", "snntorch", "spikingjelly", "sinabs", "rockpool"),
    "transformers": ("transformers",),
}
PACKAGES = tuple(sorted({package for packages in FAMILIES.values() for package in packages}))
SMALL = Size(9, 3, 6)
SIZES = {"quick": Size(8, 2, 4), "short": Size(64, 4, 16), "usual": Size()}
BUDGETS = {"quick": 0.0, "short": 0.5, "usual": 1.5}
FASTER, SLOWEST = 0.2, 1.1
Found = dict[str, Any]


def loops_of(family: str) -> list[Loop]:
    return import_module(f"outside_loops.outside_{family}").LOOPS


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": "outside", "package": package, "family": family, "set": args.set, "limit_s": 1800}
        for family, packages in FAMILIES.items()
        for package in packages
        if not args.only or package in args.only
    ]


def run_cell(cell: harness.Cell) -> Found:
    warnings.simplefilter("ignore")  # of the packages
    try:
        version = importlib.metadata.version(cell["package"])
    except importlib.metadata.PackageNotFoundError:
        return {"absent": "not installed"}
    options = SMALL, SIZES[cell["set"]], BUDGETS[cell["set"]]
    loops = [loop for loop in loops_of(cell["family"]) if loop.package == cell["package"]]
    if cell["set"] == "quick":
        loops = loops[:1]
    return {"version": version, "loops": [_checked(loop, *options) for loop in loops]}


def _checked(loop: Loop, small: Size, large: Size, budget_s: float) -> Found:
    try:
        return check(loop, small, large, budget_s)
    except Exception as error:
        return {"name": loop.name, "error": f"{type(error).__name__}: {error}"[:500]}


def found_in(result: Result) -> list[Found]:
    """All loops that ran."""
    answers = [(entry["cell"]["package"], entry["raw"][-1]) for entry in result["entries"] if entry["raw"]]
    return [{"package": package} | loop for package, answer in answers for loop in answer.get("loops", ())]


def ratio(found: Found, way: str = "") -> float | None:
    """The port's time, of the original's; that of the compiled port where it has a loop to compile."""
    way = way or ("compiled" if "compiled_s" in found else "eager")
    return found[f"{way}_s"] / found["original_s"] if f"{way}_s" in found else None


def kept(found: Found) -> float | None:
    """The port's bytes, of the original's."""
    way = "compiled" if "compiled_bytes" in found else "eager"
    return found[f"{way}_bytes"] / found["original_bytes"] if found.get("original_bytes") else None


def ratios(result: Result) -> list[float]:
    return sorted(x for found in found_in(result) if "error" not in found and (x := ratio(found)) is not None)


def wrong(found: Found) -> bool:
    return "error" not in found and not found["same"]


def rows_of(found: list[Found]) -> list[list[str]]:
    """A row for each loop, and one for each group."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for loop in found:
        if "error" not in loop:
            groups.setdefault((loop["package"], loop["group"] or loop["name"]), []).append(loop)
    return [row_of(name, loops) for name, loops in groups.items()]


def row_of(name: tuple[str, str], loops: list[Found]) -> list[str]:
    def median(values: list[float | None]) -> str:
        there = [x for x in values if x is not None]
        return harness.digits(statistics.median(there)) if there else "-"

    def lines(key: str) -> str:
        return str(loops[0].get(key, "-"))

    title = f"{name[1]}: {len(loops)} layers, medians" if len(loops) > 1 else name[1]
    marks = ["wrong"] if any(map(wrong, loops)) else ["same"]
    marks += ["its cell"] if loops[0]["wraps"] else []
    marks += ["falls back"] if any(loop.get("fell") for loop in loops) else []
    return [
        name[0],
        title,
        ", ".join(marks),
        f"{max(loop['apart'] for loop in loops):.1e}",
        f"{lines('port_lines')} : {lines('original_lines')}",
        median([loop["original_s"] * 1e3 for loop in loops]),
        median([ratio(loop, "eager") for loop in loops]),
        median([ratio(loop, "compiled") for loop in loops]),
        median([kept(loop) for loop in loops]),
    ]


def section(result: Result, picture: str) -> str:
    found = found_in(result)
    header = ["package", "loop", "port", "apart", "lines, port : loop", "original, ms", "eager", "compiled", "bytes"]
    blocks = [harness.table(header, rows_of(found), text_columns=3), f"![Times of the ports]({picture})"]
    worst = [f"- {f['package']}, {f['name']}: {ratio(f):.2f}" for f in found if (ratio(f) or 0) > SLOWEST]
    told = {
        "**Ports that take longer than the original**, times the original's time:": worst,
        "**What differs**, as `same_loop` says it:": [told_of(f, t) for f in found for t in f.get("differences", ())],
        "**What falls back:**": [told_of(f, f["fell"]) for f in found if f.get("fell")],
        "**Remarks:**": [told_of(f, f["note"]) for f in found if f.get("note")],
        "**Where `same_loop` stops:**": [told_of(f, f["stopped"]) for f in found if f.get("stopped")],
        "**No figure:**": [told_of(f, f["error"]) for f in found if "error" in f],
    }
    for title, lines in told.items():
        blocks += [title, "\n".join(lines)] if lines else []
    return "\n\n".join([*blocks, versions(result)])


def told_of(found: Found, text: str) -> str:
    return f"- {found['package']}, {found['name']}: {' '.join(text.split())}"


def versions(result: Result) -> str:
    answers = {entry["cell"]["package"]: entry["raw"][-1] for entry in result["entries"] if entry["raw"]}
    there = [f"{name} {answer['version']}" for name, answer in sorted(answers.items()) if "version" in answer]
    lacking = [name for name, answer in sorted(answers.items()) if "absent" in answer]
    text = f"Packages: {', '.join(there)}." if there else ""
    return f"{text} Not installed: {', '.join(lacking)}.".strip() if lacking else text


def summary(result: Result) -> list[str]:
    found, times = found_in(result), ratios(result)
    if not times:
        return []
    checked = [loop for loop in found if "error" not in loop]
    return [
        f"Of {len(checked)} loops of {len({loop['package'] for loop in checked})} packages "
        f"{sum(not wrong(loop) for loop in checked)} ports give the original's numbers. They take "
        f"{harness.digits(statistics.median(times))} times the original's time (median), at most "
        f"{harness.digits(times[-1])}; {sum(x > SLOWEST for x in times)} take more than {SLOWEST} times as long."
    ]


def targets(result: Result) -> list[Target]:
    found, times = found_in(result), ratios(result)
    if {loop["package"] for loop in found} < set(PACKAGES):
        return []
    return [
        Target("port : original, time, median", statistics.median(times), FASTER),
        Target("port : original, time, largest", times[-1], SLOWEST),
        Target("ports that give other numbers", sum(map(wrong, found)), 0),
    ]


def draw(result: Result, path: Path) -> None:
    """A point for each port, in order."""
    times = ratios(result)
    with plots.drawing(path, (6, 3.2)) as drawn:
        axes = drawn.subplots()
        axes.plot(range(1, len(times) + 1), times, "o", color=plots.COLOURS[0], markersize=4)
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_yticks(ticks := [0.05, 0.1, 0.2, 0.5, 1, 2], [f"{tick:g}" for tick in ticks])
        axes.set_xlabel("loops, in order")
        axes.set_ylabel("time, port / original (lower is faster)")
        axes.spines[["top", "right"]].set_visible(False)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PACKAGES, help="packages; the others keep their figures")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    rounds={"quick": 1, "short": 1, "usual": 1},
    targets=targets,
    draw=draw,
    peers=(Peer("outside", ("torch",), lambda cell: True),),
    options=options,
    group=lambda cell: f"{cell['package']}, {cell['family']}",
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
