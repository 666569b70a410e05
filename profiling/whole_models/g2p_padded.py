"""The example `docs/examples/g2p` on padded words: its weights, its step, its scores, and PyTorch's own padding.

Words are padded with `pad_sequence`, the LSTMs run between `pad_packed_sequence` and `pack_padded_sequence`, the steps
are those of the longest word in a plain Python loop, and the loss leaves padding out by `ignore_index`.
`profiling/g2p_padding.py` measures it beside the packed one; the tests take it for what the packed one must give.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from docs.examples.g2p.data import Examples
from docs.examples.g2p.model import G2P, Carry, Context, Masks
from tensorloop import TensorArray

IGNORE = -100  # in place of a phone behind the end of a word


class Batch(NamedTuple):
    """B words, time first: what a step reads then lies together."""

    letters: Tensor  # (S, B) int64, 0 behind the ends
    lens: Tensor  # (B,): letters
    phones: Tensor  # (T, B) int64, IGNORE behind the ends


def pad(letters: Sequence[Tensor], phones: Sequence[Tensor]) -> Batch:
    """The ids of each word's letters, and of its phones and end."""
    lens = torch.tensor([len(row) for row in letters])
    return Batch(pad_sequence(list(letters)), lens, pad_sequence(list(phones), padding_value=IGNORE))


def encode(model: G2P, letters: Tensor, lens: Tensor, masks: Masks) -> tuple[Context, Carry]:
    """What `model.encode` gives for packed letters."""
    states = model.embed(letters) * masks.embedded
    ragged = bool((lens != len(letters)).any())
    for depth, lstm in enumerate(model.encoder):
        if ragged:
            packed = pack_padded_sequence(states, lens, enforce_sorted=False)
            states = pad_packed_sequence(lstm(packed)[0])[0]
        else:  # without packing it is faster
            states = lstm(states.transpose(0, 1))[0].transpose(0, 1)
        if depth == 0:
            states = states * masks.encoded
    behind = torch.arange(len(letters)) >= lens[:, None]
    mask = states.new_zeros(behind.shape).masked_fill(behind, -torch.inf)
    mean = states.sum(0) / lens[:, None]  # states behind the ends are zero
    h_lower, c_lower, h_upper, c_upper = model.bridge(mean).chunk(4, 1)
    lower, upper = (h_lower.tanh(), c_lower), (h_upper.tanh(), c_upper)
    carry = Carry(lower, upper, torch.zeros_like(mean), TensorArray().append(upper[0]))
    return Context(states.transpose(0, 1), mask, lens, masks), carry


def mean_loss(model: G2P, batch: Batch, masks: Masks, label_smoothing: float) -> Tensor:
    """Cross entropy, the mean over the phones and ends of all words."""
    context, carry = encode(model, batch.letters, batch.lens, masks)
    first = torch.full_like(batch.phones[:1], model.config.bos_id)
    given = torch.cat((first, batch.phones[:-1].clamp(min=0)))  # behind an end any id will do
    readouts = []
    for tokens in given.unbind(0):
        carry = model.step(carry, tokens, context)
        readouts.append(carry.feed)
    beyond = torch.arange(len(given))[:, None] - batch.lens
    scores = model.scores(torch.stack(readouts) * masks.readout, beyond)
    goals = batch.phones.flatten()
    return F.cross_entropy(scores.flatten(0, 1), goals, ignore_index=IGNORE, label_smoothing=label_smoothing)


class PaddedExamples:
    """The example's words and pronunciations, dealt out padded."""

    def __init__(self, examples: Examples) -> None:
        letters, phones = examples.batch(torch.arange(len(examples)))
        self._letters, self._phones = (rows.values.split(rows.lens.tolist()) for rows in (letters, phones))

    def batch(self, indices: Tensor) -> Batch:
        rows = indices.tolist()
        return pad([self._letters[i] for i in rows], [self._phones[i] for i in rows])
