"""The script that breaks lines: what it changes, what it takes for caught; and that its page shows its results."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiling_modules import profiling_modules

ROOT = Path(__file__).parents[2]
SOURCE = '''
def f(x, y=0):
    """One."""
    if x < 1:
        raise ValueError(f"{x + 2} is less")
    z = x * 2
    x = x + z
    g.seen = x
    g.call(x)
    return x is None and y
'''


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with profiling_modules("mutations") as modules:
        yield modules["mutations"]


def test_mutants_of_a_source(script: Any):
    found = {mutant.what: mutant.apply(SOURCE) for mutant in script.mutants("f.py", SOURCE)}
    assert sorted(found) == [
        "0 -> 1",
        "1 -> 2",
        "2 -> 3",
        "Add -> Sub",
        "And -> Or",
        "Is -> IsNot",
        "Lt -> GtE",
        "Lt -> LtE",
        "Mult -> Add",
        "condition negated",
        "without: g.call(x)",
        "without: g.seen = x",
        "without: x = x + z",
    ]
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for text in found.values():
        assert sum(a != b for a, b in zip(plain, text.splitlines(), strict=True)) == 1
    assert "if x >= 1:" in found["Lt -> GtE"]
    assert "return x is None or y" in found["And -> Or"]


def test_a_seed_draws_the_same_mutants_again(script: Any):
    room = script.ROOMS["undo"]
    keys = [mutant.key for mutant in script.draw(room, 9, 1)]
    assert keys == [mutant.key for mutant in script.draw(room, 9, 1)]
    assert keys != [mutant.key for mutant in script.draw(room, 9, 2)]
    assert len(set(keys)) == 9


def test_every_room_has_files_and_tests_that_are_there(script: Any):
    for room in script.ROOMS.values():
        for file, tests in room.tests.items():
            assert (ROOT / "tensorloop" / file).is_file(), file
            for test in (*tests, *room.wider):
                assert test == "--device" or (ROOT / test).exists(), test


@pytest.mark.parametrize(("outcome", "survives"), [(0, True), (1, False), (None, False)])
def test_caught_is_what_fails_or_hangs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: int | None, survives: bool
):
    seen: list[str] = []
    mutant = script.draw(script.ROOMS["undo"], 1, 0)[0]
    monkeypatch.setattr(script.shutil, "copytree", lambda *args, **options: None)
    monkeypatch.setattr(script, "ROOMS", {})
    file = tmp_path / "tensorloop" / mutant.file
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / "tensorloop" / mutant.file).read_text())

    def run(command: list[str], **options: Any) -> Any:
        seen.append(file.read_text())
        if len(seen) == 1:  # without the fault
            return subprocess.CompletedProcess(command, 0)
        if outcome is None:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, outcome)

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.Workshop(tmp_path).survives(mutant, ("tests/loop",)) is survives
    assert seen == [file.read_text(), mutant.apply(file.read_text())]  # whole, broken while the tests ran, whole again


def test_tests_that_fail_without_a_fault_tell_nothing(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script.shutil, "copytree", lambda *args, **options: None)
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **options: failed)
    mutant = script.draw(script.ROOMS["undo"], 1, 0)[0]
    monkeypatch.setattr(script, "ROOMS", {})
    with pytest.raises(SystemExit, match="tests/loop fail without any fault"):
        script.Workshop(tmp_path).survives(mutant, ("tests/loop",))


def test_the_page_shows_the_results(script: Any):
    results = script.read_results(script.RESULTS)
    page = (ROOT / "docs" / "tested.md").read_text()
    assert script.score(results) in page
    for found in results.values():
        for key in (key for key, x in found.items() if x["survived"]):
            assert key.split(":")[0] in page, f"why {key} survives is not said"
