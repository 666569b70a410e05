"""The fuzzer itself: programs follow from their seeds, what is wrong is found, and a few programs of each kind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tensorloop.loop.compiled.run.plan import plans
from tests.device import built
from tests.fuzz import programs, shrink, triage
from tests.fuzz.check import check, differences, script
from tests.fuzz.run import read

RUN = Path(__file__).with_name("run.py")
SEEDS = 10


def fuzz(out: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Runs the command in a process without other threads; its results."""
    command = [sys.executable, "-W", "ignore", str(RUN), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, sorted(read(out), key=lambda found: found["seed"])


def test_the_same_seed_is_the_same_program():
    texts = [programs.program(seed) for seed in range(20)]
    assert texts == [programs.program(seed) for seed in range(20)]
    assert len(set(texts)) == 20
    for text in texts:
        compile(script(text), "program", "exec")


def test_a_text_does_not_change_by_itself():
    text = programs.program(1)
    again = subprocess.run([sys.executable, str(RUN), "--source", "1"], capture_output=True, text=True, check=True)
    assert text in again.stdout


def test_some_programs(tmp_path: Path):
    code, found = fuzz(tmp_path, "--programs", str(SEEDS), "--seed", "0")
    assert not [(x["seed"], x["finds"]) for x in found if x["finds"]]
    assert [x["seed"] for x in found] == [*range(SEEDS)]
    assert code == 0
    assert sum(x["compiled"] for x in found) >= 0.6 * SEEDS


def test_some_programs_on_a_pretended_device(tmp_path: Path):
    if built.why_not():
        return
    code, found = fuzz(tmp_path, "--device", "--programs", "3", "--seed", "0")
    assert (code, [x["finds"] for x in found]) == (0, [[]] * 3)
    assert sum(x["compiled"] and x["outcome"] == "same" for x in found) >= 2  # an error in both is no agreement


def test_faults_are_found_and_the_run_goes_on(tmp_path: Path):
    done = json.dumps({"seed": 5, "outcome": "same", "finds": []})
    (tmp_path / "results-0.jsonl").write_text(f'{done}\n{{"seed": 6, "outc')  # the last line was cut short
    code, found = fuzz(tmp_path, "--programs", "4", "--seed", "3", "--plant", "3:crash,4:wrong")
    assert code == 1
    assert [x["seed"] for x in found] == [3, 4, 5, 6]
    assert [x["outcome"] for x in found[:2]] == ["crash", "different"]
    assert "SIGABRT" in found[0]["finds"][0]
    assert "random" in found[1]["finds"][0]
    assert ["seconds" in x for x in found] == [True, True, False, True]


WRONG = """
def run(compile, call):
    h1, w2 = make(3, seed=1, grad=True), make(3, seed=2)
    def body(carry, x):
        h0, = carry
        v1 = h0 * 1.5
        v2 = v1 * (1 + compile * 0.1)
        return (v2.sin() + w2,), (v1, )
    carry, ys = tl.scan(body, (h1,), length=3)
    return {"carry": carry, "ys": ys}, {"h1": h1}

CALLS, LOSS, SECOND = [0, 1], "", False
"""


def test_another_value_is_found_and_its_program_made_smaller():
    plans.clear()  # those of other tests of this process
    verdict = check(WRONG)
    assert verdict.outcome == "different"
    assert any("gradient of h1" in line for line in verdict.finds)
    assert not verdict.compiled

    def judge(text: str) -> str:
        found = check(text).finds
        return triage.kind(found[0]) if found else ""

    smaller = shrink.shrink(WRONG, judge, seconds=10)
    assert judge(smaller) == judge(WRONG)
    assert "compile" in smaller
    assert "grad=True" not in smaller


def test_errors_are_compared_by_type():
    assert not [*differences(ValueError("a"), ValueError("b"), 0)]
    assert len([*differences(ValueError("a"), {}, 0)]) == 1


def test_an_error_in_a_line_whose_value_nothing_uses_is_none_of_a_compiled_loop():
    failing = "v3 = torch.linalg.inv(v2.outer(v2) * 0)"
    text = WRONG.replace("compile * 0.1", "0").replace("return (v2.sin()", f"{failing}\n        return (v2.sin()")
    assert check(text).outcome == "same"
    used = check(text.replace("(v1, )", "(v1, v3)"))
    assert (used.outcome, used.finds) == ("raises", [])


def test_finds_are_grouped():
    finds = [
        "call 0: ys[0]: value, eager 1.5, compiled nan (1 of 3)",
        "call 1: ys[1]: value, eager 2, compiled nan (2 of 3)",
    ]
    found = [{"seed": i, "finds": [line]} for i, line in enumerate(finds)] + [{"seed": 9, "finds": []}]
    assert list(triage.grouped(found).values()) == [[0, 1]]
