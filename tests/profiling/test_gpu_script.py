"""profiling/gpu.py: counts and times in one file of results, and cells that share a process."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiling_modules import FOLDER, profiling_modules

ECHO = """
import json, os, sys

assert sys.argv[1:] == ["--cell", "-"]
for line in sys.stdin:
    kind = json.loads(line)["kind"]
    print("a library's own line", flush=True)
    if kind == "dies":
        print("what it says", file=sys.stderr)
        sys.exit(7)
    while kind == "hangs":
        pass
    print(json.dumps({"process": os.getpid(), "kind": kind}), flush=True)
"""


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    with profiling_modules("gpu", "harness", "worker") as found:
        yield found


def counts(workload: str) -> dict[str, Any]:
    return {"cell": {"kind": "counts", "workload": workload}, "raw": [{"eager_short_launches": 3}]}


def timed(workload: str) -> dict[str, Any]:
    cell = {"kind": "time", "workload": workload, "T": 24, "variant": "eager"}
    return {"cell": cell, "raw": [{"total_s": [0.002]}]}


def test_times_and_counts_stand_in_one_page(modules: dict[str, Any]) -> None:
    text = modules["gpu"].section({"entries": [counts("RNNs"), counts("W1"), timed("RNNs")]}, "")
    assert text.count("T=24") == 1
    assert text.index("Milliseconds of forward") < text.index("Launches and waits")


def about(processor: str) -> dict[str, Any]:
    versions = {"tensorloop": "1", "torch": "2", "python": "3"}
    return {"machine": {"processor": processor, "cores": 2}, "versions": versions, "command": "", "date": ""}


@pytest.mark.parametrize("kinds", ["counts first", "times first"])
def test_each_kind_stays_beside_the_other_of_another_machine(modules: dict[str, Any], kinds: str) -> None:
    script, parts = modules["gpu"].SCRIPT, [counts("RNNs"), timed("RNNs")]
    old_entry, new_entry = parts if kinds == "counts first" else parts[::-1]
    old = {"about": about("one"), "again": {}, "checks": [], "entries": [old_entry]}
    script.refuse_to_mix(old, about("another"), [new_entry["cell"]], Path("gpu.json"))
    new = {"about": about("another"), "again": {}, "checks": [], "entries": [new_entry]}
    result = script.renewed(old, new)
    assert [entry["cell"]["kind"] for entry in result["entries"]] == [e["cell"]["kind"] for e in (old_entry, new_entry)]
    first, second = script.parts(result)
    assert (first["about"]["machine"]["processor"], first["entries"]) == ("one", [old_entry])
    assert (second["about"]["machine"]["processor"], second["entries"]) == ("another", [new_entry])


def test_times_of_two_machines_are_not_mixed(modules: dict[str, Any]) -> None:
    old = {"about": about("one"), "again": {}, "checks": [], "entries": [timed("W1")]}
    with pytest.raises(Exception, match="has rows of another machine or version that this run leaves out: slice"):
        modules["gpu"].SCRIPT.refuse_to_mix(old, about("another"), [timed("RNNs")["cell"]], Path("gpu.json"))


def test_all_that_is_timed_shares_a_process(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gpu = list[Any](), modules["gpu"]
    monkeypatch.setattr(modules["worker"], "ask", lambda script, cell: asked.append(cell) or {})
    monkeypatch.setattr(modules["harness"], "spawn", lambda *given: pytest.fail("a process of its own"))
    args = gpu.SCRIPT.arguments(["--quick", "--rehearse", "--only", "RNNs", "W2s"])
    cells = [*gpu.checks(args), *gpu.cells(args)]
    for cell in cells:
        gpu.SCRIPT.process(FOLDER / "gpu.py", cell)
    assert asked == cells
    assert {cell["kind"] for cell in cells} == {"check", "time"}


@pytest.fixture
def echo(modules: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "echo.py"
    path.write_text(ECHO)
    yield path
    modules["worker"].end_all()


def test_one_process_answers_until_it_ends(modules: dict[str, Any], echo: Path) -> None:
    """What ends the process is an answer, too, and the next cell has a new one."""
    ask = modules["worker"].ask
    first, second, died, third = (ask(echo, {"kind": kind}) for kind in ("x", "y", "dies", "z"))
    assert first == second | {"kind": "x"}
    assert died == {"error": "exit status 7: what it says"}
    assert third["process"] != first["process"]
    hung = ask(echo, {"kind": "hangs", "limit_s": 0.5})
    assert hung == {"error": "not done after 0.5 s"}
    with pytest.raises(ProcessLookupError):
        os.kill(third["process"], signal.SIGTERM)
