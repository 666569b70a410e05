"""The profiling script of scan and while_loop: its loops compare, its cells answer, its report holds.

The cells run in this process, small; what is looked at are losses, gradients, counts and texts, never times.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "profiling"
# Lengths at which checkpoints are fewer than steps, and rows end at different steps.
STEPS = {"W2": 12, "W3": 40, "W4": 80, "W5": 25}
# In float32, of the first sizes that anybody measured.
RECORDED_LOSS = {("W2", 128): 324.73236, ("W3", 128): 1962.3562, ("W4", 100): 1056.8103, ("W5", 256): 220881.42}


@pytest.fixture(scope="module")
def quick(scripts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one run on the smallest sizes, without peers, each cell in this process."""
    out = tmp_path_factory.mktemp("profiling") / "quick.json"
    loops = scripts["loops"]

    def spawn(script: Path, cell: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(loops.run_cell(cell)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops.harness, "spawn", spawn)
        patch.delenv("JAX_PYTHON", raising=False)
        assert loops.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    return out


def test_every_cell_answers(quick: Path):
    result = json.loads(quick.read_text())
    entries = result["entries"]
    assert {e["cell"]["kind"] for e in entries} == {"time", "memory", "bare", "count"}
    assert {e["cell"]["workload"] for e in result["checks"]} == {"W2", "W3", "W4", "W5"}
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
    assert "Not installed: jax." in tables
    assert tables.count("not installed") > 6
    assert quick.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("workload", STEPS)
def test_variants_agree(scripts: dict[str, Any], workload: str):
    workloads = scripts["loop_workloads"]
    d = workloads.leaves(workload, STEPS[workload], torch.float64)
    loops, compare = workloads.VARIANTS[workload], scripts["workloads"].compare
    right = scripts["workloads"].gradients(loops[workloads.PLAIN[workload]], d)
    assert set(right[1]) == {name for name, x in d.items() if x.is_floating_point()}
    assert all(grad.abs().max() > 1e-3 for grad in right[1].values())
    for variant, apart in compare(loops, right, d).items():
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
    result = {"checks": [], "entries": entries}
    assert report.budget_ms(result, 10000, 32) == pytest.approx(6500)
    found = {t.what: (t.value, t.met) for t in report.targets(result)}
    assert found == {
        "A loop of unknown length, N=10,000, K=32: time / budget": (pytest.approx(1.2), True),
        "A loop of unknown length, N=10,000, K=32: peak memory": (pytest.approx(40), True),
        "A loop of unknown length: body calls beyond the schedule's, any N and K": (1, False),
    }


def test_ratios_are_against_the_best_plain_loop(scripts: dict[str, Any]):
    w2 = {"kind": "time", "workload": "W2", "T": 128}
    values = {"scan": 2.0, "list_unbind": 4.0, "list_index": 1.0}
    result = {"entries": [entry(x, "total_s", variant=variant, **w2) for variant, x in values.items()]}
    assert scripts["loops_report"].against(result, "time", "W2", 128, "scan", "list_unbind", "list_index") == 2.0


@pytest.mark.parametrize(("loop", "known"), [("scan", True), ("while_loop", False)])
def test_the_loops_of_the_overhead_agree(scripts: dict[str, Any], loop: str, known: bool):
    overhead = scripts["loop_overhead"]
    assert overhead.apart(loop, 40) <= overhead.APART
    assert overhead.planned_advances(100, 8, known=True) == 248
    costs = overhead.costs(loop, 40, 1)
    assert set(costs) == {
        f"{k} {w} {x}" for k in overhead.KEEPS for w in overhead.WAYS for x in ("ours", "bare", "over")
    }
    assert all(len(values) == 1 for values in costs.values())


def test_the_overhead_s_report(scripts: dict[str, Any], tmp_path: Path):
    overhead = scripts["loop_overhead"]
    costs = {
        f"{k} {w} {x}": [n] for k in overhead.KEEPS for w in overhead.WAYS for x, n in (("ours", 9), ("over", 2.5))
    }
    entries = [
        {"cell": {"kind": "overhead", "loop": loop, "T": T}, "raw": [costs]}
        for loop in overhead.LOOPS
        for T in (100, 1000)
    ]
    out = tmp_path / "overhead.json"
    about = overhead.harness.about(1, command="c")
    out.write_text(json.dumps({"about": about, "checks": [], "entries": entries}))
    assert overhead.SCRIPT.main(["--report", "--out", str(out)]) == 0
    assert out.with_suffix(".md").read_text().count("| 9.0 (2.5) | 9.0 (2.5) |") == 12
    targets = json.loads(out.read_text())["targets"]
    assert [t["value"] for t in targets] == [2.5] * 6
    assert targets[0]["what"] == "tl.scan, every step, T=1,000: a step beyond bare loops"


@pytest.mark.parametrize("name", ["loops", "loop_overhead"])
def test_the_document_has_the_markers(name: str):
    text = (FOLDER.parent / "docs" / "benchmarks" / f"{name}.md").read_text()
    assert 0 < text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")
