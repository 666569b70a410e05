"""Samples of other sizes: a dim of seven steps cut to none or one, or made longer by beginning again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.pytree import leaves_with_paths
from tensorloop._torch.dispatch import tree_leaves, tree_map
from tensorloop.packed.table.base import is_packed

Sizes = Mapping[str, int | Sequence[int]] | None


def named_sizes(sizes: Any, sample: tuple[Any, ...], weights: Iterable[Tensor]) -> dict[str, tuple[int, Sequence[int]]]:
    """Name -> (the size in the sample, those to try instead); of nobody's choice those that no weight has."""
    there = _sizes_in(sample)
    if sizes is None:
        fixed = {n for weight in weights for n in weight.shape}
        return {f"size {n}": (n, _others(n)) for n in there if n not in fixed}
    if not isinstance(sizes, Mapping):
        raise WrongType(f"sizes must be a dict from names to sizes, such as {{'T': 7}}, got {describe(sizes)}")
    found: dict[str, tuple[int, Sequence[int]]] = {}
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


def refuse_iterators(sample: tuple[Any, ...]) -> None:
    """Raises where a sample has something that the first run would use up."""
    for path, x in leaves_with_paths(sample):
        if isinstance(x, Iterator):
            raise WrongType(f"sample{path} is {describe(x)}, which one run uses up; give a list")


def resized(sample: Mapping[str, Any], size: int, new: int) -> Mapping[str, Any]:
    """A sample whose dims and ints of one size are of another."""

    def change(x: Any) -> Any:
        if type(x) is int and x == size:
            return new
        if isinstance(x, Tensor):
            for dim, n in enumerate(x.shape):
                if n == size:
                    places = torch.arange(new, device=x.device)  # a mask goes on as it ends, others begin again
                    x = x.index_select(dim, places.clamp(max=n - 1) if x.dtype is torch.bool else places % n)
        return x

    return {name: tree_map(change, part, is_leaf=is_packed) for name, part in sample.items()}


def _sizes_in(sample: tuple[Any, ...]) -> list[int]:
    shapes = (x.shape for x in tree_leaves(sample, is_leaf=is_packed) if isinstance(x, Tensor))
    return list(dict.fromkeys(n for shape in shapes for n in shape if n > 1))


def _others(n: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(m for m in (0, 1, n + 1 + n % 2) if m != n))


def bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of tensors together."""
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
