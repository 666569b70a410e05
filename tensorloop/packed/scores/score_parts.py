"""Parts of the scores of each row: its triangles and diagonals, and what is written into them."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongIndex
from tensorloop.packed.scores.score_ops import collect, per_row, rows_of
from tensorloop.packed.table.aliases import changed, put
from tensorloop.packed.table.assign import assign
from tensorloop.packed.table.base import refusal
from tensorloop.packed.table.dispatch import handles


@handles
def _write(func: Any, input: Any, key: Any, value: Any) -> None:
    """x[key] = value, in place. Two lists are pairs of queries and keys, of which a row takes those that it has."""
    pairs = [torch.as_tensor(k, device=input.device) for k in key[-2:] if _is_list(k)] if type(key) is tuple else []
    if len(pairs) < 2:
        assign(input, key, value)
        return
    if getattr(value, "ndim", 0) or len(key) not in (input.ndim, 3) or key[0] not in (Ellipsis, slice(None)):
        raise refusal(f"{key} of {input.shape}", "write one number at x[..., i, j], or use torch.where")
    longest = input.rows.max_len, input.columns.max_len
    if any(bool((k >= n).any()) for k, n in zip(pairs, longest, strict=True)):
        raise WrongIndex(f"{key[-2:]} is out of range for {longest} queries and keys")
    rows = rows_of(input.alike(torch.arange(input.flat.numel(), device=input.device)))
    inside = [(pairs[0] < row.shape[-2]) & (pairs[1] < row.shape[-1]) for row in rows]
    found = [row[(..., *key[1:-2], *(k[there] for k in pairs))] for row, there in zip(rows, inside, strict=True)]
    put(input.flat, torch.cat([row.flatten() for row in found]), torch.as_tensor(value, dtype=input.dtype))
    changed(input.flat)


def _is_list(k: Any) -> bool:
    return isinstance(k, (list, range)) or (isinstance(k, Tensor) and k.dim() == 1)


@handles
def _keep_triangle(func: Any, input: Any, diagonal: int = 0) -> Any:
    """The triangle of queries and keys of each row."""
    out = per_row(input, lambda row: getattr(torch, func.__name__.rstrip("_"))(row, diagonal))
    return input.copy_(out) if func.__name__.endswith("_") else out


@handles
def _diagonal(func: Any, input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Gives the diagonals over queries and keys as the last dim, as long as each row has them."""
    dims = input.find(dim1), input.find(dim2)
    if sorted(dims) != [-2, -1]:
        raise refusal(f"dims {dim1} and {dim2} of {input.shape}", "give the last two: x.diagonal(0, -2, -1)")
    return collect([row.diagonal(offset, *dims) for row in rows_of(input)], input, 1)
