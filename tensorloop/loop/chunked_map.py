"""`map` in chunks: `torch.func.vmap` on `split`s of xs.

That is one gradient for all chunks, where vmap's own `chunk_size` slices and makes a dense one for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse, WrongType, WrongValue
from tensorloop._common.pytree import Tree, leaves_with_paths
from tensorloop._torch.fake import fake_tensors
from tensorloop.loop.advice import of_slabs
from tensorloop.loop.called import Called
from tensorloop.loop.carry import describe
from tensorloop.loop.effects.follow import without_effects
from tensorloop.loop.effects.judge import Effect
from tensorloop.loop.outputs import no_packed, place
from tensorloop.loop.slabs import Leaves, flatten_like, guard, kind_of, put_loop_dim_at, put_loop_dim_first
from tensorloop.tensor_array.array import TensorArray


def map_in_chunks(fn: Callable[[Any], Any], xs: Any, dim: int, batch_size: int) -> Any:
    """`fn` of every element of xs, `batch_size` at a time under `torch.func.vmap`.

    `fn` sees one element: a tree as xs without `dim`; a TensorArray gives its slots, None stays None. It runs once a
    chunk, so the rules of vmap hold: no branch on the values, random numbers different for each element.
    Shapes: the leaves of xs have T elements along `dim`. In ys a tensor is stacked along `dim` (or last where it has
    fewer dims), a number becomes a tensor (T,), None stays None. ys shares no memory with xs. For T = 0 the shapes of
    ys are those that `fn` gives for one fake element.
    Gradient: by autograd through vmap. Cost: T / batch_size calls of `fn`, and what these save for backward.
    Raises: TypeError (a leaf of xs or ys that is none of the above, no
    tensor in xs; another structure, shape or dtype in a later chunk), ValueError (batch_size < 1, no such dim, lengths
    that differ).
    """
    if batch_size < 1:
        raise WrongValue(f"batch_size must be at least 1, got {batch_size}")
    named = leaves_with_paths(xs)
    columns = put_loop_dim_first([(path, x) for path, x in named if x is not None], dim)
    element = _Element(fn, Tree(xs), [x is None for _, x in named])
    if len(columns[0]) == 0:
        ys = _call_on_a_fake(element, columns, dim)
    else:
        chunks = zip(*(x.split(batch_size) for x in columns), strict=True)
        try:
            done = [element.of(rows) for rows in chunks]
        except (TypeError, AttributeError) as error:
            of_slabs("map", Called("fn", fn, ("x",)), xs, error)
            raise
        ys = [_join(parts, dim) for parts in zip(*done, strict=True)]
    return element.tree_of(ys)


class _Element:
    """A user's `fn` of one element, for vmap: tensors in, tensors out; what it returns first, it must return again."""

    def __init__(self, fn: Callable[[Any], Any], xs: Tree, absent: list[bool]) -> None:
        self.fn = fn
        self._xs = xs
        self._absent = absent  # where xs has None
        self._ys: Tree | None = None
        self._kinds: list[Any] = []

    def of(self, rows: Leaves) -> Leaves:
        """All tensors of ys (n, *F), for the n elements of xs in `rows`."""
        return torch.func.vmap(self.__call__, randomness="different")(*map(guard, rows))

    def tree_of(self, ys: Leaves) -> Any:
        """The tree of these, with None where `fn` returned it."""
        assert self._ys is not None
        left = iter(ys)
        return self._ys.unflatten([None if kind == "None" else next(left) for kind in self._kinds])

    def __call__(self, *tensors: Tensor) -> Leaves:
        left = iter(tensors)
        out = self.fn(self._xs.unflatten([None if absent else next(left) for absent in self._absent]))
        if self._ys is None:
            self._learn(out)
            assert self._ys is not None
        ys = flatten_like(self._kinds, self._ys, out, "fn must return the same for every chunk as for the first")
        # Of a tensor `as_tensor` would make one on the default device.
        return tuple(y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys if y is not None)

    def _learn(self, out: Any) -> None:
        no_packed(out)
        named = leaves_with_paths(out)
        for path, y in named:
            if not (y is None or isinstance(y, Tensor | int | float | complex)):
                hint = "; return its stack()" if isinstance(y, TensorArray) else ""
                raise WrongType(f"y{path} is {describe(y)}; expected tensors, numbers or None{hint}")
        self._ys, self._kinds = Tree(out), [kind_of(y) for _, y in named]


def _call_on_a_fake(element: _Element, xs: Leaves, dim: int) -> list[Tensor]:
    """The ys of no elements."""
    try:
        with fake_tensors():
            fakes = without_effects(
                element.of, [torch.empty((1, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in xs]
            )
    except Effect as effect:  # what cannot be taken back
        raise Misuse(f"map: xs have no elements, and fn {effect.what}, so nobody knows the shapes of ys") from None
    except Exception as error:
        error.add_note("map: xs have no elements; fn was called on a fake tensor for the shapes of ys")
        raise
    return [_join([torch.empty((0, *y.shape[1:]), dtype=y.dtype, device=y.device)], dim) for y in fakes]


def _join(parts: Leaves, dim: int) -> Tensor:
    """The chunks (n, *F) of one leaf of ys as one tensor, a copy, its loop dim at `dim`."""
    return torch.cat([put_loop_dim_at(y, dim) for y in parts], place(dim, parts[0].dim() - 1))
