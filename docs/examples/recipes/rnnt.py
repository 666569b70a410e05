"""An RNN transducer whose loss and whose greedy decoding are loops.

The loss goes over frames with one row of the lattice in its carry, and asks the joint network for a frame's
probabilities when it comes to that frame. The logits of the whole lattice, (B, T, U + 1, V), are never there at once:
with `checkpoints` it takes the bytes of one frame and of K rows of numbers. Utterances are packed, so an utterance
that has ended leaves the batch.

Sources: Graves 2012 (sequence transduction); the row of the lattice in closed form by a cumulative sum.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl

BLANK = 0
NEVER = -1e30  # the logarithm of 0, but for gradients, in which infinity less infinity would be NaN


class Transducer(nn.Module):
    """Frames (B, T*, F) of an encoder to labels 1 ... V - 1."""

    def __init__(self, features: int, labels: int, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(features, width)
        self.embed = nn.Embedding(labels, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Linear(width, labels)

    def predict(self, labels: Any) -> Any:
        """(B, U) -> (B, U + 1, width), packed or padded: what is expected before each label, and after the last."""

        def step(h: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
            h = self.cell(self.embed(label), h)
            return h, h

        h = self.embed.weight.new_zeros(labels.shape[0], self.cell.hidden_size)
        return tl.scan(step, h, F.pad(labels, (1, 0), value=BLANK), dim=1)[1]

    def joint(self, frame: Any, guess: Any) -> Any:
        return self.out(torch.tanh(frame + guess)).log_softmax(-1)

    def loss(self, frames: tl.PackedTensor, labels: Tensor, lens: Tensor, checkpoints: Any = None) -> Tensor:
        """-log p(labels | frames) (B,), labels (B, U) of which row b has lens[b]."""
        encoded, guesses = self.encode(frames), self.predict(labels)

        def step(alpha: Tensor, frame: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
            """alpha (b, U + 1): log p(u labels so far), when the frame begins, then when it ends."""
            guesses, labels = row
            scores = self.joint(frame[:, None], guesses)
            return frame_of_lattice(alpha, scores, labels), None

        start = guesses.new_full(guesses.shape[:2], NEVER)
        start[:, 0] = 0
        alpha, _ = tl.scan(step, start, encoded, context=(guesses, labels), checkpoints=checkpoints)
        return -alpha.gather(1, lens[:, None])[:, 0]

    def plain_loss(self, frames: Tensor, frame_lens: Tensor, labels: Tensor, lens: Tensor) -> Tensor:
        """The same by the whole lattice: frames (B, T, F) are padded, and all logits are made first."""
        scores = self.joint(self.encode(frames)[:, :, None], self.predict(labels)[:, None])
        alpha = scores.new_full((len(labels), labels.shape[1] + 1), NEVER)
        alpha[:, 0] = 0
        for t in range(frames.shape[1]):
            alpha = torch.where((t < frame_lens)[:, None], frame_of_lattice(alpha, scores[:, t], labels), alpha)
        return -alpha.gather(1, lens[:, None])[:, 0]

    def decode(self, frames: tl.PackedTensor, most: int = 10) -> tl.PackedTensor:
        """The labels (B, U*) of the likeliest step after the likeliest step; at most `most` of them at one frame."""
        encoded, lens = self.encode(frames).pad(), frames.lens

        def goes_on(state: Decoding, row: tuple[Tensor, Tensor]) -> Tensor:
            return state.frame < row[1]

        def step(state: Decoding, row: tuple[Tensor, Tensor]) -> Decoding:
            frame = row[0].gather(1, state.frame[:, None, None].expand(-1, 1, row[0].shape[2]))[:, 0]
            label = self.joint(frame, state.guess).argmax(1)
            says = (label != BLANK) & (state.here < most)
            guess = torch.where(says[:, None], self.cell(self.embed(label), state.guess), state.guess)
            labels = state.labels.write_rows(state.said, label, where=says)
            return Decoding(state.frame + ~says, torch.where(says, state.here + 1, 0), guess, state.said + says, labels)

        nothing = torch.zeros_like(lens)
        first = self.predict(lens.new_zeros(len(lens), 0))[:, 0]
        labels = tl.TensorArray(element_shape=(len(lens),), dtype=torch.int64, device=lens.device)
        end = tl.while_loop(
            goes_on, step, Decoding(nothing, nothing, first, nothing, labels), context=(encoded, lens), compact=True
        )
        return tl.pack_padded(end.labels.stack().T, end.said)

    def beam(self, frames: tl.PackedTensor, size: int, most: int = 20, **options: Any) -> tl.beam.Hypotheses:
        """The likeliest labels, at most `most`, best first. Alignments of the same labels merge; blanks are left in.

        The last frame's blank is the end, a token V behind the labels.
        """
        encoded, lens = self.encode(frames).pad(), frames.lens

        def step(state: Prefix, symbol: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Prefix, Tensor]:
            encoded, lens = row
            says = symbol != BLANK
            guess = self.cell(self.embed(symbol).flatten(0, 1), state.guess.flatten(0, 1)).view_as(state.guess)
            guess = torch.where(says[..., None], guess, state.guess)
            labels = state.labels.scatter(2, state.said[..., None], symbol[..., None])  # a blank leaves blanks
            state = Prefix(state.frame + ~says, labels, state.said + says, guess)
            b = torch.arange(len(lens), device=lens.device)[:, None]
            scores = self.joint(encoded[b, state.frame.clamp(max=encoded.shape[1] - 1)], guess)
            full, last = (state.said == most)[..., None], (state.frame == lens[:, None] - 1)[..., None]
            blank = scores[..., :1]
            names = scores[..., 1:].masked_fill(full, -torch.inf)
            ways = blank.masked_fill(last, -torch.inf), names, blank.masked_fill(~last, -torch.inf)
            return state, torch.cat(ways, 2)

        nothing = torch.zeros_like(lens)
        guess = self.predict(lens.new_zeros(len(lens), 0))[:, 0]
        begin = Prefix(nothing - 1, nothing[:, None].repeat(1, most + 1), nothing, guess)
        return tl.beam_search(
            step, begin, batch_size=len(lens), beam_size=size, bos_id=BLANK, eos_id=self.out.out_features,
            context=(encoded, lens), merge=lambda state: state.labels, **options,
        )  # fmt: skip


class Prefix(NamedTuple):
    """What an alignment has said, (B, K) each. As many steps with the same labels have come to the same frame."""

    frame: Tensor
    labels: Tensor  # (B, K, most + 1), blanks behind them
    said: Tensor  # how many labels
    guess: Tensor  # (B, K, width)


class Decoding(NamedTuple):
    frame: Tensor  # (B,)
    here: Tensor  # (B,): labels that this frame has given
    guess: Tensor  # (B, width)
    said: Tensor  # (B,): labels in all
    labels: tl.TensorArray  # elements (B,)


def frame_of_lattice(alpha: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """alpha (B, U + 1) behind a frame whose log-probabilities are (B, U + 1, V): labels upwards, then a blank."""
    return upwards(alpha, scores[:, :-1].gather(2, labels[..., None])[..., 0]) + scores[..., BLANK]


def upwards(alpha: Tensor, labels: Tensor) -> Tensor:
    """here[u] = log(exp alpha[u] + exp(here[u - 1] + labels[u - 1])) of (B, U + 1) and (B, U), by a cumulative sum."""
    ups = torch.cat([labels.new_zeros(len(labels), 1), labels.cumsum(1)], 1)
    return ups + torch.logcumsumexp(alpha - ups, 1)


class Utterances(NamedTuple):
    frames: tl.PackedTensor  # (B, T*, F)
    labels: Tensor  # (B, U), 1 ... F, padded by 1
    lens: Tensor  # (B,)


def make_utterances(rows: int, longest: int, features: int, generator: torch.Generator) -> Utterances:
    """Labels that sound for one to three frames each, in noise and with pauses."""
    lens = torch.randint(1, longest + 1, (rows,), generator=generator)
    # each another than the one before it: a frame alone does not tell a second sound from a longer one
    labels = torch.randint(1, features, (rows, longest), generator=generator).cumsum(1) % features + 1
    frames = []
    for row, n in zip(labels.tolist(), lens.tolist(), strict=True):
        sounds = []
        for label in row[:n]:
            sounding, pause = (int(torch.randint(1, 4, (), generator=generator)) for _ in range(2))
            sound = torch.zeros(sounding + pause, features)
            sound[:sounding, label - 1] = 1
            sounds.append(sound)
        whole = torch.cat(sounds)
        frames.append(whole + 0.1 * torch.randn(whole.shape, generator=generator))
    return Utterances(tl.PackedTensor.from_list(frames), labels, lens)


def train(model: Transducer, updates: int, rows: int = 32, seed: int = 0) -> list[float]:
    """The loss per label at each update."""
    generator, adam, losses = torch.Generator().manual_seed(seed), torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(updates):
        batch = make_utterances(rows, 6, model.encode.in_features, generator)
        loss = model.loss(*batch, checkpoints=8).sum() / batch.lens.sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def wrong(model: Transducer, batch: Utterances) -> float:
    """Edits per label that the decoded labels need."""
    with torch.no_grad():
        found = model.decode(batch.frames)
    return float(tl.edit_distance(found, tl.pack_padded(batch.labels, batch.lens)).sum() / batch.lens.sum())
