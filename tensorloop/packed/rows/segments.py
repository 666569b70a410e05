"""Differentiable operations on ragged rows: plain tensors values (N, *F) cut into B rows by offsets (B+1,) int64.

They are linear, and a linear map's gradient is another map of the same kind: pack and pad, sum and spread, a
permutation and its inverse, a cumulative sum and the one from the other end. Such a pair is a `_Pair` of kernels, and
either side of it is a `Formula`: twice differentiable, forward mode and vmap included, and no gradient is a
scatter-add. What is not linear is in `segment_reduce`.

Arguments are checked by the caller: offsets[0] = 0, offsets[-1] = N, not decreasing, on the device of the values.
Under vmap only values may be batched.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.eager_only import runs_kernels
from tensorloop._torch.formula import Formula, evaluate
from tensorloop.kernels import find

_unsafe_view = torch.ops.aten._unsafe_view.default


class _Pair(NamedTuple):
    """A linear map on plain tensors, and its adjoint."""

    run: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]


@runs_kernels
def _linear(x: Tensor, pair: _Pair) -> Tensor:
    turned = _Pair(pair.adjoint, pair.run)
    return evaluate(Formula(pair.run, lambda grad: (_linear(grad, turned),), lambda along: _linear(along[0], pair)), x)


def run_kernel(operation: str, x: Tensor, lead: int, *args: Any) -> Tensor:
    """Runs a kernel on x with all dims after the first `lead` as one."""
    features = x.shape[lead:]
    flat = x.reshape(*x.shape[:lead], prod(features)).contiguous()
    out = find(operation, flat)(flat, *args)
    # No view, which autograd would not let anybody change in place.
    return out if len(features) == 1 else _unsafe_view(out, (*out.shape[:-1], *features))


def pack(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, *F) -> (n, *F)"""
    return _linear(padded, _pack_pair(offsets, n, padded.shape[1]))


@runs_kernels
def pad(values: Tensor, offsets: Tensor, steps: int, fill: float = 0) -> Tensor:
    """(N, *F) -> (B, steps, *F), `fill` behind the end of each row; no row is longer than `steps`."""
    if fill == 0:
        to_packed, to_padded = _pack_pair(offsets, len(values), steps)
        return _linear(values, _Pair(to_padded, to_packed))
    n = len(values)
    return evaluate(  # affine: its derivative is that of padding with 0
        Formula(
            lambda x: run_kernel("pad_rows", x, 1, offsets, steps, fill),
            lambda grad: (pack(grad, offsets, n),),
            lambda along: pad(along[0], offsets, steps),
        ),
        values,
    )


def _pack_pair(offsets: Tensor, n: int, steps: int) -> _Pair:
    return _Pair(
        lambda x: run_kernel("pack_rows", x, 2, offsets, n),
        lambda x: run_kernel("pad_rows", x, 1, offsets, steps, 0),
    )


def spread(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, *F) -> (n, *F): row b as often as it is long."""
    to_rows, to_values = _sum_pair(offsets, n)
    return _linear(rows, _Pair(to_values, to_rows))


def sum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); 0 for an empty row."""
    return _linear(values, _sum_pair(offsets, len(values)))


def _sum_pair(offsets: Tensor, n: int) -> _Pair:
    return _Pair(
        lambda x: run_kernel("segment_sum", x, 1, offsets),
        lambda x: run_kernel("spread_rows", x, 1, offsets, n),
    )


def count(offsets: Tensor, like: Tensor) -> Tensor:
    """The length of each row, (B, 1, ..) in the dtype of `like` (·, *F)."""
    return offsets.diff().to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def mean(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (B, *F); NaN for an empty row."""
    return sum(values, offsets) / count(offsets, values)


@runs_kernels
def gather(values: Tensor, index: Tensor, in_order: bool = False) -> Tensor:
    """(N, *F), (M,) -> (M, *F) for any index, with repeats or without; its gradient is a gather and a segment sum.

    `in_order`: the index does not decrease, so that its gradient is a segment sum alone.
    """
    n, index = len(values), _unwrap(index)

    def adjoint(x: Tensor) -> Tensor:
        order = None if in_order else torch.argsort(index, stable=True)
        sorted_index = index if order is None else index.index_select(0, order)
        numbers = torch.arange(n + 1, device=index.device)
        ends = torch.searchsorted(sorted_index, numbers)  # ends[i]: how many entries of the index are below i
        return _sum_pair(ends, len(index)).run(x if order is None else _make_gather(order)(x))

    return _linear(values, _Pair(_make_gather(index), adjoint))


@runs_kernels
def permute(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """(N, *F) -> (N, *F): values[index] for a permutation; its gradient is the gather by `inverse`."""
    return _linear(values, _Pair(_make_gather(index), _make_gather(inverse)))


@runs_kernels
def repeat(values: Tensor, index: Tensor, places: Tensor) -> Tensor:
    """(N, *F), (M,) -> (M, *F): values[index], where entry n stands at places[n] and what else repeats one is filler.

    The gradient of filler must be 0: it is left out.
    """
    return _linear(values, _Pair(_make_gather(index), _make_gather(places)))


@runs_kernels
def collect(values: Tensor, places: Tensor) -> Tensor:
    """(M, *F), (N,) -> (N, *F): values[places], of which no two are the same."""
    to_places, from_places = _place_pair(places, len(values))
    return _linear(values, _Pair(from_places, to_places))


@runs_kernels
def place(values: Tensor, places: Tensor, m: int, fill: float = 0) -> Tensor:
    """(N, *F), (N,) -> (m, *F): entry n at places[n], of which no two are the same; `fill` everywhere else."""
    if fill == 0:
        return _linear(values, _place_pair(places, m))
    return evaluate(  # affine: its derivative is that with 0
        Formula(
            lambda x: x.new_full((m, *x.shape[1:]), fill).index_copy_(0, places, x),
            lambda grad: (collect(grad, places),),
            lambda along: place(along[0], places, m),
        ),
        values,
    )


def _place_pair(places: Tensor, m: int) -> _Pair:
    return _Pair(lambda x: x.new_zeros(m, *x.shape[1:]).index_copy_(0, places, x), _make_gather(places))


def _unwrap(index: Tensor) -> Tensor:
    """An index without the wrappers of transforms: kernels see it, not autograd."""
    if transforms.is_batched(index):
        raise TypeError("ragged gather: the index is batched by vmap; it must be the same for every call")
    return transforms.numbers(index)


def _make_gather(index: Tensor) -> Callable[[Tensor], Tensor]:
    index = _unwrap(index)
    return lambda x: run_kernel("gather_rows", x, 1, index)


@runs_kernels
def mirror(offsets: Tensor, n: int) -> Tensor:
    """(n,): for each entry the one as far from the other end of its row; a permutation that is its own inverse."""
    with transforms.outside_transforms():
        ends = (offsets[:-1] + offsets[1:] - 1).unsqueeze(1)
        return find("spread_rows", ends)(ends, offsets, n).squeeze(1) - torch.arange(n, device=offsets.device)


def flip(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), each row from its end to its start."""
    index = mirror(offsets, len(values))
    return permute(values, index, index)


@runs_kernels
def cumsum(values: Tensor, offsets: Tensor) -> Tensor:
    """(N, *F) -> (N, *F), each row's sums from its start."""

    def forwards(x: Tensor) -> Tensor:
        return run_kernel("segment_cumsum", x, 1, offsets)

    turn = _make_gather(mirror(offsets, len(values)))
    return _linear(values, _Pair(forwards, lambda x: turn(forwards(turn(x)))))
