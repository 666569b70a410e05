"""The grapheme-to-phoneme example: checkpoint files that are damaged or foreign, and runs killed between two files."""

import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples.g2p import checkpoint, cli
from docs.examples.g2p.checkpoint import CheckpointError
from tests.examples.test_g2p_runs import SETTINGS, assert_one_line, save_toy_model, toy_trainer, write_lexicon

Content = dict[str, Any]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch."""
    trainer = toy_trainer(tmp_path_factory.mktemp("begun"))
    assert not trainer.run(stop=lambda step: step == 9)
    return trainer.folder


# --- runs that are killed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_run_killed_before_its_history_is_written_has_it_after_resuming(
    tmp_path: Path, epoch: int, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException):
        pass

    write_json = checkpoint.write_json

    def kill(path: Path, value: Content) -> None:
        if len(value["epochs"]) == epoch:
            raise Killed
        write_json(path, value)

    monkeypatch.setattr(checkpoint, "write_json", kill)
    with pytest.raises(Killed):
        toy_trainer(tmp_path).run()
    monkeypatch.undo()
    last = toy_trainer(tmp_path)
    last.resume()
    assert last.run()
    record = json.loads((tmp_path / "history.json").read_text())
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2, 3]
    assert record["epochs"] == last.history
    assert record["settings"] == asdict(SETTINGS)


@pytest.mark.usefixtures("_tiny")
def test_resuming_before_the_first_checkpoint_begins_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lexicon, run = str(write_lexicon(tmp_path / "toy.txt")), tmp_path / "run"
    train = ["train", "--run", str(run), "--size", "small", "--data", lexicon, "--resume"]
    said = f"g2p: {run} holds no training.pt to go on from: beginning from the start\n"
    assert cli.main(train) == 0
    assert capsys.readouterr().err.startswith(said)
    assert len(json.loads((run / "history.json").read_text())["epochs"]) == SETTINGS.epochs
    assert cli.main(train) == 0
    assert said not in capsys.readouterr().err


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.SIZES, "small", SETTINGS)


# --- training.pt --------------------------------------------------------------------------------------------------


def without(key: str) -> Callable[[Content], object]:
    return lambda content: content.pop(key)


def put(value: object, *keys: Any) -> Callable[[Content], None]:
    """Sets what stands at a path of keys."""

    def change(content: Content) -> None:
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def one_nan(*keys: Any) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        inner: Any = content
        for key in keys:
            inner = inner[key]
        inner.view(-1)[0] = math.nan

    return change


DAMAGED = [
    *(
        pytest.param(without(key), f"(it has no {key!r})", id=f"no {key}")
        for key in ("config", "settings", "examples", "weights", "average", "optimizer", "random", "step", "history")
    ),
    (without("seconds"), "(it has no 'seconds')"),
    (without("loss_sum"), "(it has no 'loss_sum')"),
    (put("9", "step"), "its step must be a whole number from 0 to 21, found '9'"),
    (put(9.0, "step"), "its step must be a whole number from 0 to 21, found 9.0"),
    (put(-1, "step"), "its step must be a whole number from 0 to 21, found -1"),
    (put(22, "step"), "its step must be a whole number from 0 to 21, found 22"),
    (put(torch.tensor(9), "step"), "its step must be a whole number from 0 to 21, found a Tensor"),
    (put(math.nan, "loss_sum"), "its loss_sum must be a number of 0 or more, found nan"),
    (put(None, "seconds"), "its seconds must be a number of 0 or more, found a NoneType"),
    (put(math.inf, "history", 0, "dev_wer"), "its history[0]['dev_wer'] must be a number of 0 or more, found inf"),
    (put({}, "history", 0), "(it has no '"),
    (put(3, "history"), "does not fit this run ("),
    (put(torch.zeros(3), "settings"), "was made with other settings"),
    (put(torch.zeros(3), "settings", "epochs"), "does not fit this run ("),
    (put([1], "vocabulary", "letters"), "was made with other vocabulary"),
    (one_nan("weights", "output.bias"), "holds weights that are not finite (weights['output.bias'])"),
    (one_nan("average", "output.bias"), "holds weights that are not finite (average['output.bias'])"),
    (one_nan("optimizer", "state", 2, "exp_avg"), "not finite (optimizer[2]['exp_avg'])"),
    (put(torch.zeros(2), "weights", "output.bias"), "(weights['output.bias'] is (2,) of torch.float32, not ("),
    (put([1.0], "weights", "output.bias"), "weights['output.bias'] must be a tensor, found list"),
    (put(torch.zeros(2), "average", "extra"), "(average has an unknown 'extra')"),
    (put([], "weights"), "weights must be a dict of tensors, found list"),
    (put(torch.zeros(3), "optimizer", "state", 0, "exp_avg_sq"), "(optimizer[0]['exp_avg_sq'] is (3,)"),
    (put("x", "optimizer", "param_groups", 0, "betas"), "was made with another optimizer"),
    (put([], "optimizer", "param_groups"), "was made with another optimizer"),
    (put({0: {}}, "optimizer", "state"), "(it has no 'step')"),
    (put(None, "optimizer"), "does not fit this run ("),
    (put(torch.zeros(7), "random"), "does not fit this run ("),
    (put(torch.zeros(7, dtype=torch.uint8), "random"), "does not fit this run ("),
]


@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_a_damaged_run_is_refused_before_anything_is_changed(
    tmp_path: Path, begun: Path, change: Callable[[Content], object], message: str
):
    path = tmp_path / "training.pt"
    content = torch.load(begun / "training.pt", weights_only=True)
    change(content)
    torch.save(content, path)
    trainer, random = toy_trainer(tmp_path), torch.get_rng_state()
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        trainer.resume()
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert trainer.step == 0
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], weight) for name, weight in trainer.model.state_dict().items())
    assert os.listdir(tmp_path) == ["training.pt"]


def test_the_file_that_is_not_damaged_is_taken(tmp_path: Path, begun: Path):
    shutil.copy(begun / "training.pt", tmp_path)
    trainer = toy_trainer(tmp_path)
    trainer.resume()
    assert trainer.step == 9


def test_bytes_cut_off_or_flipped_give_no_other_error(tmp_path: Path, begun: Path):
    whole, path = (begun / "training.pt").read_bytes(), tmp_path / "training.pt"
    trainer = toy_trainer(tmp_path)
    refused = 0
    for i in range(40):
        data = bytearray(whole)
        at = len(data) * i // 40
        if i % 2:
            data[at : at + 16] = bytes(b ^ 0xA5 for b in data[at : at + 16])
        else:
            del data[at:]
        path.write_bytes(data)
        with suppress(CheckpointError):  # a flip may hit bytes that nobody reads
            trainer.resume()
            continue
        refused += 1
    assert refused >= 20


# --- files of other kinds -----------------------------------------------------------------------------------------


class _Runs:
    """Runs code when it is read by a plain pickle."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


def test_a_file_of_somebody_else_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"format": checkpoint.MODEL_FORMAT, "weights": _Runs()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is not a checkpoint, or is cut short"):
        checkpoint.load_model(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(torch.zeros(2), "format"), "expected a checkpoint of format 'tensorloop-g2p-model-1', found None"),
        (put(10**12, "config", "letters"), "its vocabulary has not the 1000000000000 letters of its config"),
        (put(10**12, "config", "embed"), "does not fit this program's model (weights["),
        (put(3, "config", "hidden"), "(G2P: hidden must be even"),
        (put(-4, "config", "hidden"), "does not fit this program's model ("),
        (put("big", "config", "hidden"), "does not fit this program's model ("),
        (put(1, "config", "depth"), "does not fit this program's model ("),
        (put(["A", "A", "C", "D"], "vocabulary", "letters"), "its letters must be a list of strings, each once"),
        (put([1, 2], "vocabulary", "phones"), "its phones must be a list of strings, each once"),
        (put(None, "vocabulary"), "does not fit this program's model ("),
        (put(torch.zeros(3, dtype=torch.float64), "weights", "output.bias"), "of torch.float64, not (3,) of torch.fl"),
    ],
)
def test_a_damaged_model_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Content], object], message: str
):
    path = save_toy_model(tmp_path / "model.pt")
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    assert_one_line(capsys, ["say", "A", "--checkpoint", str(path)], message)


def test_a_folder_in_place_of_a_checkpoint_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert_one_line(capsys, ["say", "A", "--checkpoint", str(tmp_path)], "cannot be read (Is a directory)")


# --- writing ------------------------------------------------------------------------------------------------------


def test_a_symlink_beside_the_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    victim, path = tmp_path / "victim", tmp_path / "model.pt"
    victim.write_text("mine")
    monkeypatch.setattr(checkpoint.secrets, "token_hex", lambda n: "guessed")
    (tmp_path / ".model.pt.guessed.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        checkpoint.save(path, "kind", {"value": 1})
    monkeypatch.undo()
    (tmp_path / ".model.pt.tmp").symlink_to(victim)
    (tmp_path / ".model.pt.x.tmp").mkdir()  # cannot be taken away as a file is
    checkpoint.save(path, "kind", {"value": 1})
    assert victim.read_text() == "mine"
    assert checkpoint.load(path, "kind")["value"] == 1


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path):
    (tmp_path / "plain").touch()
    checkpoint.write_json(tmp_path / "history.json", [])
    assert (tmp_path / "history.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "write",
    [
        lambda path: checkpoint.save(path, "kind", {"value": torch.zeros(100_000)}),
        lambda path: checkpoint.write_json(path, list(range(10_000))),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path: Path, write: Callable[[Path], None]):
    path = tmp_path / "file"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
