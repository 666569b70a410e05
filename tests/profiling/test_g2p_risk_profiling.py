"""The script that compares minimum risk with cross entropy: runs, a stop, and its table. No time is looked at."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.examples.g2p import checkpoint
from tests.examples.test_g2p_runs import SETTINGS, toy_trainer, write_lexicon

FOLDER = Path(__file__).parents[2] / "profiling"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """profiling/g2p_risk.py in this process, on a toy lexicon and with a toy model to begin from."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("g2p_risk")
    lexicon = write_lexicon(tmp_path / "lexicon")
    monkeypatch.setattr(module, "SIZES", {"full": replace(SETTINGS, beam=2)})
    monkeypatch.setattr(module.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(module.data, "TRAIN_FILE", lexicon)
    monkeypatch.setattr(module.data, "TEST_FILE", lexicon)
    monkeypatch.setattr(module.data, "DEV_WORDS", 20)
    yield module
    for name in ("g2p_risk", "harness"):
        sys.modules.pop(name, None)


def test_both_ways_from_two_seeds(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = toy_trainer(tmp_path / "first", replace(SETTINGS, epochs=1))
    trainer.run()
    out, runs = tmp_path / "result.json", tmp_path / "runs"
    options = ["--checkpoint", str(tmp_path / "first" / "model.pt"), "--runs", str(runs), "--out", str(out)]
    assert script.main([*options, "--seeds", "1"]) == 0
    first = json.loads(out.read_text())
    assert [[entry["seed"] for entry in first["runs"][way]] for way in ("entropy", "risk")] == [[1], [1]]
    kept = (runs / "risk-1" / "training.pt").stat().st_mtime_ns
    assert script.main([*options, "--seeds", "1", "2"]) == 0
    assert (runs / "risk-1" / "training.pt").stat().st_mtime_ns == kept  # what is done is not done again
    result = json.loads(out.read_text())
    assert [len(result["runs"][way]) for way in ("entropy", "risk")] == [2, 2]
    assert all(0 <= result["before"][name] <= 100 and name in result["runs"]["risk"][0] for name in script.FIGURES)
    other, same = result["runs"]["risk"][1], result["runs"]["risk"][0]
    assert other["seed"] == 2
    assert same == first["runs"]["risk"][0]
    lines = script.page(result).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["before", "cross entropy", "minimum risk"]
    assert "±" in lines[3]
    assert "±" not in lines[2]
    history = json.loads((runs / "entropy-1" / "history.json").read_text())["epochs"]
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3, 4]
    assert not any("risk" in entry for entry in history)


def test_a_stopped_run_goes_on(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    toy_trainer(tmp_path / "first", replace(SETTINGS, epochs=1)).run()
    options = ["--checkpoint", str(tmp_path / "first" / "model.pt"), "--seeds", "5", "--ways", "entropy"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert script.main([*options, "--runs", str(whole), "--out", str(tmp_path / "a.json")]) == 0
    train = script.Trainer._train_on

    def stopping(self: Any, indices: Any) -> Any:
        if self.step == 9:
            raise KeyboardInterrupt
        return train(self, indices)

    options += ["--runs", str(parts), "--out", str(tmp_path / "b.json")]
    with monkeypatch.context() as patch:
        patch.setattr(script.Trainer, "_train_on", stopping)
        assert script.main(options) == 130
    assert not (tmp_path / "b.json").exists()
    assert script.main(options) == 0
    ours, theirs = (checkpoint.load_model(folder / "entropy-5" / "model.pt")[0] for folder in (whole, parts))
    assert all((a == b).all() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    a, b = (json.loads((tmp_path / name).read_text())["runs"]["entropy"][0] for name in ("a.json", "b.json"))
    assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
