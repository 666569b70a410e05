"""The grapheme-to-phoneme example on packed words: losses and gradients of a padded batch, and no work on padding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from docs.examples.g2p import data
from docs.examples.g2p.model import G2P, Config, Masks
from tensorloop import PackedTensor
from tests.support.profiling_modules import profiling_modules

EOS = 5

UNSORTED = [([0, 1], [2, 0, 1, 3]), ([2, 3, 1, 0, 1], [1]), ([3], [4, 4]), ([1, 1, 2], []), ([0, 2, 2, 1, 3], [0] * 7)]
EQUAL = [([0, 1, 3], [2, 0]), ([2, 3, 1], [1, 4]), ([3, 3, 0], [4, 4])]
ALONE = [([1, 2], [3, 0, 4])]
BATCHES = pytest.mark.parametrize("words", [UNSORTED, EQUAL, ALONE], ids=["unsorted", "equal", "alone"])


def batch_of(words: list[tuple[list[int], list[int]]]) -> tuple[PackedTensor, PackedTensor]:
    return data.pack([letters for letters, _ in words]), data.pack([[*phones, EOS] for _, phones in words])


def double_model() -> G2P:
    torch.manual_seed(0)
    return G2P(Config(letters=4, phones=5, embed=6, hidden=8, dropout=0.4)).double().train()


@pytest.fixture(scope="module")
def padded() -> Iterator[Any]:
    """profiling/whole_models/g2p_padded.py: the same weights and steps on padded words."""
    with profiling_modules("g2p_padded") as modules:
        yield modules["g2p_padded"]


def padded_loss(padded: Any, model: G2P, letters: PackedTensor, phones: PackedTensor, masks: Masks) -> Tensor:
    rows = (list(x.values.split(x.lens.tolist())) for x in (letters, phones))
    return padded.mean_loss(model, padded.pad(*rows), masks, label_smoothing=0.1)


def packed_loss(model: G2P, letters: PackedTensor, phones: PackedTensor, masks: Masks) -> Tensor:
    scores = model(letters, phones, masks)
    assert torch.equal(scores.lens, phones.lens)
    return F.cross_entropy(scores.values, phones.values, label_smoothing=0.1)


@BATCHES
def test_losses_and_gradients_are_those_of_a_padded_batch(words: list[tuple[list[int], list[int]]], padded: Any):
    model, (letters, phones) = double_model(), batch_of(words)
    masks = model.masks(len(words))
    ours = packed_loss(model, letters, phones, masks)
    theirs = padded_loss(padded, model, letters, phones, masks)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    weights = list(model.parameters())
    found, expected = (torch.autograd.grad(loss, weights) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(bool(gradient.any()) for gradient in found)


def test_the_order_of_the_rows_does_not_matter():
    model, n = double_model(), len(UNSORTED)
    masks = model.masks(n)
    by_length = sorted(range(n), key=lambda b: len(UNSORTED[b][1]))
    found = []
    for rows in (list(range(n)), by_length, by_length[::-1]):
        loss = packed_loss(model, *batch_of([UNSORTED[b] for b in rows]), masks.of_rows(rows))
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


@BATCHES
def test_nothing_is_computed_on_padding(words: list[tuple[list[int], list[int]]]):
    model, (letters, phones) = double_model(), batch_of(words)
    seen: dict[str, list[int]] = {}

    def note(name: str, x: Tensor | PackedTensor) -> None:
        seen.setdefault(name, []).append(len(x.values if isinstance(x, PackedTensor) else x))

    layers: dict[str, nn.Module] = dict(model.named_children())
    del layers["encoder"]
    for name, layer in (*layers.items(), *((f"encoder.{i}", lstm) for i, lstm in enumerate(model.encoder))):
        layer.register_forward_hook(lambda _, given, __, name=name: note(name, given[0]))
    packed_loss(model, letters, phones, model.masks(len(words)))
    steps = [sum(len(row) >= t for _, row in words) for t in range(phones.max_len)]
    assert sum(steps) == len(phones.values)
    for name in ("lower", "upper", "token_gates", "queries", "readout"):
        assert seen.pop(name) == steps
    for name in ("embed", "encoder.0", "encoder.1"):
        assert seen.pop(name) == [len(letters.values)]
    assert seen == {"bridge": [len(words)], "output": [len(phones.values)]}


def test_a_row_has_its_own_mask_at_every_step():
    model, (letters, phones) = double_model(), batch_of(UNSORTED)
    masks = Masks(*(torch.rand_like(mask) + 0.5 for mask in model.masks(len(UNSORTED))))
    together = model(letters, phones, masks)
    for b, word in enumerate(UNSORTED):
        alone = model(*batch_of([word]), masks.of_rows([b]))
        torch.testing.assert_close(together[b], alone.values, rtol=1e-10, atol=1e-12)


def test_weights_keep_the_names_of_saved_models():
    kinds = [f"{kind}_l0{way}" for way in ("", "_reverse") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    with_bias = ["bridge", "lower.linear", "upper.linear", "readout", "output"]
    assert set(double_model().state_dict()) == {
        *(f"encoder.{depth}.{kind}" for depth in (0, 1) for kind in kinds),
        *(f"{layer}.{kind}" for layer in with_bias for kind in ("weight", "bias")),
        *(f"{layer}.weight" for layer in ("embed", "token_gates", "queries")),
    }
