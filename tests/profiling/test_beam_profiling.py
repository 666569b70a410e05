"""The profiling script of beam search: its ways agree, its report holds. No time is looked at."""

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.test_g2p_runs import SETTINGS, toy_trainer, write_lexicon

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = (
    "beam",
    "beam_g2p",
    "beam_models",
    "captions",
    "harness",
    "names",
    "partial",
    "plots",
    "resident",
    "script",
    "sentences",
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """profiling/beam.py, with small models."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    module = importlib.import_module("beam")
    sys.path[:] = before
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HIDDEN": 8, "WORDS": 13, "ROWS": 3, "BEAMS": 4}.items():
            patch.setattr(module.models, name, value)
        patch.setattr(module.models.Short, "ROWS", 5)
        yield module
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("what", ["gru", "attends", "step"])
def test_the_ways_agree(script: Any, what: str) -> None:
    assert script.run_cell({"kind": "check", "what": what})["apart"] <= script.CHECKS[what]


@pytest.fixture
def model(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of the example g2p, and a few words."""
    lexicon = write_lexicon(tmp_path / "lexicon")
    monkeypatch.setattr(script.beam_g2p.data, "TRAIN_FILE", lexicon)
    monkeypatch.setattr(script.beam_g2p.data, "DEV_WORDS", 20)
    monkeypatch.setattr(script.beam_g2p, "WORDS", 7)
    monkeypatch.setattr(script.beam_g2p.torch, "set_num_threads", lambda n: None)
    monkeypatch.setenv("G2P_MODEL", "")
    toy_trainer(tmp_path / "toy", replace(SETTINGS, epochs=1)).run()
    return tmp_path / "toy" / "model.pt"


def test_a_step_on_a_trained_model(
    script: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.harness, "spawn", lambda path, cell: json.loads(json.dumps(script.run_cell(cell))))
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--only", "g2p", "--g2p", str(model), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["checks"][0]["raw"][0]["apart"] < 1e-10
    (entry,) = result["entries"]
    assert {key: len(spent) for key, spent in entry["raw"][0].items()} == {"search_s": 1, "packed_s": 1, "padded_s": 1}
    assert str(model.parent) not in json.dumps(result).replace(str(out), "")
    names = [target["what"] for target in result["targets"]]
    assert names == [f"the same on a model of g2p: time / search and {way} second pass" for way in ("packed", "padded")]
    text = out.with_suffix(".md").read_text()
    assert f"begins with {hashlib.sha256(model.read_bytes()).hexdigest()[:12]}." in text
    assert "| a second pass on packed rows, `tl.scan` " in text


def test_without_a_model_its_rows_stay_or_say_how_to_get_it(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("G2P_MODEL", raising=False)
    args = script.SCRIPT.arguments(["--quick", "--out", str(tmp_path / "quick.json")])
    assert not {"g2p"} & {script.group(cell) for cell in [*script.cells(args), *script.checks(args)]}
    assert script.SCRIPT.main(["--quick", "--only", "g2p", "--out", str(tmp_path / "quick.json")]) == 2
    (said,) = script.on_a_model({"entries": []})
    assert "`python -m docs.examples.g2p train` makes one" in said


def test_ways_that_are_apart_are_seen(script: Any) -> None:
    x = torch.randn(3, requires_grad=True)
    assert script.apart_by([x.square().sum(), x.square().sum()], [x]) == 0
    assert script.apart_by([x.square().sum(), 1.01 * x.square().sum()], [x]) > 0.005


def test_a_run_without_transformers(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        script.harness, "spawn", lambda path, cell: json.loads(json.dumps(script.run_cell({**cell, "runs": 1})))
    )
    for variable in ("HF_PYTHON", "G2P_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    for entry in json.loads(out.read_text())["entries"]:
        assert ("absent" in entry["raw"][0]) == (entry["cell"]["kind"] == "speed")
        assert "error" not in entry["raw"][0]
    text = out.with_suffix(".md").read_text()
    assert "a step of minimum risk: time / search and second pass" in text
    assert "Not installed: hf." in text


def test_the_report(script: Any, tmp_path: Path) -> None:
    entries = [
        {"cell": {"kind": "speed", "way": way, "steps": steps}, "raw": [{"total_s": [2.0 + k], "model_s": [1.9]}]}
        for steps in script.STEPS["usual"]
        for k, way in enumerate(["search", "HF"])
    ]
    entries += [
        {
            "cell": {"kind": "held", "decoder": decoder, "way": way, "T": t},
            "raw": [{"held_bytes": t * 2**20 * size, "total_s": [0.1]}],
        }
        for decoder in script.DECODERS
        for t in script.T["usual"]
        for way, size in zip(script.WAYS, (2, 1, 0.9, 0.2), strict=True)
    ]
    entries += [
        {"cell": {"kind": "step", "way": way}, "raw": [{"forward_s": [0.1], "total_s": [0.2 * (k + 1)]}]}
        for k, way in enumerate(script.STEP_WAYS)
    ]
    out = tmp_path / "beam.json"
    out.write_text(json.dumps({"about": script.harness.about(1), "checks": [], "entries": entries}))
    assert script.SCRIPT.main(["--report", "--out", str(out)]) == 0
    assert [(t.what, t.value, t.met) for t in script.targets(json.loads(out.read_text()))] == [
        ("64 tokens: speed / `generate`'s", 1.5, False),
        ("64 tokens: share of the time outside the model", pytest.approx(0.05), True),
        ("256 tokens: speed / `generate`'s", 1.5, True),
        ("256 tokens: share of the time outside the model", pytest.approx(0.05), True),
        ("a GRU decoder, T=128: held", 128, True),
        ("a GRU decoder, T=128: with linear_log_softmax", pytest.approx(115.2), True),
        ("a GRU decoder, T=128: held with checkpoints / without", pytest.approx(0.2), True),
        ("a decoder that attends to its past, T=128: held", 128, True),
        ("a decoder that attends to its past, T=128: held with checkpoints / without", pytest.approx(0.2), True),
        ("a step of minimum risk: time / search and second pass", 0.5, True),
    ]
    assert out.with_suffix(".png").stat().st_size > 10_000
