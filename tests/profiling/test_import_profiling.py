"""The script that times imports: its report holds. No time is looked at; `test_import_time.py` runs it."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = ("captions", "harness", "import_time", "names", "partial", "plots", "resident", "script", "sentences")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("import_time")
    sys.path[:] = before
    yield module
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_report(script: Any, tmp_path: Path):
    args = script.SCRIPT.arguments([])
    entries = [
        {"cell": cell, "raw": [{"seconds": [0.01 * (k + 1), 9, 0], "modules": [k, k, k], "others": [0, 0, 0]}]}
        for k, cell in enumerate(script.cells(args))
    ]
    entries[-1]["raw"] = [{"error": "no"}]
    out = tmp_path / "import_time.json"
    out.write_text(json.dumps({"about": script.harness.about(1, threads=1), "checks": [], "entries": entries}))
    assert script.SCRIPT.main(["--report", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["targets"] == [
        {"what": "`import tensorloop`, compiled anew", "value": 20, "bound": 100, "least": False, "unit": "ms"}
    ]
    lines = [
        line.split("|")[1:-1] for line in out.with_suffix(".md").read_text().splitlines() if "; tensorloop." in line
    ]
    assert [[text.strip() for text in line[1:]] for line in (lines[0], lines[-1])] == [
        ["30.0 ms", "40.0 ms", "2", "0"],
        ["150.0 ms", "error", "14", "0"],
    ]
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_a_statement_that_fails(script: Any):
    cell = {"kind": "import", "statement": "import no_such_package", "how": "kept", "processes": 1}
    with pytest.raises(RuntimeError, match="No module named 'no_such_package'"):
        script.run_cell(cell)
