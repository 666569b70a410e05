"""What the items of a stage are given: the device, the time that is left, and how a run of it is timed."""

import contextlib
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
OURS = ("tensorloop", "compiled", "cuBLAS", "kernel", "graph")  # words of warnings that a reader wants
FELL = ("is left to", "goes on another way", "is dropped")  # said where a loop or an operation runs a rung below
PRETENDED = "a pretended device has none"


@dataclass
class World:
    """One process of a stage."""

    folder: Path
    rehearsed: bool
    until: float
    """On `time.monotonic`, when the stage's time is up."""
    only: list[str] = field(default_factory=list)

    def left(self) -> float:
        return self.until - time.monotonic()

    def microseconds(self, run: Callable[[], object], runs: int = 20, warm: int = 3) -> float:
        """The median of a run, the device waited for."""
        if self.rehearsed:
            runs, warm = 1, 1
        for _ in range(warm):
            run()
        torch.cuda.synchronize()
        found = list[float]()
        while len(found) < runs and not (found and self.left() < 20):
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) * 1e6)
        return statistics.median(found)

    def ran(self, command: list[str], log: str = "", share: float = 1.0) -> tuple[int, str]:
        """The exit status and output of a program, kept in a file; it may take a share of the time that is left."""
        path = os.pathsep.join(str(ROOT / name) for name in ("", "cuda", "profiling"))
        told = os.environ | {"PYTHONPATH": path}
        where = self.folder / (log or "program.log")
        limit = max(1.0, (self.left() - 5) * share)
        with where.open("w+", errors="replace") as out:
            try:
                done = subprocess.run(
                    command, stdout=out, stderr=subprocess.STDOUT, timeout=limit, env=told, cwd=ROOT
                ).returncode
            except subprocess.TimeoutExpired:
                done = -1
                out.write(f"\nnot done after {limit:.0f} s\n")
            out.seek(0)
            text = out.read()
        if not log:
            where.unlink()
        return done, text


@contextlib.contextmanager
def kernels(wanted: bool) -> Iterator[None]:
    """Loops are made kernels meanwhile, or graphs."""
    before = os.environ.get("TENSORLOOP_PTX")
    os.environ["TENSORLOOP_PTX"] = "1" if wanted else "0"
    try:
        yield
    finally:
        del os.environ["TENSORLOOP_PTX"]
        if before is not None:
            os.environ["TENSORLOOP_PTX"] = before


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The warnings of a block that are ours, once it is done."""
    found = list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = [" ".join(str(w.message).split())[:300] for w in caught]
    found += sorted({text for text in texts if any(word in text for word in OURS)})


def fell(notes: list[str]) -> list[str]:
    """Those that say that something runs a rung below."""
    return [note for note in notes if any(word in note for word in FELL)]


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


Items = dict[str, Callable[[], dict[str, Any]]]
