"""The short set of every script here, one after the other: `make bench`, about fifteen minutes on two cores.

    python profiling/bench.py                         # all, and docs/benchmarks/short.md
    python profiling/bench.py --only regroup packed   # these alone; the others keep the figures of their last run
    python profiling/bench.py --jax-python PYTHON     # with the peers of peers/README.md
    python profiling/bench.py --report                # measures nothing: the page again, from the results

Results go to profiling/results/short/, beside those of the usual runs and never in their place. The page has
what was to be reached, with the figures of both. A script that fails is listed at the end, the others run all the
same, and the exit status is 1.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import captions, names
from running import harness
from running.script import Result, Target

FOLDER = Path(__file__).resolve().parent
SCRIPTS = (
    "memory_curve",
    "loop_overhead",
    "tensor_array",
    "loops",
    "packed",
    "regroup",
    "attention",
    "beam",
    "compiled",
    "bodies",
    "hf",
    "programs",
    "memory_tools",
    "import_time",
    "associative",
    "torch_loops",
)
PEERS = {
    "jax": "jax and equinox",
    "tf": "tensorflow",
    "fbgemm": "fbgemm_gpu",
    "hf": "transformers",
    "torchdiffeq": "torchdiffeq",
    "snn": "torch, snntorch, norse and spikingjelly",
}
PAGE, MARKER = "docs/benchmarks/short.md", "bench"


class Stopped(Exception):
    """By Ctrl-C; what is still to be run is its argument."""


def run(name: str, out: Path, report: bool = False) -> int:
    """The exit status of a script's short set, or of its report; its progress bar is on our standard error."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--report" if report else "--short"]
    if report or out != harness.results(name, short=True):
        command += ["--out", str(out)]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode


def run_all(scripts: Sequence[str], folder: Path, report: bool = False) -> list[str]:
    """Runs them, and gives a line for each that failed."""
    failed, start = [], time.monotonic()
    for number, name in enumerate(scripts, 1):
        print(f"[{number}/{len(scripts)}] {name}, after {time.monotonic() - start:.0f} s", file=sys.stderr)
        try:
            status = run(name, folder / f"{name}.json", report)
        except KeyboardInterrupt as error:
            raise Stopped(scripts[number - 1 :]) from error
        if status:
            failed.append(f"{name}: exit status {status}")
    print(f"{len(scripts)} scripts in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return failed


def read(path: Path) -> Result | None:
    return json.loads(path.read_text()) if path.is_file() else None


def section(folder: Path, failed: Sequence[str]) -> str:
    """Of every script that has results of a short set: the figures of that, beside those of its usual run."""
    parts = [f"Not finished, so their figures are missing or older: {'; '.join(failed)}."] if failed else []
    found = {name: short for name in SCRIPTS if (short := read(folder / f"{name}.json"))}
    judged = [met for short in found.values() for given in short["targets"] if (met := Target(**given).met) is not None]
    parts.append(f"In the short set {sum(judged)} of {len(judged)} targets are met. A column is one run.")
    for name, short in found.items():
        parts += [f"### {name}", *of_script(short, read(harness.results(name)))]
    return "\n\n".join(parts)


def of_script(short: Result, usual: Result | None) -> list[str]:
    before = {given["what"]: Target(**given) for given in (usual or {}).get("targets", [])}
    rows = []
    for target in (Target(**given) for given in short["targets"]):
        what, value, bound, holds = target.row()
        if target.value is not None:
            other = before.get(what)
            rows.append([what, bound, f"{value} {holds}".strip(), other.row()[1] if other else "-"])
    command = f" Command: `{names.worded(short['about']['command'])}`."
    beside = f" Beside it: `{names.worded(usual['about']['command'])}`, {with_which(usual['about'])}." if usual else ""
    lines = [captions.line(short) + command + beside, harness.table(["", "bound", "short set", "usual run"], rows)]
    missing = harness.failures(short["entries"])
    return [*lines, *([f"No figure: {len(missing)} cells failed, see the file of results."] if missing else [])]


def with_which(about: dict[str, Any]) -> str:
    """Date, version and machine of the usual run, which need not be those of the short set."""
    return f"{about['date']}, tensorloop {about['versions']['tensorloop']}, {about['machine']['processor']}"


def arguments(given: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="scripts to run")
    parser.add_argument("--report", action="store_true", help="measure nothing: targets and page from the results")
    parser.add_argument("--out", type=Path, help="a folder for all results, tables and pictures; no document changes")
    for name, packages in PEERS.items():
        parser.add_argument(f"--{name}-python", help=f"a Python with {packages}; or set {name.upper()}_PYTHON")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    for name in PEERS:
        if python := getattr(args, f"{name}_python"):
            os.environ[f"{name.upper()}_PYTHON"] = python  # the scripts inherit it
    folder = args.out.resolve() if args.out else harness.results("", short=True).parent
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in args.only if not args.report or (folder / f"{name}.json").is_file()]
    try:
        failed = run_all(chosen, folder, args.report)
    except Stopped as stopped:
        (left,) = stopped.args
        print(f"stopped; the documents are as they were. To go on: --only {' '.join(left)}", file=sys.stderr)
        return 130
    text = section(folder, failed)
    if args.out:
        (folder / "bench.md").write_text(text + "\n")
    elif not harness.replace_between(harness.ROOT / PAGE, MARKER, text):
        print(f"{PAGE} is unchanged: it lacks the lines of the marker {MARKER}", file=sys.stderr)
    print(text)
    for line in failed:
        print("failed:", line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
