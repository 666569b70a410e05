"""The RNN-T loss of joints that are packed: every pair of an audio frame and a text position is an entry of its row."""

from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.packed.rows import alignments, segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.autograd import check_gradient
from tensorloop.packed.table.base import Packed, is_packed

P = TypeVar("P", bound=Packed)


@called_eagerly
@named("pairs")
def pairs(a: P, b: Packed) -> tuple[P, P]:
    """Pairs every entry of a row of a with every entry of that row of b: the joint of a transducer, without padding.

    Entry (t, s) of a row of S is t * S + s, so that a joint network is `net(x + y)` of what comes, and `rnnt_loss`
    takes what that gives.

    Args:
        a: packed (B, T*, *F).
        b: packed (B, S*, *G), of as many rows.

    Returns:
        Two packed tensors of one Dim, (B, (T S)*, *F) and (B, (T S)*, *G).

    Gradient: to both, any number of times; each is a sum. Cost: writes sum(T S) entries of each, and keeps numbers of
    entries (8 bytes each, twice). Lengths on a device are waited for.

    Raises:
        TypeError: not packed.
        ValueError: another number of rows, another device.

    Example:
        >>> a, b = tl.PackedTensor(torch.tensor([1, 2, 3]), [2, 1]), tl.PackedTensor(torch.tensor([10, 20]), [1, 1])
        >>> x, y = tl.packed.pairs(a, b)
        >>> (x + y).values, x.lens
        (tensor([11, 12, 23]), tensor([2, 1]))
    """
    for x, what in ((a, "a"), (b, "b")):
        if not is_packed(x):
            raise WrongType(f"{what} must be a PackedTensor, got {arguments.describe(x)}; pack_padded makes one")
    check_gradient(a, b)
    if len(a._dim) != len(b._dim):
        raise WrongValue(f"a has {len(a._dim)} rows, b has {len(b._dim)}")
    if a._dim.device != b._dim.device:
        raise WrongValue(f"a is on {a._dim.device}, b on {b._dim.device}; move them with .to()")
    widths = b._dim._lens
    dim = Dim(None, a._dim._lens * widths)
    n = torch.arange(dim.total, device=dim.device)
    wide = widths[dim._row_ids]
    t, s = n - dim._offsets[dim._row_ids], b._dim._offsets[dim._row_ids]
    first = segments.gather(a.values, a._dim._offsets[dim._row_ids] + t // wide, in_order=True)
    second = segments.gather(b.values, s + t % wide)
    return a._with(first, dim), a._with(second, dim)


@called_eagerly
@named("rnnt_loss")
def rnnt_loss(log_probs: Packed, targets: Packed, *, blank: int = 0, reduction: str = "mean") -> Tensor:
    """The RNN-transducer loss: minus the log-probability of targets, summed over their alignments with frames.

    An alignment emits at each frame some tokens, then a blank. T is the length of a row by U + 1.

    Args:
        log_probs: packed (B, (T (U + 1))*, V), real floating: the joint of T frames and U + 1 text positions, entry (t,
            u) at t * (U + 1) + u, as `pairs` makes it.
        targets: packed (B, U*), integers.
        blank: int, default 0: the class of the blank.
        reduction: "mean" (default) over the rows, "sum", or "none".

    Returns:
        A 0-d tensor, or (B,) for "none", of the dtype of `log_probs`; sums are float64 on the CPU. A row without frames
        has loss 0 where U = 0, else infinity.

    Gradient: to log_probs, in closed form, twice differentiable; only blank and next token of an entry have one.
    Cost: time N, with one gather of N pairs of numbers; kept: those, and 8 bytes an entry; backward writes (N, V). A
    joint too large is computed row by row under `torch.utils.checkpoint`: docs/api/packed.md.

    Raises:
        TypeError: not packed, other dtypes.
        ValueError: rows that differ, a length that is no multiple of U + 1, blank, reduction.
        IndexError: a target that is no class. On a device lengths and targets are not looked at.

    Source: Graves 2012.

    Example:
        >>> joint = tl.PackedTensor(torch.zeros(2 * 2, 3).log_softmax(-1), [4])  # 2 frames, 1 token, 3 classes
        >>> tl.packed.rnnt_loss(joint, tl.PackedTensor(torch.tensor([1]), [1]))  # 2 paths of 3 emissions
        tensor(2.6027)
    """
    for x, what in ((log_probs, "log_probs"), (targets, "targets")):
        if not is_packed(x):
            raise WrongType(f"{what} must be a PackedTensor, got {arguments.describe(x)}; pack_padded makes one")
    check_gradient(log_probs)
    if log_probs.ndim != 3 or targets.ndim != 2:
        raise WrongValue(
            f"log_probs must be (B, (T (U + 1))*, V) and targets (B, U*), got {log_probs.shape} and {targets.shape}"
        )
    if not log_probs.values.dtype.is_floating_point:
        raise WrongType(f"log_probs must be of a real floating dtype, got {log_probs.values.dtype}")
    if targets.values.dtype not in arguments.INTEGERS:
        raise WrongType(f"targets have dtype {targets.values.dtype}, but tokens are integers")
    if reduction not in ("none", "mean", "sum"):
        raise WrongValue(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    classes = log_probs.values.shape[1]
    blank = alignments.read_blank(blank, classes)
    dim, widths = log_probs._dim, targets._dim._lens + 1
    _check_rows(dim, targets, widths, classes)
    losses = alignments.rnnt(_pick(log_probs.values, dim, targets, widths, blank), dim._offsets, widths)
    losses = losses.to(log_probs.values.dtype)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _check_rows(dim: Dim, targets: Any, widths: Tensor, classes: int) -> None:
    if len(dim) != len(widths):
        raise WrongValue(f"log_probs have {len(dim)} rows, targets {len(widths)}")
    if dim.device != targets._dim.device:
        raise WrongValue(f"log_probs are on {dim.device}, targets on {targets._dim.device}; move them with .to()")
    if not arguments.must_check(None, targets.values):
        return
    if bool((rest := dim._lens % widths).any()):
        row = int(rest.nonzero()[0])
        raise WrongValue(
            f"row {row} of log_probs has {int(dim._lens[row])} entries, no multiple of the {int(widths[row])} text "
            f"positions of {int(widths[row]) - 1} targets; make the joint of pairs(audio, text), text U + 1 long"
        )
    arguments.in_range(targets.values, 0, classes, "targets")


def _pick(values: Tensor, dim: Dim, targets: Any, widths: Tensor, blank: int) -> Tensor:
    """(N, 2): the log-probability of the blank at each entry, and that of the next token, or again of the blank."""
    wide = widths[dim._row_ids]
    u = dim._positions % wide
    inside, first = u + 1 < wide, targets._dim._offsets[dim._row_ids]
    tokens = targets.values.long()
    if len(tokens):
        tokens = torch.where(inside, tokens[(first + u).clamp(max=len(tokens) - 1)], blank)
    else:
        tokens = torch.full_like(u, blank)
    index = torch.stack([torch.full_like(tokens, blank), tokens], 1)
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return values.gather(1, index)
