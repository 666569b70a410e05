"""The grapheme-to-phoneme example: training runs, resuming, checkpoints, the command line."""

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples.g2p import checkpoint, cli, data
from docs.examples.g2p.checkpoint import CheckpointError
from docs.examples.g2p.data import Vocabulary
from docs.examples.g2p.model import G2P, Config
from docs.examples.g2p.scoring import pronounce, score
from docs.examples.g2p.train import Settings, Trainer, one_cycle

SETTINGS = Settings(epochs=3, batch_size=16, hidden=16, embed=8, learning_rate=2e-2, dropout=0.1, average=0.9)
SOUND = {"A": "AA", "B": "B", "C": "K", "D": "D"}
ROOT = Path(__file__).parents[2]


def toy_lexicon() -> data.Lexicon:
    """120 words spelled as they sound; some have a second pronunciation, with a phone more."""
    generator = torch.Generator().manual_seed(0)
    lexicon: data.Lexicon = {}
    while len(lexicon) < 120:
        size = int(torch.randint(1, 6, (), generator=generator))
        word = "".join("ABCD"[i] for i in torch.randint(4, (size,), generator=generator).tolist())
        phones = tuple(SOUND[letter] for letter in word)
        lexicon[word] = [phones, (*phones, "Z")] if word.endswith("DD") else [phones]
    return lexicon


def toy_trainer(folder: Path, settings: Settings = SETTINGS) -> Trainer:
    lexicon = toy_lexicon()
    train, dev = data.split_dev(lexicon, 20)
    return Trainer(folder, train, dev, Vocabulary.of(lexicon), settings)


def write_lexicon(path: Path) -> Path:
    lines = [f"{word}\t{' '.join(phones)}\n" for word, found in toy_lexicon().items() for phones in found]
    path.write_text("".join(lines))
    return path


def assert_same(a: object, b: object) -> None:
    """Equal to the last bit in every tensor and every value, but for the clock."""
    assert type(a) is type(b)
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert_same(a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run that was never stopped."""
    trainer = toy_trainer(tmp_path_factory.mktemp("finished"))
    assert trainer.run()
    return trainer


# --- training and resuming ----------------------------------------------------------------------------------------


def test_training_learns_to_spell(tmp_path: Path):
    words = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product(SOUND, repeat=size)]
    lexicon: data.Lexicon = {word: [tuple(SOUND[letter] for letter in word)] for word in words}
    train, dev = data.split_dev(lexicon, 20)
    settings = Settings(epochs=25, batch_size=8, hidden=32, embed=16, learning_rate=1e-2, dropout=0, average=0.9)
    trainer = Trainer(tmp_path, train, dev, Vocabulary.of(lexicon), settings)
    trainer.run()
    losses = [entry["loss"] for entry in trainer.history]
    assert losses[-1] < 0.5 * losses[0]
    best = min(entry["dev_wer"] for entry in trainer.history)
    assert best <= 40  # of words never seen; chance is below one word in a hundred
    model, vocabulary = checkpoint.load_model(tmp_path / "model.pt")
    assert score(pronounce(model, vocabulary, list(dev)), dev).wer == best


@pytest.mark.parametrize("stops", [[0], [1], [10], [3, 4, 15]])
@pytest.mark.extended("stops0", "stops1", "stops2")
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path, finished: Trainer, stops: list[int]):
    assert finished.steps_per_epoch == 7  # so 1, 3, 4, 10 and 15 lie inside an epoch
    for number, at in enumerate(stops):
        trainer = toy_trainer(tmp_path)
        if number:
            trainer.resume()
        assert not trainer.run(stop=lambda step, at=at: step == at)
        torch.rand(7)  # the generator moves on between the two processes
    last = toy_trainer(tmp_path)
    last.resume()
    assert last.step == stops[-1]
    assert last.run()
    assert_same(last.state(), finished.state())
    ours, theirs = (checkpoint.load_model(t.folder / "model.pt")[0] for t in (last, finished))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, finished: Trainer):
    class Killed(BaseException):
        pass

    def kill(step: int) -> bool:
        if step == 12:
            raise Killed
        return False

    with pytest.raises(Killed):
        toy_trainer(tmp_path).run(save_every=0, stop=kill)
    last = toy_trainer(tmp_path)
    last.resume()
    assert last.step == 12  # save_every=0 saves after every step
    assert last.run()
    assert_same(last.state(), finished.state())


def test_a_finished_run_has_nothing_left_to_do(finished: Trainer):
    again = toy_trainer(finished.folder)
    again.resume()
    assert again.run()
    assert_same(again.state(), finished.state())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 4}, "with other settings (epochs: then 3, now 4)"),
        ({"hidden": 8}, "with other config (hidden: then 16, now 8)"),
        ({"seed": 7, "clip": 1.0}, "with other settings (clip: then 2.0, now 1.0, seed: then 0, now 7)"),
    ],
)
def test_resuming_another_run_is_refused(finished: Trainer, change: dict[str, Any], message: str):
    trainer = toy_trainer(finished.folder, replace(SETTINGS, **change))
    before = trainer.state()
    with pytest.raises(CheckpointError) as caught:
        trainer.resume()
    assert message in str(caught.value)
    assert trainer.step == before["step"] == 0


def test_resuming_with_other_data_is_refused(finished: Trainer):
    lexicon = toy_lexicon()
    train, dev = data.split_dev(lexicon, 30)
    trainer = Trainer(finished.folder, train, dev, Vocabulary.of(lexicon), SETTINGS)
    with pytest.raises(CheckpointError, match="with other examples"):
        trainer.resume()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path):
    trainer = toy_trainer(tmp_path)
    with torch.no_grad():
        trainer.model.output.bias[0] = math.nan
    with pytest.raises(FloatingPointError, match="train: the loss of step 0 is nan; lower the learning rate"):
        trainer.run()
    assert not (tmp_path / "training.pt").exists()


def test_the_learning_rate_rises_and_falls_to_zero():
    rates = [one_cycle(step, 100, 1.0, warmup=0.1) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0, abs=1e-12)


def test_the_history_is_json(finished: Trainer):
    record = json.loads((finished.folder / "history.json").read_text())
    assert record["settings"] == asdict(SETTINGS)
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2, 3]
    assert record["epochs"] == finished.history
    assert set(record["epochs"][0]) == {"epoch", "loss", "dev_per", "dev_wer", "seconds"}


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.extended("fsync")
def test_a_kill_while_writing_leaves_the_old_file_whole(tmp_path: Path, moment: str):
    path = tmp_path / "model.pt"
    checkpoint.save(path, "kind", {"value": 1})
    script = (
        f"import os; from docs.examples.g2p import checkpoint; os.{moment} = lambda *a: os._exit(9); "
        f"checkpoint.save({str(path)!r}, 'kind', {{'value': 2}})"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 9
    assert checkpoint.load(path, "kind")["value"] == 1
    assert len(list(tmp_path.glob(".model.pt.*.tmp"))) == 1
    checkpoint.save(path, "kind", {"value": 3})
    assert checkpoint.load(path, "kind")["value"] == 3
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path):
    path = tmp_path / "history.json"
    checkpoint.write_json(path, {"value": 1})
    with pytest.raises(TypeError):
        checkpoint.write_json(path, {"value": object()})
    assert json.loads(path.read_text()) == {"value": 1}


def save_toy_model(path: Path, change: Callable[[G2P], object] = lambda model: None) -> Path:
    model = G2P(Config(letters=4, phones=2, embed=4, hidden=4)).eval()
    with torch.no_grad():
        change(model)
    checkpoint.save_model(path, model, Vocabulary(("A", "B", "C", "D"), ("P", "Q")))
    return path


def test_a_model_comes_back_as_it_was(tmp_path: Path):
    path = save_toy_model(tmp_path / "model.pt")
    model, vocabulary = checkpoint.load_model(path)
    assert vocabulary == Vocabulary(("A", "B", "C", "D"), ("P", "Q"))
    assert model.config == Config(letters=4, phones=2, embed=4, hidden=4)
    assert not model.training
    saved = checkpoint.load(path, checkpoint.MODEL_FORMAT)["weights"]
    assert all(torch.equal(saved[name], weight) for name, weight in model.state_dict().items())


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def cut_short(path: Path) -> None:
    save_toy_model(path)
    path.write_bytes(path.read_bytes()[:-300])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("not a checkpoint")


def with_code(path: Path) -> None:
    torch.save({"format": checkpoint.MODEL_FORMAT, "weights": Path("x")}, path)


def bare_weights(path: Path) -> None:
    torch.save(torch.zeros(3), path)


def another_format(path: Path) -> None:
    checkpoint.save(path, "somebody-else-1", {})


def another_model(path: Path) -> None:
    save_toy_model(path)
    content = checkpoint.load(path, checkpoint.MODEL_FORMAT)
    del content["weights"]["output.bias"]
    torch.save(content, path)


def without_config(path: Path) -> None:
    checkpoint.save(path, checkpoint.MODEL_FORMAT, {"weights": {}})


def not_finite(path: Path) -> None:
    save_toy_model(path, lambda model: model.output.bias[0].fill_(math.inf))


BAD_CHECKPOINTS = [
    (missing, "no such checkpoint"),
    (cut_short, "is not a checkpoint, or is cut short"),
    (empty, "is not a checkpoint, or is cut short"),
    (text, "is not a checkpoint, or is cut short"),
    (with_code, "is not a checkpoint, or is cut short"),
    (bare_weights, "expected a checkpoint of format 'tensorloop-g2p-model-1', found None"),
    (another_format, "found 'somebody-else-1'"),
    (another_model, "does not fit this program's model"),
    (without_config, "does not fit this program's model"),
    (not_finite, "holds weights that are not finite"),
]


@pytest.mark.parametrize(("make", "message"), BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None], message: str
):
    path = tmp_path / "model.pt"
    make(path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    for command in (["say", "A"], ["evaluate"]):
        assert_one_line(capsys, [*command, "--checkpoint", str(path)], message)


# --- the command line ---------------------------------------------------------------------------------------------


def assert_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("g2p: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.SIZES, "small", SETTINGS)


@pytest.mark.usefixtures("tiny")
def test_train_evaluate_say_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lexicon, run = str(write_lexicon(tmp_path / "toy.txt")), tmp_path / "run"
    train = ["train", "--run", str(run), "--size", "small", "--data", lexicon, "--limit", "90", "--seed", "3"]
    assert cli.main(train) == 0
    assert str(run / "learning_curve.png") in capsys.readouterr().out
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "history.json").read_text())["settings"]["seed"] == 3
    model = ["--checkpoint", str(run / "model.pt")]
    assert cli.main(["evaluate", *model, "--data", lexicon, "--limit", "40"]) == 0
    assert capsys.readouterr().out.startswith("test, greedy: PER ")
    assert cli.main(["evaluate", *model, "--data", lexicon, "--split", "dev"]) == 0
    assert "(12 words" in capsys.readouterr().out
    assert cli.main(["say", *model, "cab", "D"]) == 0
    spoken = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert spoken == 4 * ["CAB"] + 4 * ["D"]
    assert_one_line(capsys, train, "holds a run; go on with --resume")
    assert cli.main([*train, "--resume"]) == 0


@pytest.mark.usefixtures("tiny")
def test_the_demo_shows_rates_words_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):  # it may be run again
        assert cli.main(["demo", "--run", str(tmp_path / "demo"), "--limit", "40"]) == 0
    out = capsys.readouterr().out
    assert "(1000 words, " in out
    assert all(f"  {word} " in out for word in cli.DEMO_SAYS)
    assert str(tmp_path / "demo" / "learning_curve.png") in out


def test_the_demo_says_words_that_are_not_in_the_dictionary():
    known = data.read_lexicon(data.TRAIN_FILE).keys() | data.read_lexicon(data.TEST_FILE).keys()
    assert not known & set(cli.DEMO_SAYS)


@pytest.mark.extended
def test_the_module_runs_from_the_root_without_a_traceback(tmp_path: Path):
    command = [sys.executable, "-m", "docs.examples.g2p", "say", "--checkpoint", str(tmp_path / "no.pt"), "A"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"g2p: {tmp_path / 'no.pt'}: no such checkpoint\n"


@pytest.mark.parametrize(
    ("word", "message"), [("", "the word is empty"), ("NAÏVE", "characters never seen in training"), ("A B", "' '")]
)
def test_a_bad_word_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str):
    path = save_toy_model(tmp_path / "model.pt")
    assert_one_line(capsys, ["say", "--checkpoint", str(path), "A", word], message)


def test_bad_data_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    broken, single = tmp_path / "broken.txt", tmp_path / "single.txt"
    broken.write_text("A\tAH\nB B\n")
    single.write_text("A\tAH\n")
    model = save_toy_model(tmp_path / "model.pt")
    run = ["train", "--run", str(tmp_path / "run"), "--data"]
    assert_one_line(capsys, [*run, str(broken)], f"{broken}:2: expected WORD<TAB>PHONE")
    assert_one_line(capsys, [*run, str(single)], "needs at least two words")
    assert_one_line(capsys, [*run, str(tmp_path / "none.gz")], "cannot be read (No such file or directory)")
    assert_one_line(capsys, ["evaluate", "--checkpoint", str(model), "--data", str(broken)], f"{broken}:2: ")
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_written_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lexicon = str(write_lexicon(tmp_path / "toy.txt"))
    train = ["train", "--size", "small", "--data", lexicon, "--run"]
    assert_one_line(capsys, [*train, lexicon], f"{lexicon}: File exists")


@pytest.mark.parametrize(
    "arguments", [[], ["train", "--epochs", "0"], ["say"], ["evaluate", "--limit", "-3"], ["sing"]]
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m docs.examples.g2p" in capsys.readouterr().err
