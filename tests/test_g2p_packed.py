"""The grapheme-to-phoneme example on packed words: losses and gradients of a padded batch, and no work on padding."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from docs.examples.g2p import data
from docs.examples.g2p.model import END_SLOPE, G2P, Carry, Config, Context, Masks
from tensorloop import PackedTensor, TensorArray

IGNORE = -100  # what cross_entropy leaves out
EOS, BOS = 5, 6

UNSORTED = [([0, 1], [2, 0, 1, 3]), ([2, 3, 1, 0, 1], [1]), ([3], [4, 4]), ([1, 1, 2], []), ([0, 2, 2, 1, 3], [0] * 7)]
EQUAL = [([0, 1, 3], [2, 0]), ([2, 3, 1], [1, 4]), ([3, 3, 0], [4, 4])]
ALONE = [([1, 2], [3, 0, 4])]
BATCHES = pytest.mark.parametrize("words", [UNSORTED, EQUAL, ALONE], ids=["unsorted", "equal", "alone"])


def batch_of(words: list[tuple[list[int], list[int]]]) -> tuple[PackedTensor, PackedTensor]:
    return data.pack([letters for letters, _ in words]), data.pack([[*phones, EOS] for _, phones in words])


def double_model() -> G2P:
    torch.manual_seed(0)
    return G2P(Config(letters=4, phones=5, embed=6, hidden=8, dropout=0.4)).double().train()


def padded_encode(model: G2P, letters: PackedTensor, masks: Masks) -> tuple[Context, Carry]:
    """What ``model.encode`` gives, from padded letters (B, S) and torch's own packing around each layer."""
    lens, states = letters.lens, model.embed(letters.pad()) * masks.embedded[:, None]
    for lstm, mask in zip(model.encoder, (masks.encoded, torch.ones_like(masks.encoded)), strict=True):
        packed = pack_padded_sequence(states, lens, batch_first=True, enforce_sorted=False)
        states = pad_packed_sequence(lstm(packed)[0], batch_first=True)[0] * mask[:, None]
    mean = states.sum(1) / lens[:, None]
    h_lower, c_lower, h_upper, c_upper = model.bridge(mean).chunk(4, 1)
    behind = torch.arange(states.shape[1]) >= lens[:, None]
    mask = torch.zeros(behind.shape, dtype=mean.dtype).masked_fill(behind, -torch.inf)
    lower, upper = (h_lower.tanh(), c_lower), (h_upper.tanh(), c_upper)
    carry = Carry(0, lower, upper, torch.zeros_like(mean), TensorArray().append(upper[0]))
    return Context(states, mask, lens, masks), carry


def padded_loss(model: G2P, letters: PackedTensor, phones: PackedTensor, masks: Masks) -> Tensor:
    """Cross entropy of a batch whose every row is as long as its longest, by a Python loop."""
    context, carry = padded_encode(model, letters, masks)
    goals = phones.pad(IGNORE)
    given = torch.cat((torch.full_like(goals[:, :1], BOS), goals[:, :-1].clamp(min=0)), 1)
    feeds = []
    for tokens in given.unbind(1):
        carry = model.step(carry, tokens, context)
        feeds.append(carry.feed)
    logits = model.output(torch.stack(feeds, 1) * masks.readout[:, None])
    beyond = (torch.arange(goals.shape[1]) - letters.lens[:, None]).clamp(min=0)
    logits = logits + END_SLOPE * beyond[..., None] * F.one_hot(torch.tensor(EOS), EOS + 1)
    return F.cross_entropy(logits.flatten(0, 1), goals.flatten(), ignore_index=IGNORE, label_smoothing=0.1)


def packed_loss(model: G2P, letters: PackedTensor, phones: PackedTensor, masks: Masks) -> Tensor:
    scores = model(letters, phones, masks)
    assert torch.equal(scores.lens, phones.lens)
    return F.cross_entropy(scores.values, phones.values, label_smoothing=0.1)


@BATCHES
def test_losses_and_gradients_are_those_of_a_padded_batch(words: list[tuple[list[int], list[int]]]):
    model, (letters, phones) = double_model(), batch_of(words)
    masks = model.masks(len(words))
    ours, theirs = (loss(model, letters, phones, masks) for loss in (packed_loss, padded_loss))
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
