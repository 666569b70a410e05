"""The profiling script of the memory tools: its cells run, its report tells what was missed. No time is looked at."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = ("captions", "harness", "memory_tools", "names", "partial", "resident", "script", "sentences")


@pytest.fixture
def script() -> Iterator[Any]:
    before, threads = list(sys.path), torch.get_num_threads()
    sys.path.insert(0, str(FOLDER))
    found = {name: importlib.import_module(name) for name in NAMES}
    sys.path[:] = before
    yield found["memory_tools"]
    torch.set_num_threads(threads)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("step", ["LSTM", "transformer"])
def test_a_cell_times_every_way(script: Any, step: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "WARM_UPS", 0)
    found = script.run_cell({"kind": "step", "step": step, "runs": 1})
    assert list(found) == ["forward", "saved_residuals", "step", "empty mode", "track"]
    assert all(seconds > 0 for seconds in found.values())


def test_the_targets_tell_what_was_missed(script: Any):
    fast = {"forward": 1.0, "saved_residuals": 2.0, "step": 2.0, "empty mode": 2.4, "track": 2.5}
    slow = fast | {"saved_residuals": 3.5, "track": 4.0}
    found = dict.fromkeys(script.STEPS, fast) | {"transformer": slow}
    result = {"entries": [{"cell": {"kind": "step", "step": name}, "raw": [raw]} for name, raw in found.items()]}
    rows = {target.what: (target.value, target.met) for target in script.targets(result)}
    assert rows["saved_residuals, LSTM cells: time / forward"] == (2.0, True)
    assert rows["saved_residuals, transformer: time / forward"] == (3.5, False)
    assert rows["track, transformer: time / step"] == (2.0, False)
    assert rows["track, wide transformer: time / step"] == (1.25, True)
    assert "4000 ms, 2.00x" in script.section(result, "")
