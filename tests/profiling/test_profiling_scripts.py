"""What all profiling scripts share: their command line, the order of events, peers, targets.

One file: all of it runs the same script of two sums, which takes no time.
"""

import json
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.profiling_modules import profiling_modules

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiling"
NAMES = ("bench", "captions", "harness", "names", "partial", "resident", "script", "sentences")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    with profiling_modules(*NAMES) as found:
        yield found


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
        summary=lambda result: [f"The sums are {len(result['entries'])}."],
        titles={"2": "the second sum"},
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
    first, line, sums_, targets, table, how, command = text.split("\n\n")
    assert first == "The sums are 2."  # what the figures say comes first, and how it was measured comes last
    assert re.match(
        r"Measured on [\d-]+ with tensorloop \S+ and torch \S+\. Processor: .+, \d+ cores; 2 threads\.", line
    )
    assert (sums_, targets) == ("2 sums, sums.png", "**Targets.** 1 of 1 are met.")
    assert "| the first sum |       10 | at most 15 | met |" in table
    assert how == "**How it was measured.**"
    assert command.startswith(f"- Command: `python profiling/sums.py --out {out}`.\n- Versions: tensorloop ")
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
    said = "- Measured in a run of their own: the second sum (`python profiling/sums.py --only 2 --rounds 1"
    assert said in out.with_suffix(".md").read_text()
    assert sums.main(["--out", str(out)]) == 0
    assert json.loads(out.read_text())["again"] == {}


def of_an_older_torch(out: Path, groups: tuple[str, ...]) -> dict[str, Any]:
    """Changes a file of results: some groups are of another torch. Gives the results."""
    result = json.loads(out.read_text())
    older = result["about"] | {"versions": result["about"]["versions"] | {"torch": "1.0"}, "date": "2020-02-02"}
    if len(groups) == 2:
        result["about"] = older
    else:
        result["again"] = dict.fromkeys(groups, older)
    out.write_text(json.dumps(result))
    return result


@pytest.mark.parametrize("groups", [("1", "2"), ("1",)])
def test_a_part_of_another_version_is_refused_before_it_is_measured(
    sums: Any,
    modules: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    groups: tuple[str, ...],
):
    out = tmp_path / "sums.json"
    assert sums.main(["--out", str(out)]) == 0
    of_an_older_torch(out, groups)
    before, page = out.read_text(), out.with_suffix(".md").read_text()
    spawn = Stopping(None)
    monkeypatch.setattr(modules["harness"], "spawn", spawn)
    assert sums.main(["--only", "2", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{out} has rows of another machine or version that this run leaves out: 1 (torch: 1.0 and " in said
    assert "measure these rows too, or name another file by --out" in said
    assert (out.read_text(), out.with_suffix(".md").read_text(), spawn.seen) == (before, page, [])
    assert sums.main(["--only", "2", "--out", str(tmp_path / "beside.json")]) == 0
    assert sums.main(["--out", str(out)]) == 0  # the whole replaces it all
    assert json.loads(out.read_text())["again"] == {}
    assert "1.0" not in out.with_suffix(".md").read_text()


def test_rows_of_another_version_stand_in_a_table_of_their_own(sums: Any, tmp_path: Path):
    out = tmp_path / "sums.json"
    assert sums.main(["--out", str(out)]) == 0
    of_an_older_torch(out, ("2",))
    assert sums.main(["--report", "--out", str(out)]) == 0
    first, other = out.with_suffix(".md").read_text().split("\n### Rows of another run\n")
    assert ("1 sums, sums.png" in first, "1 sums, sums.png" in other) == (True, True)
    assert ("torch 1.0" in first, "torch 1.0" in other) == (False, True)
    assert ("2020-02-02" in first, other.strip().startswith("Measured on 2020-02-02 with")) == (False, True)
    assert [target["value"] for target in json.loads(out.read_text())["targets"]] == [10.0, 20.0]


def test_another_machine_is_another_run(modules: dict[str, Any]):
    captions, about = modules["captions"], modules["harness"].about(1)
    there = about | {"machine": about["machine"] | {"processor": "another"}}
    assert captions.differences(about, about | {"load_at_start": 9, "date": "later", "rounds": 7}) == []
    assert captions.differences(there, about) == [f"processor: another and {about['machine']['processor']}"]
    with_peer = about | {"peers": {"jax": {"jax": "0.1"}}}
    assert captions.differences(with_peer, about) == captions.differences(about, with_peer) == []
    newer = about | {"peers": {"jax": {"jax": "0.2"}}}
    assert captions.differences(with_peer, newer) == ["jax: 0.1 and 0.2"]


def test_workloads_are_known_by_words_and_by_the_keys_of_older_days(
    modules: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    names, parser = modules["names"], ArgumentParser()
    names.add_only(parser, ["W2", "W4", "crf"])
    assert parser.parse_args(["--only", "unknown_length", "W2", "crf"]).only == ["W4", "W2", "crf"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--only", "W9"])
    assert "there is no 'W9'; expected one of lstm, unknown_length, crf" in capsys.readouterr().err
    assert names.worded("python profiling/compiled.py --only W2s W4 crf") == (
        "python profiling/compiled.py --only lstm_small unknown_length crf"
    )
    assert names.heading("W4").startswith("A loop of unknown length")


def test_sentences_are_true_whoever_wins(modules: dict[str, Any]):
    words = modules["sentences"]
    assert words.speed(0.02, "x") == "50 times as fast as x"
    assert words.speed(2.0, "x") == "0.5 times as fast as x"
    assert words.speed(1.04, "x") == "about as fast as x"
    assert (words.share(0.034), words.share(1.49)) == ("3.4 %", "1.5 times")
    assert words.winners({"a": 0.5, "b": 1.04, "c": None}) == ["No peer wins by more than 5 % in time (2 comparisons)."]
    assert words.winners({"a": 0.5, "b": 1.5, "c": 12.0}, "memory") == [
        "Where peers win by more than 5 % in memory (2 of 3 comparisons):",
        "- c: ours needs 12 times as much memory\n- b: ours needs 1.5 times as much memory",
    ]
    assert words.winners({}) == []
    many = words.winners({str(n): 1.0 + n for n in range(1, 9)})
    assert many[1].endswith("- and 3 more: see the tables")


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
    assert "**The run was stopped**: 3 of 4 figures." in partial.with_suffix(".md").read_text()


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
