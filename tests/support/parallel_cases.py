"""Shared by the tests of associative_scan and of map in chunks: operators that rotate, a fold to compare with, work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tensorloop import reference
from tensorloop._torch.dispatch import OperationMode
from tensorloop.loop.associative import associative_scan
from tensorloop.testing import assert_matches_reference

Fn = Callable[[Any, Any], Any]
both_ways = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


class Affine(NamedTuple):
    """h -> a @ h + b, with leaves of two ranks: a (T, 2, 2), b (T, 2)."""

    a: Tensor
    b: Tensor


def then(p: Affine, q: Affine) -> Affine:
    """`p` and after it `q`, on slabs."""
    return Affine(q.a @ p.a, (q.a @ p.b[..., None]).squeeze(-1) + q.b)


def rotations(*shape: int, requires_grad: bool = False) -> Tensor:
    """(*shape, 2, 2) rotations by different angles: products neither shrink nor grow."""
    angle = torch.rand(shape, dtype=torch.float64) * 6
    c, s = angle.cos(), angle.sin()
    return torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2)).detach().requires_grad_(requires_grad)


def recurrence(T: int, requires_grad: bool = False) -> Affine:
    b = torch.randn(T, 2, dtype=torch.float64)
    return Affine(rotations(T, requires_grad=requires_grad), b.requires_grad_(requires_grad))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrices in the order of time: not commutative."""
    return b @ a


def assert_like_the_fold(fn: Fn, xs: Any, dim: int = 0, reverse: bool = False) -> None:
    assert_matches_reference(
        lambda v: associative_scan(fn, v, dim=dim, reverse=reverse),
        lambda v: reference.associative_scan(fn, v, dim, reverse),
        xs,
        rtol=1e-10,
        atol=1e-10,
    )


class Written(OperationMode):
    """Counts the elements of all results of all operations, views aside."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.total += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor) and x._base is None)
        return out


def work(run: Callable[[], Tensor]) -> int:
    """Elements written by a run and its backward pass."""
    with Written() as written:
        run().backward()
    return written.total
