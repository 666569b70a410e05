"""Losses of packed tensors: of pairs of entries, of classes, and over the alignments of a row (CTC)."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.rows import alignments, segments
from tensorloop.packed.rows.dim import Dim, as_dim
from tensorloop.packed.table.base import Packed, check_same_rows, is_packed, is_tensor, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.pointwise import check_partner, rewrap, to_values


@handles
def _loss(func: Any, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A loss of pairs of entries: the mean is over the entries there are."""
    if weight is not None and not is_packed(weight) and not is_tensor(weight):
        args, weight = (weight, *args), None  # an old-style size_average
    if not (is_packed(input) and is_packed(target)):
        raise refusal("input and target must both be packed", "pack the other: pack_padded(x, p.lens)")
    check_partner(input, target)
    if isinstance(weight, Packed):
        check_partner(input, weight)
    if kwargs.get("reduction") == "batchmean":
        return _loss(func, input, target, weight, *args, **(kwargs | {"reduction": "sum"})) / len(input._dim)
    kwargs = {k: to_values(x, input) for k, x in kwargs.items()}
    if weight is not None:
        kwargs["weight"] = to_values(weight, input)
    out = func(input.values, target.values, *args, **kwargs)
    return rewrap(input, out) if kwargs.get("reduction") == "none" else out


@handles
def _classes(func: Any, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Gives losses of classes in dim 2 of (B, T*, V, *F), for targets (B, T*, *F) or probabilities of that shape."""
    if not (is_packed(input) and is_packed(target)):
        raise refusal("input and target must both be packed", "pack the other: pack_padded(x, p.lens)")
    check_same_rows(input, target)
    if input.ndim < 3:
        raise refusal(f"input {input.shape} has no dim of classes", "give it (B, T*, V)")
    if is_packed(weight):
        raise refusal("weight is one number for each class", "weigh entries of reduction='none'")
    out = func(input.values, target.values, weight, *args, **kwargs)
    return input._with(out) if kwargs.get("reduction") == "none" else out


@handles
def _ctc_loss(
    func: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Computes the CTC loss of (B, T*, V) log-probabilities; targets (B, S*) are packed, padded or row after row."""
    if not is_packed(log_probs):
        raise refusal("its log_probs are not packed", "pack them, or pass the padded targets")
    if log_probs.ndim != 3:
        raise WrongValue(f"log_probs must be packed (B, T*, V), got {log_probs.shape}")
    if reduction not in ("none", "mean", "sum"):
        raise WrongValue(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    p = _cut(log_probs, input_lengths)
    tokens, dim = _read_targets(targets, target_lengths, p)
    blank = alignments.read_blank(blank, p.shape[2])
    losses = alignments.ctc(p.values, p._dim._offsets, tokens, dim._offsets, blank)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0, losses)
    if reduction == "mean":
        return (losses / dim._lens.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def _cut(p: Packed, lengths: Any) -> Packed:
    """The first so many entries of each row; all where None."""
    if lengths is None or lengths is p._dim or lengths is p._dim._lens:
        return p
    lens = p._dim._host_lens
    given = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
    if given.shape != lens.shape:
        raise WrongValue(f"input_lengths must be ({len(lens)},), got {tuple(given.shape)}")
    if torch.equal(given, lens):
        return p
    if bool((bad := (given > lens) | (given < 0)).any()):
        row = int(bad.nonzero()[0])
        raise WrongValue(f"input_lengths[{row}] is {int(given[row])}, but row {row} has {int(lens[row])} entries")
    dim = p._dim._derive(lambda _: given)
    index = p._dim._offsets[:-1].index_select(0, dim._row_ids) + dim._positions
    return p._with(segments.gather(p.values, index, in_order=True), dim)


def _read_targets(targets: Any, lengths: Any, p: Packed) -> tuple[Tensor, Dim]:
    """The tokens one row after another (M,) int64, and their dim; all are classes."""
    rows = len(p._dim)
    if isinstance(targets, Packed):
        tokens, dim = targets.values, targets._dim
        if lengths is not None and not dim.same(as_dim(torch.as_tensor(lengths, dtype=torch.int64, device="cpu"))):
            raise WrongValue("target_lengths are not the lens of targets; give None, or crop: targets[:, :n]")
    else:
        arguments.dense_tensor(targets, "targets")
        if lengths is None:
            raise WrongValue("target_lengths are needed for targets that are not packed")
        dim = as_dim(torch.as_tensor(lengths, dtype=torch.int64).to(targets.device))
        tokens = targets
        if targets.dim() == 2:
            if len(targets) != len(dim):
                raise WrongValue(f"targets have {len(targets)} rows, target_lengths {len(dim)}")
            if dim.max_len > targets.shape[1]:
                raise WrongValue(f"target_lengths go up to {dim.max_len}, targets have {targets.shape[1]} columns")
            tokens = targets[torch.arange(targets.shape[1], device=dim.device) < dim._lens[:, None]]
    if tokens.dtype not in arguments.INTEGERS:
        raise WrongType(f"targets have dtype {tokens.dtype}, but tokens are integers; convert with .to(torch.int64)")
    if tokens.dim() != 1:
        raise WrongValue(
            f"targets must be packed (B, S*), padded (B, S) or (sum of lengths,), got {tuple(targets.shape)}"
        )
    if len(dim) != rows:
        raise WrongValue(f"log_probs have {rows} rows, targets {len(dim)}")
    if dim.total != len(tokens):
        raise WrongValue(f"target_lengths sum to {dim.total}, but there are {len(tokens)} targets")
    if dim.device != p.values.device:
        raise WrongValue(f"log_probs are on {p.values.device}, targets on {dim.device}; move them with .to()")
    if arguments.must_check(None, tokens):  # a kernel would read what is not its own
        arguments.in_range(tokens, 0, p.values.shape[1], "targets")
    return tokens.to(torch.int64), dim
