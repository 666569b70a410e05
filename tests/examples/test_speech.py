"""The speech example: the packed model beside the padded one, the search beside the CTC loss, sounds, a run."""

import itertools
import random
import stat
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tensorloop as tl
from docs.examples.speech import cli, padded, search, sound
from docs.examples.speech.compare import losses_of
from docs.examples.speech.data import make_words
from docs.examples.speech.model import BLANK, Config, Conformer
from docs.examples.speech.train import Budget, Model, greedy, train, wrong
from docs.examples.speech.transducer import Transducer

LENS = [[30, 0, 9, 17, 1], [12, 12], [33]]
KINDS = Conformer, Transducer


def model_of(kind: type[Model], dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return kind(Config(5, 7, width=16, blocks=2, heads=2, kernel=5, dropout=0.0)).to(dtype)


def batch_of(lens: list[int], dtype: torch.dtype = torch.float64) -> tuple[tl.PackedTensor, tl.PackedTensor]:
    torch.manual_seed(1)
    spoken = [n // 10 for n in lens]
    labels = tl.PackedTensor(torch.randint(1, 7, (sum(spoken),)), spoken)
    return tl.PackedTensor(torch.randn(sum(lens), 5, dtype=dtype, requires_grad=True), lens), labels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_losses_and_gradients_are_those_of_the_padded_model(
    lens: list[int], dtype: torch.dtype, apart: float, kind: type[Model]
):
    ours = model_of(kind, dtype)
    theirs = deepcopy(ours)
    frames, labels = batch_of(lens, dtype)
    losses = (
        ours.loss(frames, labels),
        padded.loss(theirs, frames.pad(), frames.lens, labels.pad(), labels.lens),
    )
    torch.testing.assert_close(*losses, rtol=apart, atol=apart)
    of_each = [
        torch.autograd.grad(loss, [*model.parameters(), frames.values])
        for loss, model in zip(losses, (ours, theirs), strict=True)
    ]
    assert all(grad.any() for grad in of_each[0])
    torch.testing.assert_close(*of_each, rtol=apart, atol=apart)
    statistics = [dict(model.named_buffers()) for model in (ours, theirs)]
    torch.testing.assert_close(*statistics, rtol=apart, atol=apart)
    for model in (ours, theirs):
        model.eval()
    encoded, kept = padded.encode(
        theirs if isinstance(theirs, Conformer) else theirs.conformer, frames.pad(), frames.lens
    )
    found = ours(frames) if isinstance(ours, Transducer) else ours.encode(frames)
    tl.testing.assert_close(found, tl.pack_padded(encoded, kept), rtol=apart, atol=apart)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_heard_as_if_it_were_alone(kind: type[Model]):
    model, (frames, _) = model_of(kind).eval(), batch_of(LENS[0])
    for row, alone in zip(model(frames).unbind(), frames.unbind(), strict=True):
        torch.testing.assert_close(row, model(tl.PackedTensor(alone, [len(alone)])).values)


@pytest.mark.parametrize(("kind", "share"), [(Conformer, 0.45), (Transducer, 0.4)])
def test_padding_is_neither_computed_nor_kept(kind: type[Model], share: float):
    rows = [(torch.randn(n, 5), torch.ones(n // 10, dtype=torch.int64)) for n in (400, 40, 40, 40)]
    losses = losses_of(model_of(kind, torch.float32), rows)
    kept = {name: tl.memory.saved_residuals(loss).bytes for name, loss in losses.items()}
    assert kept["packed"] < share * kept["padded"]  # 520 of 1600 frames


def scores_of(lens: list[int], labels: int = 3) -> tl.PackedTensor:
    torch.manual_seed(3)
    return tl.PackedTensor((2 * torch.randn(sum(lens), labels, dtype=torch.float64)).log_softmax(-1), lens)


def test_the_search_finds_every_labelling_with_its_probability():
    p, size = scores_of([4, 0, 1, 3]), 30
    found = search.beam(p, size, size)
    assert found.stopped == ["exact"] * 4
    every = [list(said) for n in range(5) for said in itertools.product((1, 2), repeat=n)]
    for b in range(4):
        expected = {tuple(said): -loss_of(p[b : b + 1], said) for said in every}
        expected = {said: score for said, score in expected.items() if score > -torch.inf}
        rows = found.tokens.unbind()[b * size : (b + 1) * size]
        listed = zip(rows, found.scores[b].tolist(), found.valid[b].tolist(), strict=True)
        scored = {tuple(row.tolist()): score for row, score, valid in listed if valid}
        assert {said: scored[said] for said in expected} == pytest.approx(expected, abs=1e-9)
        assert tuple(rows[0].tolist()) == max(expected, key=expected.__getitem__)


def loss_of(p: tl.PackedTensor, said: Sequence[int]) -> float:
    labels = tl.PackedTensor(torch.tensor(list(said), dtype=torch.int64), [len(said)])
    return float(F.ctc_loss(p, labels, p.lens, labels.lens, reduction="sum"))


def test_a_search_of_long_rows_is_no_worse_than_the_greedy_choice():
    p = scores_of([40, 25, 0, 1], 6)
    chosen, found = search.greedy(p), search.beam(p, 8)
    for b, row in enumerate(chosen.unbind()):
        path = p.values.argmax(-1).split(p.lens.tolist())[b].tolist()
        assert row.tolist() == [label for label, _ in itertools.groupby(path) if label != BLANK]
        likely = -loss_of(p[b : b + 1], found.tokens.unbind()[b].tolist())
        assert float(found.scores[b, 0]) == pytest.approx(likely, abs=1e-8)
        assert likely >= -loss_of(p[b : b + 1], row.tolist()) - 1e-9


def test_features_are_those_of_each_sound_alone():
    draw = random.Random(0)
    sounds = [sound.toned(labels, draw) for labels in ([3], [1, 17, 30], [8, 8])]
    for row, alone in zip(sound.frames_of(sounds, rows=2), sounds, strict=True):
        assert row.shape == (1 + len(alone) // sound.HOP, sound.MELS)
        spectra = torch.stft(
            alone, sound.WINDOW, sound.HOP, window=torch.hann_window(sound.WINDOW), return_complex=True
        )
        logs = (sound.mel_filters() @ spectra.abs().square() + 1e-6).log().T
        torch.testing.assert_close(row, logs - logs.mean(0), rtol=1e-3, atol=1e-3)
    assert (sound.mel_filters().sum(1) > 0).all()


def program(folder: Path, gives: str) -> None:
    path = folder / sound.PROGRAM
    path.write_text(f"#!{sys.executable}\nimport sys\n{gives}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_program_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not sound.has_voice()
    with pytest.raises(sound.SoundError, match="could not speak 'A'"):
        sound.spoken("A", random.Random(0))
    # a header of 44 bytes, whose lengths are those of a stream, then four samples and half of one
    program(
        tmp_path, "sys.stdout.buffer.write(b'RIFF' + bytes(32) + b'data' + b'\\xff' * 4 + b'\\0\\x40' * 4 + b'\\1')"
    )
    assert sound.has_voice()
    assert sound.spoken("A", random.Random(0)).tolist() == [0.5] * 4
    program(tmp_path, "print('no')")
    with pytest.raises(sound.SoundError, match="gave no WAV file for 'A'"):
        sound.spoken("A", random.Random(0))
    program(tmp_path, "sys.exit(3)")
    with pytest.raises(sound.SoundError, match="exit status 3"):
        sound.spoken("A", random.Random(0))


def test_words_to_check_on_are_not_trained_on():
    words = make_words(12, 4, voice=False, most=2)
    assert 0 < len(words.dev) <= 4
    assert len(words.train) >= 5
    for frames, labels in words.train + words.dev:
        assert frames.shape[1] == sound.MELS
        assert 1 <= int(labels.min()) <= int(labels.max()) <= len(words.phones)
        assert 4 * len(labels) <= len(frames)  # after the convolutions a label has a frame
    assert words.written([1, 2]) == " ".join(words.phones[:2])


@pytest.mark.parametrize(
    ("kind", "width", "updates", "max_frames", "most"),
    [(Conformer, 32, 120, 1200, 0.1), (Transducer, 64, 240, 300, 0.2)],
)
@pytest.mark.extended("Transducer")
def test_training_on_tones_lowers_loss_and_error(
    kind: type[Model], width: int, updates: int, max_frames: int, most: float
):
    torch.manual_seed(0)
    rows = [few_labels(draw) for draw in map(random.Random, range(60))]
    model = kind(Config(sound.MELS, 5, width=width, blocks=1, kernel=5, dropout=0.0))
    losses = train(model, rows, Budget(updates=updates), max_frames=max_frames)
    assert len(losses) == updates
    assert losses[-1] < 0.2 * losses[0]
    assert wrong(model, rows, greedy(model)) < most


def few_labels(draw: random.Random) -> tuple[Tensor, Tensor]:
    labels = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
    (frames,) = sound.frames_of([sound.toned(labels, draw)])
    return frames, torch.tensor(labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.extended("Conformer")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Model]):
    small = ["--tones", "--words", "8", "--width", "16", "--blocks", "1"]
    small += ["--transducer"] * (kind is Transducer)
    assert cli.main(["train", *small, "--dev-words", "3", "--updates", "2", "--run", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 updates; the last loss" in said
    assert said.count("unseen words are wrong") == 2
    kept = torch.load(tmp_path / "model.pt", weights_only=True)
    kind(Config(*kept["config"])).load_state_dict(kept["weights"])
    assert cli.main(["compare", *small, "--rounds", "1"]) == 0
    assert "of the bytes" in capsys.readouterr().out
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["train", *small, "--run", str(file)]) == 2
    assert capsys.readouterr().err.startswith("speech: ")
