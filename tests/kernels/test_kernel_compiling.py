"""What is said when kernels are compiled for long, to whom, and how often. No clock decides anything here."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from numba.core import event as events

from tensorloop.kernels.cpu import compiling as compiled
from tensorloop.kernels.cpu import rows

ROOT = Path(__file__).parents[2]


def compiling(function: Any, start: bool, folder: str | None = "/a/folder") -> events.Event:
    dispatcher = SimpleNamespace(py_func=function, stats=SimpleNamespace(cache_path=folder))
    status = events.EventStatus.START if start else events.EventStatus.END
    return events.Event("numba:compile", status, data={"dispatcher": dispatcher})


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    """What the library's logger said (pytest's own plugin for that is off: it costs each test a millisecond)."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("tensorloop")
    handler.emit = lambda record: records.append(record)
    level = logger.level
    logger.setLevel(logging.WARNING)  # an example in the documents turns it off
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compiled, "perf_counter", clock)
    return clock


def compile_for(notice: compiled.Notice, clock: Clock, seconds: float, function: Any, **options: Any) -> None:
    notice.notify(compiling(function, True, **options))
    clock.now += seconds
    notice.notify(compiling(function, False, **options))


PAD, PACK = (getattr(rows, name).py_func for name in ("_pad", "_pack"))


def test_a_slow_compile_is_told_once(clock: Clock, told: list[logging.LogRecord]) -> None:
    notice = compiled.Notice()
    compile_for(notice, clock, 0.6, PACK)
    assert not told
    compile_for(notice, clock, 0.7, PAD)
    compile_for(notice, clock, 30, PACK)
    assert [record.getMessage() for record in told] == [
        "tensorloop: kernels are compiled when first used, 1.3 s so far, the last of them "
        "tensorloop.kernels.cpu.rows._pad; more may follow. They are kept for later processes in /a/folder"
    ]
    assert told[0].name == "tensorloop"
    assert told[0].levelno == logging.WARNING


def test_where_nothing_is_kept(clock: Clock, told: list[logging.LogRecord]) -> None:
    compile_for(compiled.Notice(), clock, 13, PAD, folder=None)
    assert told[0].getMessage().endswith("They are not kept: there is no folder to write to")


def test_quick_ones_and_those_of_others_are_not_told(clock: Clock, told: list[logging.LogRecord]) -> None:
    notice = compiled.Notice()
    compile_for(notice, clock, 0.9, PAD)
    compile_for(notice, clock, 60, Path.joinpath)  # somebody else's function
    assert not told


def test_what_is_compiled_inside_counts_once(clock: Clock, told: list[logging.LogRecord]) -> None:
    notice = compiled.Notice()
    notice.notify(compiling(PAD, True))
    compile_for(notice, clock, 0.8, PACK)
    notice.notify(compiling(PAD, False))
    assert notice.spent == pytest.approx(0.8)
    assert not told


SCRIPT = """
import sys, logging, tensorloop, torch
from tensorloop.kernels.cpu import compiling
compiling.PATIENCE = 0.0
if "quiet" in sys.argv:
    logging.getLogger("tensorloop").setLevel(logging.ERROR)
tensorloop.PackedTensor(torch.ones(3, 2), [1, 2]).softmax(1)
"""


def run(cache: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "cuda")])
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    return done.stderr


def test_a_process_that_compiles_says_so_and_the_next_one_loads(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said.count("\n") == 1
    assert said.startswith("tensorloop: kernels are compiled when first used, ")
    assert f"They are kept for later processes in {tmp_path}" in said
    assert run(tmp_path) == ""


@pytest.mark.extended
def test_it_can_be_turned_off(tmp_path: Path) -> None:
    assert run(tmp_path, "quiet") == ""
