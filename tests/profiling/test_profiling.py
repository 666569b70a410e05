"""The profiling script from end to end on its smallest cells, and that what it compares is comparable.

What is looked at are fields, losses and gradients, never times.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiling"
SCRIPT = FOLDER / "tensor_array.py"
# Longer than the ring has slots, so that some are overwritten, most of them read.
STEPS = {"W1": 50, "W3": 24, "ring": 150}
RECORDED_LOSS = {("W1", 1000): -2901.21484375, ("W3", 128): 1962.356201171875}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one run of the script, without a figure."""
    out = tmp_path_factory.mktemp("profiling") / "quick.json"
    done = run("--quick", "--rounds", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "no figure" not in done.stderr
    assert "**Targets.**" in done.stdout
    return out


def test_the_results_tell_where_they_come_from(quick: Path):
    about = json.loads(quick.read_text())["about"]
    assert about["command"].startswith("python profiling/tensor_array.py --quick")
    assert set(about["versions"]) == {"python", "torch", "numpy", "tensorloop"}
    assert set(about["machine"]) == {"processor", "cores", "memory_gib", "system"}
    assert (about["threads"], about["rounds"], about["repeats"]) == (2, 1, 1)
    assert about["load_at_start"] >= 0


def test_every_cell_has_its_raw_values(quick: Path):
    result = json.loads(quick.read_text())
    fields = {
        "check": {"tensor_array", "cat"},
        "time": {"loss", "warmup_s", "forward_s", "total_s"},
        "memory": {"loss", "peak_bytes"},
        "micro": {"tensor_array forward", "tensor_array backward", "list forward", "list backward"},
        "rows": {"kernel write", "kernel loop", "torch write", "torch loop"},
    }
    entries = result["checks"] + result["entries"]
    found = [(e["cell"]["kind"], set(e["raw"][0])) for e in entries if e["cell"]["kind"] != "pieces"]
    expected = ["check", "time", "time", "memory", "memory", "micro", "rows"]
    assert found == [(kind, fields[kind]) for kind in expected]
    (pieces,) = [e["raw"][0] for e in result["entries"] if e["cell"]["kind"] == "pieces"]
    assert all(value > 0 for values in pieces.values() for value in values)


def test_processes_agree_on_the_loss(quick: Path):
    entries = json.loads(quick.read_text())["entries"]
    losses = [raw["loss"] for e in entries for raw in e["raw"] if "loss" in raw]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_picture_and_tables_come_from_the_results(quick: Path):
    picture, tables = quick.with_suffix(".png"), quick.with_suffix(".md")
    first = tables.read_text()
    assert "| torch.cat " in first
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    tables.unlink()
    done = run("--report", "--out", str(quick))
    assert done.returncode == 0, done.stderr
    assert tables.read_text() == first
    assert picture.exists()


@pytest.mark.parametrize("workload", STEPS)
def test_variants_agree(scripts: dict[str, Any], workload: str):
    workloads = scripts["workloads"]
    loops, d = workloads.VARIANTS[workload], workloads.leaves(workload, STEPS[workload], torch.float64)
    right = workloads.gradients(loops[workloads.peer_of(workload)], d)
    apart = workloads.compare(loops, right, d)
    assert list(apart) == list(loops)
    assert max(x for both in apart.values() for x in both.values()) <= 1e-12
    assert abs(right[0]) > 1


@pytest.mark.parametrize(("workload", "T"), RECORDED_LOSS)
def test_inputs_stay_what_they_were(scripts: dict[str, Any], workload: str, T: int):
    workloads = scripts["workloads"]
    loss = workloads.VARIANTS[workload][workloads.peer_of(workload)](workloads.leaves(workload, T))
    assert loss.item() == pytest.approx(RECORDED_LOSS[workload, T], rel=1e-5)


def test_the_ring_reads_older_slots(scripts: dict[str, Any]):
    workloads = scripts["workloads"]
    first, *rest = workloads.older_slots(150)
    assert first is None
    assert all(0 <= slot < min(t, workloads.SLOTS) for t, slot in enumerate(rest, 1))


def test_a_wrong_gradient_is_reported(scripts: dict[str, Any]):
    workloads = scripts["workloads"]
    d = workloads.leaves("W1", 4, torch.float64)
    loops = {
        "tensor_array": workloads.w1_tensor_array,
        "cat": lambda d: workloads.w1_cat(d) + d["xs"].sum() - d["xs"].detach().sum(),
        "list_index": lambda d: d["none"],
    }

    def lines(answers: Any) -> list[str]:
        labels = scripts["tensor_array_report"].LABELS_OF
        return scripts["tables"].disagreements([{"cell": {"workload": "W1", "T": 4}, "raw": [answers]}], labels, 1e-12)

    wrong, failed = lines(workloads.compare(loops, workloads.gradients(workloads.w1_list_unbind, d), d))
    assert wrong.startswith("ys[t] = xs[t] * sqrt(t), slice by slice, T=4, torch.cat: gradient off by")
    assert failed == "ys[t] = xs[t] * sqrt(t), slice by slice, T=4, list + stack, xs[t]: KeyError: 'none'"
    assert len(lines({"cat": {"loss": 0.0, "gradient": float("nan")}})) == 1
    assert lines({"error": "RuntimeError: no"}) == ["ys[t] = xs[t] * sqrt(t), slice by slice, T=4: RuntimeError: no"]
    assert lines({"cat": {"absent": "not installed"}}) == []


def entries_of(values: dict[tuple[str, str, int, str], float]) -> list[dict[str, Any]]:
    key = {"time": "total_s", "memory": "peak_bytes"}
    return [
        {"cell": {"kind": kind, "workload": w, "T": T, "variant": v}, "raw": [{key[kind]: x}]}
        for (kind, w, T, v), x in values.items()
    ]


def test_targets_are_met_missed_or_not_measured(scripts: dict[str, Any]):
    values = {
        ("memory", "W3", 1024, "tensor_array"): 5.0,
        ("memory", "W3", 1024, "cat"): 100.0,
        ("time", "W3", 1024, "tensor_array"): 0.71,
        ("time", "W3", 1024, "cat"): 1.0,
        ("time", "W1", 10000, "tensor_array"): 12.1,
        ("time", "W1", 1000, "tensor_array"): 1.0,
    }
    found = scripts["tensor_array_report"].targets({"checks": [], "entries": entries_of(values)})
    assert [t.met for t in found] == [True, False, None, False, None]
    assert [t.bound for t in found] == [0.05, 0.7, 1e-12, 12, 1.25]


def test_the_median_is_of_the_rounds(scripts: dict[str, Any]):
    median = scripts["harness"].median
    entry = {"cell": {}, "raw": [{"s": [1.0, 9.0, 2.0]}, {"s": [4.0]}, {"error": "x"}, {"s": [3.0]}]}
    assert median(entry, "s") == 3.0
    assert median({"cell": {}, "raw": [{"error": "x"}]}, "s") is None


def test_what_stops_a_process_is_its_answer(scripts: dict[str, Any]):
    harness = scripts["harness"]
    raised = harness.spawn(SCRIPT, {"kind": "nonsense"})
    assert raised["error"].startswith("ValueError: kind is 'nonsense'; expected time, memory")
    assert harness.spawn(FOLDER / "no_such_script.py", {"kind": "time"})["error"].startswith("exit status 2")


def test_text_goes_between_markers(scripts: dict[str, Any], tmp_path: Path):
    replace = scripts["harness"].replace_between
    page = tmp_path / "page.md"
    assert not replace(page, "a", "new")
    page.write_text("head\n<!-- a:begin -->\nold\n<!-- a:end -->\ntail\n")
    assert replace(page, "a", "new\n")
    assert page.read_text() == "head\n<!-- a:begin -->\nnew\n<!-- a:end -->\ntail\n"
    assert not replace(page, "b", "new")


def test_the_document_has_the_markers():
    name = "tensor_array"
    text = (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text()
    assert 0 < text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")


def test_names_beside_curves_do_not_overlap(scripts: dict[str, Any]):
    spread = scripts["plots"].spread
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.55], 0.1) == pytest.approx([0.41667, 0.51667, 0.61667], abs=1e-4)


def test_every_piece_of_an_account_is_timed(scripts: dict[str, Any]):
    micro = scripts["micro"]
    timed = {"function", "function backward", *(name for name, _, _ in micro.simple_pieces())}
    assert {p for names in micro.GROUPS.values() for p in names} == timed
    assert list(micro.ACCOUNTS) == list(micro.OPERATIONS)
    pieces = dict.fromkeys(timed, 1.0)
    for operation, ways in micro.ACCOUNTS.items():
        for way, parts in ways.items():
            assert sum(micro.breakdown(operation, way, pieces).values()) == len(parts)
