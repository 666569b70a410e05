"""The memory tools' command line, given what does not serve: one message, no traceback of ours, nothing lost."""

import importlib.util
import json
from pathlib import Path

import pytest

from tensorloop.memory.command import main

SCRIPT = """
import torch

w = torch.ones(4, requires_grad=True)


def loss(T):
    return (w * torch.ones(T, 4)).square().sum()


def two_sizes(T, size):
    return loss(T)


def fails_at_32(T):
    helper(T)
    return loss(T)


def helper(T):
    if T >= 32:
        torch.zeros(T) @ torch.zeros(T + 1)


def pair(T):
    return loss(T), T


def rows(T):
    return w * torch.ones(T, 4)


def blind(T):
    with torch.no_grad():
        return loss(T)


def number(T):
    return 1.0 * T


def saves_nothing(T):
    return w.sum()


def leaves(T):
    raise SystemExit(4)


def in_place(T):
    buffer = torch.zeros(T, 4)
    total = 0.0
    for t in range(T):
        buffer[t] = w
        total = total + buffer[: t + 1].square().sum()
    return total


size = 4
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(SCRIPT)


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """What is said on standard error; nothing may be printed, and no frame of ours shown."""
    assert main([*arguments, "--no-progress"]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert "tensorloop/memory" not in err
    return err.removeprefix("tensorloop.memory: ").rstrip("\n")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("model.py:los", "model.py: there is no los; near: loss"),
        (
            "model.py:zzz",
            "model.py: there is no zzz; there are: blind, fails_at_32, helper, in_place, leaves, loss, number, "
            "pair, rows, saves_nothing",
        ),
        ("model.py:size", "model.py: size is no function, it is of type int; near: two_sizes"),
        ("modle.py:loss", "modle.py: there is no such file; near: model.py"),
        ("model.py", "model.py: give a file and a function in it, such as model.py:loss"),
        (":loss", ":loss: give a file and a function in it, such as model.py:loss"),
        ("not_there.at_all:loss", "not_there.at_all: there is no such module; is the file not_there/at_all.py meant?"),
        (
            "model.py:two_sizes",
            "model.py:two_sizes takes (T, size) and is called with T alone (missing a required argument: 'size'); give "
            "a function of T, such as def loss(T): return two_sizes(...)",
        ),
    ],
)
def test_a_function_that_is_not_there(target: str, said: str, capfd: pytest.CaptureFixture[str]):
    assert complaint(capfd, target) == said


def test_a_folder(capfd: pytest.CaptureFixture[str]):
    Path("folder.py").mkdir()
    assert complaint(capfd, "folder.py:loss") == "folder.py: Is a directory"


@pytest.mark.parametrize(
    ("name", "gave"),
    [
        ("pair", "a tuple of 2"),
        ("rows", "a tensor of shape (64, 4): take its mean() or sum()"),
        ("number", "a float"),
        ("blind", "one that needs no gradient: no_grad, detach(), or no parameters in it?"),
    ],
)
def test_no_scalar(name: str, gave: str, capfd: pytest.CaptureFixture[str]):
    assert complaint(capfd, f"model.py:{name}") == (
        f"at T = 64, the smallest: model.py:{name} must return a scalar loss to call backward on; it gave {gave}"
    )


def test_a_function_that_ends_the_program(capfd: pytest.CaptureFixture[str]):
    said = complaint(capfd, "model.py:leaves").splitlines()
    assert said[0] == "at T = 64, the smallest: model.py:leaves ended the program (exit 4)"
    assert said[-2:] == ["    raise SystemExit(4)", "SystemExit: 4"]


def test_a_function_that_fails_at_once(capfd: pytest.CaptureFixture[str]):
    said = complaint(capfd, "model.py:fails_at_32").splitlines()
    assert said[0].startswith("at T = 64, the smallest: inconsistent tensor size")
    assert [line.rpartition("/")[2] for line in said if line.startswith("  File ")] == [
        'model.py", line 16, in fails_at_32',
        'model.py", line 22, in helper',
    ]


def test_a_function_that_fails_in_backward(capfd: pytest.CaptureFixture[str]):
    said = complaint(capfd, "model.py:in_place").splitlines()
    assert said[0].startswith("at T = 64, the smallest: one of the variables needed for gradient computation has been")
    assert len(said) == 2
    assert said[1].startswith("RuntimeError: one of the variables needed")


def test_a_function_that_fails_later(capfd: pytest.CaptureFixture[str]):
    files = ["--report", "report.html", "--report", "report.png", "--json", "figures.json"]
    assert main(["model.py:fails_at_32", "--T", "8,16,32,64", "--no-progress", "--fail-above", "1.2", *files]) == 2
    out, err = capfd.readouterr()
    assert "failed at T=32: RuntimeError: inconsistent tensor size" in out
    assert err.startswith("tensorloop.memory: failed at T = 32; figures are of smaller T\nTraceback (most recent call")
    assert "helper(T)" in err
    assert "tensorloop/memory" not in err
    data = json.loads(Path("figures.json").read_text())
    assert (data["Ts"], len(data["bytes"])) == ([8, 16], 2)
    assert data["failed"]["T"] == 32
    assert "line 22, in helper" in data["traceback"]
    assert "<h2>Failed at T = 32</h2>" in Path("report.html").read_text()
    assert Path("report.png").read_bytes().startswith(b"\x89PNG")


def test_one_size_alone_is_told_too(capfd: pytest.CaptureFixture[str]):
    files = ["--report", "report.html", "--report", "report.png", "--json", "figures.json"]
    assert main(["model.py:fails_at_32", "--T", "16,32,64", "--no-progress", "--fail-above", "1.2", *files]) == 2
    assert json.loads(Path("figures.json").read_text())["Ts"] == [16]
    assert "16 " in capfd.readouterr().out


def test_a_function_that_saves_nothing(capfd: pytest.CaptureFixture[str]):
    files = ["--report", "report.html", "--report", "report.png", "--json", "figures.json"]
    assert main(["model.py:saves_nothing", "--T", "8,16", "--no-progress", "--fail-above", "1.2", *files]) == 2
    assert capfd.readouterr().err == (
        "tensorloop.memory: model.py:saves_nothing saves nothing for backward at any T: does its loss depend on what "
        "its loop makes?\n"
    )
    assert json.loads(Path("figures.json").read_text())["bytes"] == [0, 0]
    assert Path("report.png").exists()


@pytest.mark.parametrize(
    ("Ts", "said"),
    [
        ("64,32", "must be two or more sizes that rise from 1 on, such as 64,128,256; got 64,32"),
        ("64,64", "must be two or more sizes that rise from 1 on, such as 64,128,256; got 64,64"),
        ("64", "must be two or more sizes that rise from 1 on, such as 64,128,256; got 64"),
        ("0,64", "must be two or more sizes that rise from 1 on, such as 64,128,256; got 0,64"),
        ("many", "must be whole numbers such as 64,128,256; got 'many'"),
        ("64;128", "must be whole numbers such as 64,128,256; got '64;128'"),
    ],
)
def test_sizes(Ts: str, said: str, capfd: pytest.CaptureFixture[str]):
    refused(["model.py:loss", "--T", Ts], said, capfd)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--fail-above", "high", "must be a power of T such as 1.2; got 'high'"),
        ("--fail-above", "nan", "must be a power of T such as 1.2; got 'nan'"),
        ("--report", "report.pdf", "must end in .html or .png; got 'report.pdf'"),
        ("--timeline", "line.svg", "must end in .png; got 'line.svg'"),
    ],
)
def test_options(option: str, value: str, said: str, capfd: pytest.CaptureFixture[str]):
    refused(["model.py:loss", option, value], said, capfd)


def refused(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1].endswith(f"argument {arguments[1]}: {said}")


@pytest.mark.parametrize("option", ["--report", "--json", "--timeline"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(option: str, capfd: pytest.CaptureFixture[str]):
    Path("model.py").write_text("raise AssertionError('it ran')")
    name = "figures.json" if option == "--json" else "report.png"
    assert complaint(capfd, "model.py:loss", option, f"nowhere/{name}") == (
        f"nowhere/{name}: cannot be written: No such file or directory"
    )


def test_no_permission(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    assert complaint(capfd, "model.py:loss", "--json", "figures.json") == (
        "figures.json: cannot be written: Permission denied"
    )


def test_what_is_there_stays_until_the_run_is_over(capfd: pytest.CaptureFixture[str]):
    Path("old.json").write_text("old")
    complaint(capfd, "model.py:pair", "--json", "old.json", "--report", "new.html")
    assert Path("old.json").read_text() == "old"
    assert not Path("new.html").exists()


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("matplotlib", ["--report", "r.png"], "a picture: needs matplotlib: pip install 'tensorloop[memory]'"),
        ("matplotlib", ["--timeline", "t.png"], "a picture: needs matplotlib: pip install 'tensorloop[memory]'"),
        (
            "memory_profiler",
            ["--timeline", "t.png"],
            "--timeline: needs memory_profiler: pip install 'tensorloop[memory]'",
        ),
    ],
)
def test_a_package_that_is_not_installed(
    missing: str,
    arguments: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert complaint(capfd, "model.py:loss", *arguments) == said


def test_a_script_that_fails_while_it_is_imported(capfd: pytest.CaptureFixture[str]):
    Path("model.py").write_text("def f():\n    return 1 / 0\n\n\nf()\n")
    said = complaint(capfd, "model.py:loss").splitlines()
    assert said[0] == "model.py fails while it is imported:"
    assert [line.strip() for line in said if line.startswith("    ") and "^" not in line] == ["f()", "return 1 / 0"]
    assert said[-1] == "ZeroDivisionError: division by zero"


def test_a_script_that_is_no_python(capfd: pytest.CaptureFixture[str]):
    Path("model.py").write_text("def f(:\n")
    said = complaint(capfd, "model.py:loss").splitlines()
    assert said[0] == "model.py fails while it is imported:"
    assert said[-1].startswith("SyntaxError")


def test_a_module_that_fails_while_it_is_imported(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(".")
    Path("needs_another.py").write_text("import not_there_either\n")
    said = complaint(capfd, "needs_another:loss").splitlines()
    assert said[0] == "needs_another fails while it is imported:"
    assert said[-1] == "ModuleNotFoundError: No module named 'not_there_either'"


def test_a_script_that_ends_before_the_function(capfd: pytest.CaptureFixture[str]):
    Path("model.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n" + SCRIPT)
    said = complaint(capfd, "model.py:loss").splitlines()
    assert said[-1] == (
        "tensorloop.memory: model.py: there is no loss (line 2 of it ended the program while it was imported "
        "(exit 2)); it has no functions"
    )


def test_interrupted(capfd: pytest.CaptureFixture[str]):
    Path("model.py").write_text("def loss(T):\n    raise KeyboardInterrupt\n")
    assert complaint(capfd, "model.py:loss", code=130) == "interrupted"
