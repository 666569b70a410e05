"""The profiling scripts of packed tensors and attention: their ways agree, their reports hold. No time is looked at."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "profiling"
NAMES = (
    "attention",
    "captions",
    "harness",
    "names",
    "packed",
    "packed_models",
    "packed_ways",
    "partial",
    "plots",
    "resident",
    "script",
    "sentences",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The scripts, with a few short rows."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    found = {name: importlib.import_module(name) for name in NAMES}
    sys.path[:] = before
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"ROWS": 5, "STEPS": 9, "FEATURES": 3, "PERMUTED": 20}.items():
            patch.setattr(found["packed_ways"], name, value)
            if hasattr(found["packed"], name):
                patch.setattr(found["packed"], name, value)
        for name, value in {"LEAST": 8, "MOST": 17, "WIDTH": 8, "LABELS": 5}.items():
            patch.setattr(found["packed_models"], name, value)
        patch.setattr(found["packed_models"], "ROWS", dict.fromkeys(found["packed_models"].CASES, 3))
        yield found
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_run_without_fbgemm(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = scripts["packed"]

    def spawn(path: Path, cell: dict[str, Any]) -> dict[str, Any]:
        try:
            return json.loads(json.dumps(script.run_cell(cell | {"runs": 1})))
        except (RuntimeError, NotImplementedError, AttributeError) as error:  # ways that a version of torch lacks
            return {"error": str(error)}

    monkeypatch.setattr(script.harness, "spawn", spawn)
    monkeypatch.delenv("FBGEMM_PYTHON", raising=False)
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    entries = json.loads(out.read_text())["entries"]
    for entry in entries:
        (raw,) = entry["raw"]
        way = entry["cell"]["way"]
        assert ("absent" in raw) == (way == "FBGEMM")
        assert ("error" in raw) <= (way == "torch.nested"), (entry["cell"], raw)
    text = out.with_suffix(".md").read_text()
    # Each case against its fastest peer, and two against a copy, with both kinds of memory; of models, in one of them,
    # the block and the CTC loss, and the bytes of the block.
    models = scripts["packed_models"].CASES
    assert text.count(" met |") + text.count("**missed** |") == 2 * (len(script.CASES) - len(models) + 2) + 3
    assert all(f"{case}: bytes kept for backward / padded" in text for case in models)
    assert out.with_suffix(".png").stat().st_size > 10_000

    assert script.SCRIPT.main(["--quick", "--only", "permute", "--out", str(out)]) == 0
    again = json.loads(out.read_text())
    assert len(again["entries"]) == len(entries)
    assert list(again["again"]) == ["permute"]
    assert "--only" not in again["about"]["command"]  # the caption of the whole run, and beside it that of one row
    page = out.with_suffix(".md").read_text()
    assert f"- Command: `python profiling/packed.py --quick --out {out}`." in page
    assert f"their own: permute (`python profiling/packed.py --quick --only permute --out {out}`, " in page


def test_a_way_that_is_wrong_has_no_figure(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    script, ways = scripts["packed"], scripts["packed_ways"]
    right = ways.segment_sum()
    monkeypatch.setitem(
        script.CASES, "sum", lambda: {**right, "wrong": ways.Way(lambda v: 2 * right["p.sum(1)"].run(v))}
    )
    answer = script.run_cell({"kind": "fresh", "case": "sum", "way": "wrong", "runs": 1})
    assert answer["error"].startswith("wrong: off by")
    entry = {"cell": {"kind": "fresh", "case": "sum", "way": "wrong"}, "raw": [answer]}
    assert script.both({"entries": [entry]}, "fresh", "sum", "wrong") == "wrong"


def test_a_copy_moves_the_bytes_of_its_case(scripts: dict[str, Any]) -> None:
    r = scripts["packed_ways"].ragged()
    assert scripts["packed"].copy("pack").numel() == r.n * 3
    padded = scripts["packed"].copy("pad")
    assert padded.shape == (5 * r.steps, 3)
    assert not padded[r.n :].any()


def test_targets_of_packed(scripts: dict[str, Any]) -> None:
    def entry(case: str, way: str, total: float, forward: float = 0.001) -> dict[str, Any]:
        return {
            "cell": {"kind": "kept", "case": case, "way": way},
            "raw": [{"total_s": [total], "forward_s": [forward]}],
        }

    entries = [entry("permute", "permute", 0.002), entry("permute", "index_select", 0.004)]
    entries += [entry("pack", "pack_padded", 0.002, 0.002), entry("pack", "x[mask]", 0.003), entry("pack", "copy", 1)]
    assert [(t.what, t.value, t.met) for t in scripts["packed"].targets({"entries": entries})] == [
        ("pack, kept memory: time / fastest peer", pytest.approx(2 / 3), True),
        ("permute, kept memory: time / fastest peer", 0.5, False),
        ("pack, kept memory, forward: share of a copy's bandwidth", 0.5, False),
    ]


@pytest.mark.parametrize("workload", ["causal", "cross", "window", "encoder"])
def test_the_ways_of_attention_agree(scripts: dict[str, Any], workload: str) -> None:
    assert scripts["attention"].apart(workload, 7) < scripts["attention"].APART


def test_the_report_of_attention(scripts: dict[str, Any], tmp_path: Path) -> None:
    script = scripts["attention"]
    torch.manual_seed(0)
    entries = []
    for workload, Ts in script.SIZES["usual"].items():
        for T in Ts:
            for k, variant in enumerate(script.VARIANTS[workload]):
                cell = {"workload": workload, "variant": variant, "T": T}
                entries.append(
                    {"cell": {"kind": "time", **cell}, "raw": [{"forward_s": [0.01], "total_s": [0.02 * (k + 1)]}]}
                )
                entries.append({"cell": {"kind": "memory", **cell}, "raw": [{"peak_bytes": 1e6 * (k + 1)}]})
    about = script.harness.about(1)
    out = tmp_path / "attention.json"
    out.write_text(json.dumps({"about": about, "checks": [], "entries": entries}))
    assert script.SCRIPT.main(["--report", "--out", str(out)]) == 0
    text = out.with_suffix(".md").read_text()
    assert re.search(r"encoder layer, T=64: time / padded +\| +0.5 \| at most 0.6 \| +met \|", text)
    assert "T=4096: 0.50 of the time, 0.50 of the memory of padded SDPA." in text
    assert out.with_suffix(".png").stat().st_size > 10_000
