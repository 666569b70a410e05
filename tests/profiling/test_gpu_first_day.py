"""The first day on a GPU: its verdict, and that no stage's end takes anything from another one or from itself.

What runs in processes of its own is rehearsed on the pretended device; all of every stage runs by
`profiling/gpu.py first-day --rehearse`.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import built
from tests.support.profiling_modules import FOLDER, profiling_modules

ROOT = FOLDER.parent
NAMES = ("command", "inside", "kept", "page", "sanitize", "verdict", "world")
needs_device = pytest.mark.skipif(bool(built.why_not()), reason=built.why_not())
LOOPS = ("rnn", "lstm", "gru")
ODD = """
import os, signal, time

ANYWHERE = ("fine", "raises", "dies", "loses the device", "after", "hangs")

def raises():
    raise ValueError("of its own")

def loses():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def items(world):
    return {
        "fine": lambda: {"said": "yes"},
        "raises": raises,
        "dies": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "loses the device": loses,
        "after": lambda: {"said": "yes"},
        "hangs": lambda: time.sleep(1000),
    }
"""


@pytest.fixture(scope="module")
def day() -> Iterator[Any]:
    with profiling_modules(*NAMES) as modules:
        yield Namespace(**modules)


# ---- the verdict


@pytest.fixture
def found(day: Any, tmp_path: Path) -> dict[str, Any]:
    """Results of which all speak for kernels."""
    rows: dict[str, dict[str, Any]] = {
        "proofs": {f"{way} float32 lstm": {"fell": []} for way in ("graphs", "kernels")},
        "times": {
            f"{loop} {way}": {"ms": ms, "fell": [], "process": 1, "steps": 8}
            for loop in LOOPS
            for way, ms in (("eager", 9.0), ("compiled", 2.0), ("kernels", 1.0))
        },
        "sanitize": {f"{tool}: {what}": {} for tool in day.sanitize.TOOLS for what in ("planted", "ours")},
    }
    return {
        stage: day.kept.Kept(tmp_path / f"{stage}.json", rows.get(stage, {}), list(rows.get(stage, {})), processes=1)
        for stage in day.command.STAGES
    }


def test_kernels_become_the_default_where_all_holds(day: Any, found: dict[str, Any]) -> None:
    told = day.verdict.verdict(found, False)
    assert (told["answer"], told["against"], told["missing"]) == (day.verdict.YES, [], [])
    assert (told["median"], told["worst"]) == (0.5, 0.5)


Change = Callable[[dict[str, Any]], object]
AGAINST: dict[str, Change] = {
    "proofs: kernels float32 lstm: wrong": lambda f: f["proofs"].rows["kernels float32 lstm"].update(error="wrong"),
    "proofs: graphs float32 lstm: is left to torch": lambda f: (
        f["proofs"].rows["graphs float32 lstm"].update(fell=["is left to torch"])
    ),
    "sanitize: racecheck: ours: a race": lambda f: f["sanitize"].rows["racecheck: ours"].update(error="a race"),
    "times: the worst, gru, is 1.15 of graphs": lambda f: f["times"].rows["gru kernels"].update(ms=2.3),
    "times: the median is 0.85 of graphs": lambda f: [
        f["times"].rows[f"{loop} kernels"].update(ms=1.7) for loop in LOOPS[:2]
    ],
}
MISSING: dict[str, Change] = {
    "proofs: has not run": lambda f: (f["proofs"].names.clear(), f["proofs"].rows.clear()),
    "proofs: 1 of 2 not run": lambda f: f["proofs"].rows.pop("kernels float32 lstm"),
    "proofs: kernels float32 lstm: no device": lambda f: (
        f["proofs"].rows["kernels float32 lstm"].update(absent="no device")
    ),
    "sanitize: memcheck: ours: compute-sanitizer is not": lambda f: (
        f["sanitize"].rows["memcheck: ours"].update(absent="compute-sanitizer is not on this machine")
    ),
    "sanitize: memcheck: planted: not reported": lambda f: (
        f["sanitize"].rows["memcheck: planted"].update(error="not reported")
    ),
    "sanitize: no such import": lambda f: setattr(f["sanitize"], "failed", "no such import"),
    "times: 1 of 9 not run: gru kernels": lambda f: f["times"].rows.pop("gru kernels"),
    "times: gru: out of memory": lambda f: f["times"].rows.update({"gru kernels": {"error": "out of memory"}}),
    "times: gru: goes on another way": lambda f: f["times"].rows["gru kernels"].update(fell=["goes on another way"]),
    "times: gru: its two times are of two processes": lambda f: f["times"].rows["gru kernels"].update(process=2),
    "times: no loop has a time": lambda f: [f["times"].rows[f"{x} kernels"].update(refused="large") for x in LOOPS],
}


@pytest.mark.parametrize("said", AGAINST)
def test_what_speaks_against_kernels_keeps_them_opt_in(day: Any, found: dict[str, Any], said: str) -> None:
    AGAINST[said](found)
    told = day.verdict.verdict(found, False)
    assert told["answer"] == day.verdict.NO
    assert day.verdict.verdict(found, True)["answer"] == day.verdict.REHEARSAL
    assert len(told["against"]) == 1
    assert told["against"][0].startswith(said)


@pytest.mark.parametrize("said", MISSING)
def test_what_is_missing_is_named_and_is_no_yes(day: Any, found: dict[str, Any], said: str) -> None:
    MISSING[said](found)
    told = day.verdict.verdict(found, False)
    assert told["answer"] == day.verdict.OPEN
    assert [text for text in told["missing"] if text.startswith(said)] == told["missing"]


def test_a_loop_that_a_bound_keeps_from_being_a_kernel_is_not_compared(day: Any, found: dict[str, Any]) -> None:
    found["times"].rows["gru kernels"].update(refused="too large", ms=2.5)
    told = day.verdict.verdict(found, False)
    assert (told["answer"], set(told["ratios"])) == (day.verdict.YES, {"rnn", "lstm"})


def test_the_page_says_what_was_run_where_before_its_tables(day: Any, found: dict[str, Any]) -> None:
    found["facts"].rows.update(device={"said": "a card"}, versions={"LLVM": "22.1.0"}, tools={"ncu": "not there"})
    found["proofs"].rows["kernels float32 lstm"].update(error="wrong")
    identity = {"rehearsed": False, "torch": "2.11", "python": "3.12", "tensorloop": "1", "sources": "abc"}
    text = day.page.page(identity, found, day.verdict.verdict(found, False))
    answer, where, proofs = (
        text.index(x) for x in ("**PTX stays opt-in.**", "a card. tensorloop 1, torch 2.11", "## Proofs")
    )
    assert answer < where < proofs
    assert "LLVM 22.1.0" in text
    assert "- as kernels float32: 0 of 1 right and on no lower rung" in text
    assert "- kernels float32 lstm: **wrong**" in text
    assert "| gru | 8 | 9.000 | 2.000 | 1.000 |" in text
    assert "Tools that are not there: ncu." in text


# ---- processes


def args_of(day: Any, folder: Path, *more: str) -> Any:
    return day.command.arguments(["--out", str(folder), *more])


def odd_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = ODD) -> None:
    """A stage of this test's."""
    (tmp_path / "gpu_first_day").mkdir()
    (tmp_path / "gpu_first_day" / "odd.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.extended
def test_what_ends_a_process_costs_one_item(day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, a crash, a lost device and an item that never ends: the others have run, and a resumed run goes on."""
    odd_stage(tmp_path, monkeypatch)
    day.command.run("odd", args_of(day, tmp_path, "--seconds", "45"))
    kept = day.kept.Kept.of(tmp_path, "odd")
    assert kept.errors == {
        "raises": "ValueError: of its own",
        "dies": "the process ended here: SIGSEGV",
        "loses the device": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "hangs": "the process ended here: the stage's 45 s were over",
    }
    assert [kept.rows[name]["process"] for name in ("fine", "dies", "loses the device", "after")] == [1, 1, 2, 3]
    assert kept.whole
    assert 40 < kept.seconds < 60
    day.command.run("odd", args_of(day, tmp_path))
    assert day.kept.Kept.of(tmp_path, "odd").rows == kept.rows  # nothing runs twice
    (tmp_path / "gpu_first_day" / "odd.py").write_text(ODD.replace("time.sleep(1000)", '{"said": "now"}'))
    day.command.run("odd", args_of(day, tmp_path, "--retry", "--only", "hangs"))
    assert day.kept.Kept.of(tmp_path, "odd").rows["hangs"]["said"] == "now"


def test_a_stage_that_does_not_begin_says_why(day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd_stage(tmp_path, monkeypatch, "import no_such_module")
    day.command.run("odd", args_of(day, tmp_path))
    failed = day.kept.Kept.of(tmp_path, "odd").failed
    assert failed == "exit status 1: ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_every_item_says_so(day: Any, tmp_path: Path) -> None:
    assert day.command.main(["faults", "--out", str(tmp_path)]) == 0
    kept = day.kept.Kept.of(tmp_path, "faults")
    assert len(kept.rows) > 10
    assert set(kept.absent.values()) == {"torch sees no CUDA device"}
    assert set(kept.absent) == set(kept.names)
    assert "torch sees no CUDA device" in (tmp_path / "first_day.md").read_text()


@pytest.mark.extended
@needs_device
def test_a_stage_is_rehearsed(day: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the folder that is named, which then refuses another run's results."""
    options = ["proofs", "--only", "float64 lstm_cell", "--out", str(tmp_path)]
    assert day.command.main(["--rehearse", *options]) == 0
    kept = day.kept.Kept.of(tmp_path, "proofs")
    assert {name: row["said"] for name, row in kept.rows.items()} == {
        "graphs float64 lstm_cell": "right",
        "kernels float64 lstm_cell": "right",
    }
    page = (tmp_path / "first_day.md").read_text()
    assert "**A rehearsal on a pretended device.**" in page
    assert "- as kernels float64: 1 of 1 right and on no lower rung" in page
    told = json.loads((tmp_path / "verdict.json").read_text())
    assert told["answer"] == day.verdict.REHEARSAL
    assert f"proofs: {len(kept.left)} of {len(kept.names)} not run" in str(told["missing"])  # --only is no whole stage
    assert day.command.main(options) == 2
    assert "has results of another run (rehearsed, devices): name another folder by --out" in capsys.readouterr().err


@needs_device
@pytest.mark.extended
@pytest.mark.parametrize(
    ("stage", "only"),
    [("facts", ""), ("faults", "in turn"), ("times", "RNNs"), ("tests", "test_gpu_compiled,"), ("sanitize", "")],
)
def test_every_stage_is_rehearsed(day: Any, tmp_path: Path, stage: str, only: str) -> None:
    """By the command that one types."""
    command = [sys.executable, str(FOLDER / "gpu.py"), "first-day", stage, "--rehearse", "--out", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "cuda")])
    more = ["--only", only] if only else []
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    kept = day.kept.Kept.of(tmp_path, stage)
    assert kept.rows
    assert kept.whole or only
    assert kept.errors == {}
    assert f"## {stage.capitalize()}" in (tmp_path / "first_day.md").read_text()


@needs_device
@pytest.mark.extended
def test_what_the_sanitizer_runs_launches_kernels() -> None:
    command = [sys.executable, "-m", "gpu_first_day.sanitized", "ours", "2", "--rehearse"]
    path = os.pathsep.join(str(ROOT / name) for name in ("", "cuda", "profiling"))
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert [line for line in lines if line.startswith("ran ")] == ["ran lstm", "ran lstm_cell"]
    assert all(int(line.split()[1]) > 1 for line in lines if line.startswith("launches "))


# ---- the sanitizer

HAZARDS = "2 hazards displayed (0 errors, 2 warnings)"
CLEAN = "========= ERROR SUMMARY: 0 errors"
SAID: dict[str, tuple[str, int, dict[str, str]]] = {
    "clean": (f"ran lstm\nlaunches 3\n{CLEAN}", 0, {"said": f"{CLEAN.strip('= ')}; 1 cases, 3 launches of ours"}),
    "found": (
        "ran lstm\nlaunches 3\n========= ERROR SUMMARY: 2 errors",
        9,
        {"error": "exit status 9, 3 launches of ours: ERROR SUMMARY: 2 errors"},
    ),
    "hazards": (
        f"ran lstm\nlaunches 3\n========= RACECHECK SUMMARY: {HAZARDS}",
        0,
        {"error": f"exit status 0, 3 launches of ours: RACECHECK SUMMARY: {HAZARDS}"},
    ),
    "nothing launched": (CLEAN, 0, {"error": f"exit status 0, 0 launches of ours: {CLEAN.strip('= ')}"}),
    "refused": (
        "========= Error: Device not supported",
        1,
        {"absent": "compute-sanitizer does not work here: Error: Device not supported"},
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_the_sanitizer_says_is_read(day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    text, status, expected = SAID[case]
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    world = day.world.World(tmp_path, False, time.monotonic() + 60)
    row = day.sanitize.ran(world, "memcheck", "ours")
    assert expected.items() <= row.items()
    planted = day.sanitize.ran(world, "memcheck", "planted")
    assert (planted.get("said") == "reported") == (case in ("found", "hazards"))
    if case in ("clean", "nothing launched"):
        assert planted["error"] == f"memcheck did not report the planted fault: {CLEAN}"


def test_a_missing_sanitizer_is_named(day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    world = day.world.World(tmp_path, False, time.monotonic() + 60)
    rows = [run() for run in day.sanitize.items(world).values()]
    assert rows == [{"absent": "compute-sanitizer is not on this machine"}] * 6
