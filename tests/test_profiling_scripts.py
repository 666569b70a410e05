"""What all profiling scripts share: their command line, the order of events, peers, targets; and `make bench`."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "profiling"
NAMES = ("bench", "harness", "resident", "script")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    found = {name: importlib.import_module(name) for name in NAMES}
    sys.path[:] = before
    yield found
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def sums(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script that adds two numbers, cells in this process; `right` is its check."""
    script = modules["script"]

    def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
        return {"apart": 0.0} if cell["kind"] == "check" else {"total": cell["case"] * 10}

    monkeypatch.setattr(modules["harness"], "spawn", lambda path, cell, python=None: run_cell(cell))
    return script.Script(
        file=str(FOLDER / "sums.py"),
        text="Sums.",
        cells=lambda args: [{"kind": "time", "case": case} for case in args.only],
        run_cell=run_cell,
        section=lambda result, picture: f"{len(result['entries'])} sums, {picture}",
        rounds={"quick": 1, "short": 1, "usual": 2},
        checks=lambda args: [{"kind": "check", "case": case, "at_most": 0.5} for case in args.only],
        targets=lambda result: [script.Target("the first sum", float(result["entries"][0]["raw"][0]["total"]), 15)],
        options=lambda parser: parser.add_argument("--only", nargs="+", type=int, default=[1, 2]),
        group=lambda cell: str(cell["case"]),
    )


def test_a_run_writes_results_targets_and_section(sums: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "sums.json"
    assert sums.main(["--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [len(entry["raw"]) for entry in result["entries"]] == [2, 2]
    assert [entry["cell"]["kind"] for entry in result["checks"]] == ["check", "check"]
    assert result["targets"] == [
        {"what": "the first sum", "value": 10.0, "bound": 15, "least": False, "unit": ""},
    ]
    text = out.with_suffix(".md").read_text()
    assert text.startswith(f"Made by `python profiling/sums.py --out {out}`")
    assert text.endswith("2 sums, sums.png\n")
    assert capsys.readouterr().out == text
    out.with_suffix(".md").unlink()
    assert sums.main(["--report", "--out", str(out)]) == 0
    assert out.with_suffix(".md").read_text() == text


def test_what_is_not_measured_anew_stays_and_says_so(sums: Any, tmp_path: Path):
    out = tmp_path / "sums.json"
    assert sums.main(["--out", str(out)]) == 0
    assert sums.main(["--only", "2", "--rounds", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {entry["cell"]["case"]: len(entry["raw"]) for entry in result["entries"]} == {1: 2, 2: 1}
    assert len(result["checks"]) == 2
    assert (result["about"]["rounds"], result["again"]["2"]["rounds"]) == (2, 1)
    assert "2: made by `python profiling/sums.py --only 2 --rounds 1" in out.with_suffix(".md").read_text()
    assert sums.main(["--out", str(out)]) == 0
    assert json.loads(out.read_text())["again"] == {}


@pytest.mark.parametrize("answer", [{"apart": 0.6}, {"apart": float("nan")}, {"error": "RuntimeError: no"}])
def test_nothing_is_measured_where_values_differ(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, Any],
):
    seen = []

    def spawn(path: Path, cell: dict[str, Any]) -> dict[str, Any]:
        seen.append(cell["kind"])
        return answer

    monkeypatch.setattr(modules["harness"], "spawn", spawn)
    out = tmp_path / "sums.json"
    assert sums.main(["--out", str(out)]) == 1
    assert seen == ["check", "check"]
    assert not out.exists()
    assert "values or gradients disagree, so nothing is timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--quick"], "--quick needs --out: its figures are no benchmarks"),
        (["--rounds", "0"], "--rounds is 0; expected 1 or more"),
        (["--report", "--out", "nowhere.json"], "nowhere.json; measure first"),
        (["--quick", "--short"], "not allowed with argument"),
    ],
)
def test_what_makes_no_sense_is_refused(sums: Any, given: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        sums.main(given)
    assert said in capsys.readouterr().err


def test_a_short_set_has_a_file_of_its_own(sums: Any, modules: dict[str, Any]):
    usual, short = modules["harness"].results("sums"), modules["harness"].results("sums", short=True)
    assert short == usual.parent / "short" / "sums.json"
    assert sums.arguments(["--short"]).out == short
    assert sums.arguments([]).out == usual


def test_peers_that_are_missing_have_cells_that_say_so(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("OTHER_PYTHON", raising=False)
    peer = modules["script"].Peer("other", ("no_such_package",), lambda cell: cell["case"] == 2)
    with_peer = replace(sums, peers=[peer])
    out = tmp_path / "sums.json"
    for given in ([], ["--other-python", "no/such/python"], ["--other-python", sys.executable]):
        assert with_peer.main([*given, "--out", str(out)]) == 0
        result = json.loads(out.read_text())
        assert result["about"]["peers"] == {"other": {}}
        assert modules["harness"].why_not(result, kind="time", case=2) == "not installed"
        assert "Not installed: other." in out.with_suffix(".md").read_text()
    said = capsys.readouterr().err
    assert "no_such_package left out: no/such/python: " in said
    assert f"no_such_package left out: {sys.executable}: KeyError: 'no_such_package'" in said


@pytest.mark.parametrize("option", [True, False])
def test_a_peer_s_python_runs_its_cells(
    sums: Any, modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: bool
):
    seen = []
    monkeypatch.setattr(
        modules["harness"], "spawn", lambda path, cell, *python: seen.append(python) or {"apart": 0.0, "total": 1}
    )
    monkeypatch.setenv("OTHER_PYTHON", "" if option else sys.executable)
    peer = modules["script"].Peer("other", ("numpy",), lambda cell: cell["case"] == 2)
    out = tmp_path / "sums.json"
    given = ["--other-python", sys.executable] if option else []
    assert replace(sums, peers=[peer]).main([*given, "--out", str(out)]) == 0
    assert set(seen) == {(), (sys.executable,)}
    about = json.loads(out.read_text())["about"]
    assert about["command"] == f"python profiling/sums.py --out {out} --other-python PYTHON"
    assert set(about["peers"]["other"]) == {"numpy"}


def test_a_peer_that_fails_its_check_stops_nobody(
    sums: Any, modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTHER_PYTHON", sys.executable)

    def spawn(path: Path, cell: dict[str, Any], python: str | None = None) -> dict[str, Any]:
        return {"error": "broken"} if python else {"apart": 0.0, "total": 10}

    monkeypatch.setattr(modules["harness"], "spawn", spawn)
    peer = modules["script"].Peer("other", ("numpy",), lambda cell: cell["case"] == 2)
    out = tmp_path / "sums.json"
    assert replace(sums, peers=[peer]).main(["--out", str(out)]) == 0
    assert modules["harness"].why_not(json.loads(out.read_text()), kind="time", case=2) == "error"


def test_targets_in_words(modules: dict[str, Any]):
    Target = modules["script"].Target
    assert Target("time", 0.5, 0.6).row() == ["time", "0.5", "at most 0.6", "met"]
    assert Target("speed", 1.5, 1.6, least=True, unit="x").row() == ["speed", "1.5 x", "at least 1.6 x", "**missed**"]
    assert Target("time", None, 0.6).row() == ["time", "-", "at most 0.6", "not measured"]
    assert Target("step", 8.0, unit="us").row() == ["step", "8 us", "-", ""]


# ---- make bench ----

PROGRAM = """
import json, pathlib, sys
sys.path[:0] = [{folder!r}]
import harness
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
assert sys.argv[1] == "--short"
about = harness.about(1, command="python profiling/{name}.py --short", set="short")
entries = [{{"cell": {{"kind": "time"}}, "raw": [{{"error": "no"}}]}}]
targets = [{{"what": "time", "value": 0.25, "bound": 0.5, "least": False, "unit": "ms"}}]
targets += [{{"what": "much", "value": None, "bound": 0.5, "least": False, "unit": ""}}]
out.write_text(json.dumps({{"about": about, "entries": entries, "targets": targets}}))
"""


def test_bench_goes_on_after_a_script_that_fails(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bench = modules["bench"]
    scripts, out = tmp_path / "scripts", tmp_path / "out"
    scripts.mkdir()
    for name in ("first", "last"):
        (scripts / f"{name}.py").write_text(PROGRAM.format(folder=str(FOLDER), name=name))
    (scripts / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(bench, "FOLDER", scripts)
    monkeypatch.setattr(bench, "SCRIPTS", ("first", "broken", "last"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert bench.main(["--only", "first", "broken", "last", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "[3/3] last" in said.err
    assert "failed: broken: exit status 3" in said.err
    text = (out / "bench.md").read_text()
    assert text.startswith("Not finished, so their figures are missing or older: broken: exit status 3.")
    assert text.count("| time | at most 0.5 ms | 0.25 ms met | ") == 2
    assert "much" not in text
    assert text.count("This is the short set") == text.count("No figure: 1 cells failed") == 2
    assert bench.main(["--only", "last", "--out", str(out)]) == 0
    assert "### first" in (out / "bench.md").read_text()


def test_bench_shows_the_usual_figures_beside(modules: dict[str, Any]):
    target = {"what": "time", "value": 0.25, "bound": 0.5, "least": False, "unit": ""}
    about = modules["harness"].about(1, command="python profiling/x.py", date="2020-02-02")
    short = {"about": about, "entries": [], "targets": [target]}
    head, table = modules["bench"].of_script(short, {"about": about, "targets": [target | {"value": 0.125}]})
    assert head.endswith("Beside it: `python profiling/x.py`, 2020-02-02.")
    assert "| time | at most 0.5 |  0.25 met |     0.125 |" in table


def test_bench_names_scripts_that_there_are(modules: dict[str, Any]):
    for name in modules["bench"].SCRIPTS:
        assert '"short"' in (FOLDER / f"{name}.py").read_text()
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in (*modules["bench"].SCRIPTS, modules["bench"].MARKER):
        assert 0 < text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")
