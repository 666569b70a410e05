"""Every script of profiling/ runs: its ways agree, its cells answer, its tables and picture come out.

The cells run in this process, on the smallest sizes and without peers; no time is looked at. That a way which is wrong
is not measured, and what else all scripts share, is in `test_profiling_scripts.py`.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import built

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiling"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "\nSCRIPT = " in path.read_text())
CHEAP = {"compiled_threads"}
# What a run leaves out that would take minutes.
SOME = {"compiled": ("--only", "lstm_small", "ode"), "packed": ("--only", "permute")}
OF_OLDER_FORM = {"g2p_compiled", "g2p_padding", "g2p_phonetisaurus"}  # captions that no script of today writes
# In float32, of the first sizes that anybody measured.
RECORDED_LOSS = {
    "workloads": {("W1", 1000): -2901.21484375, ("W3", 128): 1962.356201171875},
    "loop_workloads": {("W2", 128): 324.73236, ("W4", 100): 1056.8103, ("W5", 256): 220881.42},
}


@pytest.fixture
def run(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Runs a script with some options and returns its file of results."""

    def here(name: str, *options: str, of: Path | None = None) -> Path:
        def spawn(path: Path, cell: dict[str, Any], *_: str) -> dict[str, Any]:
            try:
                return json.loads(json.dumps(scripts[name].run_cell(cell)))
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"}

        monkeypatch.setattr(scripts["harness"], "spawn", spawn)
        out = tmp_path / f"{name}.json"
        if of is not None:
            shutil.copy(of, out)
        assert scripts[name].SCRIPT.main([*options, "--out", str(out)]) == 0
        return out

    for variable in ("JAX", "TF", "HF", "FBGEMM", "TORCHDIFFEQ", "SNN"):
        monkeypatch.delenv(f"{variable}_PYTHON", raising=False)
    threads = torch.get_num_threads()
    yield here
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.extended) for n in NAMES])
def test_a_quick_run(scripts: dict[str, Any], run: Callable[..., Path], name: str):
    out = run(name, "--quick", *SOME.get(name, ()))
    result = json.loads(out.read_text())
    assert result["entries"]
    # Versions of torch differ in what its nested tensors can do.
    entries = [entry for entry in result["checks"] + result["entries"] if entry["cell"].get("way") != "torch.nested"]
    errors = {raw["error"] for entry in entries for raw in entry["raw"] if "error" in raw}
    kept = scripts["harness"].results(name).read_text()  # where a peer that cannot run on a CPU says so, too
    assert {error for error in errors if json.dumps(error) not in kept} == set()
    assert re.search(r"^(\*\*How it was measured\.\*\*|Measured on )", out.with_suffix(".md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_targets_and_page_are_those_of_the_results(scripts: dict[str, Any], run: Callable[..., Path], name: str):
    script, kept = scripts[name].SCRIPT, scripts["harness"].results(name)
    result = json.loads(kept.read_text())
    out = run(name, "--report", of=kept)
    assert json.loads(out.read_text())["targets"] == result["targets"]
    page, marker = script.page or (f"docs/benchmarks/{name}.md", name)
    _, begin, rest = (ROOT / page).read_text().partition(f"<!-- {marker}:begin -->")
    shown, end, _ = rest.partition(f"<!-- {marker}:end -->")
    assert (begin, end) == (f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->")
    if name not in OF_OLDER_FORM:
        assert re.sub(r"[\w./]*images/", "", shown).strip() == out.with_suffix(".md").read_text().strip()


@pytest.mark.parametrize(
    ("module", "workload", "T"), [(m, *key) for m, losses in RECORDED_LOSS.items() for key in losses]
)
def test_inputs_stay_what_they_were(scripts: dict[str, Any], module: str, workload: str, T: int):
    workloads = scripts[module]
    way = scripts["workloads"].peer_of(workload) if module == "workloads" else workloads.PLAIN[workload]
    with torch.no_grad():
        loss = workloads.VARIANTS[workload][way](workloads.leaves(workload, T))
    assert loss.item() == pytest.approx(RECORDED_LOSS[module][workload, T], rel=1e-5)


def test_a_wrong_gradient_is_reported(scripts: dict[str, Any]):
    workloads = scripts["workloads"]
    d = workloads.leaves("W1", 4, torch.float64)
    loops = {
        "tensor_array": workloads.w1_tensor_array,
        "cat": lambda d: workloads.w1_cat(d) + d["xs"].sum() - d["xs"].detach().sum(),
        "list_index": lambda d: d["none"],
    }
    answers = workloads.compare(loops, workloads.gradients(workloads.w1_list_unbind, d), d)
    labels = scripts["tensor_array_report"].LABELS_OF
    entry = {"cell": {"workload": "W1", "T": 4}, "raw": [answers]}
    wrong, failed = scripts["tables"].disagreements([entry], labels, 1e-12)
    assert wrong.startswith("ys[t] = xs[t] * sqrt(t), slice by slice, T=4, torch.cat: gradient off by")
    assert failed == "ys[t] = xs[t] * sqrt(t), slice by slice, T=4, list + stack, xs[t]: KeyError: 'none'"


def test_a_cell_is_a_process_and_what_stops_it_is_its_answer(scripts: dict[str, Any]):
    raised = scripts["harness"].spawn(FOLDER / "tensor_array.py", {"kind": "nonsense"})
    assert raised["error"].startswith("ValueError: kind is 'nonsense'; expected time, memory")


def test_the_operation_of_bodies_is_called_out(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    workloads, texts = scripts["body_workloads"], list[str]()
    scan = workloads.tl.scan

    def explained(body: Any, init: Any, xs: Any, **options: Any) -> Any:
        texts.append(workloads.tl.explain(body, init, xs).text)
        return scan(body, init, xs, **options)

    monkeypatch.setattr(workloads.tl, "scan", explained)
    workloads.called(3, torch.float32).scan(compile=True)
    (text,) = texts
    assert "_cdist_forward" in text.partition("of these by torch")[2]
    assert "_cdist_backward" in text.rpartition("of these by torch")[2]


@pytest.mark.extended
def test_timed_runs_of_the_gpu_are_rehearsed_on_a_pretended_device(tmp_path: Path):
    """In processes of their own: losses and gradients agree, each way answers, and the page has a line."""
    if why := built.why_not():
        pytest.skip(why)
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--quick", "--rehearse", "--only", "RNNs", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [entry["cell"]["variant"] for entry in result["entries"]] == ["compiled", "kernels", "eager"]
    assert all(set(raw) == {"first_s", "total_s"} for entry in result["entries"] for raw in entry["raw"])
    assert re.search(
        r"^\| .*, T=24 +\| +[\d.]+ \| +[\d.]+ \| +[\d.]+ \| +- \|", out.with_suffix(".md").read_text(), re.M
    )
