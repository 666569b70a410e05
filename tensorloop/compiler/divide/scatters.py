"""Nodes that add values to zeros in places, as the gradient of a table that was read at an index.

Their sum over steps is one such operation, whose places and values are those of all steps: it takes memory for the rows
that were read, and for one table.
"""

from collections.abc import Callable, Container
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.operations import aten, is_view, value_of


class StepsScatter(NamedTuple):
    """A node's values and places; `together` takes its arguments for all steps, and a shape where it is given zeros."""

    values: fx.Node
    places: list[fx.Node]
    together: Callable[..., Tensor]


def scatter_of(n: fx.Node) -> StepsScatter | None:
    """Returns how a node adds values to zeros; None where it does something else."""
    args: Any = n.args
    if n.target is aten.embedding_dense_backward.default:
        return StepsScatter(args[0], [args[1]], _rows_added)
    if n.target is aten._sparse_coo_tensor_with_dims_and_tensors.default:
        return StepsScatter(args[4], [args[3]], _rows_joined)
    if n.target not in (aten.index_add.default, aten.scatter_add.default, aten.index_put.default):
        return None
    if not _is_zeros(args[0]) or not value_of(args[0]).dim():
        return None
    if n.target is not aten.index_put.default:
        together = _index_added if n.target is aten.index_add.default else _scatter_added
        return StepsScatter(args[3], [args[2]], together)
    places = [i for i in args[1] if i is not None]
    ranks, rest = [value_of(i).dim() for i in places], value_of(args[0]).dim() - len(places)
    if any(map(is_mask, places)) or not n.args[3:] or not args[3] or value_of(args[2]).dim() != max(ranks) + rest:
        return None
    return StepsScatter(args[2], places, _put)


def is_mask(n: fx.Node) -> bool:
    """Whether a node, as an index, says how many places there are."""
    return value_of(n).dtype in (torch.bool, torch.uint8)


def is_still(scatter: StepsScatter, moving: Container[fx.Node]) -> bool:
    """Whether the places are the same at each step: then the values can be added up before they are put there."""
    return not any(i in moving for i in scatter.places)


def _is_zeros(n: Any) -> bool:
    while is_view(n):
        n = n.args[0]
    return n.target is aten.full.default and n.args[1] == 0


def _wide(together: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a function add in float32 what is then rounded to two bytes: one row may get many terms."""

    @wraps(together)
    def added(*args: Any, **kwargs: Any) -> Tensor:
        dtype = next(x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point())
        if dtype in (torch.float16, torch.bfloat16):
            args = tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        return together(*args, **kwargs).to(dtype)

    return added


@_wide
def _rows_added(grad: Tensor, index: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    if by_frequency:  # how often a step reads an index
        first = torch.arange(len(index), device=index.device).mul(rows)
        keys = index + first.reshape(-1, *(1,) * (index.dim() - 1))
        _, which, counts = torch.unique(keys, return_inverse=True, return_counts=True)
        grad = grad / counts[which].unsqueeze(-1)
    return aten.embedding_dense_backward.default(grad, index, rows, padding, False)


@_wide
def _rows_joined(sparse: int, dense: int, size: Any, places: Tensor, values: Tensor, **_: Any) -> Tensor:
    """The gradient of a table that is asked for as a sparse tensor: the rows of all steps."""
    return torch.sparse_coo_tensor(
        _in_line(places, 1), values.flatten(0, 1), size, is_coalesced=False, check_invariants=False
    )


@_wide
def _index_added(shape: Any, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return source.new_zeros(shape).index_add_(dim, index.reshape(-1), _in_line(source, dim % len(shape)), alpha=alpha)


@_wide
def _scatter_added(shape: Any, dim: int, index: Tensor, source: Tensor) -> Tensor:
    dim %= len(shape)
    source = source[tuple(map(slice, index.shape))]  # which may be larger
    return source.new_zeros(shape).scatter_add_(dim, _in_line(index, dim), _in_line(source, dim))


def _in_line(x: Tensor, dim: int) -> Tensor:
    """Puts the steps' values one after another along a dim of one step's."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


@_wide
def _put(shape: Any, places: Any, values: Tensor, _: bool) -> Tensor:
    places, at = places_of_steps(places)
    return aten.index_put_.default(values.new_zeros(shape), places, values.movedim(0, at), True)


def places_of_steps(places: Any) -> tuple[list[Tensor | None], int]:
    """The places of all steps, which are a further dim in front of one step's, and where indexing puts that dim."""
    dims = [dim for dim, i in enumerate(places) if i is not None]
    rank = max(places[dim].dim() for dim in dims)
    found = [i if i is None else i.reshape(len(i), *(1,) * (rank - i.dim()), *i.shape[1:]) for i in places]
    return found, dims[0] if dims[-1] - dims[0] < len(dims) else 0
