"""What all profiling scripts share: their command line, the order of events, peers, targets; and `make bench`.

One file: all of it runs the same script of two sums, which takes no time.
"""

import importlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiling"
NAMES = ("bench", "harness", "partial", "resident", "script")


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


def test_the_caption_speaks_of_the_rows_that_there_are(sums: Any, modules: dict[str, Any], tmp_path: Path):
    out = tmp_path / "sums.json"
    given = ["--out", str(out), "--only"]
    assert sums.main([*given, "1", "2"]) == 0
    whole = json.loads(out.read_text())["about"]
    whole["versions"]["torch"] = "1.0"
    out.write_text(json.dumps(json.loads(out.read_text()) | {"about": whole}))
    assert sums.main([*given, "2"]) == 0
    result = json.loads(out.read_text())
    assert (result["about"], list(result["again"])) == (whole, ["2"])
    text = modules["harness"].circumstances(result)
    assert text.count("torch 1.0, python") == 1
    assert re.search(r"2: made by `[^`]+--only 2`, [\d-]+, rounds: 2, torch 2[^ ]+, python", text)  # with another torch
    assert sums.main([*given, "1"]) == 0  # nothing of the whole run is left
    result = json.loads(out.read_text())
    assert result["about"]["command"].endswith("--only 1")
    assert {group: about["command"][-1] for group, about in result["again"].items()} == {"2": "2"}


def test_quick_leaves_nothing_behind(
    sums: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sums.main(["--quick"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "2 sums" in capsys.readouterr().out


class Stopping:
    """Stands for `spawn`: Ctrl-C at the given call, and everything else that is asked for."""

    def __init__(self, at: int | None) -> None:
        self.seen: list[tuple[str, int]] = []
        self.at = at

    def __call__(self, path: Path, cell: dict[str, Any], python: str | None = None) -> dict[str, Any]:
        if len(self.seen) == self.at:
            raise KeyboardInterrupt
        self.seen.append((cell["kind"], cell["case"]))
        return {"apart": 0.0} if cell["kind"] == "check" else {"total": cell["case"] * 10}


@pytest.fixture
def stopped(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[list[str], Path]:
    """The options of a run that was stopped after three of its four figures, and the file that has them."""
    out = tmp_path / "sums.json"
    monkeypatch.setattr(modules["harness"], "spawn", Stopping(5))
    assert sums.main(["--out", str(out)]) == 130
    assert not out.exists()
    assert f"stopped; what was measured is in {tmp_path / 'sums.partial.json'}, and --resume" in capsys.readouterr().err
    return ["--out", str(out)], tmp_path / "sums.partial.json"


def test_a_run_that_is_stopped_keeps_its_figures(sums: Any, stopped: tuple[list[str], Path]):
    _, partial = stopped
    result = json.loads(partial.read_text())
    assert result["partial"] == "3 of 4"
    assert [len(entry["raw"]) for entry in result["entries"]] == [1, 2]
    assert sums.main(["--report", "--out", str(partial)]) == 0
    assert "**A run that was stopped**: 3 of 4 figures." in partial.with_suffix(".md").read_text()


def test_a_run_that_was_stopped_goes_on(
    sums: Any, modules: dict[str, Any], stopped: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch
):
    given, partial = stopped
    spawn = Stopping(None)
    monkeypatch.setattr(modules["harness"], "spawn", spawn)
    assert sums.main([*given, "--resume"]) == 0
    assert spawn.seen == [("check", 1), ("check", 2), ("time", 1)]
    result = json.loads(Path(given[1]).read_text())
    assert [len(entry["raw"]) for entry in result["entries"]] == [2, 2]
    assert "partial" not in result
    assert (result["about"]["parts"], result["about"]["command"]) == (2, f"python profiling/sums.py {' '.join(given)}")
    assert "In 2 parts" in Path(given[1]).with_suffix(".md").read_text()
    assert not partial.exists()
    assert sums.main([*given, "--resume"]) == 0  # nothing to go on with: from the beginning
    assert "parts" not in json.loads(Path(given[1]).read_text())["about"]


def test_what_failed_is_measured_again(
    sums: Any, modules: dict[str, Any], stopped: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch
):
    given, partial = stopped
    result = json.loads(partial.read_text())
    result["entries"][1]["raw"][0] = {"error": "no memory"}
    partial.write_text(json.dumps(result))
    spawn = Stopping(None)
    monkeypatch.setattr(modules["harness"], "spawn", spawn)
    assert sums.main([*given, "--resume"]) == 0
    assert sorted(spawn.seen[2:]) == [("time", 1), ("time", 2)]


def test_errors_do_not_replace_figures(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    out, spawn = tmp_path / "sums.json", modules["harness"].spawn

    def failing(path: Path, cell: dict[str, Any]) -> dict[str, Any]:
        return {"error": "no memory"} if cell == {"kind": "time", "case": 2} else spawn(path, cell)

    assert sums.main(["--out", str(out)]) == 0
    before = out.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(modules["harness"], "spawn", failing)
        assert sums.main(["--out", str(out)]) == 1
        assert out.read_text() == before
        assert "time 2: no memory" in capsys.readouterr().err
        other = tmp_path / "other.json"  # where nothing is lost, an error is a result
        assert sums.main(["--out", str(other)]) == sums.main(["--out", str(other)]) == 0
    assert sums.main(["--out", str(out), "--resume"]) == 0
    assert json.loads(out.read_text())["about"]["parts"] == 2


@pytest.mark.parametrize("what", ["command", "versions", "sources"])
def test_another_run_does_not_go_on(
    sums: Any,
    modules: dict[str, Any],
    stopped: tuple[list[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
):
    given, partial = stopped
    if what == "sources":
        monkeypatch.setattr(modules["partial"], "sources", lambda: "of another commit")
    elif what == "versions":
        result = json.loads(partial.read_text())
        result["about"]["versions"]["torch"] = "1.0"
        partial.write_text(json.dumps(result))
    before = partial.read_text()
    assert sums.main([*given, "--resume", *(["--only", "1"] if what == "command" else [])]) == 2
    assert f"{partial} is of another run ({what}): measure without --resume" in capsys.readouterr().err
    assert partial.read_text() == before


def test_a_part_is_not_reported_as_the_whole(
    sums: Any,
    modules: dict[str, Any],
    stopped: tuple[list[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    _, partial = stopped
    monkeypatch.setattr(modules["harness"], "results", lambda name, short=False: partial)
    with pytest.raises(SystemExit):
        sums.main(["--report"])
    assert "is of a run that was stopped; the documents are for whole ones" in capsys.readouterr().err


def test_figures_outlive_a_report_that_fails(sums: Any, tmp_path: Path):
    def failing(result: dict[str, Any]) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(sums, targets=failing).main(["--out", str(tmp_path / "sums.json")])
    assert json.loads((tmp_path / "sums.partial.json").read_text())["partial"] == "4 of 4"


def test_a_file_that_cells_need_stays_out_of_the_command(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    place = modules["script"].Place("sum", "MODEL", "a model")
    monkeypatch.delenv("SUM_MODEL", raising=False)
    with_place, out, model = replace(sums, places=[place]), tmp_path / "sums.json", tmp_path / "model.pt"
    model.write_text("")
    for given in ([], ["--sum", str(model)]):
        assert with_place.main([*given, "--out", str(out)]) == 0
        assert place.path == (model if given else None)
        command = json.loads(out.read_text())["about"]["command"]
        assert command == f"python profiling/sums.py --out {out}" + (" --sum MODEL" if given else "")
    assert with_place.arguments([]).sum == str(model)  # from the environment
    with pytest.raises(SystemExit):
        with_place.main(["--sum", "nowhere.pt", "--out", str(out)])
    assert "--sum: there is no file nowhere.pt" in capsys.readouterr().err


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


def test_bench_that_is_stopped_changes_no_document(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bench = modules["bench"]

    def run(name: str, out: Path) -> int:
        if name == "regroup":
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(bench, "run", run)
    page = tmp_path / "docs.md"
    page.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    monkeypatch.setattr(bench, "PAGE", str(page))
    assert bench.main(["--only", "packed", "regroup", "beam"]) == 130
    assert page.read_text() == "<!-- bench:begin -->\n<!-- bench:end -->\n"
    assert "To go on: --only regroup beam" in capsys.readouterr().err


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
    pages = {f"docs/benchmarks/{name}.md": name for name in modules["bench"].SCRIPTS}
    for page, name in (pages | {modules["bench"].PAGE: modules["bench"].MARKER}).items():
        text = (ROOT / page).read_text()
        assert 0 < text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")
