"""Packages that other people maintain, with a patch of at most 30 lines that runs their own loops by this library.

    python profiling/outside_backends.py --outside-python PYTHON                  # a Python that has them: some minutes
    python profiling/outside_backends.py --outside-python PYTHON --only torchrl   # one package

Each patch in `outside_patches/` is applied to a copy of the installed package; what is installed stays as it is. The
same public calls then run in two processes, one with the package and one with the copy: values and gradients in double
precision after twenty calls, the bytes kept for backward, and processor seconds of a forward and backward pass in
float32 by one thread, in turns, as medians. `first calls` is what the first ten calls take together, with
what they compile.

Tests of a package run with it and with the copy where OUTSIDE_TESTS in the environment names a folder that has them,
in a folder of the package's name: an unpacked source distribution or a clone.

A pip of that Python finds all by the names of the patches, without their dependencies, and then what an import of each
asks for. What is not installed is left out, and the page says so.
"""

import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from outside_patches import patching
from running import harness
from running.script import Peer, Result, Script, Target

PATCHES = {patch.package: patch for patch in patching.patches()}
TURNS = {"quick": 1, "short": 3, "usual": 9}
WARM = {"quick": 4, "short": 20, "usual": 20}  # calls, by when what compiles is compiled
FIRST = 10
AT_MOST = 1e-9
SLOW = " and not parallel and (not compile or aliasing) and not collector and not triton"  # or for a GPU
TESTS = {
    "torchrecurrent": (".", ["tests/test_layers.py"]),
    "torchrl": ("test/modules", ["test_rnn.py", "-k", f"(LSTM or GRU){SLOW}"]),
}
NO_TESTS = {
    "xlstm": "its tests need a GPU",
    "auto-esn": "it has none",
    "torchlpc": "its tests call other functions",
}
LIMIT_S = 900
Found = dict[str, Any]


class Asked:
    """A process of `patched_calls.py`, with or without a copy before the installed packages."""

    def __init__(self, package: str, size: str, environment: dict[str, str]) -> None:
        command = [sys.executable, str(patching.FOLDER / "patched_calls.py"), package, size]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def ask(self, *what: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["answer"]

    def end(self) -> None:
        self.process.communicate(timeout=60)


def environments(patch: patching.Patch, copy: Path) -> list[dict[str, str]]:
    """Of the package as it is, and of the copy."""
    path = [str(harness.ROOT), str(harness.ROOT / "profiling")]
    return [os.environ | {"PYTHONPATH": os.pathsep.join(p)} for p in (path, [str(copy), *path])]


def run_cell(cell: harness.Cell) -> Found:
    patch = PATCHES[cell["package"]]
    try:
        version = importlib.metadata.version(patch.package)
    except importlib.metadata.PackageNotFoundError:
        return {"absent": "not installed"}
    if version != patch.version:
        return {"absent": f"{version} is installed, and the patch is for {patch.version}"}
    installed = Path(str(importlib.metadata.distribution(patch.package).locate_file("")))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        patching.patched_copy(patch, installed, copy)
        if cell["kind"] == "tests":
            return tests_of(patch, copy)
        from outside_patches.patched_calls import CALLS

        names = list(CALLS[patch.package])[: 1 if cell["set"] == "quick" else None]
        asked = [Asked(patch.package, cell["set"], e) for e in environments(patch, copy)]
        try:
            calls = [call_of(name, asked, cell["set"], copy) for name in names]
            for call in calls:  # at the end: what watches a call upsets torch's own scan, there and in later calls
                call["bytes"] = [0, 0] if "error" in call else [x.ask("bytes", call["name"]) for x in asked]
            return {"version": version, "calls": calls}
        finally:
            for process in asked:
                process.end()


def call_of(name: str, asked: list[Asked], size: str, folder: Path) -> Found:
    """One call: what differs, what it keeps, what it takes."""
    try:
        paths = [str(folder / f"{i}.pt") for i in range(2)]
        dtypes = [process.ask("values", name, path, WARM[size]) for process, path in zip(asked, paths, strict=True)]
        theirs, ours = (torch.load(path) for path in paths)
        warm = [[process.ask("time", name) for _ in range(WARM[size])] for process in asked]
        times = [[process.ask("time", name) for process in asked] for _ in range(TURNS[size])]
        apart = max(map(distance, theirs, ours)) if len(theirs) == len(ours) else float("inf")
    except RuntimeError as error:
        return {"name": name, "error": str(error)}
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    first = [sum(column[:FIRST]) for column in warm]
    return {"name": name, "dtypes": dtypes, "apart": apart, "first_s": first, "s": medians}


def distance(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """The largest difference, of the largest number."""
    if theirs.shape != ours.shape:
        return float("inf")
    return float((theirs - ours).abs().max() / theirs.abs().max().clamp_min(1e-30)) if theirs.numel() else 0.0


def tests_of(patch: patching.Patch, copy: Path) -> Found:
    """Counts of its own tests, with the package and with the copy."""
    folder = Path(os.environ.get("OUTSIDE_TESTS", "")) / patch.package
    if patch.package not in TESTS or "OUTSIDE_TESTS" not in os.environ or not folder.is_dir():
        return {"absent": NO_TESTS.get(patch.package, "not fetched")}
    below, chosen = TESTS[patch.package]
    told = [tested(folder / below, chosen, environment) for environment in environments(patch, copy)]
    return {"chosen": chosen, "counts": told}


def tested(folder: Path, chosen: list[str], environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *chosen]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    return counts(harness.last_line(done.stdout))


def counts(line: str) -> dict[str, int]:
    """What pytest's last line counts."""
    words = ("passed", "failed", "error", "skipped", "xfailed")
    found = {word: re.search(rf"\b(\d+) {word}", line) for word in words}
    return {word: int(match[1]) for word, match in found.items() if match}


# ---- the page ----


def answers(result: Result, kind: str) -> dict[str, Found]:
    return {e["cell"]["package"]: e["raw"][-1] for e in result["entries"] if e["raw"] and e["cell"]["kind"] == kind}


def calls_in(result: Result) -> list[Found]:
    """All calls that ran."""
    packages = answers(result, "calls").items()
    calls = [{"package": package} | call for package, answer in packages for call in answer.get("calls", ())]
    return [call for call in calls if "error" not in call]


def ratio(call: Found, key: str = "s") -> float:
    theirs, ours = call[key]
    return ours / theirs if theirs else float("nan")


def row_of(call: Found) -> list[str]:
    theirs, ours = call["s"]
    kept = f"{ratio(call, 'bytes'):.2f}" if all(call["bytes"]) else "-"
    return [
        call["package"],
        call["name"],
        *(f"{x * 1e3:.3g}" for x in (theirs, ours)),
        f"{ratio(call):.2f}",
        kept,
        "/".join(f"{x:.2g}" for x in call["first_s"]),
        f"{call['apart']:.0e}",
    ]


def section(result: Result, picture: str) -> str:
    header = ["package", "call", "as it is, ms", "patched, ms", "ratio", "bytes, ratio", "first calls, s", "apart"]
    blocks = [harness.table(header, [row_of(call) for call in calls_in(result)], text_columns=2)]
    found, tests = answers(result, "calls"), answers(result, "tests")
    failed = [
        f"- {package}, {call['name']}: {call['error']}"
        for package, answer in found.items()
        for call in answer.get("calls", ())
        if "error" in call
    ]
    blocks += ["No figure:", "\n".join(failed)] if failed else []
    header = ["patch", "for", "licence", "lines", "its own tests, as it is", "patched"]
    rows = [patch_row(patch, tests.get(package, {})) for package, patch in PATCHES.items()]
    blocks.append(harness.table(header, rows, text_columns=3))
    lacking = [f"{package}: {answer['absent']}" for package, answer in found.items() if "absent" in answer]
    return "\n\n".join([*blocks, *([f"Left out: {'; '.join(lacking)}."] if lacking else [])])


def patch_row(patch: patching.Patch, tests: Found) -> list[str]:
    link = f"[{patch.package}](../profiling/outside_patches/{patch.package}.patch)"
    said = [", ".join(f"{n} {word}" for word, n in count.items()) for count in tests.get("counts", ())]
    said = said or [tests.get("absent", tests.get("error", "not run")), "-"]
    return [link, f"{patch.version}: {patch.what}", patch.licence, str(patch.lines), *said]


def targets(result: Result) -> list[Target]:
    found = calls_in(result)
    if not found:
        return []
    worse = sum(a.get("passed", 0) > b.get("passed", 0) for a, b in counted(result))
    return [
        Target("patched : as it is, time, median", statistics.median(map(ratio, found)), 0.3),
        Target("calls whose numbers differ", sum(not call["apart"] <= AT_MOST for call in found), 0),
        Target("packages of which fewer tests pass", worse, 0),
    ]


def counted(result: Result) -> list[list[dict[str, int]]]:
    return [answer["counts"] for answer in answers(result, "tests").values() if "counts" in answer]


def summary(result: Result) -> list[str]:
    found = calls_in(result)
    if not found:
        return []
    slower = [f"{call['package']}, {call['name']} ({ratio(call):.1f} times)" for call in found if ratio(call) > 1.05]
    told = f" Slower: {'; '.join(slower)}." if slower else ""
    median = harness.digits(statistics.median(map(ratio, found)))
    return [f"{len(found)} calls of {len({c['package'] for c in found})} packages take {median} times as long.{told}"]


def cells(args: Namespace) -> list[harness.Cell]:
    return [
        {"kind": kind, "package": package, "set": args.set}
        for package in PATCHES
        if not args.only or package in args.only
        for kind in ("calls", *(["tests"] if args.set == "usual" else []))
    ]


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PATCHES), help="packages; the others keep their figures")


SCRIPT = Script(
    file=__file__,
    text=__doc__,
    cells=cells,
    run_cell=run_cell,
    section=section,
    summary=summary,
    targets=targets,
    rounds={"quick": 1, "short": 1, "usual": 1},
    page=("docs/outside.md", "outside_backends"),
    brief=True,
    peers=(Peer("outside", ("torch",), lambda cell: True),),
    options=options,
    group=lambda cell: cell["package"],
    settings=lambda args: {"threads": 1},
)

if __name__ == "__main__":
    sys.exit(SCRIPT.main())
