"""The profiling script of transformers' models: its cells answer and its report holds; never its times."""

import json
from pathlib import Path
from typing import Any

import pytest


def test_every_cell_answers(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, out = scripts["hf"], tmp_path / "quick.json"
    monkeypatch.setattr(scripts["harness"], "spawn", lambda path, cell: json.loads(json.dumps(script.run_cell(cell))))
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {e["cell"]["kind"] for e in result["entries"]} == {"decode", "turns", "crop", "search"}
    assert not [raw for e in result["entries"] for raw in e["raw"] if "error" in raw]
    of = {e["cell"]["way"]: e["raw"][0]["bytes"] for e in result["entries"] if e["cell"]["kind"] == "decode"}
    assert of["tensorloop + steps"] < of["tensorloop"]
    assert out.with_suffix(".png").is_file()
