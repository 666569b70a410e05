"""The script that asks what of torch compiles: what it makes of samples, shares and the table."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fuzz import coverage
from tests.fuzz.operations import Row


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_operations_are_run_and_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = tmp_path / "rows.json"
    options = ["--only", "mode", "nonzero", "tanh", "--dtypes", "float32", "--most", "1", "--rows", str(rows)]
    assert coverage.main(options) == 0
    assert "| `mode` | forward | float32 | called out: mode |" in capsys.readouterr().out
    found = json.loads(rows.read_text())
    assert found["nonzero"]["float32"]["forward"][0] == "no fixed shape"
    assert found["tanh"]["float32"] == {"forward": ["native", ""], "backward": ["native", ""]}


def test_the_worst_sample_counts():
    kinds = ("native", "no fixed shape", "refused", "called out")
    rows = [Row("float32", "forward", "0", kind, kind) for kind in kinds]
    assert coverage.worst(rows) == {"float32": {"forward": ("refused", "refused")}}
    assert coverage.worst([Row("float32", "forward", "0", "out of time")])["float32"]["forward"][0] == "crash"


def test_the_table_has_shares_and_reasons():
    of = {
        "a": {"int64": {"forward": ("native", "")}},
        "b": {"int64": {"forward": ("refused", "scan: not compiled: x|y")}},
    }
    text = coverage.page_of(of, "Of a version.")
    assert "| int64 | forward | 2 | 50.0 % | 0 | 0 | 50.0 % | 0 | 0 |" in text
    assert "| `b` | forward | int64 | refused: x/y |" in text
