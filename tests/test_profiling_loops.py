"""The profiling script of scan and while_loop: its loops compare, its cells answer, its report holds.

The cells run in this process, small; what is looked at are losses, gradients, counts and texts, never times.
"""

import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "profiling"
# Lengths at which checkpoints are fewer than steps, and rows end at different steps.
STEPS = {"W2": 12, "W3": 40, "W4": 80, "W5": 25}
# In float32, of the first sizes that anybody measured.
RECORDED_LOSS = {("W2", 128): 324.73236, ("W3", 128): 1962.3562, ("W4", 100): 1056.8103, ("W5", 256): 220881.42}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The modules of profiling/, found as a script run by path finds them, and forgotten afterwards."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    sys.path[:] = before
    yield modules
    for name in names:
        del sys.modules[name]


@pytest.fixture(scope="module")
def quick(scripts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one run on the smallest sizes, without peers, each cell in this process."""
    out = tmp_path_factory.mktemp("profiling") / "quick.json"
    loops = scripts["loops"]

    def process(script: Path, cell: dict[str, Any]) -> dict[str, Any]:
        peer = cell.get("variant") in {v for variants in scripts["loop_workloads"].PEERS.values() for v in variants}
        return loops.run_peer(cell) if peer else json.loads(json.dumps(loops.run_cell(cell)))

    gc.freeze()  # every cell collects garbage: without all that pytest has made, a matter of milliseconds
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops, "process", process)
            patch.delenv(loops.JAX_PYTHON, raising=False)
            assert loops.main(["--quick", "--out", str(out)]) == 0
    finally:
        gc.unfreeze()
    return out


def test_every_cell_answers(quick: Path):
    entries = json.loads(quick.read_text())["entries"]
    assert {e["cell"]["kind"] for e in entries} == {"check", "time", "memory", "bare", "count", "overhead"}
    assert not [e for e in entries for raw in e["raw"] if "error" in raw]
    losses: dict[tuple[str, int], list[float]] = {}
    for e in entries:
        for raw in e["raw"]:
            if "loss" in raw:
                losses.setdefault((e["cell"]["workload"], e["cell"]["T"]), []).append(raw["loss"])
    assert {workload for workload, _ in losses} == {"W2", "W3", "W4", "W5"}
    for same in losses.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-5)


def test_body_calls_are_the_schedule_s(quick: Path, scripts: dict[str, Any]):
    assert scripts["loops_report"].miscounted(json.loads(quick.read_text())) == 0


def test_peers_that_are_missing_say_so(quick: Path):
    tables = quick.with_suffix(".md").read_text()
    assert "JAX and Equinox not installed" in tables
    assert tables.count("not installed") > 6
    assert quick.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_python_without_the_peers_is_left_out(scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    assert scripts["loops"].find_peers("no/such/python") == {}
    assert "JAX and Equinox are left out: no/such/python: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("workload", STEPS)
def test_variants_agree(scripts: dict[str, Any], workload: str):
    workloads = scripts["loop_workloads"]
    d = workloads.leaves(workload, STEPS[workload], torch.float64)
    right = workloads.gradients(workload, workloads.PLAIN[workload], d)
    assert set(right[1]) == {name for name, x in d.items() if x.is_floating_point()}
    assert all(grad.abs().max() > 1e-3 for grad in right[1].values())
    for variant in workloads.VARIANTS[workload]:
        apart = workloads.apart(workloads.gradients(workload, variant, d), right)
        assert max(apart.values()) <= 1e-12, variant


@pytest.mark.parametrize(("workload", "T"), RECORDED_LOSS)
def test_inputs_stay_what_they_were(scripts: dict[str, Any], workload: str, T: int):
    workloads = scripts["loop_workloads"]
    with torch.no_grad():
        loss = workloads.VARIANTS[workload][workloads.PLAIN[workload]](workloads.leaves(workload, T))
    assert loss.item() == pytest.approx(RECORDED_LOSS[workload, T], rel=1e-5)


def test_every_variant_has_a_label(scripts: dict[str, Any]):
    workloads, report = scripts["loop_workloads"], scripts["loops_report"]
    for workload, labels in report.LABELS.items():
        assert set(labels) == {*workloads.VARIANTS[workload], *workloads.PEERS[workload]}
        assert workloads.PLAIN[workload] in labels
    assert set(report.CURVES) < set(report.LABELS["W4"])
    assert set(report.TITLES) == set(report.LABELS)


def test_a_wrong_gradient_is_reported(scripts: dict[str, Any]):
    report = scripts["loops_report"]
    cell = {"workload": "W5", "T": 4}
    answers = {
        "masked": {"loss": 0.0, "gradient": 0.0},
        "sorted": {"loss": 0.0, "gradient": 1e-3},
        "while_loop": {"loss": float("nan"), "gradient": 0.0},
        "while_loop_compact": {"error": "RuntimeError: no"},
    }
    lines = report.disagreements([{"cell": cell, "raw": [answers]}])
    assert [line.split(":")[0] for line in lines] == [
        "W5, T=4, plain loop, rows sorted, told lengths",
        "W5, T=4, tl.while_loop",
        "W5, T=4, tl.while_loop, compact",
    ]
    assert report.disagreements([{"cell": cell, "raw": [{"error": "no memory"}]}]) == ["W5, T=4: no memory"]
    assert report.disagreements([{"cell": cell, "raw": [{"sorted": {"absent": "not installed"}}]}]) == []


def entry(value: float, key: str, **cell: Any) -> dict[str, Any]:
    return {"cell": cell, "raw": [{key: value}]}


def test_the_budget_is_advances_and_steps(scripts: dict[str, Any]):
    report = scripts["loops_report"]
    w4 = {"workload": "W4", "T": 10000}
    entries = [
        entry(1e-4, "step_s", kind="bare", way="forward"),
        entry(3e-4, "step_s", kind="bare", way="both"),
        entry(7.8, "total_s", kind="time", variant="while_loop_32", **w4),
        entry(4e7, "peak_bytes", kind="memory", variant="while_loop_32", **w4),
        {"cell": {"kind": "count", "T": 10000}, "raw": [{"32": {"calls": 45001, "advances": 35000}}]},
    ]
    result = {"entries": entries}
    assert report.budget_ms(result, 10000, 32) == pytest.approx(6500)
    found = {t["target"]: (t["value"], t["met"]) for t in report.targets(result)}
    assert found["W4, N=10000, K=32: time / budget"] == (pytest.approx(1.2), True)
    assert found["W4, N=10000, K=32: peak memory, MB"] == (pytest.approx(40), True)
    assert found["W4: body calls beyond the schedule's, any N and K"] == (1, False)
    assert found["W2, T=2048: time / best plain loop"] == (None, None)


def test_ratios_are_against_the_best_plain_loop(scripts: dict[str, Any]):
    w2 = {"kind": "time", "workload": "W2", "T": 128}
    values = {"scan": 2.0, "list_unbind": 4.0, "list_index": 1.0}
    result = {"entries": [entry(x, "total_s", variant=variant, **w2) for variant, x in values.items()]}
    assert scripts["loops_report"].against(result, "time", "W2", 128, "scan", "list_unbind", "list_index") == 2.0


def test_quick_figures_stay_out_of_the_documents(scripts: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        scripts["loops"].main(["--quick"])
    assert "--quick needs --out" in capsys.readouterr().err


def test_the_document_has_the_markers():
    text = (FOLDER.parent / "docs" / "benchmarks.md").read_text()
    assert 0 < text.index("<!-- loops:begin -->") < text.index("<!-- loops:end -->")
