"""The likeliest labels of a CTC model: `tl.beam_search` over prefixes, and the greedy choice.

A prefix g is begun by all alignments that have said g so far. Its probability is the sum of those of g and one label
more, and of g as the whole; so P(g c) / P(g) are the probabilities of a next token, and those of a hypothesis multiply
to the one that the CTC loss is the logarithm of. A hypothesis never gains by a label: no maximum length is needed.

Source: Graves 2012 (prefix search); Hori et al. 2017 (as the scores of next labels).
"""

from typing import NamedTuple

import torch
from torch import Tensor

import tensorloop as tl
from docs.examples.speech.model import BLANK

NEVER = -1e30  # the logarithm of 0, but differences of two are no NaN
UNHEARD = -50.0  # of labels behind the end of a row


class Prefix(NamedTuple):
    """Logarithms (..., T + 1): of all alignments of t frames that say the prefix, by what their last frame says."""

    label: Tensor
    blank: Tensor
    last: Tensor  # (...,): the label

    def entered(self, by: Tensor) -> Tensor:
        """(..., T): of those that a frame saying the label `by` makes longer: a blank lies between two of the same."""
        again = (by == self.last)[..., None]
        return torch.where(again, self.blank, torch.logaddexp(self.label, self.blank))[..., :-1]


def greedy(log_probs: tl.PackedTensor) -> tl.PackedTensor:
    """(B, U*): the likeliest label of each frame of (B, T*, V), once where it lasts, without blanks."""
    says = log_probs.argmax(-1)
    first = tl.PackedTensor(says.positions == 0, says.lens)
    kept = (says != BLANK) & ((says != says.roll(1, 1)) | first)
    return tl.PackedTensor(says[kept], kept.sum(1))


def beam(log_probs: tl.PackedTensor, size: int, n_best: int = 1) -> tl.beam.Hypotheses:
    """The likeliest labels of (B, T*, V), best first; their scores are those of the CTC loss, less its sign."""
    frames = frames_of(log_probs)
    nothing = frames.new_full((len(frames), frames.shape[1] + 1), NEVER)
    begin = Prefix(nothing, nothing, log_probs.lens.new_zeros(len(frames)))
    return tl.beam_search(
        step,
        begin,
        batch_size=len(frames),
        beam_size=size,
        n_best=n_best,
        bos_id=BLANK,
        eos_id=BLANK,
        context=frames,
    )


def frames_of(log_probs: tl.PackedTensor) -> Tensor:
    """(B, T, V) float64. Behind a row's end come blanks, for certain: they change no probability."""
    padded = log_probs.to(torch.float64).pad(value=UNHEARD)
    ended = torch.arange(padded.shape[1], device=padded.device) >= log_probs.lens[:, None]
    blanks = padded[..., BLANK].masked_fill(ended, 0.0)
    return torch.cat([blanks[..., None], padded[..., 1:]], -1)


def step(before: Prefix, last: Tensor, frames: Tensor) -> tuple[Prefix, Tensor]:
    """One label more, (B, K), and what may come next, (B, K, V): in place of the blank, the end."""
    blanks = frames[:, None, :, BLANK]
    says = frames.gather(2, last[:, None].expand(-1, frames.shape[1], -1)).mT  # (B, K, T)
    start = (last == BLANK)[..., None]  # no label has come, and none enters but at the start of the first frame
    label = torch.where(start, NEVER, behind(linger(before.entered(last), says), NEVER))
    enters = torch.where(start, NEVER, label[..., :-1])
    enters[..., :1] = torch.where(start, 0.0, enters[..., :1])
    blank = behind(linger(enters, blanks), torch.where(start, 0.0, NEVER))
    prefix = Prefix(label, blank, last)

    other = (prefix.entered(torch.full_like(last, BLANK - 1))[..., None] + frames[:, None]).logsumexp(-2)
    same = (prefix.entered(last) + says).logsumexp(-1, keepdim=True)
    following = other.scatter(-1, last[..., None], same)
    following[..., BLANK] = torch.logaddexp(label[..., -1], blank[..., -1])
    scores = following.log_softmax(-1)
    return prefix, torch.where(following > NEVER / 2, scores, -torch.inf)


def linger(enters: Tensor, says: Tensor) -> Tensor:
    """h[t] = says[t] + log(exp enters[t] + exp h[t - 1]), along the last dim."""
    total = says.cumsum(-1)
    return total + (enters - (total - says)).logcumsumexp(-1)


def behind(x: Tensor, start: Tensor | float) -> Tensor:
    first = x[..., :1].new_zeros(()) + start
    return torch.cat([first.expand_as(x[..., :1]), x], -1)
