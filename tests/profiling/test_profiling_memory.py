"""The profiling script of memory over T: its ways agree, its report holds. No time is looked at."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "profiling"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    modules = {name: importlib.import_module(name) for name in ("memory_curve", "loop_peers", "harness")}
    sys.path[:] = before
    yield modules
    for name in names:
        sys.modules.pop(name, None)


def test_a_run_without_peers(scripts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = scripts["memory_curve"]
    monkeypatch.setattr(scripts["harness"], "spawn", lambda path, cell: json.loads(json.dumps(script.run_cell(cell))))
    for name in ("JAX_PYTHON", "TF_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "quick.json"
    assert script.SCRIPT.main(["--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [entry["cell"]["workload"] for entry in result["checks"]] == list(script.WAYS)
    for entry in result["entries"]:
        (raw,) = entry["raw"]
        peer = entry["cell"]["variant"] not in script.WAYS[entry["cell"]["workload"]]
        assert set(raw) == ({"absent"} if peer else {"loss", "peak_bytes"})
    text = out.with_suffix(".md").read_text()
    assert "Not installed: jax, tf." in text
    assert [f"### {title}" in text for title in script.TITLES.values()] == [True] * 5
    assert out.with_suffix(".png").stat().st_size > 10_000


def entries(workload: str, values: dict[str, list[float]], Ts: list[int]) -> list[dict[str, Any]]:
    return [
        {"cell": {"kind": "memory", "workload": workload, "variant": v, "T": T}, "raw": [{"peak_bytes": x}]}
        for v, sizes in values.items()
        for T, x in zip(Ts, sizes, strict=True)
    ]


def test_exponents_and_targets(scripts: dict[str, Any]):
    script = scripts["memory_curve"]
    Ts = [128, 256, 512]
    found = entries("W3", {"tensor_array": [1e6, 2e6, 4e6], "cat": [1e6, 4e6, 16e6], "stack": [1e6, 0, 0]}, Ts)
    found += entries("W4", {"while_loop_32": [3e6, 3e6, 3e6], "plain": [3e6, 6e6, 12e6]}, Ts)
    result = {"entries": found, "checks": []}
    assert script.exponent(result, "W3", "cat") == pytest.approx(2)
    assert script.exponent(result, "W3", "stack") is None
    assert [(t.what, t.value, t.bound) for t in script.targets(result)] == [
        (
            "A decoder that attends to its past, B=8, D=64, TensorArray: exponent of peak memory",
            pytest.approx(1),
            script.LINEAR,
        ),
        (
            "A loop of unknown length, B=64, D=256, tl.while_loop, K=32: exponent of peak memory",
            pytest.approx(0, abs=1e-9),
            0.1,
        ),
    ]
    table = script.over_T(result, "W3")
    ours = r"\| \*\*TensorArray\*\* +\| +0.954 MiB \(1x\) \| +1.91 MiB \(0.5x\) \| +3.81 MiB \(0.25x\) \| +1.00 \|"
    assert re.search(ours, table)
    assert table.count(" 2.00 |") == 1


def test_every_way_has_a_label_and_every_curve_a_way(scripts: dict[str, Any]):
    script = scripts["memory_curve"]
    for workload, ways in script.WAYS.items():
        names = {*ways, *script.PEERS[workload]}
        assert names <= set(script.LABELS[workload])
        assert set(script.CURVES[workload]) <= names
        assert script.PLAIN[workload] in ways
        assert script.OURS[workload] in ways
        assert set(script.SHORT.get(workload, ())) <= names
        for name in script.PEERS[workload]:
            peers = [peer for peer in scripts["loop_peers"].PEERS if peer.runs({"variant": name})]
            assert len(peers) == 1
            text = peers[0].script.read_text()
            assert f'"{name}"' in text or name.startswith("eqx_")


def test_a_peer_s_gradients_are_compared(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    peers, script = scripts["loop_peers"], scripts["memory_curve"]
    workloads = peers.workloads
    loss, grads = workloads.gradients(script.WAYS["W1"]["cat"], workloads.leaves("W1", 5, peers.torch.float64))

    def spawn(path: Path, cell: dict[str, Any], python: str) -> dict[str, Any]:
        assert (path.name, python, cell["threads"]) == ("jax_loops.py", "a python", 2)
        peers.np.savez(cell["out"], **{name: 1.5 * x.numpy() for name, x in grads.items()})
        return {"loss": loss}

    monkeypatch.setattr(scripts["harness"], "spawn", spawn)
    monkeypatch.setenv("JAX_PYTHON", "a python")
    found = peers.compare("W1", 5, script.WAYS["W1"], "list_unbind", ["cat", "lax_scan"])
    assert found["cat"] == {"loss": 0, "gradient": 0}
    assert found["lax_scan"] == {"loss": 0, "gradient": pytest.approx(0.5)}
    monkeypatch.delenv("JAX_PYTHON")
    assert peers.compare("W1", 5, script.WAYS["W1"], "list_unbind", ["lax_scan"])["lax_scan"] == {
        "absent": "not installed"
    }


def test_a_peer_that_fails_stops_nobody(scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    peers, script = scripts["loop_peers"], scripts["memory_curve"]
    monkeypatch.setattr(scripts["harness"], "spawn", lambda path, cell, python: {"error": "no memory"})
    monkeypatch.setenv("JAX_PYTHON", "a python")
    found = peers.compare("W1", 5, script.WAYS["W1"], "list_unbind", ["cat", "lax_scan"])
    checks = [{"cell": {"workload": "W1", "T": 5}, "raw": [found]}]
    assert found["lax_scan"] == {"failed": "no memory"}
    assert script.tables.disagreements(checks, script.LABELS, 0) == []
    assert re.search(r"lax.scan +\| +error \| +error \|", script.tables.checked({"checks": checks}, script.LABELS))
