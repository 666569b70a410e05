"""The loss of an RNN transducer (Graves 2012), by logits of the whole lattice: the recipe's two forms."""

import torch
from torch import Tensor

import tensorloop as tl
from docs.examples.recipes.rnnt import Transducer

ROWS, FEATURES, LABELS, WORDS, WIDTH = 8, 16, 20, 256, 32


def before(model: Transducer, frames: Tensor, frame_lens: Tensor, labels: Tensor, lens: Tensor) -> Tensor:
    return model.plain_loss(frames, frame_lens, labels, lens).mean()


def after(model: Transducer, frames: Tensor, frame_lens: Tensor, labels: Tensor, lens: Tensor) -> Tensor:
    return model.loss(tl.pack_padded(frames, frame_lens), labels, lens, checkpoints=8).mean()


def make(T: int) -> tuple[Transducer, Tensor, Tensor, Tensor, Tensor]:
    frame_lens = torch.linspace(T // 2, T, ROWS).long()
    frames, labels = torch.randn(ROWS, T, FEATURES), torch.randint(1, WORDS, (ROWS, LABELS))
    return Transducer(FEATURES, WORDS, WIDTH), frames, frame_lens, labels, torch.full((ROWS,), LABELS)
