"""Layers of static packed tensors, shapes of their features, and losses."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongType, WrongValue
from tensorloop.packed.static.static_ops import (
    check_partner,
    check_rows,
    feature_dim,
    is_static,
    rewrap,
    to_values,
)
from tensorloop.packed.static.static_reduce import sum_or_mean
from tensorloop.packed.table.base import check_only_first, refusal
from tensorloop.packed.table.dispatch import handles


@handles
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    check_only_first(input, weight, bias)
    if input.ndim < 3:
        raise refusal(f"it needs a feature dim, the tensor is {input.shape}", "unsqueeze(-1) it")
    return input._with(func(input.values, weight, bias))


@handles
def _matmul(func: Any, input: Any, other: Any) -> Any:
    check_only_first(input, other)
    if input.ndim < 3 or not isinstance(other, Tensor) or other.dim() > 2:
        raise refusal("it takes (B, T*, *F, m) and an ordinary (m,) or (m, n)", "use p.pad() for the rest")
    return input._with(torch.matmul(input.values, other))


@handles
def _embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    check_only_first(input, weight)
    if max_norm is not None or scale_grad_by_freq:
        raise refusal("max_norm and scale_grad_by_freq would count free entries", "leave them out")
    return input._with(func(input.values, weight, padding_idx=padding_idx, sparse=sparse))


# -- shapes of features


@handles
def _unflatten(func: Any, input: Any, dim: Any, sizes: Any) -> Any:
    return input._with(input.values.unflatten(feature_dim(input, dim), sizes))


@handles
def _flatten(func: Any, input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    return input._with(input.values.flatten(feature_dim(input, start_dim), feature_dim(input, end_dim)))


@handles
def _transpose(func: Any, input: Any, dim0: Any, dim1: Any) -> Any:
    return input._with(input.values.transpose(feature_dim(input, dim0), feature_dim(input, dim1)))


@handles
def _squeeze(func: Any, input: Any, dim: Any) -> Any:
    return input._with(input.values.squeeze(feature_dim(input, dim)))


@handles
def _unsqueeze(func: Any, input: Any, dim: Any) -> Any:
    n = arguments.as_int(dim, "dim")
    n = n + input.ndim + 1 if n < 0 else n
    if not 2 <= n <= input.ndim:
        raise WrongIndex(f"dim is {dim}; a new feature dim is one of 2 to {input.ndim}, or -1")
    return input._with(input.values.unsqueeze(n - 1))


@handles
def _chunk(func: Any, input: Any, *args: Any, dim: Any = 0, **kwargs: Any) -> Any:
    """Along a feature dim."""
    given = 0 if func.__name__ == "unbind" else 1
    dim = args[given] if len(args) > given else dim
    return rewrap(input, func(input.values, *args[:given], dim=feature_dim(input, dim), **kwargs))


@handles
def _cat(func: Any, tensors: Any, dim: Any = 0) -> Any:
    """Along a feature dim."""
    base = next(x for x in tensors if is_static(x))
    for x in tensors:
        check_rows(base, x)
    new = func.__name__ == "stack"
    n = arguments.as_int(dim, "dim")
    n = n + base.ndim + new if n < 0 else n
    if n < 2:
        raise refusal(
            f"dim {dim} is the {('batch', 'ragged')[max(n, 0)]} dim",
            "join .pad() and lens, and make a static one of it",
        )
    return base._with(func([x.values for x in tensors], n - 1))


@handles
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype; a device is where lens are."""
    values = func(input.values, *(x.values if is_static(x) else x for x in args), **kwargs)
    if values.device != input.values.device:
        raise refusal("rows stay on the device of lens", "move values and lens, and make a static one of them there")
    return input._with(values)


# -- losses


@handles
def _loss(func: Any, input: Any, target: Any, *, reduction: str = "mean", **kwargs: Any) -> Any:
    """A loss of pairs of entries: the mean is over the entries there are."""
    _refuse_old(kwargs)
    check_rows(input, target)
    check_partner(input, target)
    kwargs = {k: to_values(x, input) if is_static(x) or isinstance(x, Tensor) else x for k, x in kwargs.items()}
    return _finish(input._with(func(input.values, target.values, reduction="none", **kwargs)), reduction)


@handles
def _classes(func: Any, input: Any, target: Any, weight: Any = None, *, reduction: str = "mean", **kwargs: Any) -> Any:
    """Gives losses of classes in dim 2 of (B, T*, V, *F), for targets (B, T*, *F) or probabilities of that shape."""
    _refuse_old(kwargs)
    check_rows(input, target)
    if input.ndim < 3:
        raise refusal(f"input {input.shape} has no dim of classes", "give it (B, T*, V)")
    if target.values.is_floating_point():
        losses = input._with(func(input.values, target.values, weight, reduction="none", **kwargs))
        return _finish(losses, reduction)
    ignored = input._rows.clean(target.values, kwargs.get("ignore_index", -100))
    out = func(input.values, ignored, weight, reduction=reduction, **kwargs)
    return input._with(out) if reduction == "none" else out


def _refuse_old(kwargs: dict[str, Any]) -> None:
    for old in ("size_average", "reduce"):
        if kwargs.pop(old, None) is not None:
            raise WrongType(f"{old} is not taken; give reduction=")


def _finish(losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum", "batchmean"):
        raise WrongValue(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if reduction == "batchmean":
        return sum_or_mean(torch.sum, losses) / losses._rows.count
    return sum_or_mean(torch.mean if reduction == "mean" else torch.sum, losses)
