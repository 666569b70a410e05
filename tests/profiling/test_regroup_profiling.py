"""The profiling script of regroup: its ways agree, its cells answer, its report holds. No time is looked at."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = ("harness", "partial", "plots", "regroup", "resident", "script")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """profiling/regroup.py, with cases of a few rows."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("regroup")
    sys.path[:] = before
    whole = module.cases
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "cases", lambda: {name: case._replace(batch=3) for name, case in whole().items()})
        yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def spawn(script: Any, cell: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(script.run_cell(cell | {"runs": 1})))


def test_a_run_without_fbgemm(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.harness, "spawn", lambda path, cell: spawn(script, cell))
    monkeypatch.delenv("FBGEMM_PYTHON", raising=False)
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    entries = json.loads(out.read_text())["entries"]
    assert len(entries) == len(script.cases()) * (len(script.WAYS) + 1)
    for entry in entries:
        (raw,) = entry["raw"]
        assert ("absent" in raw) == (entry["cell"].get("way") == "FBGEMM")
        assert "error" not in raw
    text = out.with_suffix(".md").read_text()
    assert "of a copy" in text
    assert re.search(r"^\| FBGEMM +\| +not installed \| +not installed \| +not installed \|$", text, re.MULTILINE)
    assert text.count(" met |") + text.count("**missed** |") == len(script.cases()) + 1
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_a_way_that_is_wrong_has_no_figure(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        script.WAYS, "wrong", lambda case: lambda values: [x * 2 for x in script.split_cat(case)(values)]
    )
    with pytest.raises(AssertionError, match="not equal"):
        script.run_cell({"kind": "time", "case": "few", "way": "wrong", "runs": 1})


def test_figures_and_targets(script: Any) -> None:
    def entry(case: str, way: str, seconds: float) -> dict[str, Any]:
        return {
            "cell": {"kind": "time", "case": case, "way": way},
            "raw": [{"total_s": [seconds], "forward_s": [0.001]}],
        }

    times = [entry("few", "RegroupPlan", 0.002), entry("few", "split + cat", 0.001), entry("few", "slice + cat", 0.004)]
    kernel = {"cell": {"kind": "kernel", "case": "few"}, "raw": [{"kernel_s": [0.002], "copy_s": [0.001]}]}
    result = {"entries": [*times, kernel]}
    assert script.both(result, "few", "slice + cat") == "4.00 (1.00)"
    assert script.both(result, "many", "slice + cat") == "-"
    assert script.alone(result, "few") == "2.00, 0.50 of a copy"
    assert [(t.what, t.value, t.met) for t in script.targets(result)] == [
        ("6 keys of 96 to 1024: time / fastest peer", 2, False),
        ("6 keys of 96 to 1024: kernel alone, share of a copy's bandwidth", 0.5, False),
    ]
