"""Samples of other sizes: a dim of seven steps cut to none or one, or made longer by beginning again."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.dispatch import tree_leaves, tree_map
from tensorloop.packed.table.base import is_packed

Sizes = Mapping[str, int | Sequence[int]] | None
_MOST = 4  # sizes that are tried where nobody names them


def named_sizes(sizes: Any, sample: tuple[Any, ...]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (the size in the sample, those to try instead)."""
    there = _sizes_in(sample)
    if sizes is None:
        return {f"size {n}": (n, _others(n)) for n in there[:_MOST]}
    if not isinstance(sizes, Mapping):
        raise WrongType(f"sizes must be a dict from names to sizes, such as {{'T': 7}}, got {describe(sizes)}")
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, given in sizes.items():
        several = [given] if isinstance(given, int) else given
        if not (isinstance(several, Sequence) and several and all(type(n) is int and n >= 0 for n in several)):
            raise WrongType(
                f"sizes[{name!r}] must be an int, or ints of which the first is the sample's, got {given!r}"
            )
        if several[0] not in there:
            raise WrongValue(f"sizes[{name!r}]: no tensor of the sample has a dim of {several[0]}; there are {there}")
        found[name] = several[0], tuple(several[1:]) or _others(several[0])
    return found


def resized(sample: tuple[Any, ...], size: int, new: int) -> tuple[Any, ...]:
    """A sample whose dims and ints of one size are of another."""

    def change(x: Any) -> Any:
        if type(x) is int and x == size:
            return new
        if isinstance(x, Tensor):
            for dim, n in enumerate(x.shape):
                if n == size:
                    x = x.index_select(dim, torch.arange(new, device=x.device) % max(n, 1))
        return x

    return tree_map(change, sample, is_leaf=is_packed)


def _sizes_in(sample: tuple[Any, ...]) -> list[int]:
    shapes = (x.shape for x in tree_leaves(sample, is_leaf=is_packed) if isinstance(x, Tensor))
    return list(dict.fromkeys(n for shape in shapes for n in shape if n > 1))


def _others(n: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(m for m in (0, 1, n + 1 + n % 2) if m != n))


def bytes_of(tensors: Iterator[Any]) -> int:
    """The bytes of tensors together."""
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
