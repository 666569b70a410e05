"""The memory tools' command line: what it prints and writes, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tensorloop.memory.command import main

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch

w = torch.eye(8).roll(1, 0).requires_grad_()


def grows(T):
    past = torch.zeros(0, 8)
    h = torch.ones(1, 8)
    loss = 0.0
    for _ in range(T):
        h = h @ w
        past = torch.cat([past, h])
        loss = loss + past.square().mean()
    return loss


def linear(T):
    h = torch.ones(1, 8)
    for _ in range(T):
        h = h @ w
    return h.sum()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SCRIPT)
    return "model.py"


def measure(*arguments: str) -> int:
    return main([*arguments, "--T", "16,32,64", "--no-progress"])


def test_the_guilty_line_comes_first(script: str, capfd: pytest.CaptureFixture[str]):
    assert measure(f"{script}:grows") == 0
    out, err = capfd.readouterr()
    first = out.splitlines()[0]
    assert first == "model.py:13  past = torch.cat([past, h])"
    assert err == ""


def test_the_limit_is_of_bytes(script: str, capfd: pytest.CaptureFixture[str]):
    assert measure(f"{script}:grows", "--fail-above", "1.2") == 1
    err = capfd.readouterr().err.splitlines()
    assert [line.split(" grow as ")[0] for line in err] == [
        "tensorloop.memory: saved bytes",
        "tensorloop.memory: peak bytes",
    ]
    assert all(line.endswith(", above the limit of T^1.2") for line in err)
    assert measure(f"{script}:grows", "--fail-above", "2.5") == 0
    assert measure(f"{script}:linear", "--fail-above", "1.2") == 0


def test_every_file_asked_for(script: str, tmp_path: Path):
    files = [tmp_path / name for name in ("report.html", "report.png", "figures.json")]
    html, png, figures = map(str, files)
    assert measure(f"{script}:grows", "--report", html, "--report", png, "--json", figures) == 0
    assert "past = torch.cat([past, h])" in files[0].read_text(encoding="utf-8")
    assert files[1].read_bytes().startswith(b"\x89PNG")
    data = json.loads(files[2].read_text())
    assert data["target"] == "model.py:grows"
    assert data["Ts"] == [16, 32, 64]
    assert data["lines"][0]["site"]["line"] == 13
    assert (data["failed"], data["above"], data["limit"]) == (None, [], None)


def test_json_on_standard_output_stays_clean(script: str, capfd: pytest.CaptureFixture[str]):
    noisy = "import os\nprint('print')\nos.system('echo child')\nos.write(1, b'write')\n"
    Path(script).write_text(noisy + SCRIPT + "\nold = linear\ndef linear(T):\n    print('step')\n    return old(T)\n")
    assert measure(f"{script}:linear", "--json", "-", "--fail-above", "1.2") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["above"] == []
    assert all(word in err for word in ("print", "child", "write", "step", "bytes ~ T^"))


def test_the_standard_output_is_given_back(script: str, capfd: pytest.CaptureFixture[str]):
    assert measure(f"{script}:linear") == 0
    capfd.readouterr()
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_the_script_sees_itself_called_alone(script: str, capfd: pytest.CaptureFixture[str]):
    argv, path = sys.argv, sys.path[:]
    Path("beside.py").write_text("import sys\nargv = sys.argv\n")
    parses = "import argparse, beside\nargparse.ArgumentParser().parse_args()\nassert beside.argv == [__file__]\n"
    guarded = "\nassert __name__ == 'model'\nif __name__ == '__main__':\n    raise AssertionError\n"
    Path(script).write_text(parses + SCRIPT + guarded)
    assert measure(f"{script}:linear") == 0
    assert (sys.argv, sys.path) == (argv, path)
    assert "model" not in sys.modules


def test_a_script_that_changes_the_folder(script: str, tmp_path: Path):
    Path("elsewhere").mkdir()
    Path(script).write_text(SCRIPT + "\nimport os\nos.chdir('elsewhere')\n")
    assert measure(f"{script}:linear", "--json", "figures.json", "--report", "report.html") == 0
    assert {"figures.json", "report.html"} <= {path.name for path in tmp_path.iterdir()}


def test_a_script_that_runs_its_main(script: str, capfd: pytest.CaptureFixture[str]):
    Path(script).write_text(SCRIPT + "\nimport sys\nprint('trained')\nsys.exit(3)\n")
    assert measure(f"{script}:linear") == 0
    out, err = capfd.readouterr()
    assert "trained" not in out
    assert err == (
        "trained\ntensorloop.memory: note: model.py: line 26 of it ended the program while it was imported (exit 3); "
        "linear was there by then\n"
    )


def test_a_function_of_a_module(capfd: pytest.CaptureFixture[str]):
    assert measure("docs.examples.memory.language_model:after", "--fail-above", "1.2") == 0


def test_a_method(script: str):
    Path(script).write_text(SCRIPT + "\nclass Model:\n    loss = staticmethod(linear)\n")
    assert measure(f"{script}:Model.loss") == 0


def test_a_timeline(script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert measure(f"{script}:linear", "--timeline", str(tmp_path / "line.png")) == 0
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["caf\udce9.py", "d\udce9r/model.py"])
@pytest.mark.extended("caf")
def test_a_name_that_is_no_utf_8(where: str, script: str, capfd: pytest.CaptureFixture[str]):
    """The bytes of the name are shown as \\xe9: in the table, the page, the picture, the data and in messages."""
    Path(where).parent.mkdir(exist_ok=True)
    Path(where).write_text(Path(script).read_text())
    shown = where.replace("\udce9", "\\xe9")
    pages = ["--report", "r.html", "--report", "r.png", "--report", "r\udce9.html", "--json", "f.json"]
    assert measure(f"{where}:grows", *pages) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == f"{shown}:13  past = torch.cat([past, h])"
    assert err == ""
    page = Path("r.html").read_text(encoding="utf-8")
    assert f"<title>Memory of {shown}:grows</title>" in page
    assert f"{shown}:13 grows faster than T" in page
    assert Path("r\udce9.html").read_text(encoding="utf-8") == page
    data = json.loads(Path("f.json").read_text())
    assert (data["target"], data["lines"][0]["site"]["file"]) == (f"{shown}:grows", shown)
    assert measure(f"{where}:nix") == 2
    assert f"{shown}: there is no nix" in capfd.readouterr().err


def test_a_function_that_fails_in_a_file_whose_name_is_no_utf_8(script: str, capfd: pytest.CaptureFixture[str]):
    where = "caf\udce9.py"
    late = "\n\ndef late(T):\n    if T > 32:\n        raise ValueError(__file__)\n    return linear(T)\n"
    Path(where).write_text(Path(script).read_text() + late)
    assert measure(f"{where}:late", "--report", "r.html", "--json", "-") == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["failed"]["error"].endswith("caf\\xe9.py")
    assert "caf\\xe9.py" in err
    assert "caf\\xe9.py" in Path("r.html").read_text(encoding="utf-8")


def test_from_a_shell(script: str):
    command = [sys.executable, "-m", "tensorloop.memory", f"{script}:grows", "--T", "16,32", "--fail-above", "1.2"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 1
    assert done.stdout.startswith("model.py:13")
    assert "above the limit" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away(script: str):
    command = (
        f"{sys.executable} -m tensorloop.memory {script}:grows --T 16,32 --no-progress | true; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bar_is_on_standard_error(script: str, capfd: pytest.CaptureFixture[str]):
    assert main([f"{script}:linear", "--T", "16,32"]) == 0
    out, err = capfd.readouterr()
    assert "it/s" in err or "step" in err
    assert "\r" not in out
