"""The same Conformer with a transducer beside CTC: its loss on packed pairs, and a search over prefixes.

A transducer says what comes next from the frame and from the labels so far, so its lattice has frames and labels for
its sides: rows of two unequal lengths, which `tl.packed.pairs` holds without padding. The prediction network is a loop
over packed labels, and is the recipe's, as are the joint network and greedy decoding.

The search is that of `search.py`: the probability of a prefix is that of all alignments that begin with it, and what
those give to the next label, or to the end, sums to it. Frames are not gone through in turn, but all at once, a column
of the lattice for each label. Hypotheses of one text are one, and scores are those of the loss, less its sign.

Sources: Graves 2012; Kim et al. 2017 for CTC beside it, of which an encoder learns sooner what is said when.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import tensorloop as tl
from docs.examples.recipes import rnnt
from docs.examples.speech.model import BLANK, Config, Conformer, ctc
from docs.examples.speech.search import NEVER, linger

CTC_SHARE = 0.3  # of the loss


class Transducer(nn.Module):
    """Frames (B, T*, features) to what decoding takes, (B, ceil(T / 4)*, width)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.conformer = Conformer(config)
        self.network = rnnt.Transducer(config.width, config.labels, config.width)

    def forward(self, frames: tl.PackedTensor) -> tl.PackedTensor:
        return self.conformer.encode(frames)

    def loss(self, frames: tl.PackedTensor, labels: tl.PackedTensor) -> Tensor:
        """-log p(labels | frames), by the label and the mean over rows, with a share of CTC's."""
        encoded = self(frames)
        losses = self.losses(encoded, labels)
        return mixed(losses, labels.lens, ctc(self.conformer.scores(encoded), labels))

    def losses(self, encoded: tl.PackedTensor, labels: tl.PackedTensor) -> Tensor:
        """-log p(labels | frames) (B,)"""
        frame, guess = tl.packed.pairs(self.network.encode(encoded), self.network.predict(labels))
        return tl.packed.rnnt_loss(self.network.joint(frame, guess), labels, blank=BLANK, reduction="none")

    def greedy(self, encoded: tl.PackedTensor) -> tl.PackedTensor:
        """(B, U*): the likeliest step after the likeliest step."""
        return self.network.decode(encoded)

    def beam(self, encoded: tl.PackedTensor, size: int, n_best: int = 1) -> tl.beam.Hypotheses:
        """The likeliest labels of (B, T*, width), best first; their scores are those of `losses`, less its sign."""
        frames = self.network.encode(encoded).pad(max_len=encoded.max_len + 1)  # the last of them is of no row
        ended = torch.arange(frames.shape[1], device=frames.device) >= encoded.lens[:, None]
        begin = frames.new_full((*frames.shape[:2], self.config.labels), NEVER, dtype=torch.float64)
        begin[:, 0, BLANK] = 0
        guess = frames.new_zeros(len(frames), frames.shape[2])
        return tl.beam_search(
            self.next_labels,
            Prefix(begin, guess),
            batch_size=len(frames),
            beam_size=size,
            n_best=n_best,
            bos_id=BLANK,
            eos_id=BLANK,
            context=(frames, ended),
        )

    def next_labels(self, before: "Prefix", last: Tensor, context: tuple[Tensor, Tensor]) -> tuple["Prefix", Tensor]:
        """One label more, (B, K), and what may come next, (B, K, V): in place of the blank, the end."""
        frames, ended = context
        guess = self.network.cell(self.network.embed(last).flatten(0, 1), before.guess.flatten(0, 1))
        guess = guess.unflatten(0, last.shape)
        scores = self.network.joint(frames[:, None], guess[:, :, None]).double()  # (B, K, T, V)
        # Behind a row's end come blanks, for certain: they change no probability.
        certain = scores.new_full(scores.shape[-1:], NEVER)
        certain[BLANK] = 0
        scores = torch.where(ended[:, None, :, None], certain, scores)

        enters = before.ways.gather(-1, last[..., None, None].expand(*last.shape, frames.shape[1], 1))[..., 0]
        blanks = scores[..., BLANK]
        behind = linger(enters, blanks)  # each frame
        ways = (behind - blanks)[..., None] + scores
        following = ways.logsumexp(-2)
        following[..., BLANK] = behind[..., -1]
        chances = following.log_softmax(-1)
        return Prefix(ways, guess), torch.where(following > NEVER / 2, chances, -torch.inf)


class Prefix(NamedTuple):
    ways: Tensor  # (..., T, V): the logarithm of all alignments that say the prefix, then label v at frame t
    guess: Tensor  # (..., width): what the prediction network expects


def mixed(losses: Tensor, lens: Tensor, ctc_loss: Tensor) -> Tensor:
    """Of (B,) and their numbers of labels, and of CTC's."""
    return (1 - CTC_SHARE) * (losses / lens.clamp(min=1)).mean() + CTC_SHARE * ctc_loss
