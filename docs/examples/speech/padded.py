"""The same weights on padded rows: where padding must be masked, and statistics be those of the frames there are."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from docs.examples.recipes import rnnt
from docs.examples.speech.model import BLANK, Block, Conformer, Convolution, SelfAttention, angles, rotated
from docs.examples.speech.transducer import Transducer, mixed


def loss(model: Conformer | Transducer, frames: Tensor, lens: Tensor, labels: Tensor, label_lens: Tensor) -> Tensor:
    """That of `model.loss`; frames (B, T, F) of lens (B,), labels (B, S) of label_lens (B,)."""
    conformer = model.conformer if isinstance(model, Transducer) else model
    encoded, lens = encode(conformer, frames, lens)
    scores = conformer.head(encoded).log_softmax(-1)
    ctc = F.ctc_loss(scores.transpose(0, 1), labels, lens, label_lens, blank=BLANK, zero_infinity=True)
    if isinstance(model, Transducer):
        return mixed(transducer_losses(model, encoded, lens, labels, label_lens), label_lens, ctc)
    return ctc


def transducer_losses(model: Transducer, encoded: Tensor, lens: Tensor, labels: Tensor, label_lens: Tensor) -> Tensor:
    """(B,), by the whole lattice of the longest row and the most labels."""
    network = model.network
    scores = network.joint(network.encode(encoded)[:, :, None], network.predict(labels)[:, None])  # (B, T, U + 1, V)
    says = scores[:, :, :-1].gather(3, labels[:, None, :, None].expand(-1, scores.shape[1], -1, 1))[..., 0]
    alpha = scores.new_full((len(labels), labels.shape[1] + 1), rnnt.NEVER)
    alpha[:, 0] = 0
    for t, (up, blank) in enumerate(zip(says.unbind(1), scores[..., BLANK].unbind(1), strict=True)):
        alpha = torch.where((t < lens)[:, None], rnnt.upwards(alpha, up) + blank, alpha)
    return -alpha.gather(1, label_lens[:, None])[:, 0]


def log_probs(model: Conformer, frames: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, ceil(T / 4), labels), and how many of them each row has."""
    encoded, lens = encode(model, frames, lens)
    return model.head(encoded).log_softmax(-1), lens


def encode(model: Conformer, frames: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, ceil(T / 4), width), and how many of them each row has."""
    x = frames.mT * mask_of(lens, frames.shape[1])[:, None]
    for conv in model.subsample:
        lens = (lens + 1) // 2
        x = conv(x).relu()
        x = x * mask_of(lens, x.shape[2])[:, None]  # or else the next layer reads what the bias made of padding
    x, mask = x.mT, mask_of(lens, x.shape[2])
    turns = angles(x.shape[1], model.config.width // model.config.heads, x)
    for one in model.blocks:
        x = block(cast(Block, one), x, turns, mask)
    return x, lens


def mask_of(lens: Tensor, steps: int) -> Tensor:
    return torch.arange(steps) < lens[:, None]


def block(self: Block, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    x = x + 0.5 * self.before(x)
    x = x + attention(self.attention, x, turns, mask)
    x = x + convolution(self.convolution, x, mask)
    return self.norm(x + 0.5 * self.behind(x))


def attention(self: SelfAttention, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
    q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
    q, k = rotated(q, turns), rotated(k, turns)
    heads_first = (y.transpose(1, 2) for y in (q, k, v))
    seen = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None, None])
    return self.dropout(self.out(seen.transpose(1, 2).flatten(-2)))


def convolution(self: Convolution, x: Tensor, mask: Tensor) -> Tensor:
    y = self.depthwise((self.gated(x) * mask[..., None]).mT)
    return self.out(batch_norm(self.norm, y, mask[:, None]).mT)


def batch_norm(norm: nn.BatchNorm1d, x: Tensor, mask: Tensor) -> Tensor:
    """x (B, C, T): the statistics of the entries there are, as torch's batch norm takes those of all."""
    mean, var = norm.running_mean, norm.running_var
    assert mean is not None
    assert var is not None
    assert norm.momentum is not None
    assert norm.num_batches_tracked is not None
    if norm.training:
        n = mask.sum()
        here = (x * mask).sum((0, 2)) / n
        spread = ((x - here[:, None]) * mask).square().sum((0, 2)) / n
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            mean.lerp_(here, norm.momentum)
            var.lerp_(spread * n / (n - 1), norm.momentum)
        mean, var = here, spread
    scale = norm.weight * (var + norm.eps).rsqrt()
    return x * scale[:, None] + (norm.bias - mean * scale)[:, None]
