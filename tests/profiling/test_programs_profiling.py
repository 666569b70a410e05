"""The profiling script of ported programs: cells answer, lines are counted, the report holds. No time is looked at."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = ("harness", "partial", "plots", "programs", "resident", "script")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("programs")
    sys.path[:] = before
    yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def spawn(script: Any, cell: dict[str, Any]) -> dict[str, Any]:
    """In this process, whose memory is not measured."""
    if cell["kind"] == "memory":
        return {"loss": 0.0, "peak_bytes": 2**20 * (5 if cell["way"] == "before" else 1)}
    return json.loads(json.dumps(script.run_cell(cell | {"runs": 1})))


def test_a_run_without_torchdiffeq(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.harness, "spawn", lambda path, cell: spawn(script, cell))
    monkeypatch.delenv("TORCHDIFFEQ_PYTHON", raising=False)
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (check,) = result["checks"]
    assert check["raw"][0]["apart"] < 1e-9
    for entry in result["entries"]:
        (raw,) = entry["raw"]
        assert ("absent" in raw) == bool(entry["cell"].get("peer"))
        assert "error" not in raw
    text = out.with_suffix(".md").read_text()
    row = r"^\| Neural Turing machine +\| [^|]+\| +9 \| +-\d \+\d of \d+ \| +5 MiB \| +1 MiB \| +0\.2 \| +[\d,.]+ ms \|"
    assert re.search(row, text, re.MULTILINE)
    assert re.search(r"^\| torchdiffeq +\| +not installed \|", text, re.MULTILINE)
    assert text.count("not measured |") == 3
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_a_form_that_is_wrong_is_seen(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script.module("mamba")
    assert script.apart("mamba") < 1e-12
    monkeypatch.setattr(module, "after", lambda *args: 1.001 * module.before(*args))
    assert script.apart("mamba") > 1e-6


def test_lines_that_change_are_counted(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(a: int, b: int) -> int:
        """Two lines here

        that do not count.
        """
        c = a + b

        return c * 2

    def new(a: int, b: int) -> int:
        c = a + b
        d = c * 3
        return d

    assert script.body(old) == ["        c = a + b", "        return c * 2"]
    monkeypatch.setitem(script.PORTS, "both", script.Port("", "", 1, (old, new)))
    assert script.changed("both") == (1, 2, 2)
    assert all(come + gone > 0 for gone, come, _ in (script.changed(name) for name in list(script.PORTS)[:-1]))


def test_targets(script: Any) -> None:
    def entry(key: str, value: Any, **cell: Any) -> dict[str, Any]:
        return {"cell": {"peer": True, **cell}, "raw": [{key: value}]}

    ways = script.PEER_WAYS
    times = {"cell": {"peer": True, "kind": "time"}, "raw": [{ways[0]: [2.0], ways[2]: [1.0]}]}
    peaks = [entry("peak_bytes", bytes_, kind="memory", way=way) for way, bytes_ in ((ways[0], 1000), (ways[2], 200))]
    errors = {"cell": {"peer": True, "kind": "exact"}, "raw": [{"torchdiffeq": 2e-6, "ours": 1e-6}]}
    found = script.targets({"entries": [times, *peaks, errors]})
    assert [(target.value, target.met) for target in found] == [(0.5, True), (0.2, False), (0.5, True)]
    assert [target.value for target in script.targets({"entries": []})] == [None, None, None]
