"""Norms of channels over time, whose statistics are over the entries there are, and what else treats channels alike."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.operations.reduce import square, widen
from tensorloop.packed.rows import segments
from tensorloop.packed.table.base import Packed, check_only_first, refusal
from tensorloop.packed.table.dispatch import handles


@handles
def _batch_norm(func: Any, input: Any, *args: Any, **kwargs: Any) -> Packed:
    """Over all entries of all rows; running statistics see no padding either."""
    check_only_first(input, *args, *kwargs.values())
    if func is not F.batch_norm:
        raise refusal("torch.batch_norm has arguments of its own", "use torch.nn.functional.batch_norm")
    return input._with(func(input.values, *args, **kwargs))


@handles
def _group_norm(
    func: Any, input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Packed:
    """Each row by itself, over its own entries and the channels of a group."""
    check_only_first(input, weight, bias)
    if func is not F.group_norm:
        raise refusal("torch.group_norm has arguments of its own", "use torch.nn.functional.group_norm")
    channels = input.values.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise WrongValue(f"the {channels} channels do not divide into {num_groups} groups")
    out, _, _ = _normalize(input, num_groups, eps)
    return _scale(input, out, weight, bias)


@handles
def _instance_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Packed:
    """Each channel of each row by itself; running statistics are means over rows; one entry has no variance."""
    check_only_first(input, running_mean, running_var, weight, bias)
    if not use_input_stats:
        out = F.batch_norm(input.values, running_mean, running_var, weight, bias, False, momentum, eps)
        return input._with(out)
    out, mean, var = _normalize(input, input.values.shape[1], eps)
    if running_mean is not None:
        lens = input._dim._lens.unsqueeze(1)
        unbiased = var * lens / (lens - 1)  # not var * (lens / (lens - 1)), whose factor is float32
        with torch.no_grad():
            for running, found, counts in ((running_mean, mean, lens > 0), (running_var, unbiased, lens > 1)):
                now = torch.where(counts, found, 0).sum(0) / counts.sum()
                now = torch.where(counts.any(), now.to(running.dtype), running)  # no row has one: it stays
                running.lerp_(now, momentum)
    return _scale(input, out, weight, bias)


def _normalize(p: Packed, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(values normalised, mean, variance): the statistics (B, groups) of each row over its entries."""
    n, channels = p.values.shape
    offsets, inner = p._dim._offsets, channels // groups if groups else 1
    x = widen(p.values).unflatten(1, (groups, inner))
    number = segments.count(offsets, x[..., 0]) * inner

    def average(x: Tensor) -> Tensor:
        return segments.sum(x, offsets).sum(-1) / number

    mean = average(x)
    centred = x - segments.spread(mean, offsets, n).unsqueeze(-1)
    var = average(square(centred))
    out = centred * segments.spread(torch.rsqrt(var + eps), offsets, n).unsqueeze(-1)
    return out.flatten(1).to(p.values.dtype), mean, var


def _scale(p: Packed, out: Tensor, weight: Any, bias: Any) -> Packed:
    out = out if weight is None else out * weight
    return p._with(out if bias is None else out + bias)


@handles
def _prelu(func: Any, input: Any, weight: Any) -> Packed:
    """Entry by entry, with one weight or one for each channel."""
    check_only_first(input, weight)
    return input._with(func(input.values, weight))


@handles
def _dropout1d(func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Packed:
    """Whole channels of rows set to 0."""
    check_only_first(input)
    if not 0 <= p <= 1:
        raise WrongValue(f"p must be between 0 and 1, got {p}")
    if not training or p == 0:
        return input
    if inplace:
        raise refusal("it makes a new packed tensor", "leave out inplace=True")
    rows = input.values.new_ones(len(input._dim), input.values.shape[1])
    return input._with(input.values * segments.spread(F.dropout(rows, p), input._dim._offsets, len(input.values)))
