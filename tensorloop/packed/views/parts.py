"""Parts of packed tensors seen in any order: x[key], gather, and padding."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongIndex
from tensorloop.packed.table.base import PackedView, is_packed, refusal
from tensorloop.packed.table.dispatch import dispatch, handles
from tensorloop.packed.table.layout import layout_of, see, turn_back, unwrap

ALL = slice(None)


@handles
def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """F.pad with a number, of features and of each row's own entries."""
    layout = layout_of(input)
    sizes = dict(zip(range(layout.ndim - 1, -1, -1), zip(pad[::2], pad[1::2], strict=True), strict=False))
    if mode != "constant" or len(pad) > 2 * layout.ndim or any(sizes.get(layout.batch, ())):
        raise refusal(f"{tuple(pad)} of {input.shape}, mode {mode!r}", "pad with a number, or x.transpose it back")
    given = [sizes.get(layout.order.index(d), (0, 0)) for d in range(layout.ndim - 1, 0, -1)]
    padded = dispatch(torch.nn.functional.pad, (unwrap(input), [n for pair in given for n in pair]), {"value": value})
    return see(padded, *layout[:2])


def index(x: Any, key: Any) -> Any:
    """x[key]: numbers, slices, None, dots, and one list or tensor of numbers."""
    layout = layout_of(x)
    keys = _fill_dots(key if isinstance(key, tuple) else (key,), layout.ndim)
    if sum(not isinstance(k, (int, slice)) and k is not None for k in keys) > 1:
        raise refusal("several lists of indices", "index by one after the other")
    dims = iter(range(layout.ndim))
    placed = [(k, -1 if k is None else next(dims)) for k in keys]  # each key with its dim
    of_dims = {d: k for k, d in placed}
    rows, times = of_dims[layout.batch], of_dims[layout.time]
    p: Any = unwrap(x)
    if not (is_whole(rows) and is_whole(times)):
        p = p[rows, times]
    if isinstance(p, Tensor):
        gone = [d for d in layout[:2] if isinstance(of_dims[d], int)]
        left = [ALL if d in layout[:2] else k for k, d in placed if d not in gone]
        return turn_back(p, layout, gone)[tuple(left)]
    values = p.values[(ALL, *(k for k, d in placed if d not in layout[:2]))]
    sizes = [0 if isinstance(k, int) else max(1, getattr(k, "ndim", 1)) for k, _ in placed]
    places = [sum(sizes[: next(i for i, (_, d) in enumerate(placed) if d == place)]) for place in layout[:2]]
    return see(p._with(values), *places)


def is_whole(k: Any) -> bool:
    """Whether it is `:`. By identity: `p.shape[1]` equals None, and as the end of a slice is refused."""
    return isinstance(k, slice) and k.start is None and k.stop is None and k.step is None


def _fill_dots(keys: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > ndim:
        raise WrongIndex(f"{used} indices for a packed tensor of {ndim} dims")
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    at = dots[0] if dots else len(keys)
    return (*keys[:at], *[ALL] * (ndim - used), *keys[at + (1 if dots else 0) :])


@handles
def _index_table(func: Any, input: Any, key: Any) -> Any:
    """An ordinary tensor at packed indices, `table[x]`, `pe[p.positions]`; or a view at ordinary ones."""
    if isinstance(input, PackedView):
        return index(input, key)
    p = unwrap(key)
    if is_packed(p) and p.values.dtype is not torch.bool:
        return see(p._with(input[p.values]), *layout_of(key)[:2])
    raise refusal("an ordinary tensor is indexed by one packed tensor of integers", "use .values or .pad()")
