"""Sums over the alignments of rows of frames with rows of tokens, by kernels that keep a number a state and frame.

Where gradients must themselves be differentiated, and under transforms of `torch.func`, the recursion runs in ordinary
operations: over a number for each entry and state (CTC), over padded rows of two numbers (RNN-T).

Sources: Graves et al. 2006, equations 5 to 16 (CTC); Graves 2012, equations 16 to 20 (RNN-T).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import runs_kernels
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop.kernels import find
from tensorloop.kernels.lattices import rnnt_formula
from tensorloop.packed.rows import segments

_FAR = -1e30  # for no path: minus infinity would have NaN for its gradient


def read_blank(blank: Any, classes: int) -> int:
    """The class that stands for no token."""
    n = arguments.as_int(blank, "blank")
    if not 0 <= n < classes:
        raise WrongValue(f"blank is {n}, expected 0 <= blank < {classes}")
    return n


@runs_kernels
def ctc(values: Tensor, offsets: Tensor, tokens: Tensor, token_offsets: Tensor, blank: int) -> Tensor:
    """(B,): minus the log-probability of each row of tokens (M,) under each row of log-probabilities (N, V).

    Infinite where no alignment has the tokens. The gradient is torch's, that of a loss of what a log-softmax comes from
    (e^value is added to that of the sum over alignments), and of float16 and bfloat16 that of float32.
    """
    given = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return _sum_paths("ctc_loss", ctc_formula, given, offsets, tokens, token_offsets, blank)


def _sum_paths(name: str, formula: Callable[..., Tensor], values: Tensor, *rest: Any) -> Tensor:
    """By the kernel of this name, or by the formula, which says the same."""
    if transforms.maybe_level() is not None or transforms.forward_mode():
        return formula(values, *rest)
    return _Paths.apply(values, name, formula, *rest)  # pyright: ignore[reportReturnType]


class _Paths(torch.autograd.Function):
    """(values, the name of the operation, its formula, its other arguments) -> losses (B,)"""

    @staticmethod
    def forward(ctx: Any, values: Tensor, name: str, formula: Any, *rest: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = values.contiguous()
        losses, alpha = find(name, values)(values, *rest)
        ctx.name, ctx.formula, ctx.rest = name, formula, rest
        ctx.save_for_backward(values, losses, alpha)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, losses, alpha = ctx.saved_tensors
        if is_differentiated(grad):
            (found,) = differentiate(lambda x: ctx.formula(x, *ctx.rest), (values,), grad)
        else:
            found = find(f"{ctx.name}_grad", grad, values)(grad, values, *ctx.rest, losses, alpha)
        return found, *[None] * (2 + len(ctx.rest))


def ctc_formula(values: Tensor, offsets: Tensor, tokens: Tensor, token_offsets: Tensor, blank: int) -> Tensor:
    """Alignments in ordinary operations, of a number for each entry and state of the longest targets."""
    lens, sizes = offsets.diff(), token_offsets.diff()
    frames, most = (int(x.max()) if len(x) else 0 for x in (lens, sizes))
    labels = torch.full((len(lens), 2 * most + 1), blank, device=values.device)
    labels[:, 1::2] = segments.pad(tokens[:, None], token_offsets, most)[..., 0]
    every = _of_labels(values, labels, lens)
    states = torch.arange(2 * most + 1, device=values.device)
    skips = (states % 2 == 1) & (states > 1) & (labels != labels.roll(2, 1))
    score = torch.full(labels.shape, _FAR, dtype=values.dtype, device=values.device).masked_fill(states == 0, 0)
    for t in range(frames):
        # What a row that has ended reads is not used: its last entry, or any where it is empty.
        at = (offsets[:-1] + (lens - 1).clamp(0, t)).clamp(max=len(values) - 1)
        own = every.index_select(0, at).clamp(min=_FAR)
        one, two = (torch.nn.functional.pad(score, (n, -n), value=_FAR) for n in (1, 2))
        ways = torch.stack([score, one.clamp(min=_FAR), torch.where(skips, two, _FAR)])
        if t == 0:  # only the first two states begin a path, the second from the first
            ways = torch.stack([score, one, torch.full_like(score, _FAR)])
        score = torch.where((t < lens)[:, None], (ways.logsumexp(0) + own).clamp(min=_FAR), score)
    last = (2 * sizes)[:, None]
    ends = torch.cat([score.gather(1, last), score.gather(1, (last - 1).clamp(min=0)).masked_fill(last == 0, _FAR)], 1)
    log = torch.where(lens == 0, torch.where(sizes == 0, 0, _FAR), ends.logsumexp(1))
    weights = segments.sum((values.exp() - values.detach().exp()).sum(1, keepdim=True), offsets)[:, 0]  # of value 0
    return torch.where(log < _FAR / 2, torch.inf, -log) + weights


def _of_labels(values: Tensor, labels: Tensor, lens: Tensor) -> Tensor:
    """(N, 2S + 1): of each entry the log-probabilities of its row's labels (B, 2S + 1)."""
    rows = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=len(values))
    return values.gather(1, labels.index_select(0, rows))


@runs_kernels
def rnnt(scores: Tensor, offsets: Tensor, widths: Tensor) -> Tensor:
    """(B,) of scores (N, 2): `kernels.lattices.rnnt_formula`, in any number of derivatives."""
    return _sum_paths("rnnt_loss", rnnt_formula, scores, offsets, widths)
