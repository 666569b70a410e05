"""Random loops with effects: programs follow from their seeds, what is wrong is found, and some of each kind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import effects_programs
from tests.fuzz.effects_check import FINDS, check, script
from tests.fuzz.planted import Failing, Plain
from tests.fuzz.run import read

COMMAND = Path(__file__).with_name("effects.py")
ROOT = COMMAND.parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'cuda'}"} | os.environ | {"OMP_NUM_THREADS": "1"}
FROM, FEWER = 1800, 80  # seeds among which are all families and modes: so few do for most changes


def effects(out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs the command in a process without other threads; its results."""
    command = [sys.executable, "-W", "ignore", str(COMMAND), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, sorted(read(out), key=lambda found: found["seed"])


def text(seed: int) -> str:
    return effects_programs.program(seed).text()


def test_the_same_seed_is_the_same_program():
    texts = [text(seed) for seed in range(200)]
    assert texts == [text(seed) for seed in range(200)]
    assert len(set(texts)) == 200


def test_a_program_is_a_script(tmp_path: Path):
    (tmp_path / "program.py").write_text(script(text(0)))
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert "call 0: state" in done.stdout


@pytest.mark.parametrize(("seed", "programs"), [(FROM, FEWER), pytest.param(0, 300, marks=pytest.mark.extended)])
def test_some_programs(tmp_path: Path, seed: int, programs: int):
    code, found = effects(tmp_path, "--seed", str(seed), "--programs", str(programs), "--shards", "2")
    assert [x["seed"] for x in found] == [*range(seed, seed + programs)]
    assert len({mode for x in found for mode in x["modes"]}) == 11
    assert len({family for x in found for family in x["families"]}) == 22
    # What changes between a loop and its backward is seen of closed-over names and attributes alone: docs/limits.md.
    finds = [x for x in found if x["finds"] and "backward" not in x["modes"]]
    assert not [(x["seed"], x["families"], x["finds"][0]) for x in finds]
    assert code in (0, 1)
    pure = [x for x in found if x["pure"]]
    assert sum(x["ways"]["checkpoints"] == "right" for x in pure) >= 0.85 * len(pure)
    assert sum(x["ways"]["compile"] == "right" for x in pure) >= 0.8 * len(pure)


@pytest.mark.parametrize("programs", [50, pytest.param(150, marks=pytest.mark.extended)])
def test_python_loops_are_right(tmp_path: Path, programs: int):
    """Nothing of a program differs from run to run."""
    code, found = effects(tmp_path, "--programs", str(programs), "--plant", "all:python")
    assert (code, {x["outcome"] for x in found}) == (0, {"right"})


@pytest.mark.parametrize(("seed", "programs"), [(FROM, 50), pytest.param(0, 150, marks=pytest.mark.extended)])
def test_effects_that_nothing_sees_are_found(tmp_path: Path, seed: int, programs: int):
    """Loops that run a step once more, as a look does that neither sees effects nor takes them back."""
    _, found = effects(tmp_path, "--seed", str(seed), "--programs", str(programs), "--plant", "all:blind")
    states = {"attribute", "item", "grown", "container", "taken", "iterator", "random"}
    stateful = [x for x in found if "feedback" in x["modes"] and {*x["families"]} & states]
    assert sum(bool(x["finds"]) for x in stateful) >= 0.8 * len(stateful)  # not where only the condition has state
    assert not [x["seed"] for x in found if x["pure"] and x["finds"]]


@pytest.mark.parametrize(
    ("how", "verdict"),
    [("base", "inner"), ("inner", "inner"), ("unnamed", "inner"), ("refused", "refused"), ("wrong", "silent")],
)
def test_how_a_loop_ends(how: str, verdict: str):
    loops = Plain(looks=True) if how == "wrong" else Failing(how)
    found = check(_COUNTS, {"compile": (loops, {})})
    assert found["ways"] == {"compile": verdict}
    assert bool(found["finds"]) == (verdict in FINDS)


_COUNTS = """
n = 0
def body(h, x):
    global n
    n += 1
    return h + n, h
def program(loops, report, **options):
    carry, ys = loops.scan(body, make(3, seed=1), length=4)
    report(carry, ys, [], lambda: [n])
"""


def test_a_crash_and_a_hang_are_found_and_the_run_goes_on(tmp_path: Path):
    code, found = effects(tmp_path, "--programs", "3", "--seed", "3", "--plant", "3:crash,4:hang", "--seconds", "0.5")
    assert code == 1
    assert [x["outcome"] for x in found][:2] == ["crash", "hang"]
    assert "SIGABRT" in found[0]["finds"][0]
    assert found[2]["seed"] == 5
    _, again = effects(tmp_path, "--programs", "4", "--seed", "3")
    assert again[:3] == found
    assert len(again) == 4
