"""The grapheme-to-phoneme example in two processes: torchrun gives the run of one process, to rounding."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples.g2p import checkpoint, cli, processes
from docs.examples.g2p.train import Trainer
from tests.examples.test_g2p_runs import ROOT, SETTINGS, toy_trainer, write_lexicon

# The last batch of an epoch has one row: one of two processes has none of its own there.
UNEVEN = replace(SETTINGS, epochs=4, batch_size=53)
# `tests/loop/test_many_processes.py` and `tests/hf/test_looped.py` have the processes of every run.
pytestmark = pytest.mark.extended
STOP = 5  # inside the second epoch
SECONDS = 60


def torchrun(*arguments: str) -> str:
    """Runs a module in two processes, as a user would; what they printed. No process is left behind."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "--",
        *arguments,
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            printed, _ = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun hands it on to the processes it started
            printed, _ = running.communicate()
    assert running.returncode == 0, printed
    return printed


def run_noting_losses(trainer: Trainer) -> list[float]:
    """Runs to the end; the sum of an epoch's losses so far, before each step."""
    sums: list[float] = []

    def note(step: int) -> bool:
        sums.append(trainer.loss_sum)
        return False

    assert trainer.run(stop=note)
    return sums


def one_of_two(folder: Path) -> None:
    """What each process does: a whole run, and one that is stopped."""
    torch.set_num_threads(1)
    with processes.joined():
        sums = run_noting_losses(toy_trainer(folder / "whole", UNEVEN))
        assert not toy_trainer(folder / "stopped", UNEVEN).run(stop=lambda step: step == STOP)
        checkpoint.write_json(folder / f"sums{processes.rank()}.json", sums)


def history(folder: Path) -> list[dict[str, Any]]:
    epochs = json.loads((folder / "history.json").read_text())["epochs"]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in epochs]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same losses to rounding, and the same scores."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == {**theirs, "loss": pytest.approx(theirs["loss"], rel=1e-5)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list[float]]:
    trainer = toy_trainer(tmp_path_factory.mktemp("alone"), UNEVEN)
    return trainer, run_noting_losses(trainer)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    torchrun("tests.examples.test_g2p_processes", str(folder))
    return folder


def test_every_step_has_the_loss_of_one_process(alone: tuple[Trainer, list[float]], together: Path):
    trainer, expected = alone
    assert len(trainer.examples) % UNEVEN.batch_size == 1
    assert trainer.steps_per_epoch < STOP < 2 * trainer.steps_per_epoch < len(expected)
    for rank in range(2):
        assert json.loads((together / f"sums{rank}.json").read_text()) == pytest.approx(expected, rel=1e-5)


def test_the_history_is_that_of_one_process(alone: tuple[Trainer, list[float]], together: Path):
    assert_close(history(together / "whole"), history(alone[0].folder))
    assert min(entry["dev_per"] for entry in history(together / "whole")) < 100


def test_the_saved_model_is_that_of_one_process(alone: tuple[Trainer, list[float]], together: Path):
    found, expected = (
        checkpoint.load_model(folder / "model.pt")[0] for folder in (together / "whole", alone[0].folder)
    )
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_one_process_goes_on_with_what_two_saved(alone: tuple[Trainer, list[float]], together: Path):
    resumed = toy_trainer(together / "stopped", UNEVEN)
    resumed.resume()
    assert resumed.step == STOP
    assert resumed.run()
    assert_close(history(together / "stopped"), history(alone[0].folder))


def test_the_command_line_under_torchrun(tmp_path: Path):
    words = str(write_lexicon(tmp_path / "toy.txt"))
    options = ["train", "--size", "small", "--data", words, "--epochs", "1", "--threads", "1", "--run"]
    printed = torchrun("docs.examples.g2p", *options, str(tmp_path / "two"))
    assert cli.main([*options, str(tmp_path / "one")]) == 0
    assert_close(history(tmp_path / "two"), history(tmp_path / "one"))
    assert math.isfinite(history(tmp_path / "two")[0]["loss"])
    assert printed.count("epoch 1: loss ") == printed.count("learning_curve.png") == 1  # one of them reports
    names = {"history.json", "learning_curve.png", "model.pt", "training.pt"}
    assert {path.name for path in (tmp_path / "two").iterdir()} == names


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
