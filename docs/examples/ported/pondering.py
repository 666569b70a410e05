"""Adaptive computation time (Graves 2016), whose rows all take the steps of the slowest: the recipe's two forms."""

import torch
from torch import Tensor

from docs.examples.recipes.act import Pondering, make_parities

ROWS, BITS, WIDTH = 32, 8, 64


def before(model: Pondering, xs: Tensor) -> Tensor:
    logits, cost, _ = model.plain(xs)
    return logits.square().mean() + cost.mean()


def after(model: Pondering, xs: Tensor) -> Tensor:
    logits, cost, _ = model(xs, checkpoints=8)
    return logits.square().mean() + cost.mean()


def make(T: int) -> tuple[Pondering, Tensor]:
    xs = make_parities(T, ROWS, BITS, torch.Generator().manual_seed(0))[0]
    return Pondering(BITS, WIDTH), xs.to(torch.get_default_dtype())
