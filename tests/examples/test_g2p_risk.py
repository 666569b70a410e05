"""The grapheme-to-phoneme example: beam search, its gradients, minimum risk, and runs with a risk phase."""

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from docs.examples.g2p import checkpoint, cli, data, processes
from docs.examples.g2p.data import Examples, Lexicon, Vocabulary
from docs.examples.g2p.model import G2P, Config, Masks, greedy
from docs.examples.g2p.risk import losses, nearest
from docs.examples.g2p.scoring import edit_distance, n_best, pronounce
from docs.examples.g2p.search import best, search
from docs.examples.g2p.train import Trainer
from tensorloop import PackedTensor
from tensorloop.beam import Hypotheses
from tests.examples.test_g2p_processes import run_noting_losses, torchrun
from tests.examples.test_g2p_runs import SETTINGS, assert_same, toy_lexicon, toy_trainer, write_lexicon

WORDS = ["A", "BCA", "CABBACCA", "DDABCABC", "ACBD", "BB"]
SYMBOLS = Vocabulary(("A", "B", "C", "D"), ("P", "Q", "R", "S", "T"))
LEXICON: Lexicon = {"BCA": [("P", "Q")], "D": [("S", "R", "T"), ("S",)], "ACBD": [("T",)]}
RISKY = replace(SETTINGS, epochs=2, risk_epochs=2)
# The last batch of an epoch has one row: one of two processes has none of its own there.
UNEVEN = replace(RISKY, batch_size=53)


def small_model(seed: int = 0, scale: float = 2.0, phones: int = 5) -> G2P:
    """An untrained model in float64, with weights large enough that its words differ."""
    torch.manual_seed(seed)
    model = G2P(Config(letters=4, phones=phones, embed=6, hidden=8)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


def letters_of(words: list[str]) -> PackedTensor:
    return data.pack([SYMBOLS.encode_word(word) for word in words])


# --- searching ----------------------------------------------------------------------------------------------------


def log_prob(model: G2P, word: str, phones: tuple[int, ...]) -> float:
    goal = data.pack([[*phones, model.config.eos_id]])
    scores = model(letters_of([word]), goal)
    return float(scores.values.gather(1, goal.values[:, None]).sum())


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_search_finds_the_best_of_all_pronunciations(seed: int):
    model = small_model(seed, scale=1.0, phones=2)
    model.output.bias[-1] += 2  # the end is likely, so that short ones have most of the probability
    found = search(model, letters_of(["BCA"]), 64, 5)
    every = [phones for n in range(6) for phones in itertools.product(range(2), repeat=n)]
    ranked = sorted(((log_prob(model, "BCA", phones), phones) for phones in every), reverse=True)[:5]
    assert found.stopped == ["exact"]
    assert [tuple(row.tolist()) for row in found.tokens.unbind()] == [phones for _, phones in ranked]
    assert found.scores[0].tolist() == pytest.approx([score for score, _ in ranked])


@torch.no_grad()
@pytest.mark.parametrize("reluctance", [0.0, 3.0, 15.0])
def test_a_search_needs_no_maximum_length(reluctance: float):
    model = small_model()
    model.output.bias[-1] -= reluctance
    hyps = search(model, letters_of(WORDS), 4)
    assert hyps.stopped == ["exact"] * len(WORDS)
    assert bool(hyps.finished.all())
    assert len(hyps.lattice.tokens) > reluctance  # the more so, the longer it looks on


@torch.no_grad()
def test_a_word_does_not_depend_on_its_batch():
    model = small_model()
    together = pronounce(model, SYMBOLS, WORDS, beam=4)
    assert together == {word: pronounce(model, SYMBOLS, [word], beam=4)[word] for word in WORDS}
    assert together == pronounce(model, SYMBOLS, WORDS, batch_size=2, beam=4)
    listed = n_best(model, SYMBOLS, WORDS, beam=4, n=3)
    assert {word: found[0][1] for word, found in listed.items()} == together
    for found in listed.values():
        assert [score for score, _ in found] == sorted((score for score, _ in found), reverse=True)
        assert len({phones for _, phones in found}) == len(found) == 3


@torch.no_grad()
def test_a_beam_of_one_is_no_worse_than_greedy():
    model = small_model()
    rows = zip(greedy(model, letters_of(WORDS)), best(model, letters_of(WORDS), 1), WORDS, strict=True)
    for by_greed, by_beam, word in rows:
        assert log_prob(model, word, tuple(by_beam)) >= log_prob(model, word, tuple(by_greed)) - 1e-9


def test_searching_in_training_mode_needs_masks():
    with pytest.raises(RuntimeError, match=r"search: model is in training mode.*give masks, or call eval\(\)"):
        search(small_model().train(), letters_of(["A"]), 2)


def test_damaged_weights_are_an_error():
    model = small_model()
    with torch.no_grad():
        model.readout.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="the scores of step 0 are not finite"):
        search(model, letters_of(["AB"]), 2)


# --- gradients ----------------------------------------------------------------------------------------------------


def forced_scores(model: G2P, letters: PackedTensor, hyps: Hypotheses, masks: Masks | None) -> Tensor:
    """The scores of the hypotheses from a second pass, in which each is the given phones of its word."""
    rows = torch.arange(len(letters.lens)).repeat_interleave(hyps.n_best)
    goals = data.pack([[*row.tolist(), model.config.eos_id] for row in hyps.tokens.unbind()])
    scores = model(letters[rows], goals, None if masks is None else masks.of_rows(rows.tolist()))
    picked = PackedTensor(scores.values.gather(1, goals.values[:, None])[:, 0], goals.lens)
    return picked.sum(1).view(hyps.lens.shape)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_are_those_of_a_second_pass(checkpoints: int | None, dropout: bool):
    model, letters = small_model(1, scale=6.0), letters_of(WORDS)
    masks = model.masks(len(WORDS)) if dropout else None
    gold = data.pack([[i % 5, 2] for i in range(len(WORDS))])
    hyps = search(model, letters, 4, masks=masks, gold=gold, checkpoints=checkpoints)
    assert len(set(hyps.lens.flatten().tolist())) > 3
    forced = forced_scores(model, letters, hyps, masks)
    torch.testing.assert_close(hyps.scores, forced, rtol=1e-10, atol=1e-10)
    references = (data.pack([[1, 2, 0], [3]] * len(WORDS)), torch.full((len(WORDS),), 2))
    risks = nearest(hyps, *references)
    weights = list(model.parameters())
    found, expected = (
        torch.autograd.grad((scores.softmax(1) * risks).sum() - 0.1 * scores.sum(), weights)
        for scores in (hyps.scores, forced)
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    assert all(bool(gradient.any()) for gradient in found)


# --- risk ---------------------------------------------------------------------------------------------------------


def test_the_nearest_reference_counts():
    examples, model = Examples(LEXICON, SYMBOLS), small_model(1, scale=6.0)
    indices = torch.tensor([2, 3, 0, 1])  # the second of D, ACBD, BCA, the first of D
    spoken, counts = examples.references(indices)
    assert counts.tolist() == [2, 1, 1, 2]
    assert [row.tolist() for row in spoken.unbind()] == [[3, 2, 4], [3], [4], [0, 1], [3, 2, 4], [3]]
    assert [row.tolist() for row in examples.gold(indices).unbind()] == [[3], [4], [0, 1], [3, 2, 4]]
    hyps = search(model, examples.batch(indices)[0], 3)
    rows = [SYMBOLS.decode_phones(row.tolist()) for row in hyps.tokens.unbind()]
    by_hand = [
        min(edit_distance(rows[3 * b + j], reference) for reference in LEXICON[word])
        for b, word in enumerate(["D", "ACBD", "BCA", "D"])
        for j in range(3)
    ]
    assert nearest(hyps, spoken, counts).flatten().tolist() == by_hand
    assert len(set(by_hand)) > 2


@pytest.mark.parametrize("per_phone", [False, True])
def test_losses_are_their_formulae(per_phone: bool):
    examples, model = Examples(LEXICON, SYMBOLS), small_model()
    indices = torch.arange(len(examples))
    letters, phones = examples.batch(indices)
    gold, references = examples.gold(indices), examples.references(indices)
    found = losses(model, letters, gold, references, None, 4, 0.5, per_phone)
    scores = model(letters, phones).values
    torch.testing.assert_close(found.entropy, -scores.gather(1, phones.values[:, None]).sum())
    hyps = search(model, letters, 4, gold=gold)
    risks = nearest(hyps, *references) / (gold.lens[:, None] if per_phone else 1)
    torch.testing.assert_close(found.risk, ((0.5 * hyps.scores).softmax(1) * risks).sum())


def test_the_list_of_a_word_holds_its_gold_pronunciation():
    examples, model = Examples(LEXICON, SYMBOLS), small_model()
    indices = torch.arange(len(examples))
    hyps = search(model, examples.batch(indices)[0], 2, gold=examples.gold(indices))
    assert hyps.gold is not None
    for b, row in enumerate(examples.gold(indices).unbind()):
        assert torch.equal(hyps.tokens[2 * b + int(hyps.gold[b])], row)


def test_steps_down_the_risk_lower_it():
    lexicon = toy_lexicon()
    examples = Examples(lexicon, Vocabulary.of(lexicon))
    torch.manual_seed(0)
    model = G2P(Config(letters=4, phones=5, embed=8, hidden=16))
    indices = torch.arange(32)
    batch = examples.batch(indices)[0], examples.gold(indices), examples.references(indices)
    optimizer, risks = torch.optim.Adam(model.parameters(), lr=2e-2), []
    for _ in range(40):
        found = losses(model, *batch, model.masks(32), 4)
        optimizer.zero_grad()
        (found.risk + found.entropy).backward()
        optimizer.step()
        risks.append(float(found.risk.detach()) / 32)
    assert risks[-1] < 0.7 * risks[0]


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run with a risk phase that was never stopped."""
    trainer = toy_trainer(tmp_path_factory.mktemp("finished"), RISKY)
    assert trainer.run()
    return trainer


def test_the_history_has_both_phases(finished: Trainer):
    record = json.loads((finished.folder / "history.json").read_text())
    assert [entry["epoch"] for entry in record["epochs"]] == [1, 2, 3, 4]
    assert ["risk" in entry for entry in record["epochs"]] == [False, False, True, True]
    assert all(0 < entry["risk"] < entry["loss"] < math.inf for entry in record["epochs"][2:])
    assert record["settings"]["risk_epochs"] == 2


@pytest.mark.parametrize("stops", [[14], [13, 15], [17, 21, 25]])
@pytest.mark.extended("stops0", "stops2")
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path, finished: Trainer, stops: list[int]):
    assert finished.risk_begins == 14
    for number, at in enumerate(stops):
        trainer = toy_trainer(tmp_path, RISKY)
        if number:
            trainer.resume()
        assert not trainer.run(stop=lambda step, at=at: step == at)
        torch.rand(7)  # the generator moves on between the two processes
    last = toy_trainer(tmp_path, RISKY)
    last.resume()
    assert last.step == stops[-1]
    assert last.run()
    assert_same(last.state(), finished.state())
    for name in ("model.pt", "before_risk.pt"):
        ours, theirs = (checkpoint.load_model(trainer.folder / name)[0] for trainer in (last, finished))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_a_run_killed_in_the_risk_phase_goes_on_from_its_last_checkpoint(tmp_path: Path, finished: Trainer):
    class Killed(BaseException):
        pass

    def kill(step: int) -> bool:
        if step == 18:
            raise Killed
        return False

    with pytest.raises(Killed):
        toy_trainer(tmp_path, RISKY).run(save_every=0, stop=kill)
    last = toy_trainer(tmp_path, RISKY)
    last.resume()
    assert last.step == 18
    assert last.run()
    assert_same(last.state(), finished.state())


def test_cross_entropy_before_a_risk_phase_is_that_of_a_run_without(tmp_path: Path, finished: Trainer):
    alone = toy_trainer(tmp_path, replace(RISKY, risk_epochs=0))
    assert alone.run()
    assert_same(alone.history, finished.history[:2])
    began_from = checkpoint.load_model(finished.folder / "before_risk.pt")[0]
    assert_same(dict(began_from.state_dict()), dict(alone.average.state_dict()))


def test_a_phase_of_its_own_begins_from_a_model(tmp_path: Path, finished: Trainer):
    model, _ = checkpoint.load_model(finished.folder / "before_risk.pt")
    trainer = toy_trainer(tmp_path, replace(RISKY, epochs=0))
    trainer.begin_from(model)
    assert trainer.run()
    assert [entry["epoch"] for entry in trainer.history] == [0, 1, 2]
    assert trainer.history[0]["dev_wer"] == finished.history[1]["dev_wer"]  # what it began from is an entry
    resumed = toy_trainer(tmp_path / "again", replace(RISKY, epochs=0))
    resumed.begin_from(model)
    assert not resumed.run(stop=lambda step: step == 3)
    last = toy_trainer(tmp_path / "again", replace(RISKY, epochs=0))
    last.resume()
    assert last.run()
    assert_same(last.state(), trainer.state())


# --- two processes ------------------------------------------------------------------------------------------------


def one_of_two(folder: Path) -> None:
    """What each process does: a whole run, and one that is stopped in its risk phase."""
    torch.set_num_threads(1)
    with processes.joined():
        sums = run_noting_losses(toy_trainer(folder / "whole", UNEVEN))
        assert not toy_trainer(folder / "stopped", UNEVEN).run(stop=lambda step: step == 7)
        checkpoint.write_json(folder / f"sums{processes.rank()}.json", sums)


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key], rel=1e-4) for key in ours.keys() - {"seconds"})


@pytest.mark.extended
def test_two_processes_have_the_risks_of_one(tmp_path: Path):
    alone = toy_trainer(tmp_path / "alone", UNEVEN)
    expected = run_noting_losses(alone)
    assert len(alone.examples) % UNEVEN.batch_size == 1
    assert alone.risk_begins < 7 < len(expected)
    torchrun("tests.examples.test_g2p_risk", str(tmp_path))
    for rank in range(2):
        assert json.loads((tmp_path / f"sums{rank}.json").read_text()) == pytest.approx(expected, rel=1e-4)
    assert_close(json.loads((tmp_path / "whole" / "history.json").read_text())["epochs"], alone.history)
    found, model = (checkpoint.load_model(tmp_path / name / "model.pt")[0] for name in ("whole", "alone"))
    torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-4)
    resumed = toy_trainer(tmp_path / "stopped", UNEVEN)
    resumed.resume()
    assert resumed.run()
    assert_close(resumed.history, alone.history)


# --- the command line ---------------------------------------------------------------------------------------------


def test_train_risk_evaluate_and_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(cli.SIZES, "small", replace(SETTINGS, epochs=1))
    lexicon, first, second = str(write_lexicon(tmp_path / "toy.txt")), tmp_path / "first", tmp_path / "second"
    common = ["--size", "small", "--data", lexicon, "--limit", "60"]
    assert cli.main(["train", *common, "--run", str(first), "--risk-epochs", "1", "--beam", "2"]) == 0
    settings = json.loads((first / "history.json").read_text())["settings"]
    assert (settings["epochs"], settings["risk_epochs"], settings["beam"]) == (1, 1, 2)
    risk = ["risk", *common, "--run", str(second), "--checkpoint", str(first / "model.pt"), "--risk-epochs", "1"]
    assert cli.main([*risk, "--alpha", "0.5", "--entropy", "0.3", "--per-phone"]) == 0
    settings = json.loads((second / "history.json").read_text())["settings"]
    assert (settings["epochs"], settings["alpha"], settings["entropy"], settings["per_phone"]) == (0, 0.5, 0.3, True)
    assert (second / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*risk, "--resume"]) == 2
    assert "with other settings (alpha: then 0.5, now 1.0" in capsys.readouterr().err
    model = ["--checkpoint", str(second / "model.pt")]
    assert cli.main(["evaluate", *model, "--data", lexicon, "--beam", "1", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["test, greedy", "test, beam 1", "test, beam 3"]
    assert cli.main(["say", *model, "cab", "D", "--n-best", "2"]) == 0
    spoken = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [word for word, _, _ in spoken] == ["CAB", "CAB", "D", "D"]
    assert float(spoken[0][1]) >= float(spoken[1][1])
    on = ["train", *common, "--run", str(tmp_path / "on"), *model, "--epochs", "1", "--learning-rate", "0.001"]
    assert cli.main([*on, "--dropout", "0.45"]) == 0
    history = json.loads((tmp_path / "on" / "history.json").read_text())
    before, after = history["epochs"]
    assert (
        history["settings"]["dropout"] == checkpoint.load_model(tmp_path / "on" / "model.pt")[0].config.dropout == 0.45
    )
    assert before["epoch"] == 0
    assert before["dev_wer"] == json.loads((second / "history.json").read_text())["epochs"][-1]["dev_wer"]
    assert 0 < after["loss"] < math.inf


@pytest.mark.parametrize(
    "option", [["--alpha", "0"], ["--entropy", "-1"], ["--beam", "1"], ["--risk-rate", "nan"], ["--dropout", "1"]]
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], option: list[str]):
    with pytest.raises(SystemExit):
        cli.main(["risk", *option])
    assert "must be" in capsys.readouterr().err


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
