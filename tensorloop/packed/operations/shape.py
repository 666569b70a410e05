"""Shapes of packed tensors: what rearranges feature dims; the first two dims stay where they are."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import EntryCount, NoNumber, RaggedSize
from tensorloop.packed.table.base import Packed, check_same_rows, find_dim, find_feature_dim, is_packed, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.table.entries import entries_of
from tensorloop.packed.table.heads_as_rows import is_size_of
from tensorloop.packed.table.pointwise import align
from tensorloop.packed.views.reordered_shapes import expand as expand_any
from tensorloop.packed.views.reordered_shapes import refuse_ragged_repeats, regroup, reorder, unsqueeze
from tensorloop.packed.views.reordered_shapes import stack as stack_any
from tensorloop.packed.views.reordered_shapes import unflatten as unflatten_any


@handles("unsqueeze")
def _unsqueeze(func: Any, input: Any, dim: Any) -> Any:
    """A feature dim of size 1; before the ragged dim it gives a view, such as (B, 1, T*)."""
    return unsqueeze(func, input, find_dim(input, dim, extra=1))


@handles("squeeze")
def _squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Without feature dims of size 1."""
    if dim is None:
        dims = [d for d in range(2, input.ndim) if input.shape[d] == 1]
    else:
        dims = [find_dim(input, d) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if 1 in dims or (0 in dims and len(input._dim) == 1):
        raise refusal("the batch and the ragged dim are never dropped", "use p[0] for the only row")
    return input._with(input.values.squeeze(tuple(d - 1 for d in dims if d > 1)))


@handles("transpose", "swapaxes", "swapdims", called="transpose")
def _transpose(func: Any, input: Any, dim0: Any, dim1: Any) -> Any:
    """Two dims exchanged; where batch or ragged dim are among them, a view: nothing is moved."""
    a, b = find_dim(input, dim0), find_dim(input, dim1)
    if a == b:
        return input
    if min(a, b) > 1:
        return input._with(input.values.transpose(a - 1, b - 1))
    return reorder(input, [b if d == a else a if d == b else d for d in range(input.ndim)])


@handles("permute", "movedim", "moveaxis")
def _permute(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """The dims in another order; where batch or ragged dim are moved, a view."""
    if func.__name__ == "permute":
        given = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
        order = [find_dim(input, d) for d in given]
    else:
        source, target = (x if isinstance(x, (tuple, list)) else (x,) for x in (*dims, *kwargs.values()))
        moved = dict(zip((find_dim(input, d) for d in target), (find_dim(input, d) for d in source), strict=True))
        rest = iter(d for d in range(input.ndim) if d not in moved.values())
        order = [moved[d] if d in moved else next(rest) for d in range(input.ndim)]
    if sorted(order) != list(range(input.ndim)):
        raise WrongValue(f"order {tuple(order)} is no order of the {input.ndim} dims of {input.shape}")
    return reorder(input, order)


@handles("flatten")
def _flatten(func: Any, input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    """From dim 2 on a packed tensor; from dim 0 on the entries there are, (N, ...) or (N * ..): nothing is padding."""
    a, b = find_dim(input, start_dim), find_dim(input, end_dim)
    if a >= 2:
        return input._with(input.values.flatten(a - 1, b - 1))
    if a == 0 and b >= 1:
        return entries_of(input, input.values.flatten(0, b - 1))
    raise refusal(f"dims {a} to {b} of {input.shape}", "flatten (0, 1) or more, or feature dims only")


@handles("unflatten")
def _unflatten(func: Any, input: Any, dim: Any, sizes: Any) -> Any:
    """One feature dim as several, or heads parted from the batch."""
    if find_dim(input, dim) == 0:
        return unflatten_any(func, input, 0, sizes)
    return input._with(input.values.unflatten(find_feature_dim(input, dim), tuple(sizes)))


@handles("reshape", "view")
def _view(func: Any, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """(B, None or -1, *sizes): packed. (-1, *sizes): the entries there are, an ordinary tensor."""
    given = kwargs.get("shape", shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if isinstance(given, torch.dtype):
        return input._with(input.values.view(given))
    if given and (isinstance(given[0], EntryCount) or (isinstance(given[0], RaggedSize) and len(input._dim) == 1)):
        _read_sizes(input, given)
        sizes = _find_rest(given[1:], prod(input.values.shape[1:]))
        return entries_of(input, input.values.reshape(len(input.values), *sizes))
    # A size of other rows is that of heads joined with the batch, or parted from it.
    own = all(len(n._dim) == len(input._dim) for n in given if isinstance(n, RaggedSize))
    found = _keep_rows(input, _read_sizes(input, given)) if own else None
    found = regroup(input, tuple(given)) if found is None else found
    if found is None and _is_even(input, given):
        return input.values.reshape(given)
    if found is None:
        raise refusal(
            f"{input.shape} as {tuple(given)}", "keep the first two as (B, None), or merge them with the first as -1"
        )
    return found


def _is_even(p: Packed, sizes: Any) -> bool:
    """Whether they are numbers, of rows that are of one length: a token that was cut from each row, say."""
    numbers = all(type(n) is int and n >= 0 for n in sizes) and prod(sizes) == p.values.numel()
    return numbers and len(set(p._dim._host_lens.tolist())) < 2


def _keep_rows(p: Packed, sizes: tuple[Any, ...]) -> Any:
    """(B, None or -1, *sizes), or (-1, *sizes) of all entries; None for other sizes."""
    features = p.values.shape[1:]
    if len(sizes) >= 2 and sizes[0] in (len(p._dim), -1) and (sizes[1] is None or sizes[:2] == (sizes[0], -1)):
        rest = sizes[2:]
        if sizes[1] is None and sizes[0] != -1:
            rest = _find_rest(rest, prod(features))
        return p._with(p.values.reshape(len(p.values), *rest)) if prod(rest) == prod(features) else None
    if not sizes or sizes[0] != -1 or None in sizes:
        return None
    if prod(sizes[1:]) and prod(features) % prod(sizes[1:]):
        return None
    return entries_of(p, p.values.reshape(sizes))


def _find_rest(sizes: Any, total: int) -> tuple[int, ...]:
    """Sizes with a number for one -1, as torch finds it, also where there are no entries."""
    known = -prod(sizes)
    return tuple(total // known if n == -1 else n for n in sizes) if known > 0 else tuple(sizes)


def _read_sizes(p: Packed, sizes: Any) -> tuple[Any, ...]:
    """Sizes with None for the ragged one, which must be that of `p`."""
    for n in sizes:
        dim = n._dim if isinstance(n, (RaggedSize, EntryCount)) else n
        if isinstance(dim, Dim) and not (dim.same(p._dim) or _is_of_heads(n, p)):
            raise describe_difference(p._dim, dim, f"{p.shape} by a size of other rows")
    return tuple(None if isinstance(n, (Dim, RaggedSize)) else n for n in sizes)


def _is_of_heads(n: Any, p: Packed) -> bool:
    """Whether a size is one of the rows that heads were joined with. A count of entries is none of theirs."""
    return isinstance(n, RaggedSize) and is_size_of(n._dim, p._dim)


@handles("view_as", "reshape_as")
def _view_as(func: Any, input: Any, other: Any) -> Any:
    """The features as those of `other`, of the same rows."""
    if not (is_packed(input) and is_packed(other)):
        raise refusal("only one of two tensors is packed", "use .flatten(0, 1) or pack_padded")
    check_same_rows(input, other)
    return input._with(input.values.reshape(other.values.shape))


@handles("expand", "expand_as")
def _expand(func: Any, input: Any, *sizes: Any) -> Any:
    """Feature dims of size 1 repeated without a copy."""
    if not is_packed(input):
        return sizes[0]._with(align(input, sizes[0]).expand(sizes[0].values.shape))
    if func.__name__ == "expand_as":
        return input.expand(sizes[0].shape)
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
    if len(sizes) > input.ndim or any(isinstance(n, NoNumber) for n in sizes[2:]):
        return expand_any(func, input, *sizes)
    sizes = _read_sizes(input, sizes)
    if len(sizes) != input.ndim or sizes[0] not in (-1, len(input._dim)) or sizes[1] not in (-1, None):
        raise refusal(f"{input.shape} as {sizes}", "the first two sizes must be (B or -1, None or -1)")
    return input._with(input.values.expand(-1, *sizes[2:]))


@handles("stack")
def _stack(func: Any, tensors: Any, dim: Any = 0) -> Any:
    """Along a new dim; before the ragged one it gives a view."""
    first = tensors[0]
    if not all(is_packed(x) for x in tensors):
        raise refusal("packed and padded tensors", "pack all of them: pack_padded(x, p.lens)")
    return stack_any(func, tensors, find_dim(first, dim, extra=1))


@handles("repeat", "tile")
def _repeat(func: Any, input: Any, *sizes: Any) -> Any:
    """Features repeated."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if len(sizes) != input.ndim or sizes[:2] != (1, 1):
        raise refusal(f"{sizes} repeats the batch or the ragged dim", "use repeat_interleave(n, 0) for rows")
    refuse_ragged_repeats(sizes)
    return input._with(input.values.repeat(1, *sizes[2:]))


@handles("equal", "allclose")
def _equal(func: Any, input: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two packed tensors are of the same rows, and their values are equal or close."""
    if not (is_packed(input) and is_packed(other)):
        raise refusal("only one of the two is packed", "pack the other: pack_padded(x, p.lens), or compare p.pad()")
    if not input._dim.same(other._dim):
        return False
    return func(input.values, other.values, *args, **kwargs)


@handles("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "is_floating_point", "is_complex")
def _of_values(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """As for the values: an ordinary tensor, or what torch says of them."""
    return func(input.values, *args, **kwargs)


@handles("__getitem__")
def _getitem(func: Any, input: Tensor, key: Any) -> Any:
    """An ordinary tensor at packed indices: `table[p]`, `pe[p.positions]`."""
    if isinstance(key, Packed) and key.values.dtype is not torch.bool:
        return key._with(input[key.values])
    raise refusal("an ordinary tensor is indexed by one packed tensor of integers", "use .values or .pad()")
