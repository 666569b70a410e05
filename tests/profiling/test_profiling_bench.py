"""`make bench`: the short set of every script, its page, and what happens when one fails or all are stopped."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "profiling"


@pytest.fixture
def modules(scripts: dict[str, Any]) -> dict[str, Any]:
    return scripts


PROGRAM = """
import json, pathlib, sys
sys.path[:0] = [{folder!r}]
from running import harness
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
assert sys.argv[1] == "--short"
about = harness.about(1, command="python profiling/{name}.py --short", set="short")
entries = [{{"cell": {{"kind": "time"}}, "raw": [{{"error": "no"}}]}}]
targets = [{{"what": "time", "value": 0.25, "bound": 0.5, "least": False, "unit": "ms"}}]
targets += [{{"what": "much", "value": None, "bound": 0.5, "least": False, "unit": ""}}]
out.write_text(json.dumps({{"about": about, "entries": entries, "targets": targets}}))
"""


@pytest.mark.extended
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
    assert text.count("Command: `python profiling/") == text.count("No figure: 1 cells failed") == 2
    assert bench.main(["--only", "last", "--out", str(out)]) == 0
    assert "### first" in (out / "bench.md").read_text()


def test_bench_that_is_stopped_changes_no_document(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bench = modules["bench"]

    def run(name: str, out: Path, report: bool) -> int:
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
    usual = f"2020-02-02, tensorloop {about['versions']['tensorloop']}, {about['machine']['processor']}."
    assert head.endswith(f"Beside it: `python profiling/x.py`, {usual}")
    assert "| time | at most 0.5 |  0.25 met |     0.125 |" in table


def test_bench_names_scripts_that_there_are(modules: dict[str, Any]):
    for name in modules["bench"].SCRIPTS:
        assert '"short"' in (FOLDER / f"{name}.py").read_text()
    pages = {f"docs/benchmarks/{name}.md": name for name in modules["bench"].SCRIPTS}
    for page, name in (pages | {modules["bench"].PAGE: modules["bench"].MARKER}).items():
        text = (ROOT / page).read_text()
        assert 0 < text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")


def test_bench_reports_what_there_is_without_measuring(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bench, seen = modules["bench"], []
    monkeypatch.setattr(bench, "run", lambda name, out, report: seen.append((name, out, report)) or 0)
    (tmp_path / "regroup.json").write_text('{"about": {}, "entries": [], "targets": []}')
    monkeypatch.setattr(bench, "section", lambda folder, failed: "page")
    assert bench.main(["--report", "--out", str(tmp_path)]) == 0
    assert seen == [("regroup", tmp_path / "regroup.json", True)]
    assert (tmp_path / "bench.md").read_text() == "page\n"
