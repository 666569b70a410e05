"""What speech models are made of, on packed rows and on padded ones: a Conformer block, CTC, attention's options.

Every way of a case takes one tensor (B, T, F). Ours reads as many of its entries as its rows have, one row after
another, and the padded way all of them; for the comparison `compared` gives the padded way ours' entries.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from packed_rows.packed_ways import Way
from torch import Tensor

from docs.examples.speech import padded
from docs.examples.speech.model import Block, angles
from tensorloop import attention
from tensorloop.packed import Dim, PackedTensor

LEAST, MOST = 100, 1000  # frames of a row
ROWS = {"conformer": 32, "ctc": 32, "dropout": 8, "score_mod": 8}
WIDTH, HEADS, LABELS = 144, 4, 128
DROPPED = 0.1


class Rows(NamedTuple):
    lens: Tensor
    dim: Dim
    n: int
    steps: int
    mask: Tensor  # (B, T) bool


@cache
def rows(case: str) -> Rows:
    lens = torch.randint(LEAST, MOST + 1, (ROWS[case],), generator=torch.Generator().manual_seed(0))
    steps = int(lens.max())
    return Rows(lens, Dim("time", lens), int(lens.sum()), steps, padded.mask_of(lens, steps))


def inputs(case: str) -> Tensor:
    r, size = rows(case), LABELS if case == "ctc" else WIDTH
    return torch.randn(len(r.lens), r.steps, size, generator=torch.Generator().manual_seed(1)).requires_grad_()


def both(
    case: str,
    ours: Callable[[PackedTensor], Tensor | PackedTensor],
    theirs: Callable[[Tensor], Tensor],
    weights: tuple[Tensor, ...] = (),
    same: tuple[Callable[[PackedTensor], Tensor | PackedTensor], Callable[[Tensor], Tensor]] | None = None,
) -> dict[str, Way]:
    """`same`: the two without what is random."""
    r = rows(case)

    def packed(x: Tensor, of: Callable[[PackedTensor], Tensor | PackedTensor] = ours) -> Tensor:
        out = of(PackedTensor(x.flatten(0, 1)[: r.n], r.dim))
        return out if isinstance(out, Tensor) else out.values

    def compared(x: Tensor) -> Tensor:
        entries = PackedTensor(x.flatten(0, 1)[: r.n], r.dim)
        out = (same[1] if same else theirs)(entries.pad())
        return out[r.mask] if out.dim() == 3 else out

    of = same[0] if same else ours
    return {"packed": Way(packed, lambda x: packed(x, of), weights), "padded": Way(theirs, compared, weights)}


def conformer() -> dict[str, Way]:
    """A block of Gulati et al. 2020 at the width of their smallest model."""
    torch.manual_seed(2)
    block, r = Block(WIDTH, HEADS, kernel=31).train(), rows("conformer")
    turns = angles(r.steps, WIDTH // HEADS, torch.zeros(()))
    return both(
        "conformer",
        lambda x: block(x, turns),
        lambda x: padded.block(block, x, turns, r.mask),
        tuple(block.parameters()),
    )


def ctc() -> dict[str, Way]:
    """Of raw scores: torch's gradient is that of the scores which log_softmax has made."""
    r = rows("ctc")
    lens = r.lens // 8
    labels = torch.randint(1, LABELS, (int(lens.sum()),), generator=torch.Generator().manual_seed(3))
    wide = PackedTensor(labels, lens).pad()

    def theirs(x: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), wide, r.lens, lens, reduction="none")

    targets = PackedTensor(labels, lens)
    return both("ctc", lambda x: F.ctc_loss(x.log_softmax(-1), targets, r.lens, lens, reduction="none"), theirs)


def dropout() -> dict[str, Way]:
    return attending("dropout", {"dropout": DROPPED}, None, DROPPED)


def score_mod() -> dict[str, Way]:
    """Scores fall with the distance (ALiBi), there by a matrix of numbers that is made beforehand."""
    slopes, places = 2.0 ** -torch.arange(1, HEADS + 1), torch.arange(rows("score_mod").steps)
    far = -slopes[:, None, None] * (places[:, None] - places).abs()
    return attending("score_mod", {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()}, far)


def attending(case: str, options: dict[str, Any], bias: Tensor | None, dropped: float = 0.0) -> dict[str, Way]:
    r = rows(case)
    mask = r.mask[:, None, None]
    seen = mask if bias is None else torch.where(mask, bias, -torch.inf)

    def ours(x: PackedTensor, **options: Any) -> PackedTensor:
        heads: Any = x.unflatten(-1, (HEADS, -1))
        return attention(heads, heads, heads, **options).flatten(-2)

    def theirs(x: Tensor, dropped: float = dropped) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen, dropout_p=dropped)
        return out.transpose(1, 2).flatten(-2)

    if dropped:
        return both(case, lambda x: ours(x, **options), theirs, (), (ours, lambda x: theirs(x, 0.0)))
    return both(case, lambda x: ours(x, **options), theirs)


CASES = {"conformer": conformer, "ctc": ctc, "dropout": dropout, "score_mod": score_mod}
APART = {"ctc": 2e-3}  # sums of some thousand logarithms in float32
