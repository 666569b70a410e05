"""The transducer of the speech example: its loss beside the recipe's loop, its search beside the loss."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

import tensorloop as tl
from docs.examples.speech.model import BLANK, Config
from docs.examples.speech.transducer import Transducer


def model_of(labels: int, blank: float = 0.0) -> Transducer:
    """One in whose joint network the blank is likelier by e^blank."""
    torch.manual_seed(0)
    model = Transducer(Config(5, labels, width=8, blocks=1, heads=2, kernel=3, dropout=0.0)).double().eval()
    with torch.no_grad():
        model.network.out.weight.mul_(3)
        model.network.out.bias[BLANK] += blank
    return model


def encoded_of(lens: list[int], width: int = 8) -> tl.PackedTensor:
    torch.manual_seed(2)
    return tl.PackedTensor(3 * torch.randn(sum(lens), width, dtype=torch.float64), lens).requires_grad_()


def labels_of(lens: list[int], labels: int) -> tl.PackedTensor:
    torch.manual_seed(3)
    return tl.PackedTensor(torch.randint(1, labels, (sum(lens),)), lens)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize(("frames", "said"), [([7, 1, 4, 9], [3, 2, 0, 5]), ([3], [0]), ([2, 0], [4, 0])])
def test_the_loss_is_that_of_the_loop_over_frames(frames: list[int], said: list[int], checkpoints: int | None):
    model, encoded, labels = model_of(6), encoded_of(frames), labels_of(said, 6)
    inputs = [*model.network.parameters(), encoded.values]
    losses = model.losses(encoded, labels), model.network.loss(encoded, labels.pad(), labels.lens, checkpoints)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss.square().sum(), inputs) for loss in losses))


def test_labels_are_predicted_packed_as_they_are_padded():
    network, labels = model_of(6).network, labels_of([3, 0, 5], 6)
    guesses = network.predict(labels)
    assert guesses.lens.tolist() == [4, 1, 6]
    tl.testing.assert_close(guesses, tl.pack_padded(network.predict(labels.pad()), guesses.lens))


def scores_of(model: Transducer, row: tl.PackedTensor, labellings: Sequence[Sequence[int]]) -> list[float]:
    labels = torch.tensor(list(itertools.chain(*labellings)), dtype=torch.int64)
    rows = row[torch.zeros(len(labellings), dtype=torch.int64)]
    return (-model.losses(rows, tl.PackedTensor(labels, [len(said) for said in labellings]))).tolist()


@torch.no_grad()
def test_the_search_finds_the_likeliest_labellings_with_their_probabilities():
    model, encoded, size = model_of(3, blank=6.0), encoded_of([4, 0, 1, 3]), 40
    found = model.beam(encoded, size, size)
    assert found.stopped == ["exact"] * 4
    every = [said for n in range(8) for said in itertools.product((1, 2), repeat=n)]
    for b, row in enumerate(encoded.split(1)):
        expected = sorted(zip(scores_of(model, row, every), every, strict=True), reverse=True)
        rest = 1 - sum(math.exp(score) for score, _ in expected)
        best = [(score, said) for score, said in expected if math.exp(score) > max(rest, 1e-12)][:size]
        assert best
        rows = found.tokens.unbind()[b * size :][: len(best)]
        assert [tuple(row.tolist()) for row in rows] == [said for _, said in best]
        assert found.scores[b, : len(best)].tolist() == pytest.approx([score for score, _ in best], abs=1e-9)


@torch.no_grad()
def test_a_search_of_long_rows_is_no_worse_than_the_greedy_choice():
    model, encoded = model_of(6, blank=4.0), encoded_of([30, 20, 0, 1])
    chosen, found = model.greedy(encoded), model.beam(encoded, 8)
    assert len(chosen.values) > 10
    for b, row in enumerate(encoded.split(1)):
        likely, other = scores_of(model, row, [found.tokens.unbind()[b].tolist(), chosen.unbind()[b].tolist()])
        assert float(found.scores[b, 0]) == pytest.approx(likely, abs=1e-8)
        assert likely >= other - 1e-9


@torch.no_grad()
def test_batches_without_frames_say_nothing():
    model = model_of(4)
    for lens in ([0, 0], []):
        encoded = encoded_of(lens)
        assert model.beam(encoded, 3).tokens.lens.tolist() == lens
        assert model.greedy(encoded).lens.tolist() == lens
        assert model.losses(encoded, labels_of(lens, 4)).tolist() == lens
