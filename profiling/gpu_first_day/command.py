"""The first half hour on a GPU: facts, proofs, faults, times, tests, sanitizer, verdict; each stage by itself.

    PYTHONPATH=.:cuda python profiling/gpu.py first-day                    # all stages, in folder build/first_day
    PYTHONPATH=.:cuda python profiling/gpu.py first-day facts proofs --out FOLDER
    PYTHONPATH=.:cuda python profiling/gpu.py first-day --rehearse         # on a pretended device: to see that it runs

Every stage is a process that has nine minutes. What it finds is kept item by item, in FOLDER/STAGE.json, so that the
same command goes on where time ran out, where a process was killed, or where the device was lost. FOLDER/first_day.md
is the page to read. Nothing has to be installed but torch, numpy, tqdm, numba and its llvmlite; pytest and hypothesis
for `tests`; numba-cuda, ptxas and compute-sanitizer where they are there.
"""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_first_day.kept import ERROR, Kept
from gpu_first_day.page import page
from gpu_first_day.verdict import verdict
from running import partial

import tensorloop

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("facts", "proofs", "faults", "times", "tests", "sanitize")
VERDICT = "verdict"
SECONDS = 540.0


def main(given: Sequence[str]) -> int:
    """Runs the stages asked for, and writes verdict and page of all that the folder has."""
    args = arguments(given)
    args.out.mkdir(parents=True, exist_ok=True)
    identity = identity_of(args.rehearse)
    if other := another_run(args.out, identity):
        print(other, file=sys.stderr)
        return 2
    for stage in STAGES:
        if stage in args.stages:
            run(stage, args)
            write(args.out, identity)
    told = write(args.out, identity)
    print(f"{told['answer']}; the page is {args.out / 'first_day.md'}")
    return 0


def arguments(given: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="gpu.py first-day", description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    every = (*STAGES, VERDICT)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(every)}; all without one")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "first_day", help="the folder of results")
    parser.add_argument("--rehearse", action="store_true", help="on a pretended device, which has no times")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"a stage's time; {SECONDS:.0f}")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="items whose names have one of these")
    parser.add_argument("--retry", action="store_true", help="run what failed again, too")
    parser.add_argument("--anew", action="store_true", help="forget what the folder has")
    args = parser.parse_args(given)
    if unknown := [stage for stage in args.stages if stage not in every]:
        parser.error(f"there is no stage {', '.join(unknown)}; expected some of {', '.join(every)}")
    if args.seconds <= 0:
        parser.error(f"--seconds is {args.seconds:g}; expected more than 0")
    args.stages, args.out = args.stages or list(every), args.out.resolve()
    if args.anew and args.out.is_dir():
        for path in (*(args.out / f"{stage}.json" for stage in STAGES), args.out / "run.json"):
            path.unlink(missing_ok=True)
    return args


# ---- one run ----


def identity_of(rehearsed: bool) -> dict[str, Any]:
    """What has to be the same for results to be of one run."""
    found = {"rehearsed": rehearsed, "torch": torch.__version__, "python": platform.python_version()}
    found["devices"] = "pretended" if rehearsed else devices()
    return found | {"tensorloop": tensorloop.__version__, "sources": partial.sources()}


def devices() -> str:
    """The names of the GPUs, without making this process a user of them."""
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not there"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def another_run(folder: Path, identity: dict[str, Any]) -> str:
    """Why results of this run may not join those in the folder; notes whose they are where there are none."""
    path = folder / "run.json"
    if not path.is_file():
        path.write_text(json.dumps(identity, indent=1) + "\n")
        return ""
    old = json.loads(path.read_text())
    differs = [key for key in identity if old.get(key) != identity[key]]
    if not differs:
        return ""
    return f"{folder} has results of another run ({', '.join(differs)}): name another folder by --out, or say --anew"


# ---- one stage ----


def run(stage: str, args: Namespace) -> None:
    """Processes, one after the other where one is lost, until every item has run or the time is up."""
    kept, until = Kept.of(args.out, stage), time.monotonic() + args.seconds
    kept.failed = ""
    kept.save()
    if args.retry:
        kept.retry()
    before = kept.seconds
    while True:
        had, status, error = set(kept.rows), *process(stage, args, until - time.monotonic())
        kept = Kept.of(args.out, stage)
        ended = ended_by(status, args.seconds)
        if kept.running:  # the process has gone in the middle of it
            kept.end({ERROR: f"the process ended here: {ended}", "process": kept.processes})
        elif status and set(kept.rows) == had:
            kept.failed = f"{ended}: {error}"
        kept.seconds = before + args.seconds - (until - time.monotonic())
        kept.save()
        if status == 0 or kept.failed or kept.whole or until - time.monotonic() < 5:
            return


def process(stage: str, args: Namespace, seconds: float) -> tuple[int | None, str]:
    """The exit status, None where it was stopped; and the last line of its errors, all of which are kept."""
    path = os.pathsep.join(
        [*(str(ROOT / name) for name in ("", "cuda", "profiling")), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "gpu_first_day.inside", stage, str(args.out), f"{seconds:.1f}"]
    command += [*(["--rehearse"] if args.rehearse else []), *(["--only", *args.only] if args.only else [])]
    log = args.out / f"{stage}.log"
    with log.open("w", errors="replace") as errors:
        told = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1"}
        # A session of its own: what a stage has started ends with it.
        started = subprocess.Popen(command, stderr=errors, env=told, cwd=ROOT, start_new_session=True)
        try:
            status = started.wait(seconds + 5)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(started)
    return status, (log.read_text().strip().splitlines() or ["no message"])[-1]


def stop(started: "subprocess.Popen[Any]") -> None:
    """With everything that it has started."""
    try:
        os.killpg(started.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    started.wait()


def ended_by(status: int | None, seconds: float) -> str:
    if status is None:
        return f"the stage's {seconds:.0f} s were over"
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def write(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The verdict of what there is, and the page."""
    found = {stage: Kept.of(folder, stage) for stage in STAGES}
    told = verdict(found, identity["rehearsed"])
    (folder / "verdict.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "first_day.md").write_text(page(identity, found, told))
    return told
