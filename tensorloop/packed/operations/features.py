"""Layers that work on the features of each entry, matrix products and changes of dtype."""

from typing import Any

import torch

from tensorloop.packed.table.base import (
    Packed,
    PackedView,
    check_only_first,
    find_feature_dim,
    is_packed,
    is_tensor,
    refusal,
)
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.fallback import fall_back
from tensorloop.packed.table.pointwise import align, check_partner, refuse_array
from tensorloop.packed.table.untaken import BETWEEN


@handles
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """The layer applied to every entry."""
    check_only_first(input, weight, bias)
    _needs_features(input, 1)
    return input._with(func(input.values, weight, bias))


@handles
def _embedding(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A vector for every index."""
    check_only_first(input, weight)
    return input._with(func(input.values, weight, *args, **kwargs))


@handles
def _norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Every entry normalised over its features."""
    check_only_first(input, *args, *kwargs.values())
    _needs_features(input, 1 if isinstance(normalized_shape, int) else len(normalized_shape))
    return input._with(func(input.values, normalized_shape, *args, **kwargs))


@handles
def _prelu(func: Any, input: Any, weight: Any) -> Any:
    """Entry by entry, with one weight."""
    check_only_first(input, weight)
    if weight.numel() != 1:
        raise refusal("its channels would be dim 1, the ragged one", "give it one weight, or use .flatten(0, 1)")
    return input._with(func(input.values, weight))


@handles
def _gumbel_softmax(
    func: Any, logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: Any = -1
) -> Any:
    """Over a feature dim; noise is drawn for the entries there are."""
    return logits._with(func(logits.values, tau, hard, eps, find_feature_dim(logits, dim)))


def _needs_features(p: Packed, n: int) -> None:
    if p.ndim - 2 < n:
        raise refusal(f"it needs {n} feature dims, the tensor is {p.shape}", "a ragged dim is not a feature dim")


@handles
def _matmul(func: Any, input: Any, other: Any) -> Any:
    """Multiplies by matrices in the feature dims; a matrix for each row pads, with a PackedFallbackWarning."""
    if func.__name__ == "__rmatmul__":
        input, other = other, input
    if is_packed(input) and is_packed(other):
        check_partner(input, other)
        _needs_matrix(input)
        return input._with(torch.matmul(input.values, other.values))
    if is_packed(other):
        _needs_tensor(input)
        _needs_matrix(other)
        if input.dim() > other.ndim - 2:
            input = align(input, other)
        return other._with(torch.matmul(input, other.values))
    _needs_tensor(other)
    _needs_features(input, 1)
    if input.ndim == 3 and other.dim() == 3 and other.shape[0] == 1:
        other = other[0]
    if other.dim() > max(2, input.ndim - 2):
        if input.ndim == 3 and other.dim() == 3 and other.shape[0] == len(input._dim):
            return fall_back("matmul", input, lambda x: torch.matmul(x, other))
        other = align(other, input)
    return input._with(torch.matmul(input.values, other))


def _needs_tensor(x: Any) -> None:
    if isinstance(x, PackedView):
        raise refusal("of entries with entries it has two ragged dims", BETWEEN)
    if not is_tensor(x):
        refuse_array(x)
        raise refusal(f"of a packed tensor and a {type(x).__name__}", "give it a tensor")


def _needs_matrix(p: Packed) -> None:
    if p.ndim < 4:
        raise refusal(f"the ragged dim of {p.shape} would be a dim of the matrices", BETWEEN)


@handles
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype or on another device; its lens move along."""
    args = tuple(x.values if is_packed(x) else x for x in args)
    kwargs = {k: x.values if is_packed(x) else x for k, x in kwargs.items()}
    if not is_packed(input):  # tensor.to(packed): its dtype and device
        return func(input, *args, **kwargs)
    values = func(input.values, *args, **kwargs)
    return input._with(values, input._dim.to(values.device))


@handles
def _cdist(func: Any, x1: Any, x2: Any, *args: Any, **kwargs: Any) -> Any:
    """From each entry to the rows of a codebook (K, D) or (1, K, D)."""
    if not is_packed(x1) or not is_tensor(x2) or x1.ndim != 3 or any(n != 1 for n in x2.shape[:-2]):
        raise refusal(
            "distances between steps have no packed form",
            "of (B, T*, D) give it a codebook (K, D); between steps use p.pad() and a mask",
        )
    return x1._with(func(x1.values, x2.reshape(x2.shape[-2:]), *args, **kwargs))
