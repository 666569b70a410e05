"""The profiling script of compiled loops: its loops compare, its cells answer, its report holds; never its times."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch


def test_every_cell_answers(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, out = scripts["compiled"], tmp_path / "quick.json"
    monkeypatch.setattr(scripts["harness"], "spawn", lambda path, cell: json.loads(json.dumps(script.run_cell(cell))))
    monkeypatch.delenv("JAX_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            assert script.SCRIPT.main(["--quick", "--only", "W2s", "ode", "--out", str(out)]) == 0
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    result = json.loads(out.read_text())
    assert {e["cell"]["kind"] for e in result["entries"]} == {"time", "parts", "plan"}
    assert not [raw for e in result["entries"] for raw in e["raw"] if "error" in raw]
    compiled = [e["raw"][0] for e in result["entries"] if e["cell"]["variant"] == "compiled"]
    assert len(compiled) == 2
    assert not any("not_compiled" in raw for raw in compiled)
    assert {way for e in result["checks"] for way, apart in e["raw"][0].items() if isinstance(apart, float)} == {
        "compiled",
        "compiled_k32",
    }
    text = out.with_suffix(".md").read_text()
    assert "key of a call" in text
    assert "not installed" in text
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["kalman", "viterbi", "adam", "min_gru", "iir", "hmm", "W3"])
def test_loops_compare(scripts: dict[str, Any], name: str):
    """The eager loop and the compiled one, by the script's own check."""
    cell = {"kind": "check", "workload": name, "T": 9, "variants": ["compiled"]}
    d = scripts["compiled_workloads"].leaves(name, 9, torch.float64)
    _, grads = scripts["compiled"].gradients(scripts["compiled_workloads"].loss_of(name, "eager", d, 9), d)
    assert all(grad.abs().max() > 1e-6 for grad in grads.values())
    assert scripts["compiled"].check_cell(cell)["compiled"] <= 1e-12


def test_a_difference_is_said(scripts: dict[str, Any]):
    entry = {"cell": {"workload": "crf"}, "raw": [{"compiled": float("nan"), "lax_scan": {"absent": "not installed"}}]}
    assert scripts["compiled"].differing([entry]) == ["crf compiled: nan"]


def test_names_go_together(scripts: dict[str, Any]):
    report, loops = scripts["compiled_report"], scripts["compiled_workloads"]
    assert {*loops.SCANS, "W4", "ode"} == set(report.TITLES) == set(report.SIZES)
    assert set(scripts["compiled_inputs"].MAKERS) < set(report.TITLES)
